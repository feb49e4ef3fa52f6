"""How the state of an update rule lies over its parameter: a number for each element, row, column or block of elements.

A state is a global tensor of its own. Its shape follows from the parameter's, so a checkpoint describes it by boxes, and any layout
can load it. A rank keeps the numbers of all rows (columns, blocks) of which it updates any element. So ranks whose pieces meet
within a row both keep that row's number, and must keep the same. Pure arithmetic.

A parameter is [..., R, C]: R rows of C elements, perhaps several such matrices.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron.parallel.boxes import Box, FlatPiece, PlacedBox, place

Shape = tuple[int, ...]


class StateShape(ABC):
    """How a state lies over a parameter."""

    @abstractmethod
    def shape(self, shape: Shape) -> Shape:
        """Shape of the state of a whole parameter."""

    @abstractmethod
    def room(self, shape: Shape, local_shape: Shape, numel: int) -> int:
        """The most elements that lie over a piece of `numel` elements, wherever it begins: what is allocated for it.

        Args:
            shape: that of the whole parameter.
            local_shape: that of a rank's part of it, whichever of the ranks that is.
        """

    @abstractmethod
    def boxes(self, local_shape: Shape, held: Box, piece: FlatPiece) -> list[PlacedBox]:
        """Global boxes of the state that a rank keeps for a piece. Boxes of two ranks are equal or disjoint.

        Args:
            local_shape: shape of the rank's part of the parameter, perhaps padded in its first dimension.
            held: the box of the parameter that the rank holds, without padding.
        """


class _InRuns(StateShape):
    """One of which a rank's part is laid out as the parameter is, so that a piece has a run of it."""

    @abstractmethod
    def held(self, box: Box) -> Box:
        """The box of the state that lies over a box of the parameter."""

    @abstractmethod
    def covered(self, local_shape: Shape, piece: FlatPiece) -> FlatPiece:
        """The elements of a rank's state, flattened, that lie over any element of a piece, which is not empty."""

    def edges(self, local_shape: Shape, piece: FlatPiece) -> Iterable[int]:
        """Places in the flattened state before which a box must end, so that ranks that share numbers have them in equal boxes."""
        return ()

    def boxes(self, local_shape: Shape, held: Box, piece: FlatPiece) -> list[PlacedBox]:
        """See `StateShape`."""
        piece = FlatPiece(piece.start, min(piece.stop, held.numel))
        if piece.start >= piece.stop:
            return []
        local, box, covered = self.shape(local_shape), self.held(held), self.covered(local_shape, piece)
        ends = sorted({covered.start, covered.stop, *self.edges(local_shape, piece)})
        return [
            PlacedBox(placed.box, placed.start + start - covered.start)
            for start, stop in itertools.pairwise(ends)
            for placed in place(local, box, FlatPiece(start, stop))
        ]


class _Elements(_InRuns):
    """A number for each element: as the parameter itself."""

    def shape(self, shape: Shape) -> Shape:
        return shape

    def held(self, box: Box) -> Box:
        return box

    def covered(self, local_shape: Shape, piece: FlatPiece) -> FlatPiece:
        return piece

    def room(self, shape: Shape, local_shape: Shape, numel: int) -> int:
        return numel


