"""Buffers that gradients pass through on their way to being reduced: how large they get, found by lending them as steps do.

Nothing is allocated: the buffers lie on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from megatron.data_parallel.bucket import BufferPool
from megatron.data_parallel.bucket_plan import BucketPlan
from megatron.parallel.accumulate import WriteCount


class Played(NamedTuple):
    """What steps need that only passes through, and how often they reduce."""

    elements: int
    """All buffers for gradients until they are reduced."""
    narrow_elements: int
    """All buffers for copies in which they travel."""
    reductions: list[int]
    """How often each bucket is reduced in a step."""


def play_steps(
    plans: Sequence[BucketPlan],
    writes: Iterable[str],
    dtype: torch.dtype,
    *,
    overlap: bool,
    narrow: Sequence[torch.dtype | None] = (),
) -> Played:
    """Borrow and return buffers as a step of optim_grads does, again and again until no step needs another buffer.

    Args:
        writes: names of parameters in the order in which the backwards of a step write their gradients; others are left out.
        dtype: dtype of the gradients.
        overlap: reductions go on beside the backward.
        narrow: for each bucket the dtype of the copy in which its gradients travel, if they do so in one.
    """
    # With one rank there is nothing to slice, so nothing is passed through.
    ours = {placed.entry.record.name for plan in plans if plan.num_slices > 1 for placed in plan.params}
    writes = [name for name in writes if name in ours]
    travels = narrow or [None] * len(plans)
    return _played(dtype, lambda pool, copies: _play_step(plans, writes, pool, copies, travels, overlap))


def play_reductions(
    plans: Sequence[BucketPlan],
    writes: Sequence[str],
    num_microbatches: int,
    *,
    overlap: bool,
    narrow: Sequence[torch.dtype | None],
) -> Played:
    """The same of the reductions of no_shard and optim, which each bucket has once, after the last microbatch."""
    order = list(range(len(plans)))
    if overlap:
        place_of = {placed.entry.record.name: (i, k) for i, plan in enumerate(plans) for k, placed in enumerate(plan.params)}
        counts = [WriteCount([placed.entry.uses_per_microbatch for placed in plan.params]) for plan in plans]
        complete = []
        for name in writes:
            bucket, number = place_of.get(name, (-1, 0))  # what is frozen is in no bucket
            if bucket >= 0 and counts[bucket].add(number) and counts[bucket].rounds == num_microbatches:
                complete.append(bucket)
        order = [*complete, *(bucket for bucket in order if bucket not in complete)]

    def step(pool: BufferPool, copies: BufferPool) -> list[int]:
        for bucket in order:
            if narrow[bucket] is not None:
                copies.give_back(copies.take(plans[bucket].size), lambda: None)
        copies.settle()
        return [1] * len(plans)

    return _played(torch.float32, step)


def _played(dtype: torch.dtype, step: Callable[[BufferPool, BufferPool], list[int]]) -> Played:
    """Play steps until none needs another buffer."""
    pool, copies = BufferPool(dtype, torch.device("meta")), BufferPool(torch.bfloat16, torch.device("meta"))
    before, sizes = (-1, -1), (0, 0)
    reductions: list[int] = []
    while sizes > before:
        reductions = step(pool, copies)
        before, sizes = sizes, (sum(b.numel() for b in pool.buffers), sum(b.numel() for b in copies.buffers))
    return Played(*sizes, reductions)


def _play_step(
    plans: Sequence[BucketPlan],
    writes: Sequence[str],
    pool: BufferPool,
    copies: BufferPool,
    narrow: Sequence[torch.dtype | None],
    overlap: bool,
) -> list[int]:
    counts = [WriteCount([placed.entry.uses_per_microbatch for placed in plan.params]) for plan in plans]
    place_of = {placed.entry.record.name: (i, k) for i, plan in enumerate(plans) for k, placed in enumerate(plan.params)}
    borrowed: dict[int, torch.Tensor] = {}
    for name in writes:
        bucket, number = place_of[name]
        if bucket not in borrowed:
            borrowed[bucket] = pool.take(plans[bucket].size)
        if counts[bucket].add(number):
            if narrow[bucket] is not None:
                copies.give_back(copies.take(plans[bucket].size), lambda: None)
                pool.free(borrowed.pop(bucket))
            else:
                pool.give_back(borrowed.pop(bucket), lambda: None)
            if not overlap:
                (pool if narrow[bucket] is None else copies).settle()
    pool.settle()
    copies.settle()
    return [count.rounds for count in counts]
