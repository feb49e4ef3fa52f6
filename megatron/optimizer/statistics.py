"""Statistics of full parameters, such as the row sums of a matrix, for update rules that need more than the elements of their
shard.

A rule declares its statistics as one or several lists, one list for each round of reductions. In each round, every rank writes the
contribution of its own elements. One all-reduce over the tensor and data ranks then combines the contributions of all parameters,
so the number of collectives does not grow with the number of parameters. Every rank reads the result for the full parameter.
Updates that use these statistics therefore do not depend on the layout.

For sums, each element of the model contributes exactly once: on the rank that counts the element in the global gradient norm. All
ranks of a stage arrange the statistics in memory in the same way.

A tied parameter on the first and the last stage contributes on the first stage only. The last stage receives the finished sums, so
both stages update the parameter to bitwise equal values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.parallel.collectives import all_reduce
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamPartition
from megatron.parallel.tensor_slice import align_numel
from megatron.parallel.topology import GRADIENT_AXES
from megatron.parallel.torch_private import foreach_norm


@dataclass(frozen=True)
class Statistic:
    """Declaration of sums or maxima over a full parameter that an update rule needs, such as the sum of each row. They form an
    array, which is reduced over the ranks that hold elements of the parameter."""

    name: str
    """Name by which the update rule finds the array among the statistics of the parameter."""
    shape: tuple[int, ...]
    """Shape of the array for the global, unsharded parameter."""
    uses_max: bool = False
    """Whether the ranks' contributions are combined by their maximum instead of their sum. Contributions must not be negative."""


StatisticsRounds = Sequence[Sequence[Statistic]]
"""Statistics of a parameter that its update rule needs, one list for each round of reductions. Statistics of round 2 may depend
on results of round 1."""
StatisticsFunction = Callable[[ParamPartition], StatisticsRounds]
"""Function that returns the statistics of a parameter that its update rule needs, one list for each round of reductions."""


@dataclass(frozen=True)
class StatisticsBufferPlan:
    """Layout of one flat buffer for statistics (sums or maxima over full parameters) of several parameters. One collective reduces
    the buffer."""

    statistics: tuple[tuple[ParamPartition, Statistic], ...]
    """Each statistic with its parameter, in the order of the buffer. Tied parameters come first."""
    dtype: torch.dtype
    uses_max: bool

    @property
    def offsets(self) -> list[int]:
        """Offset of each statistic in the buffer, followed by the size of the buffer, in elements."""
        return list(itertools.accumulate((align_numel(math.prod(statistic.shape)) for _, statistic in self.statistics), initial=0))

    @property
    def tied_numel(self) -> int:
        """Number of elements, at the start of the buffer, for tied parameters, which another pipeline stage holds too."""
        return self.offsets[sum(param.is_tied_across_stages for param, _ in self.statistics)]

    @property
    def num_bytes(self) -> int:
        """Size of the buffer in bytes."""
        return self.offsets[-1] * self.dtype.itemsize

    def count_sent_bytes(self, num_ranks: int) -> tuple[int, int]:
        """Return how many bytes a rank sends to reduce the buffer: in a ring all-reduce over `num_ranks` ranks, and between the
        first and the last pipeline stage."""
        return 2 * (num_ranks - 1) * self.offsets[-1] // num_ranks * self.dtype.itemsize, self.tied_numel * self.dtype.itemsize


def plan_statistics_buffers(
    params: Sequence[ParamPartition], get_statistics: StatisticsFunction
) -> list[list[StatisticsBufferPlan]]:
    """Plan the buffers for statistics (sums or maxima over full parameters) in each round of reductions. There is one buffer for
    each combination of dtype and reduction (sum or maximum).

    Args:
        params: parameters of the stage, in an order that is the same on all of its ranks.
        get_statistics: returns the statistics of a parameter, one list per round.
    """
    rounds = {param: get_statistics(param) for param in params}
    plans_by_round: list[list[StatisticsBufferPlan]] = []
    for round_index in range(max((len(param_rounds) for param_rounds in rounds.values()), default=0)):
        plans = []
        for uses_max, dtype in itertools.product((False, True), dict.fromkeys(param.main_dtype for param in params)):
            param_statistics = [
                (param, statistic)
                for param, param_rounds in sorted(rounds.items(), key=lambda item: not item[0].is_tied_across_stages)
                if param.main_dtype == dtype and round_index < len(param_rounds)
                for statistic in param_rounds[round_index]
                if statistic.uses_max is uses_max
            ]
            if param_statistics:
                plans.append(StatisticsBufferPlan(tuple(param_statistics), dtype, uses_max))
        plans_by_round.append(plans)
    return plans_by_round


