"""What each rank's backward gave by itself, before any sum over ranks: how often each gradient was written, and its signature.

A signature's signed sums are linear, so those of all microbatches and uses add up to those of the whole gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.audit.errors import ranks_in_words
from megatron.audit.signature import NUM_SIGNS, SIGNATURE_SIZE, box_signature, placed_signature
from megatron.parallel.boxes import DimPiece, Piece
from megatron.parallel.collectives import all_reduce, gather_objects
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamEntry, ParamRecord, ParamTable
from megatron.parallel.shards import Shard
from megatron.parallel.topology import GRADIENT_AXES


def whole_over(record: ParamRecord) -> tuple[str, ...]:
    """Axes along which every rank should find the same gradient, so that none is summed over them."""
    split = {split.axis for split in record.splits}
    return tuple(axis for axis in ("tp", *GRADIENT_AXES) if axis not in split and axis not in record.partial_over)


@dataclass(frozen=True)
class Seen:
    """What a rank knows of the gradient in its shard of a parameter."""

    partial_over: tuple[str, ...]
    """As the record says here; a rank that does not hold the parameter does not know."""
    tied: bool
    only_own: bool
    """It is what this rank alone computed."""


class OwnGradients:
    """Is handed every gradient of one step (`look`), on this rank.

    Args:
        params: this rank's.
        shards: this rank's.
        records: of the whole model; the rows of all signatures are in their order.
    """

    def __init__(
        self, params: ParamTable, shards: Sequence[Shard], records: Mapping[str, ParamRecord], context: ParallelContext
    ) -> None:
        self._params, self._context = params, context
        self._shards = {shard.record.name: shard for shard in shards}
        self._row_of = {name: row for row, name in enumerate(records)}
        self._writes = dict.fromkeys((entry.record.name for entry in params), 0)
        self.signatures = torch.zeros(len(records), SIGNATURE_SIZE, dtype=torch.float64, device=context.device)
        """Of the parameters. In place of the sum of squares: its sum over the writes, which says how large rounding may be."""
        self._of_shards = torch.zeros_like(self.signatures)
        """Of the part of them that this rank updates."""

    def look(self, entry: ParamEntry, grad: torch.Tensor) -> None:
        """One gradient of a parameter, of one use in one microbatch."""
        name = entry.record.name
        row, shard = self._row_of[name], self._shards.get(name)
        held = entry.record.held_box(self._context.axis_sizes, self._context.coordinates)
        self._writes[name] += 1
        self.signatures[row] += box_signature(name, held, grad[tuple(slice(size) for size in held.sizes)])
        if shard is not None:
            self._of_shards[row] += placed_signature(name, shard.boxes(self._context), _piece_of(grad, shard.piece))

    def missing(self, num_microbatches: int) -> list[str]:
        """What is wrong with the number of gradients that reached the parameters, on any rank. All ranks call it together."""
        wrong = {}
        for entry in self._params:
            name, wanted = entry.record.name, entry.uses_per_microbatch * num_microbatches
            if self._writes[name] != wanted:
                wrong[name] = f"{self._writes[name] or 'none'} of {wanted} gradients reached it"
        found: dict[tuple[str, str], list[int]] = {}
        for rank, theirs in enumerate(gather_objects(wrong, self._context.world)):
            for name, words in theirs.items():
                found.setdefault((name, words), []).append(rank)
        return [f"{name}: {words} on {ranks_in_words(ranks)}" for (name, words), ranks in found.items()]

    def addends(self) -> torch.Tensor:
        """This rank's part of what the sums over ranks should give: its signatures, but 0 where another rank's are the same."""
        at = self._context.coordinates
        part = torch.zeros_like(self.signatures)
        for entry in self._params:
            if all(at[axis] == 0 for axis in whole_over(entry.record)):
                row = self._row_of[entry.record.name]
                part[row] = self.signatures[row]
        return part

    def spread_over_tensor_ranks(self) -> torch.Tensor:
        """How far the signed sums lie apart, at most, on the tensor ranks that should each have a whole gradient: [parameters]."""
        ends = torch.zeros(2, len(self._row_of), NUM_SIGNS, dtype=torch.float64, device=self._context.device)
        for entry in self._params:
            if "tp" in whole_over(entry.record):
                row = self._row_of[entry.record.name]
                ends[0, row], ends[1, row] = self.signatures[row, :NUM_SIGNS], -self.signatures[row, :NUM_SIGNS]
        most = all_reduce(ends, self._context.group("tp"), dist.ReduceOp.MAX)
        return all_reduce((most[0] + most[1]).amax(1), self._context.world, dist.ReduceOp.MAX)

    def seen(self, name: str, band: float) -> Seen | None:
        """What this rank knows of the gradient in its shard of a parameter; None if it has none."""
        shard, own = self._shards.get(name), self._of_shards[self._row_of[name]]
        if shard is None or not shard.grad.numel():
            return None
        here = placed_signature(name, shard.boxes(self._context), shard.grad)
        near = (here - own)[:NUM_SIGNS].abs().max() <= band * own[NUM_SIGNS].sqrt()
        return Seen(shard.record.partial_over, len(shard.record.chunks) > 1, bool(near and own[NUM_SIGNS] > 0))


def _piece_of(grad: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The elements of a piece, flat."""
    if isinstance(piece, DimPiece):
        return grad.narrow(piece.dim, piece.start, piece.stop - piece.start).reshape(-1)
    return grad.view(-1)[piece.start : piece.stop]
