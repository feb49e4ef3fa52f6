"""Partition of the model's layers into model chunks, and of the chunks over pipeline stages.

`build_layer_table` returns the partition as the layer table: a list of all chunks, which all other modules read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, zip_longest

from megatron.config.imports import import_object
from megatron.config.memory import MemoryConfig, RecomputeModule
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.pipeline_layout import LayoutChunk, parse_layout, read_layer_costs
from megatron.spec.counts import count_layer_flops, count_mtp_flops, count_output_flops
from megatron.spec.layers import build_layer_specs
from megatron.spec.schedules import assign_chunks
from megatron.spec.segments import Segment, build_layer_segments, plan_segments


@dataclass(frozen=True)
class Chunk:
    """Model chunk: consecutive layers that one rank computes in one operation."""

    index: int
    num_chunks: int
    stage: int
    """Pipeline stage that holds the chunk."""
    layers: range
    segments: tuple[Segment, ...] = ()
    """Groups of consecutive layers (and MTP layers) of the chunk, in forward order. A segment says whether activations are
    kept, recomputed or offloaded. By default each layer is one segment whose activations are kept."""
    depths: range = range(0)
    """Indices of the multi-token-prediction (MTP) layers, which only the last chunk holds. They follow the indices of the
    model's layers."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "segments", self.segments or build_layer_segments([*self.layers, *self.depths]))

    @property
    def is_first(self) -> bool:
        """Whether the chunk holds the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the chunk holds the output layer and computes the loss."""
        return self.index == self.num_chunks - 1


def find_recomputed_chunks(table: Sequence[Chunk]) -> list[int]:
    """Return the indices of the model chunks in which at least one layer is recomputed in backward."""
    return [chunk.index for chunk in table if any(segment.is_recomputed for segment in chunk.segments)]


def build_layer_table(
    model: ModelConfig, parallel: ParallelConfig, vocab_size: int, memory: MemoryConfig | None = None
) -> list[Chunk]:
    """Build the layer table from the settings: a list of all model chunks with their layers and stages, in the order of the
    forward.

    Args:
        model: Shape of the model.
        parallel: Stages, schedule and all settings of the split.
        vocab_size: Rows of the output layer, without padding. They determine its cost under `--pipeline-split balanced`.
        memory: Settings for recompute and offload of activations; None to keep all activations.

    Raises:
        ValueError: the layers cannot be divided among the chunks.
    """
    table = add_mtp_depths(_split_from_settings(model, parallel, vocab_size), model)
    if memory is None:
        return table
    segments_per_chunk = plan_segments([(chunk.stage, chunk.layers, chunk.depths) for chunk in table], memory)
    return [replace(chunk, segments=segments) for chunk, segments in zip(table, segments_per_chunk, strict=True)]


def add_mtp_depths(table: Sequence[Chunk], model: ModelConfig) -> list[Chunk]:
    """Return the layer table (all model chunks) with the multi-token-prediction (MTP) layers added to its last chunk."""
    *preceding_chunks, last = table
    depths = range(model.num_layers, model.num_layers + model.mtp_num_layers)
    return [*preceding_chunks, last if last.depths == depths else replace(last, depths=depths, segments=())]


