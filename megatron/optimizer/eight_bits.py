"""AdamW with both moments in 8 bits, in blocks with a scale each (Dettmers et al. 2022, 8-bit Optimizers via Block-wise
Quantization).

A block is `block_size` elements of a row, counted in the whole matrix, the last of a row perhaps shorter. So what is rounded, and
how, does not depend on the layout. A moment is kept as a code for each element and, for each block, the largest absolute value in
it. An update works with the moments that the codes stand for, uses its results before they are rounded, and rounds them for the
next.

Where ranks divide the elements of a block, the largest value is that of all of them: one round of numbers of whole parameters, for
such blocks alone. Tensor ranks may not divide blocks (`config/checks/groups.py`), so these are those at the ends of ZeRO's slices.
Biases and the weights of norms are few, and kept as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron.config.training import OptimizerConfig
from megatron.optimizer.rule import KeptState, Target, Update, Updater, UpdateRule
from megatron.optimizer.statistics import Rounds, Statistic
from megatron.parallel.boxes import PlacedBox
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamRecord
from megatron.parallel.shards import DividedParam
from megatron.parallel.state_shape import Blocks
from megatron.spec.groups import ParamGroup

_FIRST, _SECOND = ("exp_avg_code", "exp_avg_scale"), ("exp_avg_sq_code", "exp_avg_sq_scale")
_AT_ONCE = 2**22
"""Elements whose moments are in full precision at a time."""


@functools.cache
def dynamic_codes(*, signed: bool) -> tuple[float, ...]:
    """The 256 values of a code, ascending, from about -1 (or 0) to 1: the dynamic tree of Dettmers 2015.

    Each of seven decades, [1e-7, 1e-6] to [0.1, 1], has twice as many values as the one below: the middles of equal parts. Zero and
    one come to them.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        parts = 2 ** (decade if signed else decade + 1)
        middles = [10.0 ** (decade - 6) * (0.1 + 0.9 * (part + 0.5) / parts) for part in range(parts)]
        values += [*middles, *(-value for value in middles)] if signed else middles
    return tuple(sorted(values))


