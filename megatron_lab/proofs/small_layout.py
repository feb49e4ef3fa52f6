"""Small layouts that together test a large layout: few ranks, and few layers on few pipeline stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from megatron.config.checks.memory import AUTO
from megatron.config.checks.pipeline import (
    CHUNKS_PER_STAGE,
    FIRST_STAGE_LAYERS,
    LAST_STAGE_LAYERS,
    LAYERS_PER_CHUNK,
    LAYOUT,
    SPLIT_SETTINGS,
    build_chunks,
    format_layout,
)
from megatron.config.config import Config
from megatron.config.flags import get_flag
from megatron.config.memory import MemoryConfig
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.parallel.topology import Topology
from megatron.pipeline_parallel.partition import build_layer_table
from megatron.spec.layers import build_layer_specs, group_equal
from megatron.spec.schedules import assign_chunks

DEFAULT_SPLIT: dict[str, Any] = {field: get_flag(field).default for field in (*SPLIT_SETTINGS, LAYOUT)}
"""Default values of the settings that assign layers to stages."""
_MIN_STAGES_WITH_MIDDLE = 3
"""Minimum number of pipeline stages with a stage that is neither first nor last."""
_MAX_STAGES = 4
"""Maximum number of pipeline stages. With four, a middle stage has a neighbour that is a middle stage too."""


@dataclass(frozen=True)
class AxisSizes:
    """Number of ranks along each axis: tensor (tp), pipeline (pp), data (dp) and context (cp)."""

    tp: int
    pp: int
    dp: int
    cp: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks of the layout: the product of all axis sizes."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def gradient_group_size(self) -> int:
        """Number of ranks (context x data) over which the gradients of a parameter are reduced and its optimizer state may be
        sharded."""
        return self.cp * self.dp

    def __str__(self) -> str:
        """Return the layout as text, such as `tensor 2 x pipeline 2 x data 1`."""
        return str(Topology(self.tp, self.cp, self.dp, self.pp))


def get_axis_sizes(config: Config, world_size: int) -> AxisSizes:
    """Return the number of ranks along each axis that the settings give for `world_size` ranks."""
    topology = Topology.of(config.parallel, world_size)
    return AxisSizes(topology.tp, topology.pp, topology.dp, topology.cp)


def reduce_axis_sizes(full_sizes: AxisSizes, max_ranks: int, *, is_hybrid: bool) -> list[AxisSizes]:
    """Choose the axis sizes of the small runs that together test the layout.

    One run has all axes if it fits into `max_ranks` ranks. Otherwise there is a run for each combination of three axes, of two
    axes, or for each single axis: the largest combinations that fit. If the original pipeline has middle stages, at least one run
    has some, as far as `max_ranks` allows.

    Args:
        full_sizes: original number of ranks along each axis.
        max_ranks: maximum number of ranks in a run.
        is_hybrid: whether several groups of data ranks each shard a copy of the model (hybrid FSDP). A test of this needs four data
            ranks.

    Raises:
        ValueError: `max_ranks` is too small to test any axis.
    """
    if full_sizes.world_size <= max_ranks:
        return [full_sizes]
    small_sizes = (min(full_sizes.tp, 2), min(full_sizes.pp, 2), min(full_sizes.dp, 4 if is_hybrid else 2), min(full_sizes.cp, 2))
    candidates = [AxisSizes(*sizes) for sizes in product(*(dict.fromkeys((size, 1)) for size in small_sizes))]
    for num_axes in (4, 3, 2, 1):
        selected = [
            option for option in candidates if sum(size > 1 for size in (option.tp, option.pp, option.dp, option.cp)) == num_axes
        ]
        if selected and all(option.world_size <= max_ranks for option in selected):
            break
    else:
        if is_hybrid and full_sizes.dp >= 2:
            return reduce_axis_sizes(full_sizes, max_ranks, is_hybrid=False)
        raise ValueError(f"--max-ranks {max_ranks} is too small to test any axis of this layout. Set --max-ranks to at least 2.")
    selected = [_extend_pipeline(option, full_sizes, max_ranks) if option.pp > 1 else option for option in selected]
    if full_sizes.pp >= _MIN_STAGES_WITH_MIDDLE and not any(option.pp >= _MIN_STAGES_WITH_MIDDLE for option in selected):
        pipeline_sizes = (
            AxisSizes(tp, pp, 1)
            for tp in (small_sizes[0], 1)
            for pp in range(min(full_sizes.pp, _MAX_STAGES), _MIN_STAGES_WITH_MIDDLE - 1, -1)
        )
        selected += [option for option in pipeline_sizes if option.world_size <= max_ranks][:1]
    return list(dict.fromkeys(selected))


def _extend_pipeline(sizes: AxisSizes, full_sizes: AxisSizes, max_ranks: int) -> AxisSizes:
    """Increase the number of pipeline stages as far as possible: to at most `_MAX_STAGES`, the original number of stages, and
    `max_ranks` ranks in all."""
    max_stages = max_ranks // (sizes.tp * sizes.gradient_group_size)
    return dataclasses.replace(sizes, pp=max(sizes.pp, min(full_sizes.pp, _MAX_STAGES, max_stages)))


_MAX_CHUNKS_PER_STAGE = 3
"""Maximum number of model chunks of a stage: the first, the last and one between them."""
_MAX_CHUNKS_OF_TWO_LAYERS = 4
"""Maximum number of chunks in total for which each chunk has at least two layers (if the model has enough), so that consecutive
layers of a chunk are tested."""


@dataclass(frozen=True)
class LayerSplit:
    """Assignment of layers to model chunks and pipeline stages: the number of layers of each chunk in the order of the forward
    pass, and the chunk's stage."""

    chunk_sizes: list[int]
    stage_of_chunk: tuple[int, ...]

    @property
    def chunk_sizes_by_stage(self) -> list[list[int]]:
        """Number of layers of each model chunk, as a list for each stage."""
        sizes_by_stage: list[list[int]] = [[] for _ in range(max(self.stage_of_chunk) + 1)]
        for size, stage in zip(self.chunk_sizes, self.stage_of_chunk, strict=True):
            sizes_by_stage[stage].append(size)
        return sizes_by_stage

    def __str__(self) -> str:
        """Return the number of layers of each stage as text, with "+" between the chunks of a stage. Long pipelines are
        abbreviated."""
        stage_texts = ["+".join(map(str, sizes)) for sizes in self.chunk_sizes_by_stage]
        if len(stage_texts) > 8:
            stage_texts[4:-3] = ["..."]
        return " ".join(stage_texts)