def _split_from_settings(model: ModelConfig, parallel: ParallelConfig, vocab_size: int) -> list[Chunk]:
    num_stages, chunks_per_stage = parallel.pipeline_model_parallel_size, parallel.get_chunks_per_stage(model.num_layers)
    stage_of_chunk = assign_chunks(parallel.schedule, num_stages, chunks_per_stage)
    if parallel.pipeline_model_parallel_layout is not None:
        return partition_layers(model.num_layers, stage_of_chunk, layout=parse_layout(parallel.pipeline_model_parallel_layout))
    layer_costs: Sequence[float]
    embedding_cost: float
    loss_cost: float
    if parallel.pipeline_split == "balanced" and parallel.layer_costs is not None:
        measured = read_layer_costs(parallel.layer_costs)
        layer_costs, embedding_cost, loss_cost = (
            measured.average_by_type(build_layer_specs(model)),
            measured.embedding,
            measured.loss,
        )
    elif parallel.pipeline_split == "balanced":
        layer_costs, embedding_cost, loss_cost = (
            count_layer_flops(model),
            0,
            count_output_flops(model, vocab_size) + count_mtp_flops(model),
        )
    else:
        layer_costs = (1,) * model.num_layers
        embedding_cost = int(parallel.account_for_embedding_in_pipeline_split)
        loss_cost = int(parallel.account_for_loss_in_pipeline_split)
    return partition_layers(
        model.num_layers,
        stage_of_chunk,
        layer_costs=layer_costs,
        embedding_cost=embedding_cost,
        loss_cost=loss_cost,
        first_stage_layers=parallel.decoder_first_pipeline_num_layers,
        last_stage_layers=parallel.decoder_last_pipeline_num_layers,
    )


def partition_layers(
    num_layers: int,
    stage_of_chunk: Sequence[int],
    *,
    layer_costs: Sequence[float] | None = None,
    embedding_cost: float = 0,
    loss_cost: float = 0,
    first_stage_layers: int | None = None,
    last_stage_layers: int | None = None,
    layout: Sequence[LayoutChunk] | None = None,
) -> list[Chunk]:
    """Partition the layers into model chunks, by cost (see `balance`) or as the user's pipeline layout says.

    Each chunk holds at least one layer, with three exceptions: the first chunk if the embedding has a cost, the last chunk if the
    loss has a cost, and chunks that a layout leaves empty. With equal layer costs, the sizes of stages, and of the chunks of a
    stage, differ by at most one layer. The longer stages and chunks are those without embedding and loss.

    Args:
        num_layers: Layers of the model.
        stage_of_chunk: Stage of each chunk (see `megatron.spec.schedules.assign_chunks`).
        layer_costs: Time of each layer; by default 1.
        embedding_cost: Time of the embedding, in the unit of `layer_costs`.
        loss_cost: Time of the output layer and the loss, in this unit.
        first_stage_layers: Layers of stage 0, divided equally among its chunks; by default chosen by cost.
        last_stage_layers: Layers of the last stage, divided equally among its chunks. (In a V-shaped schedule stage 0 still holds
            the loss.)
        layout: Layers of every chunk, set by `--pipeline-model-parallel-layout`. Costs and stage sizes are then ignored.

    Raises:
        ValueError: there are too few layers for the chunks, the stage sizes admit no split, or the layout has another number of
            layers or chunks.
    """
    stages = tuple(stage_of_chunk)
    if layout is not None:
        counts = _get_layout_sizes(layout, num_layers, stages)
    else:
        layer_costs = [1] * num_layers if layer_costs is None else layer_costs
        if len(layer_costs) != num_layers:
            raise ValueError(
                f"`layer_costs` has {len(layer_costs)} values, but the model has {num_layers} layers: pass one cost for each layer"
            )
        min_layers = _compute_min_layers(num_layers, stages, embedding_cost > 0, loss_cost > 0)
        min_layers, max_layers = _apply_stage_sizes(num_layers, stages, min_layers, first_stage_layers, last_stage_layers)
        counts = import_object("megatron.pipeline_parallel.balance:balance")(
            layer_costs,
            stages,
            embedding_cost=embedding_cost,
            loss_cost=loss_cost,
            min_layers=min_layers,
            max_layers=max_layers,
        )
    stops = list(accumulate(counts))
    # A final check, independent of the code above: no table may lose or duplicate a layer.
    if len(counts) != len(stages) or min(counts) < 0 or stops[-1] != num_layers:
        raise RuntimeError(
            f"internal error: the layer table is wrong: chunks of {counts} layers on stages {stages} for {num_layers} layers. "
            "Please report this"
        )
    return [
        Chunk(index, len(stages), stage, range(stop - count, stop))
        for index, (stage, count, stop) in enumerate(zip(stages, counts, stops, strict=True))
    ]


