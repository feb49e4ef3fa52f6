"""Communication volume of one rank in a step, for gradient reduction and parameter gathering. Computed from sizes, not measured.

The volume is that of ring algorithms. With n ranks, each rank sends (n - 1)/n of the tensor in a reduce-scatter and in an
all-gather, and twice that in an all-reduce, which is one after the other (Rajbhandari et al. 2019, section 7). In elements of the
model, over N data ranks and for M microbatches:

========================== ============== ============ ===================
strategy                   gradients      parameters   together
========================== ============== ============ ===================
no_shard                   2 (N - 1)/N                 2 (N - 1)/N
optim                      (N - 1)/N      (N - 1)/N    2 (N - 1)/N
optim_grads                M (N - 1)/N    (N - 1)/N    (M + 1) (N - 1)/N
optim_grads_params, always M (N - 1)/N    2M (N - 1)/N 3M (N - 1)/N
optim_grads_params, never  M (N - 1)/N    (N - 1)/N    (M + 1) (N - 1)/N
========================== ============== ============ ===================

"always" and "never" are the values of --fsdp-reshard-after-forward. With --fsdp-reduce-once gradients are sent once instead of M
times. With R replicas of N ranks, optim_grads_params sums each rank's gradient shard, 1/N of the gradient, over the replicas once
per step: 2 (R - 1)/R of the shard. Gradients are sent in the dtype of the main parameters (with --grad-reduce-in-bf16 in the
model's dtype), parameters in the model's dtype.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from megatron.data_parallel.bucket import main_grad_dtype, select_reduce_dtype
from megatron.data_parallel.bucket_plan import BucketPlan
from megatron.data_parallel.fsdp_plan import FsdpPolicy, UnitPlan, compute_padded_shard_numel
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamEntry

TrafficKind = Literal["gradients", "parameters", "matrices", "numbers", "noise"]
"""Content of messages:

- gradients, parameters: of the model;
- matrices: full matrices that an update rule needs, such as Muon; counted for the rank that sends most;
- numbers: sums over full parameters that an update rule needs, such as row sums;
- noise: gradients of the first microbatch, which the context ranks of the first data rank sum to measure the gradient noise.
"""


class StepTotals(NamedTuple):
    """Values that all ranks sum at the end of a step, in one float64 all-reduce."""

    loss: float
    """Sum over tokens of loss mask x cross entropy."""
    z_loss: float
    """Sum over tokens of loss mask x z-loss."""
    mtp_loss: float
    mask_sum: float
    """Sum of the loss mask over the tokens of the step."""
    grad_sq_sum: float
    """Sum of squares of the gradient. Not finite if any element on any rank is not finite."""
    num_zero_grads: float
    """Number of zeros in the gradient, if they are counted (--log-num-zeros-in-grad)."""
    num_exit_requests: float
    """Number of ranks that received a signal to exit."""
    num_out_of_time: float
    """Number of ranks whose time limit is reached."""
    num_save_requests: float
    """Number of ranks on which a checkpoint is due by time."""
    attention_samples: float
    """Attention cost of the step's packed samples, as the number of single-document samples whose attention would cost the
    same."""
    context_imbalance: float
    """Sum over microbatches of the imbalance of context parallelism: the attention work of the busiest context-parallel rank
    divided by the mean over the context-parallel ranks."""
    first_grad_sq_sum: float
    """Sum of squares of the first microbatch's gradient, over the parameters whose gradient noise is measured
    (`ParamRecord.measures_noise`)."""
    full_grad_sq_sum: float
    """Sum of squares of the gradient over all microbatches, over the parameters whose gradient noise is measured."""
    first_mask_sum: float
    """Sum of the loss mask of the first microbatch."""
    max_logit: float
    """Largest attention logit of the step over all ranks, if --log-max-attention-logit or --qk-clip requests it. One rank
    contributes this maximum and the others contribute 0, so the sum over ranks leaves it unchanged."""
    expert_balance: tuple[float, ...] = ()
    """Load and losses of the routers, if the model has experts. They are already reduced over the ranks. One rank contributes them
    and the others contribute 0, so the sum over ranks leaves them unchanged."""


NUM_SCALARS = len(StepTotals._fields)
"""Number of scalars that a step sums over all ranks.

