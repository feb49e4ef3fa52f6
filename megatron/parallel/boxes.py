"""Boxes: which part of a global tensor a rank holds. Pure arithmetic, so any rank can compute any other's.

A box is a rectangular slice of a global tensor, given by an offset and a size in each dimension. docs/checkpoints.md uses the same
word, since such slices are stored.

A contiguous range of a flattened tensor is a few boxes: of a matrix at most three (the tail of a row, whole rows, the head of a
row), of an N-dimensional tensor at most 2N - 1. So flat optimizer shards need no gather to be described in global terms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Each tensor, and each slice, of a flat buffer starts at a multiple of this many elements, so that vector kernels are aligned.
ALIGN = 64


def aligned(numel: int) -> int:
    """The elements that a tensor takes in a flat buffer."""
    return -(-numel // ALIGN) * ALIGN


@dataclass(frozen=True)
class Box:
    """A rectangular slice of a global tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """The box of all of a tensor."""
        return cls((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return math.prod(self.sizes)

    @property
    def index(self) -> tuple[slice, ...]:
        """The box as an index into the tensor."""
        return tuple(slice(offset, offset + size) for offset, size in zip(self.offsets, self.sizes, strict=True))

    def relative_to(self, outer: Box) -> Box:
        """The same elements of another box that contains it: with offsets relative to that one."""
        return Box(tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.sizes)

    def inside(self, outer: Box) -> Box:
        """The reverse of `relative_to`: with offsets in the tensor of which the other box is a part."""
        return Box(tuple(a + b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.sizes)

    def intersect(self, other: Box) -> Box | None:
        """The intersection, or None if it is empty."""
        low = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
        high = tuple(min(a + n, b + m) for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True))
        if any(end <= start for start, end in zip(low, high, strict=True)):
            return None
        return Box(low, tuple(end - start for start, end in zip(low, high, strict=True)))


@dataclass(frozen=True)
class PlacedBox:
    """A box, and where its elements (contiguous, row-major) begin in the holder's flat data."""

    box: Box
    start: int


@dataclass(frozen=True)
class FlatPiece:
    """Elements [start, stop) of a rank's flattened local tensor."""

    start: int
    stop: int


def flat_range_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Boxes, in order, that cover elements [start, stop) of a row-major tensor of `shape`."""
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    rest = shape[1:]
    inner = math.prod(rest)
    (first, head), (last, tail) = divmod(start, inner), divmod(stop, inner)

    def in_row(row: int, low: int, high: int) -> list[Box]:
        return [Box((row, *b.offsets), (1, *b.sizes)) for b in flat_range_boxes(rest, low, high)]

    if head and first == last:
        return in_row(first, head, tail)
    boxes = in_row(first, head, inner) if head else []
    first += head > 0
    if first < last:
        boxes.append(Box((first, *Box.whole(rest).offsets), (last - first, *rest)))
    return boxes + in_row(last, 0, tail)


def place(local_shape: tuple[int, ...], held: Box, piece: FlatPiece) -> list[PlacedBox]:
    """Global boxes of a piece of a local tensor.

    Args:
        local_shape: the local tensor's shape; its first dimension may be padded beyond the box.
        held: the global, unpadded box that the local tensor holds (perhaps empty).
        piece: a part of the local tensor.

    Returns:
        boxes in global coordinates, each with its start in the flat data of the piece; padding is left out.
    """
    assert local_shape[1:] == held.sizes[1:], "only the first dimension may be padded"
    placed: list[PlacedBox] = []
    at = 0
    for box in flat_range_boxes(held.sizes, piece.start, min(piece.stop, held.numel)):
        placed.append(PlacedBox(box.inside(held), at))
        at += box.numel
    return placed
