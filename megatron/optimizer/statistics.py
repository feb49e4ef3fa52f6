"""Numbers of whole parameters, such as sums over the rows of a matrix, of which each rank knows only the share of its elements.

A rule names them in rounds. In each it writes this rank's shares of all its parameters; then they are put together over the tensor
and data ranks, in one reduction whatever the number of parameters, and every rank reads whole numbers. So what is computed from
them is the same at every layout. Of sums each element of the model gives its share once, on the rank that counts it in the global
norm. The layout of the numbers in memory is the same on all ranks of a stage.

A tied parameter on the first and the last stage is counted on the first. Its sums go on to the last as they are, so both update it
to the same bits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.parallel.boxes import aligned
from megatron.parallel.collectives import all_reduce
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import DividedParam
from megatron.parallel.topology import GRADIENT_AXES
from megatron.parallel.torch_private import foreach_norm


@dataclass(frozen=True)
class Statistic:
    """Some numbers of a whole parameter."""

    name: str
    shape: tuple[int, ...]
    """In terms of the global tensor."""
    largest: bool = False
    """Whether ranks give candidates of which the largest counts. (None is below zero.) If not, they give summands."""


Rounds = Sequence[Sequence[Statistic]]
StatisticsOf = Callable[[DividedParam], Rounds]
"""Gives the numbers of a parameter that its rule needs, round by round."""


@dataclass(frozen=True)
class NumbersPlan:
    """Numbers of several parameters that are put together in one reduction, one after the other in a buffer."""

    numbers: tuple[tuple[DividedParam, Statistic], ...]
    dtype: torch.dtype
    largest: bool

    @property
    def starts(self) -> list[int]:
        """Where each begins, and where the last ends."""
        return list(itertools.accumulate((aligned(math.prod(one.shape)) for _, one in self.numbers), initial=0))

    @property
    def num_tied(self) -> int:
        """Elements at the begin that belong to parameters that another stage holds too."""
        return self.starts[sum(param.tied_apart for param, _ in self.numbers)]

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer."""
        return self.starts[-1] * self.dtype.itemsize

    def sent(self, ranks: int) -> tuple[int, int]:
        """Bytes that a rank sends: of a ring over so many ranks, and between the first and the last stage."""
        return 2 * (ranks - 1) * self.starts[-1] // ranks * self.dtype.itemsize, self.num_tied * self.dtype.itemsize


def plan_numbers(params: Sequence[DividedParam], statistics_of: StatisticsOf) -> list[list[NumbersPlan]]:
    """What is put together in each round."""
    rounds = {param: statistics_of(param) for param in params}
    planned: list[list[NumbersPlan]] = []
    for number in range(max((len(of) for of in rounds.values()), default=0)):
        plans = []
        for largest, dtype in itertools.product((False, True), dict.fromkeys(param.main_dtype for param in params)):
            chosen = [
                (param, one)
                for param, of in sorted(rounds.items(), key=lambda item: not item[0].tied_apart)
                if param.main_dtype == dtype and number < len(of)
                for one in of[number]
                if one.largest is largest
            ]
            if chosen:
                plans.append(NumbersPlan(tuple(chosen), dtype, largest))
        planned.append(plans)
    return planned