class _Rows(_InRuns):
    """A number for each row: [..., R]."""

    def shape(self, shape: Shape) -> Shape:
        return shape[:-1]

    def held(self, box: Box) -> Box:
        return Box(box.offsets[:-1], box.sizes[:-1])

    def covered(self, local_shape: Shape, piece: FlatPiece) -> FlatPiece:
        length = local_shape[-1]
        return FlatPiece(piece.start // length, -(-piece.stop // length))

    def room(self, shape: Shape, local_shape: Shape, numel: int) -> int:
        return min(_touched(numel, local_shape[-1]), math.prod(local_shape[:-1]))

    def edges(self, local_shape: Shape, piece: FlatPiece) -> Iterable[int]:
        (first, head), (last, tail) = divmod(piece.start, local_shape[-1]), divmod(piece.stop, local_shape[-1])
        return [*([first + 1] if head else []), *([last] if tail and last > piece.start // local_shape[-1] else [])]


class _Columns(_InRuns):
    """A number for each column of each matrix: [..., C]."""

    def shape(self, shape: Shape) -> Shape:
        return (*shape[:-2], shape[-1])

    def held(self, box: Box) -> Box:
        return Box((*box.offsets[:-2], box.offsets[-1]), (*box.sizes[:-2], box.sizes[-1]))

    def covered(self, local_shape: Shape, piece: FlatPiece) -> FlatPiece:
        matrix, length = math.prod(local_shape[-2:]), local_shape[-1]
        return FlatPiece(piece.start // matrix * length, -(-piece.stop // matrix) * length)

    def room(self, shape: Shape, local_shape: Shape, numel: int) -> int:
        matrices = min(_touched(numel, math.prod(local_shape[-2:])), math.prod(local_shape[:-2]))
        return matrices * local_shape[-1]

    def edges(self, local_shape: Shape, piece: FlatPiece) -> Iterable[int]:
        covered = self.covered(local_shape, piece)
        return range(covered.start, covered.stop, local_shape[-1])


@dataclass(frozen=True)
class BlockRun:
    """Equally long blocks, or parts of one, one after the other in some rows: as [rows, blocks, elements]."""

    elements: PlacedBox
    """The rows, perhaps with elements before and after them."""
    columns: slice
    """The run's, in these."""
    numbers: PlacedBox
    """The blocks'."""

    @property
    def num_rows(self) -> int:
        """How many rows."""
        return self.numbers.box.numel // self.num_blocks

    @property
    def num_blocks(self) -> int:
        """How many in a row."""
        return self.numbers.box.sizes[-1]


@dataclass(frozen=True)
class Blocks(StateShape):
    """A number for each block of `size` elements of a row, the last of a row perhaps shorter: [..., R, C / size].

    Blocks are counted in the whole row, wherever ranks divide it. A rank keeps the numbers of blocks of which it may have only a
    part, at the begin and the end of its rows, apart from those between: other ranks keep them too.
    """

    size: int

    def shape(self, shape: Shape) -> Shape:
        """See `StateShape`."""
        return (*shape[:-1], -(-shape[-1] // self.size))

    def room(self, shape: Shape, local_shape: Shape, numel: int) -> int:
        """See `StateShape`."""
        firsts = {first % self.size for first in range(0, shape[-1], local_shape[-1])}
        return max(self._room(local_shape, first, numel) for first in firsts) if numel else 0

    def _room(self, local_shape: Shape, first: int, numel: int) -> int:
        """That of a rank whose rows begin with this element of a block."""
        length = local_shape[-1]
        per_row, head = -(-(first + length) // self.size), self.size - first
        tail = length + first - (per_row - 1) * self.size
        rows, rest = divmod(numel - 1, length)  # of the elements after the first, how many begin another block at the most
        # Nearest to each other are the beginnings of the blocks at which a row ends and the next begins.
        begun = (rest > 0) + (rest > min(head, tail))
        if rest > head + tail:
            begun += 1 + (rest - 1 - head - tail) // self.size
        return min(1 + rows * per_row + begun, math.prod(local_shape[:-1]) * per_row)

    def boxes(self, local_shape: Shape, held: Box, piece: FlatPiece) -> list[PlacedBox]:
        """See `StateShape`."""
        return [run.numbers for run in self.runs(local_shape, held, piece)]

    def runs(self, local_shape: Shape, held: Box, piece: FlatPiece) -> Iterator[BlockRun]:
        """All blocks of which a piece has any element. Its numbers lie in memory in this order; arguments as in `boxes`."""
        at = 0
        for placed in place(local_shape, held, piece):
            box, column = placed.box, 0
            first, length = box.offsets[-1], box.sizes[-1]
            head = min(length, -first % self.size)
            whole, tail = divmod(length - head, self.size)
            for count, size in ((1, head), (whole, self.size), (1, tail)):
                if count and size:
                    number = (first + column) // self.size
                    numbers = PlacedBox(Box((*box.offsets[:-1], number), (*box.sizes[:-1], count)), at)
                    yield BlockRun(placed, slice(column, column + count * size), numbers)
                    column, at = column + count * size, at + numbers.box.numel


def _touched(numel: int, length: int) -> int:
    """The most runs of `length` elements, laid end to end, of which so many elements in a row touch any."""
    return numel if numel < 2 else (numel - 2) // length + 2


ELEMENTS: StateShape = _Elements()
ROWS: StateShape = _Rows()
COLUMNS: StateShape = _Columns()