def get_layer_split(model: ModelConfig, parallel: ParallelConfig, vocab_size: int) -> LayerSplit:
    """Return the assignment of layers to model chunks and pipeline stages that the settings give."""
    table = build_layer_table(model, parallel, vocab_size)
    return LayerSplit([len(chunk.layers) for chunk in table], tuple(chunk.stage for chunk in table))


def count_layers_of_all_types(model: ModelConfig) -> int:
    """Return the smallest n such that the first n layers contain every type of layer of the model."""
    return 1 + max(layers[0] for layers in group_equal(build_layer_specs(model)).values())


def reduce_layer_split(split: LayerSplit, schedule: str, num_stages: int, min_layers: int = 1) -> LayerSplit:
    """Reduce the number of stages, chunks and layers in an assignment of layers to stages. Chunk sizes that differ stay different,
    and larger chunks stay larger.

    The first and last stage are selected first, then middle stages with other chunk sizes than those selected. The chunks of a
    stage are selected by the same rule.

    Args:
        split: original assignment.
        schedule: pipeline schedule, which decides the stage of each chunk.
        num_stages: reduced number of stages.
        min_layers: minimum number of layers in all.
    """
    stages = split.chunk_sizes_by_stage
    selected_stages = _select_representatives([tuple(sizes) for sizes in stages], num_stages)
    per_stage = len(stages[0])
    chunk_columns = [tuple(stages[stage][chunk] for stage in selected_stages) for chunk in range(per_stage)]
    selected_chunks = _select_representatives(chunk_columns, min(per_stage, _MAX_CHUNKS_PER_STAGE))
    stage_of_chunk = assign_chunks(schedule, num_stages, len(selected_chunks))
    next_chunk = [0] * num_stages
    sizes = []
    for stage in stage_of_chunk:
        sizes.append(stages[selected_stages[stage]][selected_chunks[next_chunk[stage]]])
        next_chunk[stage] += 1
    nonzero_sizes = sorted({size for size in sizes if size})
    min_size = min(2 if len(stage_of_chunk) <= _MAX_CHUNKS_OF_TWO_LAYERS else 1, *nonzero_sizes) if nonzero_sizes else 1
    small_sizes = {size: min_size + rank for rank, size in enumerate(nonzero_sizes)} | {0: 0}
    sizes = [small_sizes[size] for size in sizes]
    if (num_missing := min_layers - sum(sizes)) > 0 and nonzero_sizes:
        num_nonempty = sum(size > 0 for size in sizes)
        sizes = [size + -(-num_missing // num_nonempty) if size else 0 for size in sizes]
    if not nonzero_sizes:  # only empty chunks were selected, but a model has at least one layer
        sizes[-1] = 1
    return LayerSplit(sizes, tuple(stage_of_chunk))


def apply_layer_split(
    model: ModelConfig, parallel: ParallelConfig, vocab_size: int, split: LayerSplit
) -> tuple[ParallelConfig, bool]:
    """Build the parallel settings of the small model so that its layers are assigned to stages as `split` says. These are the
    layout flags of the user's run with smaller numbers, if they can express the split, and otherwise an explicit
    --pipeline-model-parallel-layout.

    Args:
        model: small model, with the number of layers of the split.
        parallel: settings of the user's run, but already with the number of stages of the small run.
        vocab_size: rows of the output layer of the small model, without padding. They determine its cost under --pipeline-split
            balanced.
        split: number of layers and stage of each model chunk.

    Returns:
        the settings, and whether they use the layout flags of the user's run.
    """
    stages = split.chunk_sizes_by_stage
    split_fields = {
        CHUNKS_PER_STAGE: len(stages[0]),
        LAYERS_PER_CHUNK: max(split.chunk_sizes),
        FIRST_STAGE_LAYERS: sum(stages[0]),
        LAST_STAGE_LAYERS: sum(stages[-1]),
    }
    changes: dict[str, Any] = {field: value for field, value in split_fields.items() if getattr(parallel, field) is not None}
    if parallel.pipeline_model_parallel_layout is not None:
        changes[LAYOUT] = format_layout(build_chunks(split.chunk_sizes))
    adapted = dataclasses.replace(parallel, **changes)
    if _has_layer_split(model, adapted, vocab_size, split):
        return adapted, True
    explicit_layout: dict[str, Any] = {
        LAYOUT: format_layout(build_chunks(split.chunk_sizes)),
        "pipeline_schedule": parallel.schedule,
    }
    explicit = dataclasses.replace(parallel, **{**DEFAULT_SPLIT, **explicit_layout})
    assert _has_layer_split(model, explicit, vocab_size, split), f"no settings make {split}"
    return explicit, False


def _has_layer_split(model: ModelConfig, parallel: ParallelConfig, vocab_size: int, split: LayerSplit) -> bool:
    try:
        return get_layer_split(model, parallel, vocab_size) == split
    except ValueError:
        return False


def reduce_memory(memory: MemoryConfig, full_split: LayerSplit, small_split: LayerSplit) -> MemoryConfig:
    """Reduce the settings of recomputation and offloading to fewer layers and stages.

    If only some layers of a model chunk were recomputed or offloaded, only some are in the small run too, provided that the chunk
    has at least two layers.

    Args:
        memory: original settings.
        full_split: original assignment of layers to stages.
        small_split: assignment of layers to stages in the small run.
    """

    def reduce_count(count: int, full_count: int, small_count: int) -> int:
        return small_count if count >= full_count else min(count, max(1, small_count - 1))

    num_recomputed, counts_by_stage = memory.recompute_num_layers, memory.recompute_counts
    stages, full_stage_sizes = small_split.chunk_sizes_by_stage, full_split.chunk_sizes_by_stage
    if memory.recompute_layers_per_stage == AUTO:  # AUTO depends on the device's memory, which a small model cannot fill
        memory = dataclasses.replace(memory, recompute_layers_per_stage=",".join("1" * len(stages)))
    elif counts_by_stage is not None:
        full_stages = [round(stage * (len(full_stage_sizes) - 1) / max(1, len(stages) - 1)) for stage in range(len(stages))]
        counts = [
            reduce_count(counts_by_stage[full_stage], sum(full_stage_sizes[full_stage]), sum(new))
            for full_stage, new in zip(full_stages, stages, strict=True)
        ]
        memory = dataclasses.replace(memory, recompute_layers_per_stage=",".join(map(str, counts)))
    elif memory.recompute_method == "block":
        num_recomputed = reduce_count(num_recomputed, max(full_split.chunk_sizes), max(small_split.chunk_sizes))
    num_offloaded = memory.cpu_offloading_num_layers
    return dataclasses.replace(
        memory,
        recompute_num_layers=max(1, min(num_recomputed, sum(small_split.chunk_sizes))),
        cpu_offloading_num_layers=reduce_count(num_offloaded, max(full_split.chunk_sizes), max(small_split.chunk_sizes))
        if num_offloaded
        else 0,
    )


def _select_representatives(rows: Sequence[tuple[int, ...]], count: int) -> list[int]:
    """Select `count` of these rows (sizes of the chunks of one stage, for example), and return their indices in ascending order.

    The first and the last row are selected first, then rows that differ from those selected, then evenly spaced rows.
    """
    last = len(rows) - 1
    if count == 1:
        return [0]
    selected = [0, last]
    for index in range(1, last):
        if len(selected) < count and rows[index] not in {rows[selected_index] for selected_index in selected}:
            selected.append(index)
    even_spread = [round(step * last / (count - 1)) for step in range(count)]
    for index in [*even_spread, *range(last)]:
        if len(selected) < count and index not in selected:
            selected.append(index)
    return sorted(selected)
