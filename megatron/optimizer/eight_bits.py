"""AdamW with 8-bit moments, quantized in blocks with one scale each (Dettmers et al. 2022, 8-bit Optimizers via Block-wise
Quantization).

A block is `block_size` consecutive elements of a row of the full matrix; the last block of a row may be shorter. The blocks, and so
the rounding, do not depend on the layout. A moment is stored as one code per element and, per block, the largest absolute value as
the scale. An update dequantizes the moments, uses their new values before rounding, and quantizes them for the next update.

If several ranks hold elements of a block, each of them needs the largest absolute value of the full block. The ranks get it by one
reduction (maximum). Only two types of blocks need this reduction: blocks at the boundaries of ZeRO shards, and blocks of a row that
several tensor ranks share. Biases and the weights of norms are few and are not quantized.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron.config.training import OptimizerConfig
from megatron.optimizer.rule import StateSpec, Target, Update, Updater, UpdateRule
from megatron.optimizer.statistics import Statistic, StatisticsRounds
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamPartition, ParamRecord
from megatron.parallel.state_shape import BlockRange, PerBlock
from megatron.spec.groups import ParamGroup

_FIRST, _SECOND = ("exp_avg_code", "exp_avg_scale"), ("exp_avg_sq_code", "exp_avg_sq_scale")
_MAX_ELEMENTS = 2**22
"""Elements whose moments exist in full precision at one time."""


@functools.cache
def build_dynamic_codes(*, signed: bool) -> tuple[float, ...]:
    """Return the 256 values that an 8-bit code can stand for, ascending, from about -1 (or 0) to 1: the quantization that Dettmers
    2015 calls dynamic tree quantization.

    Each of seven decades, [1e-7, 1e-6] to [0.1, 1], is divided into equal intervals, twice as many as in the decade below. The
    values are the midpoints of the intervals, and 0 and 1.

    Args:
        signed: include negative values, with half as many values per decade and sign.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        num_values = 2 ** (decade if signed else decade + 1)
        midpoints = [10.0 ** (decade - 6) * (0.1 + 0.9 * (i + 0.5) / num_values) for i in range(num_values)]
        values += [*midpoints, *(-value for value in midpoints)] if signed else midpoints
    return tuple(sorted(values))


