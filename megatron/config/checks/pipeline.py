"""Rules about the pipeline: model chunks (virtual stages), the schedules that support them, and the distribution of layers."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

from megatron.config.checks.finding import (
    Change,
    Finding,
    create_change,
    find_divisors,
    find_multiples_near,
    format_setting,
    is_set,
    reset,
    rule,
    try_values,
)
from megatron.config.config import Config
from megatron.config.parallel import ParallelConfig
from megatron.config.pipeline_layout import LayoutChunk, find_layout_problems, parse_layout_or_none, read_layer_costs
from megatron.spec.schedules import SCHEDULES, get_default_schedule

PP, LAYOUT = "pipeline_model_parallel_size", "pipeline_model_parallel_layout"
LAYERS_PER_CHUNK, CHUNKS_PER_STAGE = "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"
ENDS_AS_LAYERS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
LAYER_COSTS = "layer_costs"
FIRST_STAGE_LAYERS, LAST_STAGE_LAYERS = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
END_LAYERS = (FIRST_STAGE_LAYERS, LAST_STAGE_LAYERS)
SPLIT_SETTINGS = ("pipeline_split", LAYER_COSTS, LAYERS_PER_CHUNK, CHUNKS_PER_STAGE, *END_LAYERS, *ENDS_AS_LAYERS)
"""Fields that distribute the layers over the chunks, except the layout."""
CHUNK_COUNT_SETTINGS = ("num_layers", PP, "pipeline_schedule", LAYOUT, LAYERS_PER_CHUNK, CHUNKS_PER_STAGE, *ENDS_AS_LAYERS)
"""Fields that determine the number of chunks."""

_MAX_TABLE_ROWS = 32  # the middle of a longer table is omitted


def get_chunks_per_stage(config: Config) -> int | None:
    """Return the number of model chunks (virtual stages) of each pipeline rank, or None if the settings are invalid, which another
    rule reports."""
    try:
        return config.parallel.get_chunks_per_stage(config.model.num_layers)
    except ValueError:
        return None


def parse_valid_layout(config: Config) -> tuple[LayoutChunk, ...] | None:
    """Return the model chunks of --pipeline-model-parallel-layout, or None if the flag is not set or its value is invalid."""
    return parse_layout_or_none(config.parallel.pipeline_model_parallel_layout)


def build_chunks(sizes: Sequence[int]) -> tuple[LayoutChunk, ...]:
    """Build one model chunk for each number of layers in `sizes`. The first chunk also has the embedding, and the last has the
    loss."""
    return tuple(LayoutChunk(index == 0, size, index == len(sizes) - 1) for index, size in enumerate(sizes))


def format_layout(chunks: Sequence[LayoutChunk]) -> str:
    """Format model chunks as a value of --pipeline-model-parallel-layout, such as Ett|ttL."""
    symbols = ("t" * chunk.num_layers if chunk.num_layers < 4 else f"t*{chunk.num_layers}" for chunk in chunks)
    return "|".join(
        "E" * chunk.has_embedding + layer_symbols + "L" * chunk.has_loss
        for chunk, layer_symbols in zip(chunks, symbols, strict=True)
    )


def format_chunk_table(config: Config, chunks: Sequence[LayoutChunk]) -> tuple[str, ...]:
    """Return the lines of a table with the pipeline stage and the layers of each model chunk. The middle of a long table is
    omitted."""
    layer_ends = list(itertools.accumulate(chunk.num_layers for chunk in chunks))
    stages = assign_stages(config.parallel, len(chunks))

    def format_row(index: int) -> str:
        chunk, layer_end = chunks[index], layer_ends[index]
        return f"{index:5d}  {stages[index]:5d}  {chunk.summarize(layer_end - chunk.num_layers) or 'nothing'}"

    num_chunks = len(chunks)
    if num_chunks <= _MAX_TABLE_ROWS:
        return ("chunk  stage  layers", *map(format_row, range(num_chunks)))
    first, last = range(_MAX_TABLE_ROWS // 2), range(num_chunks + 1 - _MAX_TABLE_ROWS // 2, num_chunks)
    return ("chunk  stage  layers", *map(format_row, first), f"  ...  ({num_chunks} chunks)", *map(format_row, last))


def assign_stages(parallel: ParallelConfig, num_chunks: int) -> tuple[int, ...]:
    """Return the pipeline rank of each model chunk, also if the schedule does not support the number of chunks."""
    schedule = SCHEDULES[parallel.schedule]
    stages = schedule.assign_chunks(min(parallel.pipeline_model_parallel_size, num_chunks), schedule.chunks_per_stage or 1)
    return tuple(itertools.islice(itertools.cycle(stages), num_chunks))


def format_layer_count(config: Config) -> str:
    """Format the number of layers for a message, with the embedding and the loss if they count as layers: ``--num-layers 30 + loss
    = 31``."""
    parallel, num_layers = config.parallel, config.model.num_layers
    terms = [f"--num-layers {num_layers}"]
    terms += ["embedding"] * parallel.account_for_embedding_in_pipeline_split
    terms += ["loss"] * parallel.account_for_loss_in_pipeline_split
    return terms[0] if len(terms) == 1 else f"{' + '.join(terms)} = {parallel.count_split_units(num_layers)}"


_MAX_TABLE_CHUNKS = 64  # chunks in a table or in a suggested layout


@rule(LAYERS_PER_CHUNK, "num_layers", PP, depends_on=(CHUNKS_PER_STAGE, *ENDS_AS_LAYERS))
def check_layers_divisible_by_virtual_stages(config: Config, world_size: int) -> Iterator[Finding]:
    """The layers must be divisible into virtual stages of --num-layers-per-virtual-pipeline-stage layers, with the same number of
    virtual stages on each pipeline rank. This number must equal --num-virtual-stages-per-pipeline-rank if both flags are given."""
    parallel, num_layers, num_stages = config.parallel, config.model.num_layers, config.parallel.pipeline_model_parallel_size
    layers_per_chunk = parallel.num_layers_per_virtual_pipeline_stage
    chunks_per_stage = parallel.num_virtual_stages_per_pipeline_rank
    if layers_per_chunk is None:
        return
    num_units, divisor = parallel.count_split_units(num_layers), num_stages * layers_per_chunk
    if num_units % divisor:
        yield Finding(
            f"{format_layer_count(config)} is not divisible by --pipeline-model-parallel-size {num_stages} x "
            f"--num-layers-per-virtual-pipeline-stage {layers_per_chunk} = {divisor}.",
            [
                try_values(
                    LAYERS_PER_CHUNK,
                    layers_per_chunk,
                    find_divisors(num_units // num_stages) if num_units % num_stages == 0 else [],
                ),
                build_virtual_stage_candidates(config, (max(1, num_units // divisor), num_units // divisor + 1)),
                try_values(
                    "num_layers",
                    num_layers,
                    [total - (num_units - num_layers) for total in find_multiples_near(num_units, divisor)],
                ),
            ],
            "Each virtual stage holds this number of layers, and each pipeline rank the same number of virtual stages; "
            "--num-virtual-stages-per-pipeline-rank supports any number of layers.",
        )
    elif chunks_per_stage is not None and chunks_per_stage != num_units // divisor:
        yield Finding(
            f"{format_setting(config, LAYERS_PER_CHUNK)} and {format_setting(config, CHUNKS_PER_STAGE)} contradict each other.",
            [[create_change(**{LAYERS_PER_CHUNK: None}), create_change(**{CHUNKS_PER_STAGE: None})]],
            f"{format_layer_count(config)} over {num_stages} pipeline ranks in virtual stages of {layers_per_chunk} makes "
            f"{num_units // divisor} on each rank; set only one of the two flags.",
            (LAYERS_PER_CHUNK, CHUNKS_PER_STAGE, "num_layers", PP),
        )


def build_virtual_stage_candidates(config: Config, chunks_per_stage: Iterable[int]) -> list[Change]:
    """Return one candidate change for each given number of virtual stages per pipeline rank."""
    return [reset(config, LAYERS_PER_CHUNK, **{CHUNKS_PER_STAGE: value}) for value in chunks_per_stage]


@rule(depends_on=CHUNK_COUNT_SETTINGS)
def check_schedule_supports_virtual_stages(config: Config, world_size: int) -> Iterator[Finding]:
    """The pipeline schedule must support the number of virtual stages (model chunks) on each pipeline rank. Depending on
    --pipeline-schedule this is one, two, or any number from two on."""
    parallel, num_layers, chunks_per_stage = config.parallel, config.model.num_layers, get_chunks_per_stage(config)
    if chunks_per_stage is None or SCHEDULES[parallel.schedule].supports(chunks_per_stage):
        return
    num_stages, layers_per_chunk = parallel.pipeline_model_parallel_size, parallel.num_layers_per_virtual_pipeline_stage
    requested = [field for field in (LAYOUT, LAYERS_PER_CHUNK, CHUNKS_PER_STAGE) if getattr(parallel, field) is not None]
    source = ""
    if LAYOUT in requested:
        source = " (from the chunks of --pipeline-model-parallel-layout)"
    elif layers_per_chunk is not None:
        source = (
            f" ({format_layer_count(config)} over {num_stages} ranks, --num-layers-per-virtual-pipeline-stage {layers_per_chunk})"
        )
    name = "--pipeline-schedule" if parallel.pipeline_schedule else "The default schedule"
    chunk_count_candidates = [reset(config, CHUNKS_PER_STAGE, LAYERS_PER_CHUNK), *build_virtual_stage_candidates(config, (2, 3, 4))]
    sizes = find_divisors(parallel.count_split_units(num_layers) // num_stages) if layers_per_chunk is not None else []
    default = get_default_schedule(chunks_per_stage > 1)
    supported = [schedule for schedule, spec in SCHEDULES.items() if spec.supports(chunks_per_stage)]
    yield Finding(
        f"{name} {parallel.schedule} does not support {chunks_per_stage} virtual stage{'s' * (chunks_per_stage != 1)} "
        f"on each pipeline rank{source}.",
        [
            [create_change(pipeline_schedule=schedule) for schedule in sorted(supported, key=default.__ne__)],
            chunk_count_candidates if LAYOUT not in requested else [],
            try_values(LAYERS_PER_CHUNK, layers_per_chunk or 1, sizes),
        ],
        SCHEDULES[parallel.schedule].chunk_description,
        ("pipeline_schedule", *(requested or [CHUNKS_PER_STAGE]), PP),
    )


@rule(depends_on=(*CHUNK_COUNT_SETTINGS, *SPLIT_SETTINGS))
def check_no_empty_chunks(config: Config, world_size: int) -> Iterator[Finding]:
    """Each model chunk must hold at least one layer. If the split of the layers counts the cost of the embedding or the loss, the
    first chunk may hold only the embedding, and the last only the loss. Any larger number of layers is valid."""
    parallel, num_layers, num_stages = config.parallel, config.model.num_layers, config.parallel.pipeline_model_parallel_size
    if parallel.pipeline_model_parallel_layout is not None:
        return
    chunks_per_stage = get_chunks_per_stage(config) or 1
    num_chunks = num_stages * chunks_per_stage
    # The first and last chunk may hold no layer if the cost of embedding and loss counts.
    loss_counts = parallel.account_for_loss_in_pipeline_split or parallel.pipeline_split == "balanced"
    num_empty_allowed = (parallel.account_for_embedding_in_pipeline_split or parallel.layer_costs is not None) + loss_counts
    if num_layers + num_empty_allowed >= num_chunks:
        return
    is_interleaved = chunks_per_stage > 1
    yield Finding(
        f"--pipeline-model-parallel-size {num_stages}"
        f"{f' x {chunks_per_stage} virtual stages = {num_chunks} chunks' if is_interleaved else ''} "
        f"is more than {format_layer_count(config)}.",
        [
            try_values(PP, num_stages, range(max(1, num_layers // chunks_per_stage - 64), num_layers // chunks_per_stage + 1)),
            create_change(num_layers=num_chunks - num_empty_allowed),
            [
                *build_virtual_stage_candidates(config, range(min(chunks_per_stage - 1, 32), 1, -1)),
                reset(config, LAYERS_PER_CHUNK, CHUNKS_PER_STAGE, "pipeline_schedule"),
            ],
            _build_separate_end_candidates(config, num_chunks),
        ],
        f"Each {'chunk' if is_interleaved else 'pipeline stage'} holds at least one layer.",
        ("num_layers", PP, *([CHUNKS_PER_STAGE] if is_interleaved else [])),
        format_chunk_table(config, build_chunks([int(index < num_layers) for index in range(num_chunks)]))
        if is_interleaved and num_chunks <= _MAX_TABLE_CHUNKS
        else (),
    )


def _build_separate_end_candidates(config: Config, num_chunks: int) -> list[Change]:
    """Return a candidate change to a layout in which the loss, or both embedding and loss, have a separate model chunk. Every other
    chunk has one layer. The list is empty if this does not give `num_chunks` chunks."""
    first_layer_chunk = {1: 0, 2: 1}.get(num_chunks - config.model.num_layers)  # chunk that holds the first layer
    if first_layer_chunk is None or num_chunks > _MAX_TABLE_CHUNKS:
        return []
    layout = format_layout(build_chunks([int(first_layer_chunk <= index < num_chunks - 1) for index in range(num_chunks)]))
    return [reset(config, *SPLIT_SETTINGS, **{LAYOUT: layout})]


EXCLUSIONS = (
    ((LAYOUT,), SPLIT_SETTINGS, "The layout defines the number of chunks and their content."),
    (
        ("pipeline_split",),
        (LAYERS_PER_CHUNK, *END_LAYERS, *ENDS_AS_LAYERS),
        "A balanced split chooses the layers of each chunk by cost.",
    ),
    (
        (LAYERS_PER_CHUNK,),
        END_LAYERS,
        "Virtual stages would then differ in size between the ranks; use --num-virtual-stages-per-pipeline-rank.",
    ),
    (ENDS_AS_LAYERS, END_LAYERS, "Either flags set the layers of the first and last rank, or embedding and loss count as layers."),
)
"""Groups of fields that exclude other fields, with the reason."""


@rule(LAYER_COSTS, "num_layers", depends_on=("pipeline_split",))
def check_layer_costs(config: Config, world_size: int) -> Iterator[Finding]:
    """--layer-costs must name a valid file of measured costs, with one cost for each of the --num-layers layers."""
    path, num_layers = config.parallel.layer_costs, config.model.num_layers
    if path is None or config.parallel.pipeline_split != "balanced":
        return
    try:
        num_costs = len(read_layer_costs(path).layers)
    except ValueError as error:
        yield Finding(str(error), [reset(config, LAYER_COSTS)], "--profile-pipeline writes this file.")
        return
    if num_costs != num_layers:
        yield Finding(
            f"--layer-costs {path} has {num_costs} layers, but --num-layers is {num_layers}.",
            [reset(config, LAYER_COSTS)],
            "Costs are valid only for the profiled model: profile this model.",
        )


@rule(depends_on=(LAYOUT, *SPLIT_SETTINGS))
def check_single_split_method(config: Config, world_size: int) -> Iterator[Finding]:
    """Only one method may assign the layers to the pipeline stages, so the flags of different methods, such as
    --pipeline-model-parallel-layout and --pipeline-split, exclude each other."""
    for excluding_group, excluded_group, reason in EXCLUSIONS:
        excluding = [field for field in excluding_group if is_set(config, field)]
        excluded = [field for field in excluded_group if is_set(config, field)]
        if excluding and excluded:
            message = f"{_format_settings(config, excluding)} and {_format_settings(config, excluded)} exclude each other."
            yield Finding(message, [[reset(config, *excluded), reset(config, *excluding)]], reason, (*excluding, *excluded))


def _format_settings(config: Config, fields: Iterable[str], separator: str = ", ") -> str:
    return separator.join(format_setting(config, field) for field in fields)


def _get_end_layers(config: Config) -> dict[str, int]:
    """Return the number of layers of the first and of the last pipeline rank, by the name of the setting that sets it. The
    dictionary is empty if neither setting is set, or if a layout assigns the layers."""
    parallel = config.parallel
    end_layers = {
        field: count for field in (FIRST_STAGE_LAYERS, LAST_STAGE_LAYERS) if (count := getattr(parallel, field)) is not None
    }
    return end_layers if parallel.pipeline_model_parallel_layout is None else {}


@rule(depends_on=(*CHUNK_COUNT_SETTINGS, FIRST_STAGE_LAYERS, LAST_STAGE_LAYERS))
def check_end_layers_divisible_by_chunks(config: Config, world_size: int) -> Iterator[Finding]:
    """--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers must be divisible by the number of model chunks on
    each pipeline rank. They need at least two pipeline ranks, because other ranks hold the remaining layers."""
    end_layers, num_stages = _get_end_layers(config), config.parallel.pipeline_model_parallel_size
    if end_layers and num_stages == 1:
        yield Finding(
            f"With {_format_settings(config, end_layers, ' and ')} there must be several pipeline ranks, but there is one.",
            [reset(config, *end_layers), create_change(**{PP: 2})],
            "The remaining layers need other pipeline ranks.",
            (*end_layers, PP),
        )
        return
    chunks_per_stage = get_chunks_per_stage(config) or 1
    for field, count in end_layers.items():
        if count % chunks_per_stage:
            fewer = [divisor for divisor in reversed(find_divisors(count)) if divisor < chunks_per_stage]
            yield Finding(
                f"{format_setting(config, field)} is not divisible by the {chunks_per_stage} virtual stages of that rank.",
                [
                    try_values(field, count, find_multiples_near(count, chunks_per_stage)),
                    build_virtual_stage_candidates(config, fewer),
                    reset(config, field),
                ],
                "Each virtual stage of the rank holds the same number of layers.",
                (field, CHUNKS_PER_STAGE),
            )


@rule(depends_on=(*CHUNK_COUNT_SETTINGS, FIRST_STAGE_LAYERS, LAST_STAGE_LAYERS))
def check_end_layers_leave_enough(config: Config, world_size: int) -> Iterator[Finding]:
    """--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers must leave at least one layer for each model chunk
    of the other pipeline ranks. If there are no other ranks, no layers may remain."""
    end_layers, num_layers = _get_end_layers(config), config.model.num_layers
    num_stages = config.parallel.pipeline_model_parallel_size
    if not end_layers or num_stages == 1:
        return
    chunks_per_stage = get_chunks_per_stage(config) or 1
    num_middle_stages, total = num_stages - len(end_layers), sum(end_layers.values())
    if num_layers - total >= num_middle_stages * chunks_per_stage if num_middle_stages else num_layers == total:
        return
    ranks = f"{num_middle_stages} other pipeline rank{'s' * (num_middle_stages > 1)}"
    ranks += f" with {chunks_per_stage} virtual stages each" * (chunks_per_stage > 1)
    if num_middle_stages:
        message = (
            f"With {_format_settings(config, end_layers, ' and ')}, {max(num_layers - total, 0)} of --num-layers {num_layers} "
            f"remain for the {ranks}."
        )
        reason = f"Each {'virtual stage (chunk)' if chunks_per_stage > 1 else 'pipeline stage'} holds at least one layer."
    else:
        message = f"{_format_settings(config, end_layers, ' and ')} assign {total} layers, but --num-layers is {num_layers}."
        reason = "There are no other pipeline ranks."
    max_end_layers = num_layers - num_middle_stages * chunks_per_stage  # of the first and last rank together
    yield Finding(
        message,
        [
            *(
                try_values(field, count, [(max_end_layers - total + count) // chunks_per_stage * chunks_per_stage])
                for field, count in end_layers.items()
            ),
            create_change(num_layers=total + num_middle_stages * chunks_per_stage),
            try_values(PP, num_stages, range(2, min(num_stages, 64))),
            build_virtual_stage_candidates(config, range(min(chunks_per_stage - 1, 32), 0, -1)),
            [reset(config, field) for field in end_layers],
        ],
        reason,
        (*end_layers, "num_layers", PP, *([CHUNKS_PER_STAGE] if chunks_per_stage > 1 else [])),
    )


_MAX_LAYER_CHANGES = 1000  # number of layers that a suggested layout may add or remove
_MAX_LAYOUT_CHUNKS = 256  # of a suggested layout


@rule(LAYOUT)
def check_layout_syntax(config: Config, world_size: int) -> Iterator[Finding]:
    """--pipeline-model-parallel-layout must be a valid list of model chunks, with the embedding (E) first and the loss (L) last."""
    text = config.parallel.pipeline_model_parallel_layout
    if text is not None and parse_valid_layout(config) is None:
        candidates = [create_change(**{LAYOUT: f"E{re.sub('[ELm]', '', text)}L"}), create_change(**{LAYOUT: None})]
        yield Finding(f"{format_setting(config, LAYOUT)} cannot be used.", [candidates], " ".join(find_layout_problems(text)))


@rule(LAYOUT, "num_layers", depends_on=(PP, "pipeline_schedule", LAYERS_PER_CHUNK, CHUNKS_PER_STAGE))
def check_layout_num_layers(config: Config, world_size: int) -> Iterator[Finding]:
    """--pipeline-model-parallel-layout must contain one t for each of the --num-layers layers of the model."""
    layout, num_layers = parse_valid_layout(config), config.model.num_layers
    num_placed = sum(chunk.num_layers for chunk in layout or ())
    if layout is None or num_placed == num_layers:
        return
    missing = (
        f"{f'Layer {num_placed} is' if num_placed == num_layers - 1 else f'Layers {num_placed} to {num_layers - 1} are'} missing."
    )
    yield Finding(
        f"{format_setting(config, LAYOUT)} has {num_placed} layer{'s' * (num_placed != 1)} (t), but --num-layers is {num_layers}.",
        [
            _build_layer_count_candidates(_get_layers_per_chunk(layout), num_layers - num_placed),
            create_change(num_layers=num_placed),
            create_change(**{LAYOUT: None}),
        ],
        missing if num_placed < num_layers else f"The model has no layers {num_layers} to {num_placed - 1}.",
        table=format_chunk_table(config, layout),
    )


@rule(LAYOUT, "mtp_num_layers")
def check_layout_mtp_layers(config: Config, world_size: int) -> Iterator[Finding]:
    """If --pipeline-model-parallel-layout contains layers of multi-token prediction (m), it must contain all of them
    (--mtp-num-layers)."""
    text, num_depths = config.parallel.pipeline_model_parallel_layout, config.model.mtp_num_layers
    num_in_layout = sum(chunk.num_depths for chunk in parse_valid_layout(config) or ())
    if text is not None and num_in_layout not in (0, num_depths):
        layout_without_depths = re.sub(r"m(\*[0-9]+)?", "", text)
        candidates = [create_change(mtp_num_layers=num_in_layout)]
        candidates += [create_change(**{LAYOUT: layout_without_depths})] if not find_layout_problems(layout_without_depths) else []
        yield Finding(
            f"{format_setting(config, LAYOUT)} has {num_in_layout} depth{'s' * (num_in_layout != 1)} (m), "
            f"but --mtp-num-layers is {num_depths}.",
            candidates,
        )


@rule(LAYOUT, PP, depends_on=("num_layers", "pipeline_schedule", LAYERS_PER_CHUNK, CHUNKS_PER_STAGE))
def check_layout_divisible_by_stages(config: Config, world_size: int) -> Iterator[Finding]:
    """The number of model chunks in --pipeline-model-parallel-layout, which are separated by |, must be a multiple of
    --pipeline-model-parallel-size, because each pipeline rank holds the same number of chunks."""
    layout, num_stages = parse_valid_layout(config), config.parallel.pipeline_model_parallel_size
    if layout is None or len(layout) % num_stages == 0:
        return
    yield Finding(
        f"{format_setting(config, LAYOUT)} has {len(layout)} chunks, which do not divide among "
        f"--pipeline-model-parallel-size {num_stages}.",
        [
            _build_chunk_count_candidates(_get_layers_per_chunk(layout), num_stages),
            try_values(PP, num_stages, find_divisors(len(layout))),
            create_change(**{LAYOUT: None}),
        ],
        # If the number of layers is wrong too, another rule shows the table.
        table=format_chunk_table(config, layout) if sum(_get_layers_per_chunk(layout)) == config.model.num_layers else (),
    )


def _get_layers_per_chunk(layout: Sequence[LayoutChunk]) -> list[int]:
    return [chunk.num_layers for chunk in layout]


def _build_layer_count_candidates(layers_per_chunk: list[int], num_missing: int) -> list[Change]:
    """Return candidate changes of a layout that has too few or too many layers. Missing layers are added to the smallest model
    chunks, and superfluous layers are removed from the largest ones.

    Args:
        layers_per_chunk: number of layers of each chunk of the layout.
        num_missing: number of missing layers; negative if there are too many.
    """
    if abs(num_missing) > _MAX_LAYER_CHANGES or len(layers_per_chunk) > _MAX_LAYOUT_CHUNKS:
        return []
    step = 1 if num_missing > 0 else -1
    for _ in range(abs(num_missing)):
        # Among equal chunks, take the last one without the loss.
        index = max(range(len(layers_per_chunk)), key=lambda i: (-step * layers_per_chunk[i], i < len(layers_per_chunk) - 1, i))
        layers_per_chunk[index] += step
    return [create_change(**{LAYOUT: format_layout(build_chunks(layers_per_chunk))})]


def _build_chunk_count_candidates(layers_per_chunk: list[int], num_stages: int) -> list[Change]:
    """Return candidate changes of a layout whose number of model chunks is not a multiple of the number of stages. The smallest
    neighboring chunks are merged, or the largest chunks are split if there are fewer chunks than stages.

    Args:
        layers_per_chunk: number of layers of each chunk of the layout.
    """
    if max(len(layers_per_chunk), num_stages) > _MAX_LAYOUT_CHUNKS:
        return []
    while len(layers_per_chunk) % num_stages:
        if len(layers_per_chunk) > num_stages:
            index = min(range(len(layers_per_chunk) - 1), key=lambda i: layers_per_chunk[i] + layers_per_chunk[i + 1])
            layers_per_chunk[index : index + 2] = [layers_per_chunk[index] + layers_per_chunk[index + 1]]
        else:
            index = max(range(len(layers_per_chunk)), key=lambda i: layers_per_chunk[i])
            layers_per_chunk[index : index + 1] = [
                layers_per_chunk[index] - layers_per_chunk[index] // 2,
                layers_per_chunk[index] // 2,
            ]
    return [create_change(**{LAYOUT: format_layout(build_chunks(layers_per_chunk))})]