def format_layer_table(chunks: list[Chunk]) -> list[str]:
    """Format the layer table (all model chunks) as lines of text: one line per stage, with its chunks side by side in the order of
    the forward."""
    stages = [[_format_chunk(chunk) for chunk in chunks if chunk.stage == stage] for stage in sorted({c.stage for c in chunks})]
    widths = [max(map(len, column)) for column in zip_longest(*stages, fillvalue="")]
    rows = [" | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=False)) for cells in stages]
    return ["stage  layers", *(f"{stage:5d}  {row.rstrip()}" for stage, row in enumerate(rows))]


_RECOMPUTED_MODULES: dict[RecomputeModule, str] = {
    "layernorm": "norms",
    "core_attn": "probabilities of attention (where its kernel keeps them)",
    "mlp_act": "activations of the MLP",
    "mlp": "the MLP",
}


def describe_recompute(table: Sequence[Chunk]) -> list[str]:
    """Return a list with the log line about layers, or modules of layers, that are recomputed in backward. Return an empty list if
    nothing is recomputed."""
    selective_segments = [segment for chunk in table for segment in chunk.segments if segment.recomputed_modules]
    if selective_segments:
        descriptions = [
            description
            for module, description in _RECOMPUTED_MODULES.items()
            if any(module in segment.recomputed_modules for segment in selective_segments)
        ]
        layers = f"{sum(len(segment.layers) for segment in selective_segments)} of {_count_layers(table)} layers"
        return [
            f"{layers} compute {' and '.join(filter(None, (', '.join(descriptions[:-1]), descriptions[-1])))} again in backward"
        ]
    recomputed = [(chunk.stage, len(segment.layers)) for chunk in table for segment in chunk.segments if segment.is_recomputed]
    if not recomputed:
        return []
    by_stage = [
        sum(size for chunk_stage, size in recomputed if chunk_stage == stage)
        for stage in range(1 + max(chunk.stage for chunk in table))
    ]
    max_segment = max(size for _, size in recomputed)
    return [
        f"{sum(by_stage)} of {_count_layers(table)} layers keep only their input and run again in backward"
        + (f", in groups of up to {max_segment}" if max_segment > 1 else "")
        + (f"; by stage {','.join(map(str, by_stage))}" if len(by_stage) > 1 else "")
    ]


def describe_offload(table: Sequence[Chunk]) -> list[str]:
    """Return a list with the log line about layers whose saved tensors are in host memory between forward and backward. Return an
    empty list if there are none."""
    offloaded = [segment for chunk in table for segment in chunk.segments if segment.is_offloaded]
    if not offloaded:
        return []
    tensors = "inputs" if all(offloaded_segment.is_recomputed for offloaded_segment in offloaded) else "saved tensors"
    layers = f"{sum(len(offloaded_segment.layers) for offloaded_segment in offloaded)} of {_count_layers(table)} layers"
    return [f"{tensors} of {layers} are in host memory between forward and backward"]


def _count_layers(table: Sequence[Chunk]) -> int:
    """Count all layers of the chunks, including multi-token-prediction layers."""
    return sum(len(chunk.layers) + len(chunk.depths) for chunk in table)


def _format_chunk(chunk: Chunk) -> str:
    return (
        LayoutChunk(chunk.is_first, len(chunk.layers), chunk.is_last, len(chunk.depths)).summarize(chunk.layers.start) or "no layer"
    )


def _get_layout_sizes(layout: Sequence[LayoutChunk], num_layers: int, stages: tuple[int, ...]) -> list[int]:
    sizes = [chunk.num_layers for chunk in layout]
    if sum(sizes) != num_layers:
        raise ValueError(
            "the pipeline layout (--pipeline-model-parallel-layout) does not match the model: "
            f"it has {sum(sizes)} layers (t), but the model has {num_layers} layers. Write one t for each layer."
        )
    if len(layout) != len(stages):
        raise ValueError(
            "the pipeline layout (--pipeline-model-parallel-layout) does not match the schedule: "
            f"it has {len(layout)} chunks, but the schedule has {len(stages)} chunks. Separate this number of chunks with |."
        )
    return sizes


def _compute_min_layers(num_layers: int, stages: tuple[int, ...], embedding_counts: bool, loss_counts: bool) -> list[int]:
    """Return the minimum number of layers of each chunk. It is 1, except that the first chunk may be empty if the embedding counts
    like a layer, and the last chunk if the loss does.

    Raises:
        ValueError: the model has fewer layers than the minimum.
    """
    min_layers = [1] * len(stages)
    if embedding_counts:
        min_layers[0] = 0
    if loss_counts:
        min_layers[-1] = 0
    if num_layers < max(1, sum(min_layers)):
        num_stages = max(stages) + 1
        chunks = f" with {len(stages) // num_stages} chunks each" if len(stages) > num_stages else ""
        unit = "chunk" if chunks else "stage"
        requirement = f"each {unit} needs" if all(min_layers) else f"{sum(min_layers)} of these {unit}s need"
        raise ValueError(
            f"{num_layers} layers cannot fill {num_stages} pipeline stages{chunks}: {requirement} at least one layer. Use fewer "
            f"{unit}s or more layers"
        )
    return min_layers


def _apply_stage_sizes(
    num_layers: int, stages: tuple[int, ...], min_layers: list[int], first_size: int | None, last_size: int | None
) -> tuple[list[int], list[int]]:
    """Return the minimum and maximum number of layers of each chunk, after the user has set the size of the first or last stage.

    Raises:
        ValueError: a stage cannot have this size, or the remaining layers do not suit the other chunks.
    """
    low, high = list(min_layers), [num_layers] * len(stages)
    requested: dict[int, int] = {}
    for position, stage, size in (("first", 0, first_size), ("last", max(stages), last_size)):
        if size is None:
            continue
        chunks = [chunk for chunk in range(len(stages)) if stages[chunk] == stage]
        layers_per_chunk, remainder = divmod(size, len(chunks))
        if remainder or any(not low[chunk] <= layers_per_chunk <= high[chunk] for chunk in chunks):
            virtual = f", and divisible by the number of its virtual stages ({len(chunks)})" if len(chunks) > 1 else ""
            min_others = sum(minimum for minimum, owner in zip(low, stages, strict=True) if owner != stage)
            raise ValueError(
                f"--decoder-{position}-pipeline-num-layers {size}: the number of layers of the {position} pipeline stage must be "
                f"at least {len(chunks) * max(low[chunk] for chunk in chunks)} and at most {num_layers - min_others}{virtual}. "
                f"The other stages need at least {min_others} of the {num_layers} layers. Change this number"
            )
        for chunk in chunks:
            low[chunk] = high[chunk] = layers_per_chunk
        requested[stage] = size
    if not sum(low) <= num_layers <= sum(high):
        num_requested = sum(requested.values())
        num_required = sum(min_size for min_size, stage in zip(min_layers, stages, strict=True) if stage not in requested)
        flags = [
            f"--decoder-{position}-pipeline-num-layers {size}"
            for position, size in (("first", first_size), ("last", last_size))
            if size is not None
        ]
        raise ValueError(
            f"{' and '.join(flags)} {'take' if len(flags) > 1 else 'takes'} {num_requested} of {num_layers} layers, "
            f"so {num_layers - num_requested} of the layers remain, "
            + (
                f"but the other stages need at least {num_required} layers. Lower these numbers"
                if num_required
                else "but no other stage can take them. Raise these numbers"
            )
        )
    return low, high


# ---- Imbalance of the load of the stages.

_MIN_REPORTED_GAIN = 0.03  # of the slowest stage's time; FLOPs do not predict time more precisely


def compute_stage_costs(
    chunks: Sequence[Chunk], layer_costs: Sequence[float], embedding_cost: float, loss_cost: float
) -> list[float]:
    """Return the time that each stage needs for one microbatch, in the unit of `layer_costs`: the sum over all chunks of the
    stage."""
    costs: list[float] = [0] * (max(chunk.stage for chunk in chunks) + 1)
    for chunk in chunks:
        costs[chunk.stage] += sum(layer_costs[layer] for layer in chunk.layers)
        costs[chunk.stage] += embedding_cost * chunk.is_first + loss_cost * chunk.is_last
    return costs


def compute_imbalance(chunks: Sequence[Chunk], layer_costs: Sequence[float], embedding_cost: float, loss_cost: float) -> float:
    """Return the time of the slowest stage divided by the mean time of all stages.

    The result is 1 for a perfect split. It is the number of stages if one stage does all the work.
    """
    costs = compute_stage_costs(chunks, layer_costs, embedding_cost, loss_cost)
    return max(costs) * len(costs) / sum(costs)


def suggest_balanced_split(model: ModelConfig, parallel: ParallelConfig, vocab_size: int) -> str | None:
    """Return a log line that says how much faster the slowest stage would be with `--pipeline-split balanced`. Return None if the
    gain is small or the user has set stage sizes.

    The gain is an estimate: costs are FLOPs (`megatron.spec.counts`), which leave out the time of memory traffic.
    """
    manual_sizes = (
        parallel.pipeline_model_parallel_layout,
        parallel.decoder_first_pipeline_num_layers,
        parallel.decoder_last_pipeline_num_layers,
    )
    if parallel.pipeline_split == "balanced" or any(manual_sizes):
        return None
    table = build_layer_table(model, parallel, vocab_size)
    costs, loss_cost = count_layer_flops(model), count_output_flops(model, vocab_size) + count_mtp_flops(model)
    if model.num_layers < len(table) - 1:  # a split by cost may leave only the last chunk empty
        return None
    balanced = partition_layers(model.num_layers, [chunk.stage for chunk in table], layer_costs=costs, loss_cost=loss_cost)
    current_costs, balanced_costs = (compute_stage_costs(chunks, costs, 0, loss_cost) for chunks in (table, balanced))
    gain = 1 - max(balanced_costs) / max(current_costs)
    if gain < _MIN_REPORTED_GAIN:
        return None
    return (
        f"stage {current_costs.index(max(current_costs))} is the slowest, "
        f"with {compute_imbalance(table, costs, 0, loss_cost):.2f} times the mean work "
        f"(the loss costs as much as {loss_cost * len(costs) / sum(costs):.1f} layers): "
        f"{_format_balanced_flags(parallel, len(table))} would shorten it by {100 * gain:.0f} %"
    )


def _format_balanced_flags(parallel: ParallelConfig, num_chunks: int) -> str:
    """Format the flags that request a balanced split into this many chunks, and name the flags that they replace."""
    flags, replaced_flags = ["--pipeline-split balanced"], []
    if parallel.num_layers_per_virtual_pipeline_stage is not None:
        flags.append(f"--num-virtual-stages-per-pipeline-rank {num_chunks // parallel.pipeline_model_parallel_size}")
        replaced_flags.append("--num-layers-per-virtual-pipeline-stage")
    if parallel.account_for_embedding_in_pipeline_split:
        replaced_flags.append("--account-for-embedding-in-pipeline-split")
    if parallel.account_for_loss_in_pipeline_split:
        replaced_flags.append("--account-for-loss-in-pipeline-split")
    return " ".join(flags) + (f" in place of {' and '.join(replaced_flags)}" if replaced_flags else "")