class EightBitAdamW(UpdateRule):
    """AdamW that stores both moments in 8 bits. Betas and eps are those of the parameter group."""

    elementwise = False

    def __init__(self, config: OptimizerConfig) -> None:
        self.blocks = PerBlock(config.adam_8bit_block_size)

    def states(self, record: ParamRecord) -> tuple[StateSpec, ...]:
        """Return the optimizer states of a parameter: for both moments, an 8-bit code per element and a scale per quantization
        block."""
        pairs = ((StateSpec(code, dtype=torch.uint8), StateSpec(scale, self.blocks)) for code, scale in (_FIRST, _SECOND))
        return tuple(state for pair in pairs for state in pair)

    def statistics(self, param: ParamPartition, context: ParallelContext) -> StatisticsRounds:
        """Return the maxima that the ranks must reduce for an update: the largest absolute moments of each quantization block that
        several ranks share."""
        record = param.record
        tp_shared, at_boundaries = (
            self._find_tp_shared_blocks(record, context),
            self._find_boundary_blocks(record, param.boundaries, context),
        )
        statistics = [Statistic("within rows", (2, len(tp_shared), *record.shape[:-1]), uses_max=True)] if tp_shared else []
        statistics += [Statistic("at ends", (2, len(at_boundaries)), uses_max=True)] if at_boundaries else []
        return (statistics,) if statistics else ()

    def _find_tp_shared_blocks(self, record: ParamRecord, context: ParallelContext) -> dict[int, int]:
        """Find the quantization blocks of a row whose elements are on several tensor ranks. Return a dict from the block's index in
        the row to its index in the array of block maxima that these ranks reduce (see `statistics`)."""
        (row_length,), (local_length,) = record.shape[-1:], record.get_local_shape(context.axis_sizes)[-1:]
        shared_blocks = dict.fromkeys(
            column // self.blocks.block_size
            for column in range(local_length, row_length, local_length)
            if column % self.blocks.block_size
        )
        return {block: i for i, block in enumerate(shared_blocks)}

    def _find_boundary_blocks(
        self, record: ParamRecord, boundaries: Sequence[int], context: ParallelContext
    ) -> dict[tuple[int, int, int], int]:
        """Find the quantization blocks that a shard boundary divides, without those of `_find_tp_shared_blocks`.

        Args:
            boundaries: indices of the flattened local parameter at which a shard starts.

        Returns:
            a dict from (tensor rank, row in the rank's local tensor, block in the row) to the block's index in the array of block
            maxima that the ranks reduce (see `statistics`).
        """
        tp_shared, local_length = self._find_tp_shared_blocks(record, context), record.get_local_shape(context.axis_sizes)[-1]
        indices = dict[tuple[int, int, int], int]()
        for tp_rank in range(_count_distinct_tp_ranks(record, context)):
            first_column = tp_rank * local_length % record.shape[-1]
            for row, column in (divmod(boundary, local_length) for boundary in boundaries):
                block, offset_in_block = divmod(first_column + column, self.blocks.block_size)
                if column and offset_in_block and block not in tp_shared:
                    indices.setdefault((tp_rank, row, block), len(indices))
        return indices

    def make(self, targets: Sequence[Target], context: ParallelContext) -> Updater:
        """Build the function that updates the targets (main parameters with their gradients and moments) in place."""
        for signed in (True, False):  # fill the caches now: the host waits when a list is copied to the device
            for target in targets[:1]:
                _compute_rounding_bounds(target.main.dtype, target.main.device, signed=signed)
                _build_code_values(target.main.dtype, target.main.device, signed=signed)
        block_views = [views for target in targets for views in self._iter_block_views(target, context)]
        has_statistics = any(target.statistics for target in targets)

        def step(update: Update) -> Iterator[None]:
            for views in block_views:
                if views.shared_max is not None:
                    for batch in views.iter_row_batches():
                        batch.report_max(update)
            if has_statistics:
                yield
            for views in block_views:
                for batch in views.iter_row_batches():
                    batch.update(update)

        return step

    def _iter_block_views(self, target: Target, context: ParallelContext) -> Iterator[_BlockViews]:
        """Divide the elements of a target (a part of a main parameter) into quantization blocks, and yield views of blocks of equal
        length."""
        record, sizes = target.record, context.axis_sizes
        shape, local_slice = record.get_local_shape(sizes), record.get_local_slice(sizes, context.coordinates)
        tp_shared, at_boundaries = (
            self._find_tp_shared_blocks(record, context),
            self._find_boundary_blocks(record, target.shard_boundaries, context),
        )
        tp_rank = context.coordinates["tp"] if _count_distinct_tp_ranks(record, context) > 1 else 0
        for block_range in self.blocks.iter_block_ranges(shape, local_slice, target.flat_range):
            block_slice, shared_max = block_range.blocks.slice, None
            block_key = tp_rank, (target.flat_range.start + block_range.elements.offset) // shape[-1], block_slice.offsets[-1]
            if block_slice.offsets[-1] in tp_shared:
                row_max = target.statistics["within rows"][:, tp_shared[block_slice.offsets[-1]]]
                shared_max = row_max[(slice(None), *block_slice.index[:-1])].view(2, -1)
            elif block_key in at_boundaries:
                shared_max = target.statistics["at ends"][:, at_boundaries[block_key], None]
            yield _BlockViews.of(target, block_range, shared_max)


