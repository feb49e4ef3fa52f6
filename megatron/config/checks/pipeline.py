"""Rules about the pipeline: chunks (virtual stages), the schedule that takes them, and how layers are spread over them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

from megatron.config.checks.finding import (
    Change,
    Finding,
    change,
    divisors,
    is_changed,
    multiples_near,
    rule,
    shown,
    try_values,
    without,
)
from megatron.config.config import Config
from megatron.config.parallel import ParallelConfig
from megatron.config.pipeline_layout import LayoutChunk, layout_problems, read_layer_costs, read_layout
from megatron.spec.schedules import SCHEDULES, default_schedule

PP, LAYOUT = "pipeline_model_parallel_size", "pipeline_model_parallel_layout"
LAYERS_EACH, COUNT = "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"
COUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
COSTS = "layer_costs"
FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
SPLITS = ("pipeline_split", COSTS, LAYERS_EACH, COUNT, FIRST, LAST, *COUNTED)
"""Settings that say how layers are spread, all but the layout."""
COUNTS_CHUNKS = ("num_layers", PP, "pipeline_schedule", LAYOUT, LAYERS_EACH, COUNT, *COUNTED)
"""The settings on which the number of chunks depends."""

_LINES = 32  # of a table; of a longer one the middle is left out


def chunks_per_stage(config: Config) -> int | None:
    """Number of chunks on each pipeline rank, or None where another rule reports why it is unknown."""
    try:
        return config.parallel.chunks_per_stage(config.model.num_layers)
    except ValueError:
        return None


def layout_of(config: Config) -> tuple[LayoutChunk, ...] | None:
    """The layout, or None where there is none that can be read."""
    return read_layout(config.parallel.pipeline_model_parallel_layout)


def chunks_of(sizes: Sequence[int]) -> tuple[LayoutChunk, ...]:
    """Chunks with these numbers of layers, with embedding and loss at the ends."""
    return tuple(LayoutChunk(index == 0, size, index == len(sizes) - 1) for index, size in enumerate(sizes))


def layout_text(chunks: Sequence[LayoutChunk]) -> str:
    """A layout as a user types it."""
    layers = ("t" * chunk.num_layers if chunk.num_layers < 4 else f"t*{chunk.num_layers}" for chunk in chunks)
    return "|".join("E" * chunk.embedding + held + "L" * chunk.loss for chunk, held in zip(chunks, layers, strict=True))


def chunk_table(config: Config, chunks: Sequence[LayoutChunk]) -> tuple[str, ...]:
    """A table of what each chunk holds and where it lies, as lines of text."""
    stops = list(itertools.accumulate(chunk.num_layers for chunk in chunks))
    stages = stages_of_chunks(config.parallel, len(chunks))

    def line(index: int) -> str:
        chunk, stop = chunks[index], stops[index]
        return f"{index:5d}  {stages[index]:5d}  {chunk.content(stop - chunk.num_layers) or 'nothing'}"

    count = len(chunks)
    if count <= _LINES:
        return ("chunk  stage  layers", *map(line, range(count)))
    first, last = range(_LINES // 2), range(count + 1 - _LINES // 2, count)
    return ("chunk  stage  layers", *map(line, first), f"  ...  ({count} chunks)", *map(line, last))


def stages_of_chunks(parallel: ParallelConfig, num_chunks: int) -> tuple[int, ...]:
    """The pipeline rank of each of so many chunks, even if they are more than the schedule takes, or fewer than the stages."""
    schedule = SCHEDULES[parallel.schedule]
    places = schedule.place(min(parallel.pipeline_model_parallel_size, num_chunks), schedule.chunks_per_stage or 1)
    return tuple(itertools.islice(itertools.cycle(places), num_chunks))


def counted(config: Config) -> str:
    """The number of layers as a text, with what else counts as a layer."""
    parallel, layers = config.parallel, config.model.num_layers
    parts = [f"--num-layers {layers}"]
    parts += ["embedding"] * parallel.account_for_embedding_in_pipeline_split
    parts += ["loss"] * parallel.account_for_loss_in_pipeline_split
    return parts[0] if len(parts) == 1 else f"{' + '.join(parts)} = {parallel.units_to_split(layers)}"


_MOST_SHOWN = 64  # chunks in a table or in a suggested layout


@rule(LAYERS_EACH, "num_layers", PP, reads=(COUNT, *COUNTED))
def layers_fill_virtual_stages(config: Config, world_size: int) -> Iterator[Finding]:
    """Virtual stages of so many layers each come out whole, and as many as the other way of asking says."""
    parallel, layers, stages = config.parallel, config.model.num_layers, config.parallel.pipeline_model_parallel_size
    each, count = parallel.num_layers_per_virtual_pipeline_stage, parallel.num_virtual_stages_per_pipeline_rank
    if each is None:
        return
    units, size = parallel.units_to_split(layers), stages * each
    if units % size:
        yield Finding(
            f"{counted(config)} does not divide by --pipeline-model-parallel-size {stages} x "
            f"--num-layers-per-virtual-pipeline-stage {each} = {size}.",
            [
                try_values(LAYERS_EACH, each, divisors(units // stages) if units % stages == 0 else []),
                counts(config, (max(1, units // size), units // size + 1)),
                try_values("num_layers", layers, [total - (units - layers) for total in multiples_near(units, size)]),
            ],
            "Each virtual stage holds so many layers, and each pipeline rank the same number of virtual stages; "
            "--num-virtual-stages-per-pipeline-rank spreads any number of layers.",
        )
    elif count is not None and count != units // size:
        yield Finding(
            f"{shown(config, LAYERS_EACH)} and {shown(config, COUNT)} contradict each other.",
            [[change(**{LAYERS_EACH: None}), change(**{COUNT: None})]],
            f"{counted(config)} over {stages} pipeline ranks in virtual stages of {each} makes {units // size} on each rank; "
            "one way of asking is enough.",
            (LAYERS_EACH, COUNT, "num_layers", PP),
        )


def counts(config: Config, numbers: Iterable[int]) -> list[Change]:
    """Candidates with so many virtual stages, asked for by their number."""
    return [without(config, LAYERS_EACH, **{COUNT: number}) for number in numbers]


@rule(reads=COUNTS_CHUNKS)
def schedule_has_its_virtual_stages(config: Config, world_size: int) -> Iterator[Finding]:
    """Each pipeline rank holds as many virtual stages (chunks) as the schedule needs: one, two or several."""
    parallel, layers, chunks = config.parallel, config.model.num_layers, chunks_per_stage(config)
    if chunks is None or SCHEDULES[parallel.schedule].takes(chunks):
        return
    stages, each = parallel.pipeline_model_parallel_size, parallel.num_layers_per_virtual_pipeline_stage
    asked = [field for field in (LAYOUT, LAYERS_EACH, COUNT) if getattr(parallel, field) is not None]
    source = ""
    if LAYOUT in asked:
        source = " (from the chunks of --pipeline-model-parallel-layout)"
    elif each is not None:
        source = f" ({counted(config)} over {stages} ranks, --num-layers-per-virtual-pipeline-stage {each})"
    name = "--pipeline-schedule" if parallel.pipeline_schedule else "The default schedule"
    numbers = [without(config, COUNT, LAYERS_EACH), *counts(config, (2, 3, 4))]
    sizes = divisors(parallel.units_to_split(layers) // stages) if each is not None else []
    default, fitting = default_schedule(chunks > 1), [other for other, spec in SCHEDULES.items() if spec.takes(chunks)]
    yield Finding(
        f"{name} {parallel.schedule} does not go with {chunks} virtual stage{'s' * (chunks != 1)} on each pipeline rank{source}.",
        [
            [change(pipeline_schedule=other) for other in sorted(fitting, key=default.__ne__)],
            numbers if LAYOUT not in asked else [],
            try_values(LAYERS_EACH, each or 1, sizes),
        ],
        SCHEDULES[parallel.schedule].about_chunks,
        ("pipeline_schedule", *(asked or [COUNT]), PP),
    )


@rule(reads=(*COUNTS_CHUNKS, *SPLITS))
def stages_have_layers(config: Config, world_size: int) -> Iterator[Finding]:
    """Each chunk holds a layer, or an end whose cost counts; any number of layers beyond that is fine."""
    parallel, layers, stages = config.parallel, config.model.num_layers, config.parallel.pipeline_model_parallel_size
    if parallel.pipeline_model_parallel_layout is not None:
        return
    each = chunks_per_stage(config) or 1
    chunks = stages * each
    # The ends may hold no layer where the cost of embedding and loss counts.
    loss_counts = parallel.account_for_loss_in_pipeline_split or parallel.pipeline_split == "balanced"
    empty = (parallel.account_for_embedding_in_pipeline_split or parallel.layer_costs is not None) + loss_counts
    if layers + empty >= chunks:
        return
    several = each > 1
    yield Finding(
        f"--pipeline-model-parallel-size {stages}{f' x {each} virtual stages = {chunks} chunks' if several else ''} "
        f"is more than {counted(config)}.",
        [
            try_values(PP, stages, range(max(1, layers // each - 64), layers // each + 1)),
            change(num_layers=chunks - empty),
            [*counts(config, range(min(each - 1, 32), 1, -1)), without(config, LAYERS_EACH, COUNT, "pipeline_schedule")],
            _ends_alone(config, chunks),
        ],
        f"Each {'chunk' if several else 'pipeline stage'} holds at least one layer.",
        ("num_layers", PP, *([COUNT] if several else [])),
        chunk_table(config, chunks_of([int(index < layers) for index in range(chunks)]))
        if several and chunks <= _MOST_SHOWN
        else (),
    )


def _ends_alone(config: Config, chunks: int) -> list[Change]:
    """Layouts with one layer in each chunk, but with the loss alone or, also, the embedding alone."""
    first = {1: 0, 2: 1}.get(chunks - config.model.num_layers)  # chunk that holds the first layer
    if first is None or chunks > _MOST_SHOWN:
        return []
    layout = layout_text(chunks_of([int(first <= index < chunks - 1) for index in range(chunks)]))
    return [without(config, *SPLITS, **{LAYOUT: layout})]


EXCLUSIONS = (
    ((LAYOUT,), SPLITS, "The layout says what every chunk holds, and how many there are."),
    (("pipeline_split",), (LAYERS_EACH, FIRST, LAST, *COUNTED), "A balanced split chooses the layers of each chunk by cost."),
    (
        (LAYERS_EACH,),
        (FIRST, LAST),
        "Virtual stages then differ in length between the ranks; ask for them by --num-virtual-stages-per-pipeline-rank.",
    ),
    (COUNTED, (FIRST, LAST), "Layers at the ends are counted by hand, or embedding and loss count as layers."),
)
"""Settings that exclude others, with the reason."""


@rule(COSTS, "num_layers", reads=("pipeline_split",))
def costs_are_of_this_model(config: Config, world_size: int) -> Iterator[Finding]:
    """Measured costs can be read, and there is one for each layer."""
    path, layers = config.parallel.layer_costs, config.model.num_layers
    if path is None or config.parallel.pipeline_split != "balanced":
        return
    try:
        count = len(read_layer_costs(path).layers)
    except ValueError as error:
        yield Finding(str(error), [without(config, COSTS)], "--profile-pipeline writes such a file.")
        return
    if count != layers:
        yield Finding(
            f"--layer-costs {path} has {count} layers, but --num-layers is {layers}.",
            [without(config, COSTS)],
            "Costs are those of one model: profile this one.",
        )


@rule(reads=(LAYOUT, *SPLITS))
def one_way_of_splitting(config: Config, world_size: int) -> Iterator[Finding]:
    """Each layer's place is decided once."""
    for ones, others, reason in EXCLUSIONS:
        those = [field for field in ones if is_changed(config, field)]
        these = [field for field in others if is_changed(config, field)]
        if those and these:
            message = f"{_listed(config, those)} and {_listed(config, these)} exclude each other."
            yield Finding(message, [[without(config, *these), without(config, *those)]], reason, (*those, *these))


