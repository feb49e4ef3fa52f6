"""Layers to chunks and stages. One function makes the table, and everybody reads it; layers are never floor-divided away."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chunk:
    """A run of consecutive layers that one rank computes as a whole."""

    index: int
    num_chunks: int
    stage: int
    """Position on the pipeline axis of the rank that holds it."""
    layers: range

    @property
    def first(self) -> bool:
        """Whether the embedding belongs to it."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Whether the output layer and the loss belong to it."""
        return self.index == self.num_chunks - 1


def layer_table(num_layers: int, num_stages: int) -> list[Chunk]:
    """Chunks in the order of the depth, one a stage.

    Sizes differ by at most one layer. The longer ones come first among the inner stages, because the ends also carry the embedding
    and the loss.

    Raises:
        ValueError: fewer layers than stages.
    """
    if num_layers < num_stages:
        raise ValueError(f"{num_layers} layers cannot fill {num_stages} pipeline stages: each needs at least one")
    base, extra = divmod(num_layers, num_stages)
    inner_first = [*range(1, num_stages - 1), 0, num_stages - 1][:num_stages] if num_stages > 1 else [0]
    longer = set(inner_first[:extra])
    chunks, start = [], 0
    for stage in range(num_stages):
        size = base + (stage in longer)
        chunks.append(Chunk(stage, num_stages, stage, range(start, start + size)))
        start += size
    assert start == num_layers
    return chunks


def format_layer_table(chunks: list[Chunk]) -> list[str]:
    """The table as lines of text."""
    lines = ["stage  layers"]
    for chunk in chunks:
        parts = ["embedding"] if chunk.first else []
        if len(chunk.layers):
            parts.append(f"{chunk.layers.start}-{chunk.layers.stop - 1} ({len(chunk.layers)})")
        parts += ["norm, output, loss"] if chunk.last else []
        lines.append(f"{chunk.stage:5d}  {', '.join(parts)}")
    return lines