@dataclass(frozen=True)
class _BlockViews:
    """Views of a main parameter, its gradient and its moments as quantization blocks, [rows, blocks, elements]. The blocks of one
    object have equal length and are in consecutive rows of the parameter. A shard boundary may cut a block; then the object
    contains only this rank's part of the block."""

    group: ParamGroup
    main: torch.Tensor
    grad: torch.Tensor
    codes: tuple[torch.Tensor, torch.Tensor]
    """Codes of the first and of the second moment."""
    scales: tuple[torch.Tensor, torch.Tensor]
    """Scales of the first and of the second moment, [rows, blocks]."""
    shared_max: tuple[torch.Tensor, torch.Tensor] | None
    """Largest absolute values of both moments over all ranks, each [rows, blocks], if other ranks hold elements of the blocks;
    else None."""

    @classmethod
    def of(cls, target: Target, block_range: BlockRange, shared_max: torch.Tensor | None) -> _BlockViews:
        """Build the views of the quantization blocks in a range of a target (a part of a main parameter).

        Args:
            shared_max: if other ranks hold elements of the blocks, the largest absolute moments over all ranks, [2 moments, rows],
                with one block per row. Otherwise None.
        """
        blocks, element_rows, states = block_range.blocks, block_range.elements, target.moments

        def view_elements(flat: torch.Tensor) -> torch.Tensor:
            rows = flat[element_rows.offset : element_rows.offset + element_rows.slice.numel].view(block_range.num_rows, -1)
            return rows[:, block_range.column_range].unflatten(1, (block_range.num_blocks, -1))

        def view_blocks(flat: torch.Tensor) -> torch.Tensor:
            return flat[blocks.offset : blocks.offset + blocks.slice.numel].view(block_range.num_rows, -1)

        codes = view_elements(states[_FIRST[0]]), view_elements(states[_SECOND[0]])
        scales = view_blocks(states[_FIRST[1]]), view_blocks(states[_SECOND[1]])
        block_max = None if shared_max is None else (shared_max[0].unsqueeze(-1), shared_max[1].unsqueeze(-1))
        return cls(target.group, view_elements(target.main), view_elements(target.grad), codes, scales, block_max)

    def iter_row_batches(self) -> Iterator[_BlockViews]:
        """Yield these views in batches of rows, to limit the memory for moments in full precision."""
        batch_rows = max(1, _MAX_ELEMENTS // self.main[0].numel())
        for start in range(0, len(self.main), batch_rows):
            batch = slice(start, start + batch_rows)
            codes, scales = ((first[batch], second[batch]) for first, second in (self.codes, self.scales))
            shared_max = None if self.shared_max is None else (self.shared_max[0][batch], self.shared_max[1][batch])
            yield _BlockViews(self.group, self.main[batch], self.grad[batch], codes, scales, shared_max)

    def compute_moments(self, update: Update) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both moments of this update in full precision, before they are rounded to 8 bits."""
        (beta1, beta2), grad = self.group.betas, self.grad * update.grad_factor
        first, second = (
            _build_code_values(grad.dtype, grad.device, signed=signed)[codes.int()].mul_(scales.unsqueeze(-1))
            for codes, scales, signed in zip(self.codes, self.scales, (True, False), strict=True)
        )
        return first.lerp_(grad, 1.0 - beta1), second.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)

    def report_max(self, update: Update) -> None:
        """Write the largest absolute moments of each block, over this rank's elements, to `shared_max`, which the ranks then
        reduce."""
        assert self.shared_max is not None
        for block_max, moment in zip(self.shared_max, self.compute_moments(update), strict=True):
            block_max.copy_(moment.abs().amax(-1))

    def update(self, update: Update) -> None:
        """Update the main parameters and quantize the moments."""
        first, second = moments = self.compute_moments(update)
        for i, moment in enumerate(moments):
            block_max = moment.abs().amax(-1) if self.shared_max is None else self.shared_max[i].to(moment.device)
            scales = self.scales[i].copy_(block_max).unsqueeze(-1)
            self.codes[i].copy_(_quantize(moment / torch.where(scales > 0, scales, 1.0), signed=i == 0))
        (beta1, beta2), rate = self.group.betas, update.rate(self.group)
        denominator = second.div_(1.0 - beta2**update.step).sqrt_().add_(self.group.eps)
        self.main.mul_(1.0 - rate * update.decay(self.group)).addcdiv_(first, denominator, value=-rate / (1.0 - beta1**update.step))


def _count_distinct_tp_ranks(record: ParamRecord, context: ParallelContext) -> int:
    """Return the number of tensor ranks that hold different elements of the parameter; 1 if the parameter is replicated."""
    return 1 if "tp" in record.replicated_axes else context.topology.tp


@functools.cache
def _build_code_values(dtype: torch.dtype, device: torch.device, *, signed: bool) -> torch.Tensor:
    """Return the values of the 256 codes of a moment as a tensor.

    Args:
        signed: True for the first moment, False for the second.
    """
    return torch.tensor(build_dynamic_codes(signed=signed), dtype=dtype, device=device)


@functools.cache
def _compute_rounding_bounds(dtype: torch.dtype, device: torch.device, *, signed: bool) -> torch.Tensor:
    """Return the midpoints between adjacent code values. A value between two midpoints is rounded to the code between them."""
    table = _build_code_values(torch.float64, device, signed=signed)
    return ((table[1:] + table[:-1]) / 2).to(dtype)


def _quantize(tensor: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """Return for each element the code whose value is nearest."""
    return torch.bucketize(tensor, _compute_rounding_bounds(tensor.dtype, tensor.device, signed=signed), out_int32=True)