These are the fields of `StepTotals` without `expert_balance`, and the sum of the mask once more, which the first backward needs.
"""


@dataclass(frozen=True)
class GroupTraffic:
    """Number of bytes that one rank sends in one step over one process group, for one type of content, such as gradients or
    parameters."""

    over: str
    """Name of the process group, such as "tp x dp"."""
    kind: TrafficKind
    bytes: int
    """Number of bytes that the rank sends, padding included."""


def count_bucket_traffic(
    plans: Sequence[BucketPlan],
    context: ParallelContext,
    sharding: str,
    dtype: torch.dtype,
    reductions: Sequence[int],
    *,
    in_bf16: bool = False,
) -> list[GroupTraffic]:
    """Return the bytes that one rank sends in a step to reduce the gradients and gather the parameters of buckets. There is one
    element for each process group and type of content (gradients or parameters).

    Args:
        sharding: no_shard, optim or optim_grads.
        dtype: dtype of the parameters.
        reductions: number of reductions of each bucket in a step.
        in_bf16: whether gradients are reduced in bfloat16 where possible (--grad-reduce-in-bf16).
    """
    traffic = []
    for plan, num_reductions in zip(plans, reductions, strict=True):
        group_name, num_peers = format_axes(plan.axes, context), plan.num_slices - 1
        ring_elements = num_peers * plan.slice_size  # elements that a rank sends in a reduce-scatter or an all-gather
        reduce_dtype = select_reduce_dtype(plan, context, in_bf16=in_bf16)
        if sharding == "no_shard":
            traffic.append(_count_gradient_traffic(group_name, 2 * num_reductions * ring_elements, dtype, reduce_dtype))
        else:
            traffic.append(_count_gradient_traffic(group_name, num_reductions * ring_elements, dtype, reduce_dtype))
            traffic.append(GroupTraffic(group_name, "parameters", ring_elements * dtype.itemsize))
        if plan.tied:  # an all-reduce over two ranks
            traffic.append(
                _count_gradient_traffic("pipeline ends", plan.size if sharding == "no_shard" else plan.slice_size, dtype)
            )
    return merge_traffic(traffic)


def count_fsdp_traffic(
    units: Iterable[UnitPlan], context: ParallelContext, policy: FsdpPolicy, dtype: torch.dtype, num_microbatches: int
) -> list[GroupTraffic]:
    """Return the bytes that one rank sends in a step for parameters under `fully_shard`. There is one element for each process
    group and type of content (gradients or parameters).

    Args:
        dtype: dtype in which parameters are gathered.
    """
    traffic, entries = [], [entry for unit in units for entry in unit.entries]
    for axes in dict.fromkeys(entry.record.partial_axes for entry in entries):
        num_ranks, num_replicas = context.get_fsdp_shard_group(axes).size, context.get_fsdp_replica_group(axes).size
        shard_numel = sum(compute_padded_shard_numel(entry, num_ranks) for entry in entries if entry.record.partial_axes == axes)
        ring_elements = (num_ranks - 1) * shard_numel
        gathered_elements = (2 * num_microbatches if policy.reshard == "always" else 1) * ring_elements
        shard_group_name, replica_group_name = format_fsdp_groups(axes, context)
        traffic += [
            _count_gradient_traffic(shard_group_name, (1 if policy.reduce_once else num_microbatches) * ring_elements, dtype),
            GroupTraffic(shard_group_name, "parameters", gathered_elements * dtype.itemsize),
            _count_gradient_traffic(replica_group_name, 2 * (num_replicas - 1) * shard_numel // num_replicas, dtype),
        ]
    return merge_traffic(traffic)


def count_noise_traffic(params: Iterable[ParamEntry], context: ParallelContext, dtype: torch.dtype) -> GroupTraffic:
    """Return the bytes that one rank sends in a step for --log-gradient-noise: the gradients of the first microbatch, which context
    ranks sum. The bytes of `StepTotals` are not included.

    Args:
        dtype: dtype of the parameters.
    """
    num_ranks, records = context.topology.cp, (entry.record for entry in params)
    sizes = (math.prod(record.get_local_shape(context.axis_sizes)) for record in records if record.measures_noise)
    elements = sum(-(-size // num_ranks) * (num_ranks - 1) for size in sizes)  # each rank sends a shard to every other rank
    return GroupTraffic(format_axes(("cp",), context), "noise", elements * main_grad_dtype(dtype).itemsize)


def merge_traffic(entries: Iterable[GroupTraffic]) -> list[GroupTraffic]:
    """Add up the bytes of all entries with the same process group and the same type of content, such as gradients. Drop totals of 0
    bytes."""
    totals: Counter[tuple[str, TrafficKind]] = Counter()
    for entry in entries:
        totals[entry.over, entry.kind] += entry.bytes
    return [GroupTraffic(over, kind, total) for (over, kind), total in totals.items() if total]


def format_axes(axes: tuple[str, ...], context: ParallelContext) -> str:
    """Format axes of the rank grid as text, such as "dp" or "tp x dp". Axes with only one rank are left out."""
    return " x ".join(axis for axis in axes if context.topology.get_size(axis) > 1)


def format_fsdp_groups(axes: tuple[str, ...], context: ParallelContext) -> tuple[str, str]:
    """Return the names of two groups of ranks: the group over which `fully_shard` gathers parameters and reduces gradients, and the
    group of replicas over which it then sums the gradients.

    Args:
        axes: axes over which the gradients are summed.
    """
    group_name, num_replicas = format_axes(axes, context), context.get_fsdp_replica_group(axes).size
    shard_group_name = group_name if num_replicas == 1 else f"{context.get_fsdp_shard_group(axes).size} ranks of {group_name}"
    return shard_group_name, f"{num_replicas} replicas in {group_name}"


def _count_gradient_traffic(
    group_name: str, num_elements: int, dtype: torch.dtype, reduce_dtype: torch.dtype | None = None
) -> GroupTraffic:
    return GroupTraffic(group_name, "gradients", num_elements * (reduce_dtype or main_grad_dtype(dtype)).itemsize)
