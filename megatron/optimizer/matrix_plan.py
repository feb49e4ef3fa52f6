"""Which rank makes which matrix whole, and what travels for it: a plan, the same on all ranks of a stage. Pure arithmetic.

A rule such as Muon computes with whole matrices, of which each rank holds pieces: tensor ranks hold rows or columns, data ranks
slices of these. Each matrix is given to one rank of the stage, its owner. In a round every rank sends its pieces to the owners,
these compute, and send back to each rank what lies over its piece. A piece that several ranks hold, as replicas do, comes from the
one nearest to the owner, and goes back to all.

Matrices are dealt in the order of their work, the largest first, each to the rank that has the least so far (Graham 1969), in
rounds of similar ones. So ranks have about equal work in each round, and one round can travel while another is computed.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from megatron.parallel.boxes import Box, FlatPiece, PlacedBox, place
from megatron.parallel.collectives import Pending, start_exchange
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import DividedParam, ParamRecord
from megatron.parallel.topology import STAGE_AXES

MOST_ELEMENTS = 2**24
"""Elements that a rank makes whole in one round, unless one matrix has more: so many that products of equal shape can go together,
so few that buffers stay small beside the model (32 MiB in bfloat16)."""


@dataclass(frozen=True)
class Holding:
    """Elements of a matrix that some ranks hold, each of them the same."""

    places: tuple[int, ...]
    """Places of these ranks in the stage's group, ascending."""
    piece: FlatPiece
    """Which elements of a rank's flattened tensor they are."""
    boxes: tuple[PlacedBox, ...]
    """Where they lie in the matrix, in the order of the piece."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.piece.stop - self.piece.start


@dataclass(frozen=True)
class Matrix:
    """The last two dimensions of a parameter, at one index of those before."""

    record: ParamRecord
    index: int
    holdings: tuple[Holding, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return self.record.shape[-2], self.record.shape[-1]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Move:
    """What travels between the ranks that hold a piece of a matrix and the matrix's owner."""

    matrix: Matrix
    owner: int
    sender: int
    """The one of those that hold the piece that sends it."""
    holding: Holding


@dataclass(frozen=True)
class MatrixRound:
    """Matrices that travel together."""

    owned: tuple[tuple[Matrix, ...], ...]
    """By the owner's place; those of equal shape and cut are neighbours."""

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """All that travels, by owner, matrix and holding."""
        return tuple(
            Move(matrix, owner, min(holding.places, key=lambda one: abs(one - owner)), holding)
            for owner, matrices in enumerate(self.owned)
            for matrix in matrices
            for holding in matrix.holdings
        )


@dataclass(frozen=True)
class MatrixPlan:
    """How a stage's matrices are made whole in one update."""

    num_ranks: int
    rounds: tuple[MatrixRound, ...]

    @property
    def num_slots(self) -> int:
        """Buffers of each kind: one is filled while the other travels, if there are several rounds."""
        return min(len(self.rounds), 2 if self.num_ranks > 1 else 1)

    @cached_property
    def most_sent(self) -> tuple[int, int]:
        """The most elements that a rank gives to the exchange in a round, its own included: as a holder, and as an owner."""
        return max((max(one) for one in self._per_round(0)), default=0), max((max(one) for one in self._per_round(1)), default=0)

    @cached_property
    def most_owned(self) -> int:
        """The most elements that a rank makes whole in a round."""
        return max((sum(m.numel for m in matrices) for one in self.rounds for matrices in one.owned), default=0)

    @cached_property
    def most_held(self) -> int:
        """The most elements that come back to a rank in a round."""
        return max((max(one) for one in self._per_round(2)), default=0)

    @property
    def buffer_elements(self) -> int:
        """Elements of all memory of an exchange, the same on all ranks."""
        out, back = self.most_sent
        travelling = out + back  # alone, a rank receives in place
        if self.num_ranks > 1:
            travelling += self.most_owned + self.most_held
        return self.num_slots * travelling + 2 * self.most_owned

    def work(self, of: Callable[[Matrix], float]) -> list[float]:
        """The work of each rank in an update, by that of a matrix."""
        done = [0.0] * self.num_ranks
        for one in self.rounds:
            for owner, matrices in enumerate(one.owned):
                done[owner] += sum(of(matrix) for matrix in matrices)
        return done

    def sent(self) -> list[int]:
        """Elements that each rank sends to others in an update."""
        total = [0] * self.num_ranks
        for move in itertools.chain.from_iterable(one.moves for one in self.rounds):
            total[move.sender] += move.holding.numel * (move.sender != move.owner)
            total[move.owner] += move.holding.numel * sum(place != move.owner for place in move.holding.places)
        return total

    def _per_round(self, which: int) -> list[list[int]]:
        """For each round the elements of each rank that it 0 sends as a holder, 1 sends as an owner, 2 gets back as a holder."""
        found = []
        for one in self.rounds:
            counts = [0] * self.num_ranks
            for move in one.moves:
                for place_ in ((move.sender,), (move.owner,) * len(move.holding.places), move.holding.places)[which]:
                    counts[place_] += move.holding.numel
            found.append(counts)
        return found


