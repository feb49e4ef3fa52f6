"""What optim_grads passes through buffers in a step: how much memory they take, and how often each bucket is reduced.

A bucket borrows a full-size buffer when the first gradient of a microbatch is written into it, and returns it with its reduction,
once all its parameters have theirs. How many are borrowed at once follows from the order of the writes, and so from the schedule.
So this plays the writes of a step, one after the other, with a pool as that of the real buckets, on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from megatron.data_parallel.completeness import WriteCount
from megatron.data_parallel.plan import BucketPlan
from megatron.data_parallel.pool import BufferPool


def play_steps(plans: Sequence[BucketPlan], writes: Iterable[str], dtype: torch.dtype, *, overlap: bool) -> tuple[int, list[int]]:
    """Borrow and return buffers as a step does, again and again until no step needs another buffer.

    Args:
        writes: names of parameters in the order in which the backward passes of a step write their gradients; others are left out.
        dtype: of the gradients.
        overlap: reductions go on beside the backward.

    Returns:
        elements of all buffers, and how often each bucket is reduced in a step.
    """
    pool = BufferPool(dtype, torch.device("meta"))
    # With one rank there is nothing to slice, so nothing is passed through.
    ours = {placed.entry.record.name for plan in plans if plan.num_slices > 1 for placed in plan.params}
    writes = [name for name in writes if name in ours]
    before, size = -1, 0
    while size > before:
        reductions = _play_step(plans, writes, pool, overlap)
        before, size = size, sum(buffer.numel() for buffer in pool.buffers)
    return size, reductions


def _play_step(plans: Sequence[BucketPlan], writes: Sequence[str], pool: BufferPool, overlap: bool) -> list[int]:
    counts = [WriteCount([placed.entry.uses_per_microbatch for placed in plan.params]) for plan in plans]
    place_of = {placed.entry.record.name: (i, k) for i, plan in enumerate(plans) for k, placed in enumerate(plan.params)}
    borrowed: dict[int, torch.Tensor] = {}
    for name in writes:
        bucket, number = place_of[name]
        if bucket not in borrowed:
            borrowed[bucket] = pool.take(plans[bucket].size)
        if counts[bucket].add(number):
            pool.give_back(borrowed.pop(bucket), _nothing)
            if not overlap:
                pool.settle()
    pool.settle()
    return [count.rounds for count in counts]


def _nothing() -> None: ...
