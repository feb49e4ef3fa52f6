"""Buffers that gradients pass through, played without memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from megatron.data_parallel.bucket_plan import BucketParam, BucketPlan
from megatron_lab.planner.transient_buffers import simulate_reductions

SIZES = (1024, 64, 64, 64, 64)


def plan(name: str, size: int) -> BucketPlan:
    """A bucket of one parameter."""
    entry: Any = SimpleNamespace(record=SimpleNamespace(name=name), uses_per_microbatch=1)
    return BucketPlan(("dp",), 2, False, (BucketParam(entry, 0, size),), size // 2)


def test_copies_are_reduced_in_the_order_in_which_buckets_are_complete() -> None:
    """Four are on their way at most. If the large one goes first, it makes room for the fifth. If it goes last, a small one takes
    its buffer in the next step, so that it needs another one."""
    plans = [plan(str(number), size) for number, size in enumerate(SIZES)]
    large_first, large_last = (
        simulate_reductions(plans, list(order * 2), 2, overlap=True, reduce_dtypes=[torch.bfloat16] * len(plans))
        for order in ("01234", "43210")
    )
    assert large_first.reduce_numel == SIZES[0] + 3 * SIZES[1] < large_last.reduce_numel
    assert large_first.grad_numel == 0 and large_first.num_reductions == [1] * len(plans)
