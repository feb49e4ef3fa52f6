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
from collections.abc import Iterable
from dataclasses import dataclass

from megatron.parallel.boxes import Box, FlatPiece, PlacedBox, place

Shape = tuple[int, ...]


class StateShape(ABC):
    """How a state lies over a parameter."""

    @abstractmethod
    def shape(self, shape: Shape) -> Shape:
        """Shape of the state of a tensor, of a whole parameter or of a rank's part of one."""

    @abstractmethod
    def held(self, box: Box) -> Box:
        """The box of the state that lies over a box of the parameter."""

    @abstractmethod
    def covered(self, local_shape: Shape, piece: FlatPiece) -> FlatPiece:
        """The elements of a rank's state, flattened, that lie over any element of a piece, which is not empty."""

    @abstractmethod
    def room(self, local_shape: Shape, numel: int) -> int:
        """The most elements that lie over a piece of `numel` elements, wherever it begins: what is allocated for it."""

    def edges(self, local_shape: Shape, piece: FlatPiece) -> Iterable[int]:
        """Places in the flattened state before which a box must end, so that ranks that share numbers have them in equal boxes."""
        return ()

    def boxes(self, local_shape: Shape, held: Box, piece: FlatPiece) -> list[PlacedBox]:
        """Global boxes of the state that a rank keeps for a piece. Boxes of two ranks are equal or disjoint.

        Args:
            local_shape: shape of the rank's part of the parameter, perhaps padded in its first dimension.
            held: the box of the parameter that the rank holds, without padding.
        """
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


class _Elements(StateShape):
    """A number for each element: as the parameter itself."""

    def shape(self, shape: Shape) -> Shape:
        return shape

    def held(self, box: Box) -> Box:
        return box

    def covered(self, local_shape: Shape, piece: FlatPiece) -> FlatPiece:
        return piece

    def room(self, local_shape: Shape, numel: int) -> int:
        return numel


class _Rows(StateShape):
    """A number for each row: [..., R]."""

    def shape(self, shape: Shape) -> Shape:
        return shape[:-1]

    def held(self, box: Box) -> Box:
        return Box(box.offsets[:-1], box.sizes[:-1])

    def covered(self, local_shape: Shape, piece: FlatPiece) -> FlatPiece:
        length = local_shape[-1]
        return FlatPiece(piece.start // length, -(-piece.stop // length))

    def room(self, local_shape: Shape, numel: int) -> int:
        return min(_touched(numel, local_shape[-1]), math.prod(local_shape[:-1]))

    def edges(self, local_shape: Shape, piece: FlatPiece) -> Iterable[int]:
        (first, head), (last, tail) = divmod(piece.start, local_shape[-1]), divmod(piece.stop, local_shape[-1])
        return [*([first + 1] if head else []), *([last] if tail and last > piece.start // local_shape[-1] else [])]


class _Columns(StateShape):
    """A number for each column of each matrix: [..., C]."""

    def shape(self, shape: Shape) -> Shape:
        return (*shape[:-2], shape[-1])

    def held(self, box: Box) -> Box:
        return Box((*box.offsets[:-2], box.offsets[-1]), (*box.sizes[:-2], box.sizes[-1]))

    def covered(self, local_shape: Shape, piece: FlatPiece) -> FlatPiece:
        matrix, length = math.prod(local_shape[-2:]), local_shape[-1]
        return FlatPiece(piece.start // matrix * length, -(-piece.stop // matrix) * length)

    def room(self, local_shape: Shape, numel: int) -> int:
        matrices = min(_touched(numel, math.prod(local_shape[-2:])), math.prod(local_shape[:-2]))
        return matrices * local_shape[-1]

    def edges(self, local_shape: Shape, piece: FlatPiece) -> Iterable[int]:
        covered = self.covered(local_shape, piece)
        return range(covered.start, covered.stop, local_shape[-1])


@dataclass(frozen=True)
class Blocks(StateShape):
    """A number for each block of `size` elements of a row, the last of a row perhaps shorter: [..., R, C / size].

    Blocks are counted in the whole row. So where ranks divide a row, each must hold whole blocks.
    """

    size: int

    def shape(self, shape: Shape) -> Shape:
        """See `StateShape`."""
        return (*shape[:-1], -(-shape[-1] // self.size))

    def held(self, box: Box) -> Box:
        """See `StateShape`."""
        assert box.offsets[-1] % self.size == 0, f"{box} begins within a block of {self.size}"
        return Box((*box.offsets[:-1], box.offsets[-1] // self.size), self.shape(box.sizes))

    def covered(self, local_shape: Shape, piece: FlatPiece) -> FlatPiece:
        """See `StateShape`."""
        return FlatPiece(self.block_of(local_shape, piece.start), self.block_of(local_shape, piece.stop - 1) + 1)

    def room(self, local_shape: Shape, numel: int) -> int:
        """See `StateShape`."""
        if not numel:
            return 0
        length, per_row = local_shape[-1], -(-local_shape[-1] // self.size)
        rows, rest = divmod(numel - 1, length)  # of the elements after the first, how many begin another block at the most
        short = length - (per_row - 1) * self.size
        begun = 0 if not rest else 1 if rest - 1 < short else 2 + (rest - 1 - short) // self.size
        return min(1 + rows * per_row + begun, math.prod(local_shape[:-1]) * per_row)

    def edges(self, local_shape: Shape, piece: FlatPiece) -> Iterable[int]:
        """See `StateShape`."""
        covered = self.covered(local_shape, piece)
        found = []
        if self.first_of(local_shape, covered.start) < piece.start:
            found.append(covered.start + 1)
        if self.first_of(local_shape, covered.stop) > piece.stop:
            found.append(covered.stop - 1)
        return found

    def block_of(self, local_shape: Shape, element: int) -> int:
        """The flat number of the block of a flat element."""
        row, column = divmod(element, local_shape[-1])
        return row * -(-local_shape[-1] // self.size) + column // self.size

    def first_of(self, local_shape: Shape, block: int) -> int:
        """The flat number of a block's first element."""
        row, place = divmod(block, -(-local_shape[-1] // self.size))
        return row * local_shape[-1] + place * self.size


def _touched(numel: int, length: int) -> int:
    """The most runs of `length` elements, laid end to end, of which so many elements in a row touch any."""
    return numel if numel < 2 else (numel - 2) // length + 2


ELEMENTS: StateShape = _Elements()
ROWS: StateShape = _Rows()
COLUMNS: StateShape = _Columns()
