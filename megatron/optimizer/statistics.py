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
from megatron.parallel.shards import DividedParam
from megatron.parallel.topology import GRADIENT_AXES


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


def statistics_bytes(params: Sequence[DividedParam], statistics_of: StatisticsOf) -> int:
    """Memory of the numbers of these parameters."""
    sizes = (
        aligned(math.prod(one.shape)) * param.main_dtype.itemsize
        for param in params
        for numbers in statistics_of(param)
        for one in numbers
    )
    return sum(sizes)


class WholeNumbers:
    """The numbers of all parameters of a stage, in memory that stays.

    Args:
        params: those of all shards of the stage, in an order that is the same on all its ranks.
    """

    def __init__(self, params: Sequence[DividedParam], statistics_of: StatisticsOf, context: ParallelContext) -> None:
        self._context = context
        rounds = {param: statistics_of(param) for param in params}
        self._rounds_of = {param.record.name: of for param, of in rounds.items()}
        self._cuts = {param.record.name: param.cuts for param in params}
        self._rounds: list[list[_Buffer]] = []
        self._found: dict[str, dict[str, torch.Tensor]] = {param.record.name: {} for param in params}
        for number in range(max((len(of) for of in rounds.values()), default=0)):
            buffers = []
            for largest, dtype in itertools.product((False, True), dict.fromkeys(param.main_dtype for param in params)):
                chosen = [
                    (param, one)
                    for param, of in sorted(rounds.items(), key=lambda item: not item[0].tied_apart)
                    if param.main_dtype == dtype and number < len(of)
                    for one in of[number]
                    if one.largest is largest
                ]
                if chosen:
                    buffers.append(self._make(chosen, dtype, largest=largest))
            self._rounds.append(buffers)

    @property
    def num_rounds(self) -> int:
        """How often ranks put their numbers together in an update."""
        return len(self._rounds)

    def rounds_of(self, names: Iterable[str]) -> int:
        """In how many rounds any of these parameters has numbers."""
        return max((len(self._rounds_of[name]) for name in names if name in self._rounds_of), default=0)

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

    def _make(self, chosen: Sequence[tuple[DividedParam, Statistic]], dtype: torch.dtype, *, largest: bool) -> _Buffer:
        starts = list(itertools.accumulate((aligned(math.prod(one.shape)) for _, one in chosen), initial=0))
        numbers = torch.zeros(starts[-1], dtype=dtype, device=self._context.device)
        for (param, one), start in zip(chosen, starts, strict=False):
            self._found[param.record.name][one.name] = numbers[start : start + math.prod(one.shape)].view(one.shape)
        num_tied = starts[sum(param.tied_apart for param, _ in chosen)]
        return _Buffer(numbers, num_tied, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)


@dataclass(frozen=True)
class _Buffer:
    """Numbers that are put together in one reduction."""

    numbers: torch.Tensor
    num_tied: int
    """Elements at its begin that belong to parameters that another stage holds too."""
    op: dist.ReduceOp.RedOpType
