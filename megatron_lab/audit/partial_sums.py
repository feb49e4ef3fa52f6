"""What the optimizer would get if a gradient were not summed over some of its axes: so the audit can say which were left out.

A rank's shard then has the sum over the other axes alone, of ranks that have the same place as it along those left out. So each
rank takes the signatures of its own gradients on just the pieces that such ranks count. Their sum over the world is what the
signatures of all shards would be.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch

from megatron.parallel.boxes import FlatPiece, PlacedBox
from megatron.parallel.collectives import gather_objects
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamRecord, Shard
from megatron.parallel.topology import GRADIENT_AXES, Topology
from megatron_lab.audit.signature import placed_signature
from megatron_lab.audit.trace_file import SIGNATURE_SIZE

_AXES = ("tp", *GRADIENT_AXES)
LEFT_OUT = tuple(axes for count in range(1, len(_AXES)) for axes in itertools.combinations(_AXES, count))
"""Axes that may be left out of a sum over more of them. (Where all are, a rank sees by itself that it has its own gradient.)"""


def summed_axes(record: ParamRecord, topology: Topology) -> tuple[str, ...]:
    """Axes of several ranks over which a gradient is summed."""
    return tuple(axis for axis in record.partial_over if topology.size(axis) > 1)


class PartialSums:
    """Takes in the gradients of one step on this rank.

    Args:
        shards: this rank's shards.
        row_of: the rows of parameters in signatures.
    """

    def __init__(self, shards: Sequence[Shard], row_of: Mapping[str, int], context: ParallelContext) -> None:
        self._row_of, self._context, topology = row_of, context, context.topology
        self.signatures = torch.zeros(len(LEFT_OUT), len(row_of), SIGNATURE_SIZE, dtype=torch.float64, device=context.device)
        """By the axes that are left out: what this rank adds to the signatures of all shards."""
        several = [shard for shard in shards if len(summed_axes(shard.record, topology)) > 1 and not shard.record.tied]
        pieces = {shard.record.name: (shard.piece.start + shard.counted.start, len(shard.counted)) for shard in several}
        stage = context.group(*_AXES)
        self._counted = dict(zip(stage.ranks, gather_objects(pieces, stage), strict=True))
        self._boxes: dict[str, list[tuple[int, FlatPiece, list[PlacedBox]]]] = {}

    def look(self, record: ParamRecord, grad: torch.Tensor) -> None:
        """Take in one gradient of a parameter, [local shape]."""
        if record.name not in self._boxes:
            self._boxes[record.name] = [*self._find(record)]
        for number, piece, boxes in self._boxes[record.name]:
            part = grad.view(-1)[piece.start : piece.stop]
            self.signatures[number, self._row_of[record.name]] += placed_signature(record.name, boxes, part)

    def _find(self, record: ParamRecord) -> Iterator[tuple[int, FlatPiece, list[PlacedBox]]]:
        """Pieces of a parameter, by the axes without which this rank would be in the sum that they get."""
        context = self._context
        over = summed_axes(record, context.topology)
        for number, left_out in enumerate(LEFT_OUT):
            rest = [axis for axis in over if axis not in left_out]
            if rest and {*left_out} < {*over}:
                for rank in context.topology.group(context.rank, *rest):
                    start, size = self._counted[rank].get(record.name, (0, 0))
                    if size:
                        piece = FlatPiece(start, start + size)
                        yield number, piece, record.boxes(piece, context)
