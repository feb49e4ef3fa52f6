"""Where a parameter or an activation belongs: its layer, its pipeline stage, its turn in forward and backward; and in words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from megatron.pipeline_parallel.partition import Chunk

_LAYER = re.compile(r"layers\.(\d+)(?:\.|$)")


def layer_of(name: str) -> int | None:
    """Number of the layer, counted over the whole model; None of what belongs to none."""
    found = _LAYER.match(name)
    return int(found[1]) if found else None


def chunks_of(name: str, table: Sequence[Chunk]) -> list[Chunk]:
    """The pipeline chunks that hold it; of a tied embedding, only the first is told by its name."""
    layer = layer_of(name)
    if layer is not None:
        return [chunk for chunk in table if layer in chunk.layers]
    return [table[0] if name.startswith("embedding") else table[-1]]


def stages_of(name: str, table: Sequence[Chunk]) -> list[int]:
    """The pipeline stages of these chunks: none for a layer that no chunk holds."""
    return sorted({chunk.stage for chunk in chunks_of(name, table)})


def place_words(name: str, table: Sequence[Chunk], *, stages: Iterable[int] | None = None) -> str:
    """`layers.3.attention.qkv.weight (layer 3, stage 1)`.

    Args:
        stages: of those that are meant; by default those that the table tells.
    """
    layer = layer_of(name)
    held = sorted(set(stages_of(name, table) if stages is None else stages))
    notes = [] if layer is None else [f"layer {layer}"]
    if table and max(chunk.stage for chunk in table) > 0:
        notes += [f"stage{'s' if len(held) > 1 else ''} {listing(held)}"] if held else ["on no stage"]
        chunks = chunks_of(name, table)
        if len(chunks) == 1 and len({chunk.stage for chunk in table}) < len(table):
            notes.append(f"chunk {chunks[0].index}")
    return f"{name} ({', '.join(notes)})" if notes else name


def backward_order(names: Iterable[str]) -> list[str]:
    """Parameters in the order in which backward reaches them.

    Args:
        names: in the order of the forward.
    """
    return list(reversed(list(names)))


def forward_order(num_layers: int) -> list[str]:
    """Activations in the order in which the forward makes them."""
    layers = (f"layers.{number}{part}" for number in range(num_layers) for part in (".attention", ".mlp", ""))
    return ["embedding", *layers]


def listing(numbers: Iterable[int], most: int = 8) -> str:
    """`0, 1 and 3`; runs of three and more as `2 to 5`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts: list[str] = []
    for run in runs:
        texts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run)
    if len(texts) > most:
        texts = [*texts[: most - 1], "others"]
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)
