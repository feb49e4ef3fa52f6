"""Shapes of optimizer state relative to a parameter: one value per element, row, column or block of elements.

Each optimizer state is a global tensor. Its shape follows from the shape of the parameter, so checkpoints describe the state by
slices, and it can be loaded at any parallel layout.

A rank stores the value of every row (column, block) of which it updates at least one element. So if the boundary between two shards
is within a row, both ranks store the value of this row, and must compute the same value.

Pure arithmetic. A parameter has the shape [..., R, C]: one or more matrices of R rows and C columns.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron.parallel.tensor_slice import BufferSlice, FlatRange, TensorSlice, map_flat_range

Shape = tuple[int, ...]


class StateShape(ABC):
    """Shape of an optimizer state relative to its parameter: which values of the state belong to which elements of the
    parameter."""

    @abstractmethod
    def get_shape(self, shape: Shape) -> Shape:
        """Return the global shape of the state for a parameter of the global shape `shape`."""

    @abstractmethod
    def compute_max_numel(self, shape: Shape, local_shape: Shape, numel: int) -> int:
        """Return the maximum number of state values that a rank stores for any range of `numel` consecutive elements of its local
        parameter.

        Memory is allocated for this number.

        Args:
            shape: global shape of the parameter.
            local_shape: shape of the local parameter, the same on every rank.
        """

    @abstractmethod
    def get_slices(self, local_shape: Shape, local_slice: TensorSlice, flat_range: FlatRange) -> list[BufferSlice]:
        """Return the slices of the global state that a rank stores for a range of its local parameter.

        Slices of two ranks are equal or disjoint.

        Args:
            local_shape: shape of the local parameter. Its first dimension may be padded.
            local_slice: slice of the global parameter on this rank, without padding.
            flat_range: range of the flattened local parameter.
        """


class _ContiguousState(StateShape):
    """State stored in the order of the parameter's elements, so that a contiguous range of the parameter has a contiguous range of
    the state."""

    @abstractmethod
    def get_state_slice(self, param_slice: TensorSlice) -> TensorSlice:
        """Return the slice of the state that belongs to a slice of the parameter."""

    @abstractmethod
    def get_state_range(self, local_shape: Shape, flat_range: FlatRange) -> FlatRange:
        """Return the range of the flattened local state that belongs to a non-empty range of the flattened local parameter."""

    def get_boundaries(self, local_shape: Shape, flat_range: FlatRange) -> Iterable[int]:
        """Return the indices in the flattened local state at which a new slice must start.

        With these boundaries, ranks that store the same elements of the state have them in equal slices.
        """
        return ()

    def get_slices(self, local_shape: Shape, local_slice: TensorSlice, flat_range: FlatRange) -> list[BufferSlice]:
        """Return the slices of the global state that a rank stores for a range of its local parameter."""
        flat_range = FlatRange(flat_range.start, min(flat_range.stop, local_slice.numel))
        if flat_range.start >= flat_range.stop:
            return []
        local_state_shape, state_slice, state_range = (
            self.get_shape(local_shape),
            self.get_state_slice(local_slice),
            self.get_state_range(local_shape, flat_range),
        )
        boundaries = sorted({state_range.start, state_range.stop, *self.get_boundaries(local_shape, flat_range)})
        return [
            BufferSlice(buffer_slice.slice, buffer_slice.offset + start - state_range.start)
            for start, stop in itertools.pairwise(boundaries)
            for buffer_slice in map_flat_range(local_state_shape, state_slice, FlatRange(start, stop))
        ]


class _PerElement(_ContiguousState):
    """Optimizer state with one value per element: it has the shape of the parameter."""

    def get_shape(self, shape: Shape) -> Shape:
        return shape

    def get_state_slice(self, param_slice: TensorSlice) -> TensorSlice:
        return param_slice

    def get_state_range(self, local_shape: Shape, flat_range: FlatRange) -> FlatRange:
        return flat_range

    def compute_max_numel(self, shape: Shape, local_shape: Shape, numel: int) -> int:
        return numel


class _PerRow(_ContiguousState):
    """Optimizer state with one value per row: shape [..., R] for a parameter [..., R, C]."""

    def get_shape(self, shape: Shape) -> Shape:
        return shape[:-1]

    def get_state_slice(self, param_slice: TensorSlice) -> TensorSlice:
        return TensorSlice(param_slice.offsets[:-1], param_slice.sizes[:-1])

    def get_state_range(self, local_shape: Shape, flat_range: FlatRange) -> FlatRange:
        row_length = local_shape[-1]
        return FlatRange(flat_range.start // row_length, -(-flat_range.stop // row_length))

    def compute_max_numel(self, shape: Shape, local_shape: Shape, numel: int) -> int:
        return min(_compute_max_touched_runs(numel, local_shape[-1]), math.prod(local_shape[:-1]))

    def get_boundaries(self, local_shape: Shape, flat_range: FlatRange) -> Iterable[int]:
        (first_row, first_column), (last_row, last_column) = (
            divmod(flat_range.start, local_shape[-1]),
            divmod(flat_range.stop, local_shape[-1]),
        )
        return [
            *([first_row + 1] if first_column else []),
            *([last_row] if last_column and last_row > flat_range.start // local_shape[-1] else []),
        ]


class _PerColumn(_ContiguousState):
    """Optimizer state with one value per column of each matrix: shape [..., C] for a parameter [..., R, C] of matrices with R
    rows."""

    def get_shape(self, shape: Shape) -> Shape:
        return (*shape[:-2], shape[-1])

    def get_state_slice(self, param_slice: TensorSlice) -> TensorSlice:
        return TensorSlice((*param_slice.offsets[:-2], param_slice.offsets[-1]), (*param_slice.sizes[:-2], param_slice.sizes[-1]))

    def get_state_range(self, local_shape: Shape, flat_range: FlatRange) -> FlatRange:
        matrix_numel, row_length = math.prod(local_shape[-2:]), local_shape[-1]
        return FlatRange(flat_range.start // matrix_numel * row_length, -(-flat_range.stop // matrix_numel) * row_length)

    def compute_max_numel(self, shape: Shape, local_shape: Shape, numel: int) -> int:
        num_matrices = min(_compute_max_touched_runs(numel, math.prod(local_shape[-2:])), math.prod(local_shape[:-2]))
        return num_matrices * local_shape[-1]

    def get_boundaries(self, local_shape: Shape, flat_range: FlatRange) -> Iterable[int]:
        state_range = self.get_state_range(local_shape, flat_range)
        return range(state_range.start, state_range.stop, local_shape[-1])


@dataclass(frozen=True)
class BlockRange:
    """Consecutive quantization blocks of equal length in one or more rows of a parameter: [rows, blocks, elements].

    The range may also be a single incomplete block in each row.
    """

    elements: BufferSlice
    """Slice of the parameter that contains the quantization blocks. In each row, the slice may have further elements before and
    after the blocks."""
    column_range: slice
    """Columns of the slice `elements` that form the quantization blocks, counted from the first column of the slice."""
    blocks: BufferSlice
    """Slice of the optimizer state with the values of the quantization blocks, one value per block."""

    @property
    def num_rows(self) -> int:
        """Number of rows of the parameter in the range."""
        return self.blocks.slice.numel // self.num_blocks

    @property
    def num_blocks(self) -> int:
        """Number of quantization blocks per row."""
        return self.blocks.slice.sizes[-1]


@dataclass(frozen=True)
class PerBlock(StateShape):
    """Optimizer state with one value per block of `block_size` elements of a row: shape [..., R, ceil(C / block_size)] for a
    parameter [..., R, C].

    The last block of a row may be shorter. Blocks are counted from the start of the global row, wherever the row is split over
    ranks. Blocks at the start and the end of the local rows may be incomplete, and then other ranks store their values too.
    Therefore these blocks have their own slices.
    """

    block_size: int

    def get_shape(self, shape: Shape) -> Shape:
        """Return the global shape of the state for a parameter of the global shape `shape`."""
        return (*shape[:-1], -(-shape[-1] // self.block_size))

    def compute_max_numel(self, shape: Shape, local_shape: Shape, numel: int) -> int:
        """Return the maximum number of blocks for any range of `numel` elements of the local parameter. Memory is allocated for
        this number."""
        offsets_in_block = {offset % self.block_size for offset in range(0, shape[-1], local_shape[-1])}
        return max(self._compute_max_blocks(local_shape, offset, numel) for offset in offsets_in_block) if numel else 0

    def _compute_max_blocks(self, local_shape: Shape, offset_in_block: int, numel: int) -> int:
        """Return the maximum number of blocks that `numel` consecutive elements of the local parameter can overlap, on a rank whose
        local rows start at `offset_in_block` within a block."""
        row_length = local_shape[-1]
        blocks_per_row, head_length = -(-(offset_in_block + row_length) // self.block_size), self.block_size - offset_in_block
        tail_length = row_length + offset_in_block - (blocks_per_row - 1) * self.block_size
        # Count the blocks that start after the first element. They are closest together at the boundary of two rows, where the last
        # block of a row and the first block of the next row may be short.
        num_full_rows, num_remaining = divmod(numel - 1, row_length)
        num_extra_blocks = (num_remaining > 0) + (num_remaining > min(head_length, tail_length))
        if num_remaining > head_length + tail_length:
            num_extra_blocks += 1 + (num_remaining - 1 - head_length - tail_length) // self.block_size
        return min(1 + num_full_rows * blocks_per_row + num_extra_blocks, math.prod(local_shape[:-1]) * blocks_per_row)

    def get_slices(self, local_shape: Shape, local_slice: TensorSlice, flat_range: FlatRange) -> list[BufferSlice]:
        """Return the slices of the global state that a rank stores for a range of its local parameter."""
        return [block_range.blocks for block_range in self.iter_block_ranges(local_shape, local_slice, flat_range)]

    def iter_block_ranges(self, local_shape: Shape, local_slice: TensorSlice, flat_range: FlatRange) -> Iterator[BlockRange]:
        """Yield all blocks with at least one element in a range of the local parameter, in the order in which their values are
        stored.
        The arguments are those of `get_slices`."""
        state_offset = 0
        for elements in map_flat_range(local_shape, local_slice, flat_range):
            elements_slice, column = elements.slice, 0
            first_column, row_length = elements_slice.offsets[-1], elements_slice.sizes[-1]
            head_length = min(row_length, -first_column % self.block_size)
            num_full_blocks, tail_length = divmod(row_length - head_length, self.block_size)
            for num_blocks, block_length in ((1, head_length), (num_full_blocks, self.block_size), (1, tail_length)):
                if num_blocks and block_length:
                    block_index = (first_column + column) // self.block_size
                    blocks = BufferSlice(
                        TensorSlice((*elements_slice.offsets[:-1], block_index), (*elements_slice.sizes[:-1], num_blocks)),
                        state_offset,
                    )
                    yield BlockRange(elements, slice(column, column + num_blocks * block_length), blocks)
                    column, state_offset = column + num_blocks * block_length, state_offset + blocks.slice.numel


def _compute_max_touched_runs(numel: int, length: int) -> int:
    """Return the maximum number of rows (or blocks) of `length` elements that `numel` consecutive elements can overlap."""
    return numel if numel < 2 else (numel - 2) // length + 2


PER_ELEMENT: StateShape = _PerElement()
PER_ROW: StateShape = _PerRow()
PER_COLUMN: StateShape = _PerColumn()
