"""What optim_grads passes through buffers in a step: how much memory they take, and how often each bucket is reduced.

A bucket borrows a full-size buffer when the first gradient of a microbatch is written into it, and returns it with its reduction,
once all its parameters have theirs. How many are borrowed at once follows from the order of the writes, and so from the schedule. So
this plays the writes of a step, one after the other, with a pool as that of the real buckets on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from megatron.data_parallel.buckets import _REDUCTIONS_IN_FLIGHT
from megatron.data_parallel.plan import BucketPlan
from megatron.data_parallel.pool import BufferPool


class _Bucket:
    """How far a bucket is in its step."""

    def __init__(self, plan: BucketPlan) -> None:
        self.plan = plan
        self.uses = {placed.entry.record.name: placed.entry.uses_per_microbatch for placed in plan.params}
        self.writes = dict.fromkeys(self.uses, 0)
        self.rounds = self.reductions = 0
        """Microbatches that are reduced, and in how many reductions."""
        self.behind = len(self.writes)
        """Parameters that lack a gradient of the next microbatch."""
        self.borrowed: torch.Tensor | None = None

    def wrote(self, name: str) -> bool:
        """Count a write; returns whether all gradients of another microbatch are there now, perhaps of several."""
        self.writes[name] += 1
        if self.writes[name] == self.uses[name] * (self.rounds + 1):
            self.behind -= 1
        if self.behind:
            return False
        done = {name: writes // self.uses[name] for name, writes in self.writes.items()}
        self.rounds = min(done.values())
        self.behind = sum(microbatches == self.rounds for microbatches in done.values())
        self.reductions += 1
        return True


def play_step(plans: Sequence[BucketPlan], writes: Iterable[str], dtype: torch.dtype, *, overlap: bool) -> tuple[int, list[int]]:
    """Borrow and return buffers as a step does.

    Args:
        writes: names of parameters in the order in which backward passes write their gradients; others are left out.
        dtype: of the gradients.
        overlap: reductions go on beside the backward.

    Returns:
        elements of all buffers, and how often each bucket is reduced.
    """
    pool = BufferPool(dtype, torch.device("meta"), _REDUCTIONS_IN_FLIGHT)
    buckets = [_Bucket(plan) for plan in plans]
    bucket_of = {name: bucket for bucket in buckets for name in bucket.writes}
    for name in writes:
        bucket = bucket_of.get(name)
        if bucket is None:
            continue
        if bucket.borrowed is None:
            bucket.borrowed = pool.take(bucket.plan.size)
        if bucket.wrote(name):
            pool.give_back(bucket.borrowed, _nothing)
            bucket.borrowed = None
            if not overlap:
                pool.settle()
    return sum(buffer.numel() for buffer in pool.buffers), [bucket.reductions for bucket in buckets]


def _nothing() -> None: ...