class EightBitAdamW(UpdateRule):
    """See above. Betas and eps are those of the parameter's group."""

    elementwise = False

    def __init__(self, config: OptimizerConfig) -> None:
        self.blocks = Blocks(config.adam_8bit_block_size)

    def states(self, record: ParamRecord) -> tuple[KeptState, ...]:
        """See `UpdateRule`."""
        pairs = ((KeptState(code, dtype=torch.uint8), KeptState(scale, self.blocks)) for code, scale in (_FIRST, _SECOND))
        return tuple(state for pair in pairs for state in pair)

    def statistics(self, param: DividedParam, context: ParallelContext) -> Rounds:
        """See `UpdateRule`."""
        divided = self.divided_blocks(param.record, param.cuts, context)
        shape = (_num_parts(param.record, context), len(divided), 2)
        return ([Statistic("scales", shape, largest=True)],) if divided else ()

    def divided_blocks(self, record: ParamRecord, cuts: Sequence[int], context: ParallelContext) -> dict[int, int]:
        """The blocks of a rank's tensor that are cut, by their flat number, each with its place among them."""
        shape = record.local_shape(context.axis_sizes)
        numbers = ((self.blocks.block_of(shape, cut), cut) for cut in cuts)
        found = sorted({number for number, cut in numbers if self.blocks.first_of(shape, number) < cut})
        return {number: place for place, number in enumerate(found)}

    def make(self, targets: Sequence[Target], context: ParallelContext) -> Updater:
        """See `UpdateRule`."""
        for signed in (True, False):  # now, since the device's copy of a list waits
            for target in targets[:1]:
                _bounds(target.main.dtype, target.main.device, signed=signed)
                _table(target.main.dtype, target.main.device, signed=signed)
        runs = [run for target in targets for run in self._runs(target, context)]
        rounds = any(target.whole for target in targets)

        def step(update: Update) -> Iterator[None]:
            for run in runs:
                if run.shared is not None:
                    for largest, moment in zip(run.shared, run.moments(update), strict=True):
                        largest.copy_(moment.abs().amax())
            if rounds:
                yield
            for run in runs:
                for part in run.chunks():
                    part.update(update)

        return step

    def _runs(self, target: Target, context: ParallelContext) -> Iterator[_BlockRun]:
        """A target's elements, as equally long blocks, or parts of one, that lie in rows."""
        shape = target.record.local_shape(context.axis_sizes)
        divided = self.divided_blocks(target.record, target.cuts, context)
        index = context.coordinates["tp"] if _num_parts(target.record, context) > 1 else 0
        first = self.blocks.covered(shape, target.piece).start
        for placed in target.record.boxes(target.piece, context):
            length = placed.box.sizes[-1]
            number = self.blocks.block_of(shape, target.piece.start + placed.start)
            head = min(length, -placed.box.offsets[-1] % self.blocks.size)
            whole, tail = divmod(length - head, self.blocks.size)
            per_row = (head > 0) + whole + (tail > 0)
            scales = range(number - first, number - first + placed.box.numel // length * per_row)
            column = block = 0
            for count, size in ((1, head), (whole, self.blocks.size), (1, tail)):
                if count and size:
                    place = divided.get(number + block) if size < self.blocks.size else None
                    shared = None if place is None else target.whole["scales"][index, place]
                    columns, blocks = slice(column, column + count * size), range(block, block + count)
                    yield _BlockRun.of(target, placed, columns, blocks, scales, shared)
                    column, block = column + count * size, block + count


@dataclass(frozen=True)
class _BlockRun:
    """Equally long blocks, or parts of a block each, one after the other in some rows. All as views [rows, blocks, elements]."""

    group: ParamGroup
    main: torch.Tensor
    grad: torch.Tensor
    codes: tuple[torch.Tensor, torch.Tensor]
    """For both moments."""
    scales: tuple[torch.Tensor, torch.Tensor]
    """For both moments: [rows, blocks]."""
    shared: torch.Tensor | None
    """The largest values of both moments, [2], where other ranks have elements of the block."""

    @classmethod
    def of(
        cls, target: Target, placed: PlacedBox, columns: slice, blocks: range, scales: range, shared: torch.Tensor | None
    ) -> _BlockRun:
        """Some columns of the rows of a box.

        Args:
            blocks: places of the blocks among those of a row.
            scales: places in the state of the scales of all blocks of these rows.
        """
        length, moments = placed.box.sizes[-1], target.moments

        def elements(flat: torch.Tensor) -> torch.Tensor:
            rows = flat[placed.start : placed.start + placed.box.numel].view(-1, length)
            return rows[:, columns].unflatten(1, (len(blocks), -1))

        def of_blocks(flat: torch.Tensor) -> torch.Tensor:
            rows = flat[scales.start : scales.stop].view(placed.box.numel // length, -1)
            return rows[:, blocks.start : blocks.stop]

        codes = elements(moments[_FIRST[0]]), elements(moments[_SECOND[0]])
        found = of_blocks(moments[_FIRST[1]]), of_blocks(moments[_SECOND[1]])
        return cls(target.group, elements(target.main), elements(target.grad), codes, found, shared)

    def chunks(self) -> Iterator[_BlockRun]:
        """Parts of it, of some rows each, that are worked on at a time."""
        rows = max(1, _AT_ONCE // self.main[0].numel())
        for start in range(0, len(self.main), rows):
            some = slice(start, start + rows)
            codes, scales = ((first[some], second[some]) for first, second in (self.codes, self.scales))
            yield _BlockRun(self.group, self.main[some], self.grad[some], codes, scales, self.shared)

    def moments(self, update: Update) -> tuple[torch.Tensor, torch.Tensor]:
        """Both moments after the update, before they are rounded."""
        (beta1, beta2), grad = self.group.betas, self.grad * update.factor
        first, second = (
            _table(grad.dtype, grad.device, signed=signed)[codes.int()].mul_(scales.unsqueeze(-1))
            for codes, scales, signed in zip(self.codes, self.scales, (True, False), strict=True)
        )
        return first.lerp_(grad, 1.0 - beta1), second.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)

    def update(self, update: Update) -> None:
        """Make the update, and keep the moments."""
        first, second = moments = self.moments(update)
        for place, moment in enumerate(moments):
            largest = moment.abs().amax(-1) if self.shared is None else self.shared[place].to(moment.device)
            scales = self.scales[place].copy_(largest).unsqueeze(-1)
            self.codes[place].copy_(_coded(moment / torch.where(scales > 0, scales, 1.0), signed=place == 0))
        (beta1, beta2), rate = self.group.betas, update.rate(self.group)
        root = second.div_(1.0 - beta2**update.number).sqrt_().add_(self.group.eps)
        self.main.mul_(1.0 - rate * update.decay(self.group)).addcdiv_(first, root, value=-rate / (1.0 - beta1**update.number))


def _num_parts(record: ParamRecord, context: ParallelContext) -> int:
    """How many tensor ranks have blocks of their own."""
    return 1 if "tp" in record.replicated_axes else context.topology.tp


@functools.cache
def _table(dtype: torch.dtype, device: torch.device, *, signed: bool) -> torch.Tensor:
    return torch.tensor(dynamic_codes(signed=signed), dtype=dtype, device=device)


@functools.cache
def _bounds(dtype: torch.dtype, device: torch.device, *, signed: bool) -> torch.Tensor:
    """Where the nearest value changes."""
    table = _table(torch.float64, device, signed=signed)
    return ((table[1:] + table[:-1]) / 2).to(dtype)


def _coded(tensor: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """The code of the nearest value to each element."""
    return torch.bucketize(tensor, _bounds(tensor.dtype, tensor.device, signed=signed), out_int32=True)