class ParamStatistics:
    """Statistics (sums or maxima over full parameters) of all parameters of a stage, in buffers that are allocated once. Update
    rules add this rank's contributions, and one collective per buffer reduces the contributions of all ranks.

    Args:
        params: parameters of all shards of the stage, in an order that is the same on all of its ranks.
        get_statistics: returns the statistics of a parameter, one list per round. A round reduces its statistics over the ranks;
            statistics of round 2 may depend on results of round 1.
    """

    def __init__(self, params: Sequence[ParamPartition], get_statistics: StatisticsFunction, context: ParallelContext) -> None:
        self._context = context
        self._num_rounds = {param.record.name: len(get_statistics(param)) for param in params}
        self._boundaries = {param.record.name: param.boundaries for param in params}
        self._views: dict[str, dict[str, torch.Tensor]] = {param.record.name: {} for param in params}
        self._rounds = [[self._allocate(plan) for plan in plans] for plans in plan_statistics_buffers(params, get_statistics)]

    @property
    def num_rounds(self) -> int:
        """Number of rounds of reductions in an update: the maximum over the update rules of the parameters."""
        return len(self._rounds)

    def count_rounds(self, param_names: Iterable[str]) -> int:
        """Return the number of rounds in which any of these parameters has statistics."""
        return max((self._num_rounds[name] for name in param_names if name in self._num_rounds), default=0)

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Flat buffers that hold the statistics of all parameters, such as the row sums of matrices, for all rounds."""
        return [buffer.data for buffers in self._rounds for buffer in buffers]

    def of(self, param_name: str) -> Mapping[str, torch.Tensor]:
        """Return the statistics of a parameter by their names.

        Until `reduce_round` reduces a statistic, its tensor holds the contribution of this rank, which the update rule adds.
        Afterwards it holds the value for the full parameter.
        """
        return self._views.get(param_name, {})

    def shard_boundaries(self, param_name: str) -> tuple[int, ...]:
        """Return the indices of the rank's flattened parameter at which another rank's shard starts."""
        return self._boundaries.get(param_name, ())

    def reset(self) -> None:
        """Set the statistics of all parameters to zero at the start of an update."""
        for buffer in self.buffers:
            buffer.zero_()

    def reduce_round(self, round_index: int) -> None:
        """Reduce the statistics of one round over the ranks that hold elements of the parameters. All ranks of the stage must call
        this method together."""
        group, pipeline_ends = self._context.group("tp", *GRADIENT_AXES), self._context.pipeline_ends
        for statistics_buffer in self._rounds[round_index]:
            all_reduce(statistics_buffer.data, group, statistics_buffer.op)
            if statistics_buffer.tied_numel:
                all_reduce(statistics_buffer.data[: statistics_buffer.tied_numel], pipeline_ends, statistics_buffer.op)

    def _allocate(self, plan: StatisticsBufferPlan) -> _StatisticsBuffer:
        offsets = plan.offsets
        data = torch.zeros(offsets[-1], dtype=plan.dtype, device=self._context.device)
        for (param, statistic), offset in zip(plan.statistics, offsets, strict=False):
            self._views[param.record.name][statistic.name] = data[offset : offset + math.prod(statistic.shape)].view(
                statistic.shape
            )
        return _StatisticsBuffer(data, plan.tied_numel, dist.ReduceOp.MAX if plan.uses_max else dist.ReduceOp.SUM)


@dataclass(frozen=True)
class _StatisticsBuffer:
    """Flat buffer for statistics (sums or maxima over full parameters) on this rank, which one collective reduces."""

    data: torch.Tensor
    tied_numel: int
    """Number of elements, at the start of the buffer, that belong to tied parameters. The first and the last pipeline stage also
    reduce these elements with each other."""
    op: dist.ReduceOp.RedOpType


# ---- Sums of squares and counts of zeros over many tensors, accurate enough that all layouts agree.
#
# A single float32 reduction over millions of elements on CPU is inaccurate: 1e-3 too low, measured on 4.8 million gradients.
# Clipping uses the norm. So rows of a few thousand elements are reduced in the tensor's dtype, and the results are summed in
# float64.
#
# The sum over some elements is bitwise the same in whatever tensor they are. So a rank that sums a slice of its tensor gets the
# same result as a rank that holds only this slice. On CPU, the memory address of the slice does not matter either. On CUDA it may
# matter, because the kernel loads four elements at a time only from aligned memory. There, slices must start at multiples of four
# elements.

_ROW = 4096


def compute_squared_norms(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the sum of squares of each tensor, float64 [len(tensors)] on `device`.

    Args:
        tensors: tensors on the device or in host memory.
    """
    cuda_indices = [index for index, tensor in enumerate(tensors) if tensor.device.type == "cuda"]
    if not tensors:
        return torch.zeros(0, dtype=torch.float64, device=device)
    if len(cuda_indices) == len(tensors):
        return _compute_fused_squared_norms(tensors)
    host_indices = [index for index, tensor in enumerate(tensors) if tensor.device.type != "cuda"]
    host_norms = torch.stack([_compute_squared_norm(tensors[index]) for index in host_indices]).to(device, non_blocking=True)
    if not cuda_indices:
        return host_norms
    norms = dict(zip(host_indices, host_norms.unbind(), strict=True))
    norms |= zip(cuda_indices, _compute_fused_squared_norms([tensors[index] for index in cuda_indices]).unbind(), strict=True)
    return torch.stack([norms[index] for index in range(len(tensors))])  # indexing with a list would make the host wait


def _compute_fused_squared_norms(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(foreach_norm(list(tensors))).double().square_()  # the kernel sums in a tree


def _compute_squared_norm(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1)
    num_full = flat.numel() // _ROW * _ROW
    row_norms = torch.linalg.vector_norm(flat[:num_full].view(-1, _ROW), dim=1).double()
    remainder = torch.linalg.vector_norm(flat[num_full:]).double()
    return torch.dot(row_norms, row_norms) + remainder * remainder


def count_zeros(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the total number of zeros in the tensors, as a float64 scalar on `device`."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for tensor in tensors:
        total += (tensor.numel() - torch.count_nonzero(tensor)).to(device, non_blocking=True)
    return total
