"""How the layers of a chunk are treated between forward and backward: kept, or run again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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


def kept_whole(layers: Iterable[int], selective: Iterable[RecomputeModule] = ()) -> tuple[Segment, ...]:
    """Each layer by itself, and nothing computed again but parts."""
    return tuple(Segment(range(layer, layer + 1), selective=frozenset(selective)) for layer in layers)


def segments(layers: range, memory: MemoryConfig) -> tuple[Segment, ...]:
    """The segments of a chunk, in the order of the forward.

    Args:
        layers: those of the chunk.
    """
    if memory.recompute != "full":
        return kept_whole(layers, memory.recompute_modules if memory.recompute == "selective" else ())
    if memory.recompute_method == "block":
        first = layers[: memory.recompute_num_layers]
        each = (Segment(range(layer, layer + 1), recomputed=True) for layer in first)
        return (*each, *kept_whole(layers[len(first) :]))
    size = memory.recompute_num_layers
    return tuple(Segment(layers[place : place + size], recomputed=True) for place in range(0, len(layers), size))