def _listed(config: Config, fields: Iterable[str], between: str = ", ") -> str:
    return between.join(shown(config, field) for field in fields)


def _ends(config: Config) -> dict[str, int]:
    """Layers given to the first and the last rank; empty where a layout says what they hold."""
    parallel = config.parallel
    ends = {field: count for field in (FIRST, LAST) if (count := getattr(parallel, field)) is not None}
    return ends if parallel.pipeline_model_parallel_layout is None else {}


@rule(reads=(*COUNTS_CHUNKS, FIRST, LAST))
def ends_have_chunks(config: Config, world_size: int) -> Iterator[Finding]:
    """Layers given to the first or the last pipeline rank divide by its chunks, and it is not the only rank."""
    ends, stages = _ends(config), config.parallel.pipeline_model_parallel_size
    if ends and stages == 1:
        yield Finding(
            f"With {_listed(config, ends, ' and ')} there must be several pipeline ranks, but there is one.",
            [without(config, *ends), change(**{PP: 2})],
            "Other ranks hold the layers that the first and the last do not.",
            (*ends, PP),
        )
        return
    each = chunks_per_stage(config) or 1
    for field, count in ends.items():
        if count % each:
            fewer = [number for number in reversed(divisors(count)) if number < each]
            yield Finding(
                f"{shown(config, field)} does not divide by the {each} virtual stages of that rank.",
                [try_values(field, count, multiples_near(count, each)), counts(config, fewer), without(config, field)],
                "Each of them holds the same number of layers.",
                (field, COUNT),
            )


