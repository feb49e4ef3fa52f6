"""Which layers belong to which chunk and stage. One function makes the table that everybody reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, zip_longest

from megatron.config.imports import named
from megatron.config.memory import MemoryConfig, RecomputeModule
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.pipeline_layout import LayoutChunk, parse_layout, read_layer_costs
from megatron.spec.counts import depth_flops, layer_flops, output_flops
from megatron.spec.layers import layers
from megatron.spec.schedules import placement
from megatron.spec.segments import Segment, kept_whole, segments_of


@dataclass(frozen=True)
class Chunk:
    """Consecutive layers that one rank computes in one operation."""

    index: int
    num_chunks: int
    stage: int
    """The pipeline rank that holds it."""
    layers: range
    segments: tuple[Segment, ...] = ()
    """All its layers and depths, in the order of the forward, with what happens to their activations; by default each by itself,
    and kept."""
    depths: range = range(0)
    """Depths of multi-token prediction, which the last chunk has, counted on from the model's layers."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "segments", self.segments or kept_whole([*self.layers, *self.depths]))

    @property
    def first(self) -> bool:
        """Whether it holds the embedding."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Whether it holds the output layer and computes the loss."""
        return self.index == self.num_chunks - 1


def recomputed_chunks(table: Sequence[Chunk]) -> list[int]:
    """Indices of the chunks of which layers are run again in backward."""
    return [chunk.index for chunk in table if any(segment.recomputed for segment in chunk.segments)]


def table_of(model: ModelConfig, parallel: ParallelConfig, vocab_size: int, memory: MemoryConfig | None = None) -> list[Chunk]:
    """The chunks that the settings ask for, in the order of the depth.

    Args:
        model: Shape of the model.
        parallel: Stages, schedule and everything about the split.
        vocab_size: Rows of the output layer, without padding. They are its cost under `--pipeline-split balanced`.
        memory: What happens to activations; by default they are kept.

    Raises:
        ValueError: no table is possible.
    """
    table = with_depths(_split(model, parallel, vocab_size), model)
    if memory is None:
        return table
    treated = segments_of([(chunk.stage, chunk.layers, chunk.depths) for chunk in table], memory)
    return [replace(chunk, segments=segments) for chunk, segments in zip(table, treated, strict=True)]


def with_depths(table: Sequence[Chunk], model: ModelConfig) -> list[Chunk]:
    """The table, with the depths of multi-token prediction in its last chunk."""
    *others, last = table
    depths = range(model.num_layers, model.num_layers + model.mtp_num_layers)
    return [*others, last if last.depths == depths else replace(last, depths=depths, segments=())]


def _split(model: ModelConfig, parallel: ParallelConfig, vocab_size: int) -> list[Chunk]:
    stages, chunks_per_stage = parallel.pipeline_model_parallel_size, parallel.chunks_per_stage(model.num_layers)
    places = placement(parallel.schedule, stages, chunks_per_stage)
    if parallel.pipeline_model_parallel_layout is not None:
        return layer_table(model.num_layers, places, layout=parse_layout(parallel.pipeline_model_parallel_layout))
    costs: Sequence[float]
    embedding: float
    loss: float
    if parallel.pipeline_split == "balanced" and parallel.layer_costs is not None:
        measured = read_layer_costs(parallel.layer_costs)
        costs, embedding, loss = measured.of_kinds(layers(model)), measured.embedding, measured.loss
    elif parallel.pipeline_split == "balanced":
        costs, embedding, loss = layer_flops(model), 0, output_flops(model, vocab_size) + depth_flops(model)
    else:
        costs = (1,) * model.num_layers
        embedding = int(parallel.account_for_embedding_in_pipeline_split)
        loss = int(parallel.account_for_loss_in_pipeline_split)
    return layer_table(
        model.num_layers,
        places,
        layer_costs=costs,
        embedding_cost=embedding,
        loss_cost=loss,
        first_stage_layers=parallel.decoder_first_pipeline_num_layers,
        last_stage_layers=parallel.decoder_last_pipeline_num_layers,
    )