class WholeNumbers:
    """The numbers of all parameters of a stage, in memory that stays.

    Args:
        params: those of all shards of the stage, in an order that is the same on all its ranks.
    """

    def __init__(self, params: Sequence[DividedParam], statistics_of: StatisticsOf, context: ParallelContext) -> None:
        self._context = context
        self._rounds_of = {param.record.name: len(statistics_of(param)) for param in params}
        self._cuts = {param.record.name: param.cuts for param in params}
        self._found: dict[str, dict[str, torch.Tensor]] = {param.record.name: {} for param in params}
        self._rounds = [[self._make(plan) for plan in plans] for plans in plan_numbers(params, statistics_of)]

    @property
    def num_rounds(self) -> int:
        """How often ranks put their numbers together in an update."""
        return len(self._rounds)

    def rounds_of(self, names: Iterable[str]) -> int:
        """In how many rounds any of these parameters has numbers."""
        return max((self._rounds_of[name] for name in names if name in self._rounds_of), default=0)

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The memory of all numbers."""
        return [buffer.numbers for buffers in self._rounds for buffer in buffers]

    def of(self, name: str) -> Mapping[str, torch.Tensor]:
        """The numbers of a parameter, by name: before their round's end this rank's shares, to be added up, then the whole."""
        return self._found.get(name, {})

    def cuts_of(self, name: str) -> tuple[int, ...]:
        """Where ranks cut a parameter."""
        return self._cuts.get(name, ())

    def begin(self) -> None:
        """Begin an update: all numbers are zero."""
        for buffer in self.buffers:
            buffer.zero_()

    def put_together(self, number: int) -> None:
        """End a round. All ranks of the stage call it together."""
        group, ends = self._context.group("tp", *GRADIENT_AXES), self._context.pipeline_ends
        for buffer in self._rounds[number]:
            all_reduce(buffer.numbers, group, buffer.op)
            if buffer.num_tied:
                all_reduce(buffer.numbers[: buffer.num_tied], ends, buffer.op)

    def _make(self, plan: NumbersPlan) -> _Buffer:
        starts = plan.starts
        numbers = torch.zeros(starts[-1], dtype=plan.dtype, device=self._context.device)
        for (param, one), start in zip(plan.numbers, starts, strict=False):
            self._found[param.record.name][one.name] = numbers[start : start + math.prod(one.shape)].view(one.shape)
        return _Buffer(numbers, plan.num_tied, dist.ReduceOp.MAX if plan.largest else dist.ReduceOp.SUM)


@dataclass(frozen=True)
class _Buffer:
    """Numbers that are put together in one reduction."""

    numbers: torch.Tensor
    num_tied: int
    op: dist.ReduceOp.RedOpType


# ---- Sums of squares and counts of zeros over many tensors, accurate enough that every layout agrees.
#
# One float32 reduction over millions of elements on CPU came out 1e-3 low (measured on 4.8 million gradients), and clipping uses
# the norm. So rows of a few thousand elements are reduced in the tensor's dtype and summed up in float64.
#
# The sum over some elements is the same, bit for bit, whatever tensor they are a part of. So a rank that counts a slice of what it
# holds gets the same as a rank that holds only the slice. On CPU it does not depend on where in memory they begin either. On CUDA
# it may (the kernel takes elements four at a time from aligned memory only), so there slices must begin at multiples of four
# elements.

_ROW = 4096


def square_sums(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Sum of squares of each tensor: float64 [len(tensors)] on `device`.

    Args:
        tensors: on the device or in host memory.
    """
    together = [index for index, tensor in enumerate(tensors) if tensor.device.type == "cuda"]
    if not tensors:
        return torch.zeros(0, dtype=torch.float64, device=device)
    if len(together) == len(tensors):
        return _square_sums_in_one_kernel(tensors)
    alone = [index for index, tensor in enumerate(tensors) if tensor.device.type != "cuda"]
    sums = torch.stack([_square_sum(tensors[index]) for index in alone]).to(device, non_blocking=True)
    if not together:
        return sums
    found = dict(zip(alone, sums.unbind(), strict=True))
    found |= zip(together, _square_sums_in_one_kernel([tensors[index] for index in together]).unbind(), strict=True)
    return torch.stack([found[index] for index in range(len(tensors))])  # a list as an index would make the host wait


def _square_sums_in_one_kernel(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(foreach_norm(list(tensors))).double().square_()  # it sums in a tree


def _square_sum(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1)
    whole = flat.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1).double()
    rest = torch.linalg.vector_norm(flat[whole:]).double()
    return torch.dot(rows, rows) + rest * rest


def count_zeros(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Number of zeros in all tensors together, as a float64 scalar on `device`."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for tensor in tensors:
        total += (tensor.numel() - torch.count_nonzero(tensor)).to(device, non_blocking=True)
    return total
