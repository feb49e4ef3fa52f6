"""How the layers of a chunk are treated between forward and backward: kept, run again, or moved to host memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megatron.config.memory import MemoryConfig, RecomputeModule


@dataclass(frozen=True)
class Segment:
    """Neighbouring layers of a chunk."""

    layers: range
    """Counted over the whole model."""
    recomputed: bool = False
    """Whether they are run again in backward; of their forward only the input is kept then."""
    selective: frozenset[RecomputeModule] = frozenset()
    """Parts of each layer that are computed again by themselves."""
    offloaded: bool = False
    """Whether what is kept of them is moved to host memory until backward."""

    @property
    def treated(self) -> bool:
        """Whether anything is done with what they save."""
        return self.recomputed or self.offloaded or bool(self.selective)


def kept_whole(layers: Iterable[int], selective: Iterable[RecomputeModule] = ()) -> tuple[Segment, ...]:
    """Each layer by itself, and nothing computed again but parts."""
    return tuple(Segment(range(layer, layer + 1), selective=frozenset(selective)) for layer in layers)


def segments_of(chunks: Sequence[tuple[int, range, range]], memory: MemoryConfig) -> list[tuple[Segment, ...]]:
    """The segments of each chunk, in the order of the forward.

    Layers that run again together are moved to host memory if the first of them is chosen: their input is all that moves. A depth
    of multi-token prediction is treated as the last layer of its chunk, by itself: it has other inputs.

    Args:
        chunks: stage, layers and depths of each, in the order of the depth.
    """
    found = []
    for (_, layers, depths), segments, number in zip(chunks, *_kept_or_run_again(chunks, memory), strict=True):
        chosen = memory.offloaded(layers)
        moved = [replace(segment, offloaded=segment.layers.start in chosen) for segment in segments]
        alike = Segment(
            range(0),
            recomputed=memory.recompute == "full" and number >= max(1, len(layers)),
            selective=frozenset(memory.recompute_modules if memory.recompute == "selective" else ()),
            offloaded=memory.offloads and len(chosen) == len(layers),
        )
        found.append((*moved, *(replace(alike, layers=range(depth, depth + 1)) for depth in depths)))
    return found


def _kept_or_run_again(
    chunks: Sequence[tuple[int, range, range]], memory: MemoryConfig
) -> tuple[list[tuple[Segment, ...]], list[int]]:
    """The segments of the layers of each chunk, and how many layers may be run again there."""
    by_stage = memory.recomputed_by_stage
    assert by_stage is not None or memory.recompute_layers_per_stage is None, "auto is replaced by numbers before"
    if memory.recompute != "full" or memory.recompute_method != "block" or by_stage is None:
        most = memory.recompute_num_layers
        return [_segments(layers, memory, most) for _, layers, _ in chunks], [
            most if memory.recompute_method == "block" else max(1, len(layers)) for _, layers, _ in chunks
        ]
    found, numbers, left = [], [], list(by_stage)
    for stage, layers, _ in chunks:
        numbers.append(left[stage])
        number = min(left[stage], len(layers))
        left[stage] -= number
        found.append(_segments(layers, memory, number))
    return found, numbers


def _segments(layers: range, memory: MemoryConfig, number: int) -> tuple[Segment, ...]:
    """Those of one chunk.

    Args:
        number: layers of a group (uniform), or layers that run again (block).
    """
    if memory.recompute != "full":
        return kept_whole(layers, memory.recompute_modules if memory.recompute == "selective" else ())
    if memory.recompute_method == "block":
        first = layers[:number]
        each = (Segment(range(layer, layer + 1), recomputed=True) for layer in first)
        return (*each, *kept_whole(layers[len(first) :]))
    return tuple(Segment(layers[place : place + number], recomputed=True) for place in range(0, len(layers), number))