def layer_table(
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
    """Chunks in the order of the depth, split by cost (see `balance`) or as a layout says.

    Each chunk holds at least one layer, with three exceptions: the first chunk where the embedding costs something, the last where
    the loss does, and what a layout leaves empty. At equal costs, the sizes of stages, and of the chunks of a stage, differ by at
    most one layer; the longer ones are those without embedding and loss.

    Args:
        num_layers: Layers of the model.
        stage_of_chunk: Stage of each chunk (see `megatron.spec.schedules.placement`).
        layer_costs: Time of each layer; by default 1.
        embedding_cost: Time of the embedding, in the same unit.
        loss_cost: Time of the output layer and the loss.
        first_stage_layers: Layers of stage 0, the same number in each of its chunks; by default by cost.
        last_stage_layers: The same for the last stage. (In a V the loss lies on stage 0 all the same.)
        layout: The layers of every chunk, given by hand; costs and sizes are then ignored.

    Raises:
        ValueError: too few layers for the chunks, sizes that leave no split, a layout with other counts.
    """
    places = tuple(stage_of_chunk)
    if layout is not None:
        counts = _sizes_of_layout(layout, num_layers, places)
    else:
        layer_costs = [1] * num_layers if layer_costs is None else layer_costs
        if len(layer_costs) != num_layers:
            raise ValueError(f"costs are given for {len(layer_costs)} layers, but there are {num_layers}")
        least = _least_layers(num_layers, places, embedding_cost > 0, loss_cost > 0)
        least, most = _with_given_sizes(num_layers, places, least, first_stage_layers, last_stage_layers)
        counts = named("megatron.pipeline_parallel.balance:balance")(
            layer_costs,
            places,
            embedding_cost=embedding_cost,
            loss_cost=loss_cost,
            min_layers=least,
            max_layers=most,
        )
    stops = list(accumulate(counts))
    # A last check, whatever is done above: no table may lose or double a layer.
    if len(counts) != len(places) or min(counts) < 0 or stops[-1] != num_layers:
        raise RuntimeError(f"the layer table is wrong: chunks of {counts} layers on stages {places} for {num_layers} layers")
    return [
        Chunk(index, len(places), stage, range(stop - count, stop))
        for index, (stage, count, stop) in enumerate(zip(places, counts, stops, strict=True))
    ]


def format_layer_table(chunks: list[Chunk]) -> list[str]:
    """The table as lines of text: one for each stage, with its chunks side by side in the order of the depth."""
    stages = [[_format_chunk(chunk) for chunk in chunks if chunk.stage == stage] for stage in sorted({c.stage for c in chunks})]
    widths = [max(map(len, column)) for column in zip_longest(*stages, fillvalue="")]
    lines = [" | ".join(text.ljust(width) for text, width in zip(texts, widths, strict=False)) for texts in stages]
    return ["stage  layers", *(f"{stage:5d}  {line.rstrip()}" for stage, line in enumerate(lines))]


_PARTS: dict[RecomputeModule, str] = {
    "layernorm": "norms",
    "core_attn": "probabilities of attention (where its kernel keeps them)",
    "mlp_act": "activations of the MLP",
    "mlp": "the MLP",
}


def describe_recompute(table: Sequence[Chunk]) -> list[str]:
    """A line on the layers that run again in backward, or of which parts do, if there are any."""
    chosen = [segment for chunk in table for segment in chunk.segments if segment.selective]
    if chosen:
        parts = [words for part, words in _PARTS.items() if any(part in segment.selective for segment in chosen)]
        layers = f"{sum(len(segment.layers) for segment in chosen)} of {_num_layers(table)} layers"
        return [f"{layers} compute {' and '.join(filter(None, (', '.join(parts[:-1]), parts[-1])))} again in backward"]
    again = [(chunk.stage, len(segment.layers)) for chunk in table for segment in chunk.segments if segment.recomputed]
    if not again:
        return []
    by_stage = [sum(size for at, size in again if at == stage) for stage in range(1 + max(chunk.stage for chunk in table))]
    longest = max(size for _, size in again)
    return [
        f"{sum(by_stage)} of {_num_layers(table)} layers keep only their input and run again in backward"
        + (f", in groups of up to {longest}" if longest > 1 else "")
        + (f"; by stage {','.join(map(str, by_stage))}" if len(by_stage) > 1 else "")
    ]


def describe_offload(table: Sequence[Chunk]) -> list[str]:
    """A line on the layers whose saved tensors are in host memory between forward and backward, if there are any."""
    moved = [segment for chunk in table for segment in chunk.segments if segment.offloaded]
    if not moved:
        return []
    what = "inputs" if all(one.recomputed for one in moved) else "saved tensors"
    layers = f"{sum(len(one.layers) for one in moved)} of {_num_layers(table)} layers"
    return [f"{what} of {layers} are in host memory between forward and backward"]


def _num_layers(table: Sequence[Chunk]) -> int:
    """All layers, those of multi-token prediction too."""
    return sum(len(chunk.layers) + len(chunk.depths) for chunk in table)


def _format_chunk(chunk: Chunk) -> str:
    return LayoutChunk(chunk.first, len(chunk.layers), chunk.last, len(chunk.depths)).content(chunk.layers.start) or "no layer"


def _sizes_of_layout(layout: Sequence[LayoutChunk], num_layers: int, places: tuple[int, ...]) -> list[int]:
    sizes = [chunk.num_layers for chunk in layout]
    if sum(sizes) != num_layers:
        raise ValueError(f"the pipeline layout does not fit: it places {sum(sizes)} layers (t), but the model has {num_layers}.")
    if len(layout) != len(places):
        raise ValueError(f"the pipeline layout does not fit: it has {len(layout)} chunks, but the schedule has {len(places)}.")
    return sizes


def _least_layers(num_layers: int, places: tuple[int, ...], embedding_counts: bool, loss_counts: bool) -> list[int]:
    """The fewest layers that each chunk must hold."""
    least = [1] * len(places)
    if embedding_counts:
        least[0] = 0
    if loss_counts:
        least[-1] = 0
    if num_layers < max(1, sum(least)):
        num_stages = max(places) + 1
        chunks = f" with {len(places) // num_stages} chunks each" if len(places) > num_stages else ""
        needing = "each needs" if all(least) else f"{sum(least)} of these need"
        raise ValueError(f"{num_layers} layers cannot fill {num_stages} pipeline stages{chunks}: {needing} at least one")
    return least


def _with_given_sizes(
    num_layers: int, places: tuple[int, ...], least: list[int], first: int | None, last: int | None
) -> tuple[list[int], list[int]]:
    """The least and the most layers of each chunk, when the sizes of the first and the last stage are given."""
    low, high = list(least), [num_layers] * len(places)
    given: dict[int, int] = {}
    for what, stage, size in (("first", 0, first), ("last", max(places), last)):
        if size is None:
            continue
        chunks = [chunk for chunk in range(len(places)) if places[chunk] == stage]
        each, over = divmod(size, len(chunks))
        if over or any(not low[chunk] <= each <= high[chunk] for chunk in chunks):
            virtual = f" in {len(chunks)} virtual stages of the same size" if len(chunks) > 1 else ""
            raise ValueError(f"the {what} pipeline stage cannot hold {size} of {num_layers} layers{virtual}")
        for chunk in chunks:
            low[chunk] = high[chunk] = each
        given[stage] = size
    if not sum(low) <= num_layers <= sum(high):
        held = sum(given.values())
        others = sum(needed for needed, stage in zip(least, places, strict=True) if stage not in given)
        raise ValueError(
            f"{held} of {num_layers} layers on the first and last pipeline stage leave {num_layers - held} for the other chunks, "
            + (f"which need at least {others}" if others else "of which there are none")
        )
    return low, high


# ---- how unevenly a table loads the stages

_WORTH_SAYING = 0.03  # of the slowest stage's time; FLOPs foretell it no better


def stage_costs(chunks: Sequence[Chunk], layer_costs: Sequence[float], embedding_cost: float, loss_cost: float) -> list[float]:
    """The cost of one microbatch on each stage, all its chunks together, in the unit of the costs."""
    costs: list[float] = [0] * (max(chunk.stage for chunk in chunks) + 1)
    for chunk in chunks:
        costs[chunk.stage] += sum(layer_costs[layer] for layer in chunk.layers)
        costs[chunk.stage] += embedding_cost * chunk.first + loss_cost * chunk.last
    return costs


def imbalance(chunks: Sequence[Chunk], layer_costs: Sequence[float], embedding_cost: float, loss_cost: float) -> float:
    """Cost of the dearest stage over the mean of all: 1 is perfect; at the number of stages, one stage does all the work."""
    costs = stage_costs(chunks, layer_costs, embedding_cost, loss_cost)
    return max(costs) * len(costs) / sum(costs)


def split_advice(model: ModelConfig, parallel: ParallelConfig, vocab_size: int) -> str | None:
    """A line on what `--pipeline-split balanced` would gain, or None where that is little or sizes are given by hand.

    It is an estimate: costs are FLOPs (`megatron.spec.counts`), which leave out the time of memory traffic.
    """
    by_hand = (
        parallel.pipeline_model_parallel_layout,
        parallel.decoder_first_pipeline_num_layers,
        parallel.decoder_last_pipeline_num_layers,
    )
    if parallel.pipeline_split == "balanced" or any(by_hand):
        return None
    table = table_of(model, parallel, vocab_size)
    layers, loss = layer_flops(model), output_flops(model, vocab_size) + depth_flops(model)
    if model.num_layers < len(table) - 1:  # a split by cost may leave only the last chunk without a layer
        return None
    balanced = layer_table(model.num_layers, [chunk.stage for chunk in table], layer_costs=layers, loss_cost=loss)
    now, then = (stage_costs(chunks, layers, 0, loss) for chunks in (table, balanced))
    gain = 1 - max(then) / max(now)
    if gain < _WORTH_SAYING:
        return None
    return (
        f"stage {now.index(max(now))} is the slowest, with {imbalance(table, layers, 0, loss):.2f} times the mean work "
        f"(the loss costs as much as {loss * len(layers) / sum(layers):.1f} layers): "
        f"{_asking(parallel, len(table))} would shorten it by {100 * gain:.0f} %"
    )


def _asking(parallel: ParallelConfig, num_chunks: int) -> str:
    """How to ask for a balanced split into this many chunks: the flag, those that go with it, those that it replaces."""
    flags, instead = ["--pipeline-split balanced"], []
    if parallel.num_layers_per_virtual_pipeline_stage is not None:
        flags.append(f"--num-virtual-stages-per-pipeline-rank {num_chunks // parallel.pipeline_model_parallel_size}")
        instead.append("--num-layers-per-virtual-pipeline-stage")
    if parallel.account_for_embedding_in_pipeline_split:
        instead.append("--account-for-embedding-in-pipeline-split")
    if parallel.account_for_loss_in_pipeline_split:
        instead.append("--account-for-loss-in-pipeline-split")
    return " ".join(flags) + (f" in place of {' and '.join(instead)}" if instead else "")
