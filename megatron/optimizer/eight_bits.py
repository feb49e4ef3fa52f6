"""AdamW with both moments in 8 bits, in blocks with a scale each (Dettmers et al. 2022, 8-bit Optimizers via Block-wise
Quantization).

A block is `block_size` elements of a row, counted in the whole matrix, the last of a row perhaps shorter. So what is rounded, and
how, does not depend on the layout. A moment is kept as a code for each element and, for each block, the largest absolute value in
it. An update works with the moments that the codes stand for, uses its results before they are rounded, and rounds them for the
next.

Where ranks divide the elements of a block, the largest value is that of all of them: one round of numbers of whole parameters, for
such blocks alone. These are the blocks at the ends of ZeRO's slices, and in each row those that lie on several tensor ranks.
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
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import DividedParam, ParamRecord
from megatron.parallel.state_shape import BlockRun, Blocks
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
        record = param.record
        within, ends = self._within_rows(record, context), self._at_ends(record, param.cuts, context)
        found = [Statistic("within rows", (2, len(within), *record.shape[:-1]), largest=True)] if within else []
        found += [Statistic("at ends", (2, len(ends)), largest=True)] if ends else []
        return (found,) if found else ()

    def _within_rows(self, record: ParamRecord, context: ParallelContext) -> dict[int, int]:
        """The blocks of every row that several tensor ranks hold, each with its place among them."""
        (length,), (local,) = record.shape[-1:], record.local_shape(context.axis_sizes)[-1:]
        cut = dict.fromkeys(first // self.blocks.size for first in range(local, length, local) if first % self.blocks.size)
        return {block: place for place, block in enumerate(cut)}

    def _at_ends(self, record: ParamRecord, cuts: Sequence[int], context: ParallelContext) -> dict[tuple[int, int, int], int]:
        """The other blocks that are divided, each with its place among them: (part, row in the part's tensor, block in the row)."""
        within, length = self._within_rows(record, context), record.local_shape(context.axis_sizes)[-1]
        found = dict[tuple[int, int, int], int]()
        for part in range(_num_parts(record, context)):
            first = part * length % record.shape[-1]
            for row, column in (divmod(cut, length) for cut in cuts):
                block, before = divmod(first + column, self.blocks.size)
                if column and before and block not in within:
                    found.setdefault((part, row, block), len(found))
        return found

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
                    for part in run.chunks():
                        part.give(update)
            if rounds:
                yield
            for run in runs:
                for part in run.chunks():
                    part.update(update)

        return step

    def _runs(self, target: Target, context: ParallelContext) -> Iterator[_BlockRun]:
        """A target's elements, in blocks."""
        record, sizes = target.record, context.axis_sizes
        shape, held = record.local_shape(sizes), record.held_box(sizes, context.coordinates)
        within, ends = self._within_rows(record, context), self._at_ends(record, target.cuts, context)
        index = context.coordinates["tp"] if _num_parts(record, context) > 1 else 0
        for run in self.blocks.runs(shape, held, target.piece):
            box, shared = run.numbers.box, None
            end = index, (target.piece.start + run.elements.start) // shape[-1], box.offsets[-1]
            if box.offsets[-1] in within:
                of_rows = target.whole["within rows"][:, within[box.offsets[-1]]]
                shared = of_rows[(slice(None), *box.index[:-1])].view(2, -1)
            elif end in ends:
                shared = target.whole["at ends"][:, ends[end], None]
            yield _BlockRun.of(target, run, shared)


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
    shared: tuple[torch.Tensor, torch.Tensor] | None
    """The largest values of both moments, where other ranks have elements of the blocks: [rows, blocks]."""

    @classmethod
    def of(cls, target: Target, run: BlockRun, shared: torch.Tensor | None) -> _BlockRun:
        """Some blocks of a target. `shared` is [moments, rows], of one block a row."""
        numbers, placed, moments = run.numbers, run.elements, target.moments

        def elements(flat: torch.Tensor) -> torch.Tensor:
            rows = flat[placed.start : placed.start + placed.box.numel].view(run.num_rows, -1)
            return rows[:, run.columns].unflatten(1, (run.num_blocks, -1))

        def of_blocks(flat: torch.Tensor) -> torch.Tensor:
            return flat[numbers.start : numbers.start + numbers.box.numel].view(run.num_rows, -1)

        codes = elements(moments[_FIRST[0]]), elements(moments[_SECOND[0]])
        found = of_blocks(moments[_FIRST[1]]), of_blocks(moments[_SECOND[1]])
        largest = None if shared is None else (shared[0].unsqueeze(-1), shared[1].unsqueeze(-1))
        return cls(target.group, elements(target.main), elements(target.grad), codes, found, largest)

    def chunks(self) -> Iterator[_BlockRun]:
        """Parts of it, of some rows each, that are worked on at a time."""
        rows = max(1, _AT_ONCE // self.main[0].numel())
        for start in range(0, len(self.main), rows):
            some = slice(start, start + rows)
            codes, scales = ((first[some], second[some]) for first, second in (self.codes, self.scales))
            shared = None if self.shared is None else (self.shared[0][some], self.shared[1][some])
            yield _BlockRun(self.group, self.main[some], self.grad[some], codes, scales, shared)

    def moments(self, update: Update) -> tuple[torch.Tensor, torch.Tensor]:
        """Both moments after the update, before they are rounded."""
        (beta1, beta2), grad = self.group.betas, self.grad * update.factor
        first, second = (
            _table(grad.dtype, grad.device, signed=signed)[codes.int()].mul_(scales.unsqueeze(-1))
            for codes, scales, signed in zip(self.codes, self.scales, (True, False), strict=True)
        )
        return first.lerp_(grad, 1.0 - beta1), second.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)

    def give(self, update: Update) -> None:
        """Give the largest values of this rank's elements."""
        assert self.shared is not None
        for largest, moment in zip(self.shared, self.moments(update), strict=True):
            largest.copy_(moment.abs().amax(-1))

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