@rule(reads=(*COUNTS_CHUNKS, FIRST, LAST))
def ends_leave_layers(config: Config, world_size: int) -> Iterator[Finding]:
    """Layers given to the first and the last pipeline rank leave the others enough, and all where there are no others."""
    ends, layers, stages = _ends(config), config.model.num_layers, config.parallel.pipeline_model_parallel_size
    if not ends or stages == 1:
        return
    each = chunks_per_stage(config) or 1
    others, total = stages - len(ends), sum(ends.values())
    if layers - total >= others * each if others else layers == total:
        return
    ranks = f"{others} other pipeline rank{'s' * (others > 1)}{f' with {each} virtual stages each' * (each > 1)}"
    if others:
        message = (
            f"With {_listed(config, ends, ' and ')}, {max(layers - total, 0)} of --num-layers {layers} are left to the {ranks}."
        )
        why = f"Each {'virtual stage (chunk)' if each > 1 else 'pipeline stage'} holds at least one layer."
    else:
        message = f"{_listed(config, ends, ' and ')} make {total} layers, not --num-layers {layers}."
        why = "There are no other pipeline ranks."
    most = layers - others * each  # that the ends can have together
    yield Finding(
        message,
        [
            *(try_values(field, count, [(most - total + count) // each * each]) for field, count in ends.items()),
            change(num_layers=total + others * each),
            try_values(PP, stages, range(2, min(stages, 64))),
            counts(config, range(min(each - 1, 32), 0, -1)),
            [without(config, field) for field in ends],
        ],
        why,
        (*ends, "num_layers", PP, *([COUNT] if each > 1 else [])),
    )


_MOST_MOVED = 1000  # layers that a suggested layout has more or fewer
_MOST_CHUNKS = 256  # of a suggested layout


@rule(LAYOUT)
def layout_can_be_read(config: Config, world_size: int) -> Iterator[Finding]:
    """The text follows the grammar, and embedding and loss stand at the ends."""
    text = config.parallel.pipeline_model_parallel_layout
    if text is not None and layout_of(config) is None:
        other = [change(**{LAYOUT: f"E{re.sub('[ELm]', '', text)}L"}), change(**{LAYOUT: None})]
        yield Finding(f"{shown(config, LAYOUT)} cannot be used.", [other], " ".join(layout_problems(text)))


@rule(LAYOUT, "num_layers", reads=(PP, "pipeline_schedule", LAYERS_EACH, COUNT))
def layout_places_every_layer(config: Config, world_size: int) -> Iterator[Finding]:
    """A layout has as many t as the model has layers."""
    layout, layers = layout_of(config), config.model.num_layers
    held = sum(chunk.num_layers for chunk in layout or ())
    if layout is None or held == layers:
        return
    missing = f"{f'Layer {held} is' if held == layers - 1 else f'Layers {held} to {layers - 1} are'} missing."
    yield Finding(
        f"{shown(config, LAYOUT)} places {held} layer{'s' * (held != 1)} (t), but --num-layers is {layers}.",
        [_with_layers(_sizes(layout), layers - held), change(num_layers=held), change(**{LAYOUT: None})],
        missing if held < layers else f"The model has no layers {layers} to {held - 1}.",
        table=chunk_table(config, layout),
    )


@rule(LAYOUT, "mtp_num_layers")
def layout_names_every_depth(config: Config, world_size: int) -> Iterator[Finding]:
    """A layout that names depths of multi-token prediction (m) names all of them."""
    text, depths = config.parallel.pipeline_model_parallel_layout, config.model.mtp_num_layers
    named = sum(chunk.depths for chunk in layout_of(config) or ())
    if text is not None and named not in (0, depths):
        without_them = re.sub(r"m(\*[0-9]+)?", "", text)
        others = [change(mtp_num_layers=named)]
        others += [change(**{LAYOUT: without_them})] if not layout_problems(without_them) else []
        yield Finding(
            f"{shown(config, LAYOUT)} places {named} depth{'s' * (named != 1)} (m), but --mtp-num-layers is {depths}.", others
        )


@rule(LAYOUT, PP, reads=("num_layers", "pipeline_schedule", LAYERS_EACH, COUNT))
def layout_divides_among_ranks(config: Config, world_size: int) -> Iterator[Finding]:
    """Each pipeline rank holds the same number of chunks of a layout; | ends a chunk."""
    layout, stages = layout_of(config), config.parallel.pipeline_model_parallel_size
    if layout is None or len(layout) % stages == 0:
        return
    yield Finding(
        f"{shown(config, LAYOUT)} has {len(layout)} chunks, which do not divide among --pipeline-model-parallel-size {stages}.",
        [_with_chunks(_sizes(layout), stages), try_values(PP, stages, divisors(len(layout))), change(**{LAYOUT: None})],
        # Where the layers do not fit either, another rule shows the table.
        table=chunk_table(config, layout) if sum(_sizes(layout)) == config.model.num_layers else (),
    )


def _sizes(layout: Sequence[LayoutChunk]) -> list[int]:
    return [chunk.num_layers for chunk in layout]


def _with_layers(sizes: list[int], missing: int) -> list[Change]:
    """Changes that add the missing layers to the shortest chunks, or take the superfluous ones out of the longest."""
    if abs(missing) > _MOST_MOVED or len(sizes) > _MOST_CHUNKS:
        return []
    step = 1 if missing > 0 else -1
    for _ in range(abs(missing)):
        # Of equal ones, the last without the loss.
        index = max(range(len(sizes)), key=lambda at: (-step * sizes[at], at < len(sizes) - 1, at))
        sizes[index] += step
    return [change(**{LAYOUT: layout_text(chunks_of(sizes))})]


def _with_chunks(sizes: list[int], stages: int) -> list[Change]:
    """Changes that join the shortest neighbours until the chunks divide among the stages or, if they are fewer, cut the longest."""
    if max(len(sizes), stages) > _MOST_CHUNKS:
        return []
    while len(sizes) % stages:
        if len(sizes) > stages:
            left = min(range(len(sizes) - 1), key=lambda at: sizes[at] + sizes[at + 1])
            sizes[left : left + 2] = [sizes[left] + sizes[left + 1]]
        else:
            longest = max(range(len(sizes)), key=lambda at: sizes[at])
            sizes[longest : longest + 1] = [sizes[longest] - sizes[longest] // 2, sizes[longest] // 2]
    return [change(**{LAYOUT: layout_text(chunks_of(sizes))})]
