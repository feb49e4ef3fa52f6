"""Brings pieces of matrices to the ranks that compute with the whole, and the results back, as a plan says (`matrix_plan.py`).

Round by round: while one round's matrices are computed, the next one's pieces travel to their owners, and the results of the one
before travel back. Buffers are made once, and all views into them. Their sizes are the largest of any rank, so a plan knows them
without asking which rank it is for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron.optimizer.matrix_plan import Matrix, MatrixPlan, MatrixRound, Move
from megatron.parallel.boxes import FlatPiece
from megatron.parallel.collectives import Pending, start_exchange
from megatron.parallel.context import ParallelContext
from megatron.parallel.topology import STAGE_AXES

Compute = Callable[[int], None]
"""Computes the results of one round: from `MatrixExchange.whole` to `MatrixExchange.results`."""


@dataclass(frozen=True)
class LocalPiece:
    """What this rank holds of a parameter, and what it gives of it."""

    piece: FlatPiece
    """Elements of its flattened tensor."""
    given: torch.Tensor
    """What travels to the owners; flat."""


@dataclass(frozen=True)
class Returned:
    """Results that came back to this rank."""

    name: str
    """The parameter's."""
    piece: FlatPiece
    """Elements of the rank's piece that they lie over."""
    result: torch.Tensor
    """Flat; in the dtype of the exchange."""


@dataclass(frozen=True)
class _Travel:
    """One way of a round."""

    received: torch.Tensor
    sent: torch.Tensor
    counts: tuple[list[int], list[int]]
    """Elements that come from each rank, and that go to each."""
    filled: list[torch.Tensor]
    """Views of `sent`."""
    filled_from: list[torch.Tensor]

    def start(self, context: ParallelContext) -> Pending:
        """Fill what is sent, and let it go."""
        for view, source in zip(self.filled, self.filled_from, strict=True):
            view.copy_(source, non_blocking=True)
        return start_exchange(self.received, self.sent, self.counts, context.group(*STAGE_AXES))


@dataclass(frozen=True)
class _Way:
    """A round, as this rank sees it."""

    there: _Travel
    arrived: list[tuple[torch.Tensor, torch.Tensor]]
    """(box of a whole matrix, what is received for it)."""
    back: _Travel
    returned: list[Returned]


