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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron.parallel.boxes import Box, FlatPiece, PlacedBox, place
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamRecord
from megatron.parallel.shards import DividedParam
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
