"""Segments of a model chunk: consecutive layers whose activations are kept, recomputed or offloaded between forward and
backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megatron.config.memory import MemoryConfig, RecomputeModule


@dataclass(frozen=True)
class Segment:
    """Consecutive layers of a model chunk whose activations are kept, recomputed or offloaded together."""

    layers: range
    """Indices of the layers, counted over the whole model."""
    is_recomputed: bool = False
    """Whether the layers are recomputed in backward (full recomputation). Only the input of the first layer is saved then."""
    recomputed_modules: frozenset[RecomputeModule] = frozenset()
    """Modules of each layer that are recomputed individually (selective recomputation)."""
    is_offloaded: bool = False
    """Whether saved activations are moved to host memory after the forward pass and back to the device for the backward pass."""

    @property
    def saves_memory(self) -> bool:
        """Whether the segment's activations are recomputed or offloaded."""
        return self.is_recomputed or self.is_offloaded or bool(self.recomputed_modules)


def build_layer_segments(layers: Iterable[int], recomputed_modules: Iterable[RecomputeModule] = ()) -> tuple[Segment, ...]:
    """Build one segment per layer, in which no modules or the given ones are recomputed (selective recomputation)."""
    return tuple(Segment(range(layer, layer + 1), recomputed_modules=frozenset(recomputed_modules)) for layer in layers)


def plan_segments(chunks: Sequence[tuple[int, range, range]], memory: MemoryConfig) -> list[tuple[Segment, ...]]:
    """Divide the layers of each model chunk into segments that are recomputed or offloaded together, in forward order.

    Layers that are recomputed together are offloaded if the first of them is selected for offloading, since only its input is
    saved. A depth of multi-token prediction is a separate segment, because it also reads token embeddings. It is treated like the
    last layer of its chunk.

    Args:
        chunks: (stage, layer indices, indices of multi-token-prediction depths) of each chunk, in forward order.
    """
    segments_of_chunk = []
    for (_, layers, depths), segments, num_recomputed in zip(chunks, *_plan_recompute(chunks, memory), strict=True):
        offloaded_layers = memory.select_offloaded(layers)
        layer_segments = [replace(segment, is_offloaded=segment.layers.start in offloaded_layers) for segment in segments]
        mtp_segment = Segment(
            range(0),
            is_recomputed=memory.effective_granularity == "full" and num_recomputed >= max(1, len(layers)),
            recomputed_modules=frozenset(memory.recompute_modules if memory.effective_granularity == "selective" else ()),
            is_offloaded=memory.has_offload and len(offloaded_layers) == len(layers),
        )
        segments_of_chunk.append((*layer_segments, *(replace(mtp_segment, layers=range(depth, depth + 1)) for depth in depths)))
    return segments_of_chunk


def _plan_recompute(
    chunks: Sequence[tuple[int, range, range]], memory: MemoryConfig
) -> tuple[list[tuple[Segment, ...]], list[int]]:
    """Divide the layers of each model chunk into segments by the recompute settings.

    Returns:
        the segments of each chunk, and how many layers of each chunk the settings recompute at most. This number may exceed the
        layers of the chunk.
    """
    by_stage = memory.recompute_counts
    assert by_stage is not None or memory.recompute_layers_per_stage is None, (
        "--recompute-layers-per-stage auto is resolved earlier"
    )
    if memory.effective_granularity != "full" or memory.recompute_method != "block" or by_stage is None:
        num_layers = memory.recompute_num_layers
        return [_split_chunk(layers, memory, num_layers) for _, layers, _ in chunks], [
            num_layers if memory.recompute_method == "block" else max(1, len(layers)) for _, layers, _ in chunks
        ]
    segments, max_recomputed, remaining = [], [], list(by_stage)
    for stage, layers, _ in chunks:
        max_recomputed.append(remaining[stage])
        num_recomputed = min(remaining[stage], len(layers))
        remaining[stage] -= num_recomputed
        segments.append(_split_chunk(layers, memory, num_recomputed))
    return segments, max_recomputed


def _split_chunk(layers: range, memory: MemoryConfig, num_layers: int) -> tuple[Segment, ...]:
    """Divide the layers of one model chunk into segments by the recompute settings.

    Args:
        num_layers: layers per recomputed segment (--recompute-method uniform), or number of recomputed layers (block).
    """
    if memory.effective_granularity != "full":
        return build_layer_segments(layers, memory.recompute_modules if memory.effective_granularity == "selective" else ())
    if memory.recompute_method == "block":
        recomputed_layers = layers[:num_layers]
        recomputed = (Segment(range(layer, layer + 1), is_recomputed=True) for layer in recomputed_layers)
        return (*recomputed, *build_layer_segments(layers[len(recomputed_layers) :]))
    return tuple(Segment(layers[start : start + num_layers], is_recomputed=True) for start in range(0, len(layers), num_layers))
