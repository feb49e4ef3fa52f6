"""Rules about how layers are spread over the pipeline ranks: by count, by cost, by hand at the ends, or by a layout."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence

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
from megatron.config.checks.pipeline import (
    COUNT,
    COUNTED,
    COUNTS_CHUNKS,
    FIRST,
    LAST,
    LAYERS_EACH,
    LAYOUT,
    PP,
    SPLITS,
    chunk_table,
    chunks_of,
    chunks_per_stage,
    counts,
    layout_of,
    layout_text,
)
from megatron.config.config import Config
from megatron.config.pipeline_layout import LayoutChunk, layout_problems

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
            f"{_listed(config, ends, ' and ')} {_verb(ends, 'needs', 'need')} several pipeline ranks, but there is one.",
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
    if not others:
        what, why = f"make {total} layers, not --num-layers {layers}", "There are no other pipeline ranks."
    elif total > layers:
        what, why = f"{_verb(ends, 'is', 'are')} more than --num-layers {layers}", f"There must be layers for the {ranks}."
    else:
        what = f"{_verb(ends, 'leaves', 'leave')} {layers - total} of --num-layers {layers} to the {ranks}"
        why = f"Each {'virtual stage (chunk)' if each > 1 else 'pipeline stage'} holds at least one layer."
    most = layers - others * each  # that the ends can have together
    yield Finding(
        f"{_listed(config, ends, ' and ')} {what}.",
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


def _verb(ends: Collection[str], one: str, several: str) -> str:
    return one if len(ends) == 1 else several


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