def plan_matrices(params: Iterable[DividedParam], context: ParallelContext, work: Callable[[Matrix], float]) -> MatrixPlan:
    """Plan for the parameters that a stage's rule must see whole.

    Args:
        params: as ranks divide them, in an order that is the same on all ranks.
        work: that of a matrix, in any unit.
    """
    num_ranks = context.group(*STAGE_AXES).size
    holders = _Holders(context)
    matrices = [matrix for param in params for matrix in holders.matrices(param)]
    rest = sorted(matrices, key=lambda one: (-work(one), one.shape))  # stable
    least = [(0.0, rank) for rank in range(num_ranks)]  # a heap of (work so far, rank)
    rounds = []
    while rest:
        count = num_ranks * max(1, MOST_ELEMENTS // rest[0].numel)
        chosen, rest = rest[:count], rest[count:]
        owned: list[list[Matrix]] = [[] for _ in range(num_ranks)]
        for matrix in chosen:
            done, rank = heapq.heappop(least)
            owned[rank].append(matrix)
            heapq.heappush(least, (done + work(matrix), rank))
        rounds.append(MatrixRound(tuple(tuple(sorted(some, key=_kind)) for some in owned)))
    return MatrixPlan(num_ranks, tuple(rounds))


def by_kind(matrices: Sequence[Matrix]) -> list[list[Matrix]]:
    """Sorted matrices, those together that can be computed together."""
    return [list(alike) for _, alike in itertools.groupby(matrices, key=_kind)]


def _kind(matrix: Matrix) -> tuple[int, ...]:
    """What matrices that are computed together have in common: the shape, and how heads lie in the rows."""
    heads = matrix.record.heads
    return (*matrix.shape, *((heads.queries, heads.size) if heads else ()))


class _Holders:
    """Who holds what in a stage."""

    def __init__(self, context: ParallelContext) -> None:
        self._sizes = context.axis_sizes
        ranks = context.group(*STAGE_AXES).ranks
        self._coordinates = [context.topology.coordinates(rank) for rank in ranks]
        self._topology, self._ranks = context.topology, ranks
        self._found: dict[tuple[tuple[str, ...], int], dict[int, list[int]]] = {}

    def matrices(self, param: DividedParam) -> list[Matrix]:
        """The matrices of a parameter."""
        record = param.record
        local_shape = record.local_shape(self._sizes)
        lead, each = math.prod(local_shape[:-2]), math.prod(local_shape[-2:])
        assert all(split.dim >= len(local_shape) - 2 for split in record.splits), f"{record.name} is split between matrices"
        found: list[list[Holding]] = [[] for _ in range(lead)]
        for number, piece in enumerate(param.pieces(lead * each)):
            alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
            for place_ in self._at(param.axes, param.num_ranks)[param.first + number]:
                alike[tuple(self._coordinates[place_][split.axis] for split in record.splits)].append(place_)
            for places in alike.values():
                held = record.held_box(self._sizes, self._coordinates[places[0]])
                for index in range(piece.start // each, -(-piece.stop // each)):
                    part = FlatPiece(max(piece.start, index * each), min(piece.stop, (index + 1) * each))
                    boxes = place(local_shape, held, part)
                    if boxes:
                        own = FlatPiece(part.start, part.start + sum(one.box.numel for one in boxes))
                        found[index].append(Holding(tuple(places), own, tuple(map(_in_matrix, boxes))))
        return [Matrix(record, index, tuple(holdings)) for index, holdings in enumerate(found)]

    def _at(self, axes: Sequence[str], num_ranks: int) -> dict[int, list[int]]:
        """Places in the stage's group of the ranks at each place among those that divide a parameter."""
        key = (tuple(axes), num_ranks)
        if key not in self._found:
            self._found[key] = defaultdict(list)
            dividing: dict[tuple[int, ...], dict[int, int]] = {}
            for place_, (rank, coordinates) in enumerate(zip(self._ranks, self._coordinates, strict=True)):
                others = tuple(coordinates[axis] for axis in STAGE_AXES if axis not in axes)
                if others not in dividing:
                    dividing[others] = {one: at for at, one in enumerate(self._topology.group(rank, *axes))}
                self._found[key][dividing[others][rank] % num_ranks].append(place_)
        return self._found[key]


def _in_matrix(placed: PlacedBox) -> PlacedBox:
    """A box of one matrix of a tensor, as a box of the matrix."""
    return PlacedBox(Box(placed.box.offsets[-2:], placed.box.sizes[-2:]), placed.start)


# ---- Brings pieces of matrices to the ranks that compute with the whole, and the results back, as a plan says (`matrix_plan.py`).
#
# Round by round: while one round's matrices are computed, the next one's pieces travel to their owners, and the results of the one
# before travel back. Buffers are made once, and all views into them. Their sizes are the largest of any rank, so a plan knows them
# without asking which rank it is for.

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
