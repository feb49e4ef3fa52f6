"""Slices of global tensors: which elements of a tensor a rank stores.

A `TensorSlice` is a rectangular region of a global tensor, with an offset and a size in each dimension. Pure arithmetic: every rank
can compute the slices of every other rank without communication. Checkpoints store tensors by these slices (`boxes` in a
checkpoint's manifest, see docs/checkpoints.md).

The optimizer shards flattened tensors, so the shard of a rank is a contiguous range of elements. Such a range is a union of a few
slices: at most three for a matrix (the end of a row, full rows, the start of a row), at most 2N - 1 for an N-dimensional tensor. So
a rank can describe its shard in global coordinates without gathering anything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Tensors and shards in a flat buffer start at multiples of this number of elements, so that vectorized kernels have aligned memory.
ALIGN = 64


def align_numel(numel: int) -> int:
    """Return the number of elements that a tensor of `numel` elements occupies in a flat buffer: `numel`, rounded up to a multiple
    of `ALIGN`."""
    return -(-numel // ALIGN) * ALIGN


@dataclass(frozen=True)
class TensorSlice:
    """Rectangular slice of a global tensor: an offset and a size in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def full(cls, shape: tuple[int, ...]) -> TensorSlice:
        """Return the slice that covers a complete tensor of this shape."""
        return cls((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """Number of elements in the slice."""
        return math.prod(self.sizes)

    @property
    def index(self) -> tuple[slice, ...]:
        """Index that selects the slice from the global tensor: one Python slice per dimension."""
        return tuple(slice(offset, offset + size) for offset, size in zip(self.offsets, self.sizes, strict=True))

    def relative_to(self, outer: TensorSlice) -> TensorSlice:
        """Return this slice with offsets relative to the start of `outer`, a slice of the same tensor that contains it."""
        return TensorSlice(tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.sizes)

    def offset_by(self, outer: TensorSlice) -> TensorSlice:
        """Return this slice, whose offsets are relative to the start of `outer`, with the offsets of `outer` added. The result has
        the coordinates in which `outer` itself is given. The inverse of `relative_to`."""
        return TensorSlice(tuple(a + b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.sizes)

    def intersect(self, tensor_slice: TensorSlice) -> TensorSlice | None:
        """Return the intersection with another slice of the same tensor, or None if it is empty."""
        starts = tuple(max(a, b) for a, b in zip(self.offsets, tensor_slice.offsets, strict=True))
        ends = tuple(
            min(a + n, b + m) for a, n, b, m in zip(self.offsets, self.sizes, tensor_slice.offsets, tensor_slice.sizes, strict=True)
        )
        if any(end <= start for start, end in zip(starts, ends, strict=True)):
            return None
        return TensorSlice(starts, tuple(end - start for start, end in zip(starts, ends, strict=True)))


@dataclass(frozen=True)
class BufferSlice:
    """Slice of a global tensor whose elements a rank stores contiguously, in row-major order, in a flat buffer.

    Args:
        slice: the elements, in global coordinates.
        offset: index of the first element in the flat buffer.
    """

    slice: TensorSlice
    offset: int


@dataclass(frozen=True)
class FlatRange:
    """Elements [start, stop) of a rank's flattened local tensor."""

    start: int
    stop: int


def cover_flat_range(shape: tuple[int, ...], start: int, stop: int) -> list[TensorSlice]:
    """Split the elements [start, stop) of a flattened (row-major) tensor of `shape` into rectangular slices, in order of the
    elements."""
    if start >= stop:
        return []
    if not shape:
        return [TensorSlice((), ())]
    row_shape = shape[1:]
    row_numel = math.prod(row_shape)
    (first, head), (last, tail) = divmod(start, row_numel), divmod(stop, row_numel)

    def cover_in_row(row: int, row_start: int, row_stop: int) -> list[TensorSlice]:
        return [TensorSlice((row, *b.offsets), (1, *b.sizes)) for b in cover_flat_range(row_shape, row_start, row_stop)]

    if head and first == last:
        return cover_in_row(first, head, tail)
    slices = cover_in_row(first, head, row_numel) if head else []
    first += head > 0
    if first < last:
        slices.append(TensorSlice((first, *TensorSlice.full(row_shape).offsets), (last - first, *row_shape)))
    return slices + cover_in_row(last, 0, tail)


def map_flat_range(local_shape: tuple[int, ...], local_slice: TensorSlice, flat_range: FlatRange) -> list[BufferSlice]:
    """Map a range of a rank's flattened local tensor to slices of the global tensor.

    Args:
        local_shape: shape of the local tensor. Its first dimension may be padded beyond `local_slice`.
        local_slice: elements of the global tensor that the local tensor stores, without padding; may be empty.
        flat_range: range of the flattened local tensor.

    Returns:
        Slices in global coordinates, without padding. The offsets of the `BufferSlice`s count from the start of `flat_range`.
    """
    assert local_shape[1:] == local_slice.sizes[1:], "only the first dimension may be padded"
    buffer_slices: list[BufferSlice] = []
    offset = 0
    for tensor_slice in cover_flat_range(local_slice.sizes, flat_range.start, min(flat_range.stop, local_slice.numel)):
        buffer_slices.append(BufferSlice(tensor_slice.offset_by(local_slice), offset))
        offset += tensor_slice.numel
    return buffer_slices
