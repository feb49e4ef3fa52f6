"""A shard: the part of a parameter that this rank updates. The optimizer, clipping and checkpoints see only shards."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.parallel.boxes import Piece, PlacedBox, place
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamRecord


@dataclass
class Shard:
    """One parameter's part on this rank.

    All tensors have `piece.stop - piece.start` elements; `main` and `grad` have the same dtype.
    """

    record: ParamRecord
    piece: Piece
    """Which elements of the flattened local parameter."""
    param: torch.Tensor
    """The whole local compute parameter."""
    main: torch.Tensor
    """What is updated: the parameter itself where dtypes agree, else a float32 copy of the piece."""
    grad: torch.Tensor
    counted: bool
    """Whether this rank counts the shard in global norms and zero counts (each element counts once in the world)."""

    def boxes(self, context: ParallelContext) -> list[PlacedBox]:
        """Which boxes of the global tensor the shard holds, padding left out."""
        sizes = context.axis_sizes
        return place(self.record.local_shape(sizes), self.record.held_box(sizes, context.coordinates), self.piece)