class MatrixExchange:
    """The exchange of one rank.

    Args:
        pieces: what this rank holds, by the parameter's name.
        dtype: in which matrices travel, and are computed.
    """

    def __init__(self, plan: MatrixPlan, pieces: Mapping[str, LocalPiece], context: ParallelContext, dtype: torch.dtype) -> None:
        self.plan, self._pieces, self._context = plan, pieces, context
        self._place = context.group(*STAGE_AXES).index
        device, slots, (out, back) = context.device, plan.num_slots, plan.most_sent

        def room(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.whole, self.results = room(plan.most_owned), room(plan.most_owned)
        """Whole matrices of a round, one after the other, and the results in the same order. Both may be written."""
        self._out, self._back = room(slots, out), room(slots, back)
        alone = plan.num_ranks == 1
        self._arriving = self._out if alone else room(slots, plan.most_owned)
        self._returning = self._back if alone else room(slots, plan.most_held)
        self._ways = [self._way(one, number % slots) for number, one in enumerate(plan.rounds)]

    @property
    def buffers(self) -> list[torch.Tensor]:
        """All memory that it keeps."""
        found = [self.whole, self.results, self._out, self._back, self._arriving, self._returning]
        return list({id(one): one for one in found}.values())

    def owned(self, number: int) -> Sequence[Matrix]:
        """The matrices that this rank makes whole in a round, in their order in `whole`."""
        return self.plan.rounds[number].owned[self._place]

    def run(self, compute: Compute) -> Iterator[Sequence[Returned]]:
        """Go through all rounds; yields what came back in each, in order. All ranks of the stage do so together."""
        context, ways = self._context, self._ways
        there = ways[0].there.start(context) if ways else None
        before: tuple[Pending, _Way] | None = None
        for number, way in enumerate(ways):
            following = ways[number + 1].there.start(context) if number + 1 < len(ways) and self.plan.num_slots > 1 else None
            assert there is not None
            there.wait()
            for box, part in way.arrived:
                box.copy_(part)
            compute(number)
            back = way.back.start(context)
            if before is not None:
                before[0].wait()
                yield before[1].returned
            before, there = (back, way), following
            if there is None and number + 1 < len(ways):  # alone: one slot, which is free when its results were taken
                back.wait()
                yield way.returned
                before, there = None, ways[number + 1].there.start(context)
        if before is not None:
            before[0].wait()
            yield before[1].returned

    def _way(self, one: MatrixRound, slot: int) -> _Way:
        own = one.owned[self._place]
        starts, at = {}, 0
        for matrix in own:
            starts[matrix], at = at, at + matrix.numel
        place = self._place
        ranks = range(self.plan.num_ranks)
        going = [[move for move in one.moves if move.sender == place and move.owner == owner] for owner in ranks]
        coming = [[move for move in one.moves if move.owner == place and move.sender == sender] for sender in ranks]
        returning = [[move for move in one.moves if move.owner == place and holder in move.holding.places] for holder in ranks]
        returned = [[move for move in one.moves if move.owner == owner and place in move.holding.places] for owner in ranks]

        def box_of(room: torch.Tensor, move: Move, number: int) -> torch.Tensor:
            matrix = room[starts[move.matrix] :][: move.matrix.numel].view(move.matrix.shape)
            return matrix[move.holding.boxes[number].box.index]

        out, arriving = self._out[slot], self._arriving[slot]
        there = self._travel(arriving, coming, out, going)
        for move, view in _views(out, going):
            there.filled.append(view)
            there.filled_from.append(self._own(move))
        arrived = []
        for move, view in _views(arriving, coming):
            for number, placed in enumerate(move.holding.boxes):
                part = view[placed.start : placed.start + placed.box.numel].view(placed.box.sizes)
                arrived.append((box_of(self.whole, move, number), part))
        leaving, back_here = self._back[slot], self._returning[slot]
        back = self._travel(back_here, returned, leaving, returning)
        for move, view in _views(leaving, returning):
            for number, placed in enumerate(move.holding.boxes):
                back.filled.append(view[placed.start : placed.start + placed.box.numel].view(placed.box.sizes))
                back.filled_from.append(box_of(self.results, move, number))
        came_back = [Returned(move.matrix.record.name, self._inside(move), view) for move, view in _views(back_here, returned)]
        return _Way(there, arrived, back, came_back)

    def _travel(
        self, received: torch.Tensor, coming: Sequence[Sequence[Move]], sent: torch.Tensor, going: Sequence[Sequence[Move]]
    ) -> _Travel:
        come, go = ([sum(move.holding.numel for move in moves) for moves in one] for one in (coming, going))
        return _Travel(received[: sum(come)], sent[: sum(go)], (come, go), [], [])

    def _inside(self, move: Move) -> FlatPiece:
        """The elements of what this rank holds that a move is about."""
        held, moved = self._pieces[move.matrix.record.name].piece, move.holding.piece
        assert held.start <= moved.start and moved.stop <= held.stop, f"{move.matrix.record.name}: {moved} lies not in {held}"
        return FlatPiece(moved.start - held.start, moved.stop - held.start)

    def _own(self, move: Move) -> torch.Tensor:
        inside = self._inside(move)
        return self._pieces[move.matrix.record.name].given[inside.start : inside.stop]


def _views(room: torch.Tensor, moves: Sequence[Sequence[Move]]) -> Iterator[tuple[Move, torch.Tensor]]:
    """Where each move lies in a buffer: those of one rank after those of another."""
    at = 0
    for move in (move for some in moves for move in some):
        yield move, room[at : at + move.holding.numel]
        at += move.holding.numel
