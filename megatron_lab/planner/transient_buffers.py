"""Size of the gradient buffers that are used only until the gradients are reduced. The planner simulates how steps acquire and
release these buffers.

The buffers are on the meta device, so nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from megatron.data_parallel.bucket import BufferPool
from megatron.data_parallel.bucket_plan import BucketPlan
from megatron.parallel.accumulate import GradCounter


class BufferUse(NamedTuple):
    """Sizes of the temporary gradient buffers of a rank, and how often each bucket is reduced."""

    grad_numel: int
    """Number of elements of all temporary buffers for gradients before their reduction."""
    reduce_numel: int
    """Number of elements of all temporary buffers for copies of gradients in the dtype of the reduction."""
    num_reductions: list[int]
    """Number of gradient reductions in a step, for each bucket."""


def simulate_steps(
    plans: Sequence[BucketPlan],
    grad_writes: Iterable[str],
    dtype: torch.dtype,
    *,
    overlap: bool,
    reduce_dtypes: Sequence[torch.dtype | None] = (),
) -> BufferUse:
    """Simulate which gradient buffers the sharding strategy optim_grads needs. Steps are repeated until a step allocates no further
    buffer.

    Args:
        plans: plan of each bucket.
        grad_writes: names of parameters in the order in which the backwards of a step write their gradients. Names of parameters
            that are in no bucket are ignored.
        dtype: dtype of the gradients.
        overlap: whether reductions overlap with the backward.
        reduce_dtypes: for each bucket, the dtype to which its gradients are copied for the reduction; None for no copy.
    """
    # A bucket of a single rank is not divided, so its gradients need no separate buffers.
    bucketed = {p.entry.record.name for plan in plans if plan.num_slices > 1 for p in plan.params}
    grad_writes = [name for name in grad_writes if name in bucketed]
    dtypes = reduce_dtypes or [None] * len(plans)
    return _simulate_until_stable(
        dtype, lambda pool, reduce_pool: _simulate_step(plans, grad_writes, pool, reduce_pool, dtypes, overlap)
    )


def simulate_reductions(
    plans: Sequence[BucketPlan],
    grad_writes: Sequence[str],
    num_microbatches: int,
    *,
    overlap: bool,
    reduce_dtypes: Sequence[torch.dtype | None],
) -> BufferUse:
    """Simulate which gradient buffers the sharding strategies no_shard and optim need. They reduce each bucket once per step, after
    the last microbatch.

    Args:
        num_microbatches: microbatches of one data rank in a step. All other arguments are those of `simulate_steps`.
    """
    order = list(range(len(plans)))
    if overlap:
        position_of_param = {p.entry.record.name: (i, k) for i, plan in enumerate(plans) for k, p in enumerate(plan.params)}
        counters = [GradCounter([p.entry.uses_per_microbatch for p in plan.params]) for plan in plans]
        complete = []
        for name in grad_writes:
            bucket_index, param_index = position_of_param.get(name, (-1, 0))  # frozen parameters are in no bucket
            if (
                bucket_index >= 0
                and counters[bucket_index].count_write(param_index)
                and counters[bucket_index].num_complete == num_microbatches
            ):
                complete.append(bucket_index)
        order = [*complete, *(bucket for bucket in order if bucket not in complete)]

    def step(pool: BufferPool, reduce_pool: BufferPool) -> list[int]:
        for bucket in order:
            if reduce_dtypes[bucket] is not None:
                reduce_pool.release_after(reduce_pool.acquire(plans[bucket].size), lambda: None)
        reduce_pool.wait_all()
        return [1] * len(plans)

    return _simulate_until_stable(torch.float32, step)


def _simulate_until_stable(dtype: torch.dtype, step: Callable[[BufferPool, BufferPool], list[int]]) -> BufferUse:
    """Simulate steps until a step allocates no further buffer, and return the sizes of the buffers.

    Args:
        dtype: dtype of the gradients.
        step: simulates a step with a pool of gradient buffers and a pool of buffers for copies in the dtype of the reduction. It
            returns the number of reductions of each bucket.
    """
    pool, reduce_pool = BufferPool(dtype, torch.device("meta")), BufferPool(torch.bfloat16, torch.device("meta"))
    previous_sizes, sizes = (-1, -1), (0, 0)
    reductions: list[int] = []
    while sizes > previous_sizes:
        reductions = step(pool, reduce_pool)
        previous_sizes, sizes = sizes, (sum(b.numel() for b in pool.buffers), sum(b.numel() for b in reduce_pool.buffers))
    return BufferUse(*sizes, reductions)


def _simulate_step(
    plans: Sequence[BucketPlan],
    grad_writes: Sequence[str],
    pool: BufferPool,
    reduce_pool: BufferPool,
    reduce_dtypes: Sequence[torch.dtype | None],
    overlap: bool,
) -> list[int]:
    counters = [GradCounter([p.entry.uses_per_microbatch for p in plan.params]) for plan in plans]
    position_of_param = {p.entry.record.name: (i, k) for i, plan in enumerate(plans) for k, p in enumerate(plan.params)}
    borrowed: dict[int, torch.Tensor] = {}
    for name in grad_writes:
        bucket, param_index = position_of_param[name]
        if bucket not in borrowed:
            borrowed[bucket] = pool.acquire(plans[bucket].size)
        if counters[bucket].count_write(param_index):
            if reduce_dtypes[bucket] is not None:
                reduce_pool.release_after(reduce_pool.acquire(plans[bucket].size), lambda: None)
                pool.release(borrowed.pop(bucket))
            else:
                pool.release_after(borrowed.pop(bucket), lambda: None)
            if not overlap:
                (pool if reduce_dtypes[bucket] is None else reduce_pool).wait_all()
    pool.wait_all()
    reduce_pool.wait_all()
    return [count.num_complete for count in counters]
