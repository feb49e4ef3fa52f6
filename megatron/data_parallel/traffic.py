"""What one rank sends in a step to reduce gradients and to gather parameters, by arithmetic.

Counted as in a ring: of n ranks, each sends (n - 1)/n of the tensor in a reduce-scatter and in an all-gather, and twice that in an
all-reduce, which is one after the other (Rajbhandari et al. 2019, section 7). In elements of the model, over N data ranks and for M
microbatches:

========================== ============== ============ ===================
strategy                   gradients      parameters   together
========================== ============== ============ ===================
no_shard                   2 (N - 1)/N                 2 (N - 1)/N
optim                      (N - 1)/N      (N - 1)/N    2 (N - 1)/N
optim_grads                M (N - 1)/N    (N - 1)/N    (M + 1) (N - 1)/N
optim_grads_params, always M (N - 1)/N    2M (N - 1)/N 3M (N - 1)/N
optim_grads_params, never  M (N - 1)/N    (N - 1)/N    (M + 1) (N - 1)/N
========================== ============== ============ ===================

With --fsdp-reduce-once gradients are sent once instead of M times. With R replicas of N ranks, optim_grads_params sums each rank's
part of the gradient, 1/N, over them once a step: 2 (R - 1)/R of it. Gradients travel in the dtype of the main parameters (with
--grad-reduce-in-bf16 in the model's), parameters in the model's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from megatron.data_parallel.bucket import main_grad_dtype, travel_dtype
from megatron.data_parallel.bucket_plan import BucketPlan
from megatron.data_parallel.fsdp_plan import FsdpPolicy, UnitPlan, padded_part
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamEntry

Kind = Literal["gradients", "parameters", "matrices", "numbers", "noise"]
"""matrices: what an update rule that sees whole matrices exchanges; of the rank that sends most. numbers: what one puts together of
whole parameters, such as sums over rows. noise: gradients of the first microbatch, which the context ranks of the first data rank
add up to measure their noise."""


class StepSums(NamedTuple):
    """What a step sums over the world at its end, in one reduction of float64."""

    loss: float
    z_loss: float
    mtp_loss: float
    mask: float
    squares: float
    """Squares of the gradient; not finite if any element of any copy is not."""
    zeros: float
    """Zeros in the gradient, if they are counted."""
    asked_to_exit: float
    """Ranks that a signal asked to exit."""
    out_of_time: float
    """Ranks whose time is up."""
    attended: float
    """How many samples of one document each need as much attention."""
    context_imbalance: float
    """Sum over microbatches of what the busiest context rank attends to, as a multiple of the mean over these."""
    first_squares: float
    """Squares of the first microbatch's gradient of the parameters of which its noise is measured, if it is."""
    whole_squares: float
    """Squares of the whole gradient of these."""
    first_mask: float
    """The loss mask of the first microbatch."""
    max_logit: float
    """The largest score of attention, if it is asked for; all ranks know it, and one gives it."""
    of_experts: tuple[float, ...] = ()
    """What is said of the balance of experts, where there are some; all ranks know it, and one gives it."""


NUM_SCALARS = len(StepSums._fields)
"""Numbers that a step sums over the world: before these the mask, which the first backward needs."""


@dataclass(frozen=True)
class Sent:
    """What one rank sends in one step."""

    over: str
    """The group, named by its axes."""
    kind: Kind
    bytes: int
    """Padding included."""


def bucket_traffic(
    plans: Sequence[BucketPlan],
    context: ParallelContext,
    sharding: str,
    dtype: torch.dtype,
    reductions: Sequence[int],
    *,
    in_bf16: bool = False,
) -> list[Sent]:
    """What is sent for the parameters in buckets.

    Args:
        sharding: no_shard, optim or optim_grads.
        dtype: dtype of the parameters.
        reductions: number of reductions of each bucket in a step.
        in_bf16: gradients travel in bfloat16 where they may.
    """
    sent = []
    for plan, times in zip(plans, reductions, strict=True):
        over, others = axes_in_words(plan.axes, context), plan.num_slices - 1
        once = others * plan.slice_size  # a reduce-scatter or an all-gather
        travels = travel_dtype(plan, context, in_bf16=in_bf16)
        if sharding == "no_shard":
            sent.append(_gradients(over, 2 * times * once, dtype, travels))
        else:
            sent.append(_gradients(over, times * once, dtype, travels))
            sent.append(Sent(over, "parameters", once * dtype.itemsize))
        if plan.tied:  # an all-reduce over two ranks
            sent.append(_gradients("pipeline ends", plan.size if sharding == "no_shard" else plan.slice_size, dtype))
    return joined(sent)


def fsdp_traffic(
    units: Iterable[UnitPlan], context: ParallelContext, policy: FsdpPolicy, dtype: torch.dtype, num_microbatches: int
) -> list[Sent]:
    """What is sent for parameters under `fully_shard`.

    Args:
        dtype: dtype in which they are gathered.
    """
    sent, entries = [], [entry for unit in units for entry in unit.entries]
    for axes in dict.fromkeys(entry.record.partial_over for entry in entries):
        ranks, replicas = context.fsdp_shard(axes).size, context.fsdp_replica(axes).size
        part = sum(padded_part(entry, ranks) for entry in entries if entry.record.partial_over == axes)
        once = (ranks - 1) * part
        gathered = (2 * num_microbatches if policy.reshard == "always" else 1) * once
        within, across = parts_in_words(axes, context)
        sent += [
            _gradients(within, (1 if policy.reduce_once else num_microbatches) * once, dtype),
            Sent(within, "parameters", gathered * dtype.itemsize),
            _gradients(across, 2 * (replicas - 1) * part // replicas, dtype),
        ]
    return joined(sent)


def noise_traffic(params: Iterable[ParamEntry], context: ParallelContext, dtype: torch.dtype) -> Sent:
    """What --log-gradient-noise sends beside a step's sums.

    Args:
        dtype: dtype of the parameters.
    """
    ranks, records = context.topology.cp, (entry.record for entry in params)
    sizes = (math.prod(record.local_shape(context.axis_sizes)) for record in records if record.tells_noise)
    elements = sum(-(-size // ranks) * (ranks - 1) for size in sizes)  # a part of each goes to every other rank
    return Sent(axes_in_words(("cp",), context), "noise", elements * main_grad_dtype(dtype).itemsize)


def joined(sent: Iterable[Sent]) -> list[Sent]:
    """Sum up: one entry for each group and kind over which anything is sent."""
    totals: Counter[tuple[str, Kind]] = Counter()
    for one in sent:
        totals[one.over, one.kind] += one.bytes
    return [Sent(over, kind, total) for (over, kind), total in totals.items() if total]


def axes_in_words(axes: tuple[str, ...], context: ParallelContext) -> str:
    """A group's axes in words, such as "dp" or "tp x dp"; axes of one rank are left out."""
    return " x ".join(axis for axis in axes if context.topology.size(axis) > 1)


def parts_in_words(axes: tuple[str, ...], context: ParallelContext) -> tuple[str, str]:
    """The groups in words over which `fully_shard` gathers and reduces, and sums up replicas, of parameters of a grid."""
    over, replicas = axes_in_words(axes, context), context.fsdp_replica(axes).size
    within = over if replicas == 1 else f"{context.fsdp_shard(axes).size} ranks of {over}"
    return within, f"{replicas} replicas in {over}"


def _gradients(over: str, elements: int, dtype: torch.dtype, travels: torch.dtype | None = None) -> Sent:
    return Sent(over, "gradients", elements * (travels or main_grad_dtype(dtype)).itemsize)
