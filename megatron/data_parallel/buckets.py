"""The provider of shards whose parameters every data rank holds whole: no_shard, optim (ZeRO-1), optim_grads (ZeRO-2).

ZeRO: Rajbhandari et al. 2019, sections 5.1 and 5.2. Buckets are laid out in the same way under every strategy, with overlap on and
off. So no_shard and optim give the same sums, bit for bit, if the communication library's reduce-scatter sums in the order of its
all-reduce. So does optim_grads with one microbatch; with several, it adds them after the sum over ranks, the others before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron.config.parallel import ParallelConfig
from megatron.data_parallel.bucket import Bucket, BufferPool, Fill, SlicedBucket, WholeBucket, main_grad_dtype, travel_dtype
from megatron.data_parallel.bucket_plan import BucketPlan, is_tied_apart, plan_buckets
from megatron.data_parallel.fsdp_plan import own_modules
from megatron.data_parallel.provider import HeldTensors, Inspect, Provider
from megatron.parallel.accumulate import GradSink
from megatron.parallel.boxes import FlatPiece
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamEntry, ParamRecord, Shard, ShardGroup


class Buckets(Provider):
    """Buckets of parameters and gradients.

    Args:
        entries: the parameters, on the meta device or with values.
        units: modules that use parameters, in the order of the forward; with --overlap-param-gather each waits for its own.
        fill: initial values of parameters on the meta device.
        sharding: no_shard, optim or optim_grads.
    """

    def __init__(
        self,
        entries: Iterable[ParamEntry],
        units: Sequence[nn.Module],
        context: ParallelContext,
        config: ParallelConfig,
        fill: Fill,
        *,
        sharding: str,
    ) -> None:
        entries = list(entries)
        plans = plan_buckets(entries, context, bucket_size=config.ddp_bucket_size)
        self._overlap_reduce, self._overlap_gather = config.overlap_grad_reduce, config.overlap_param_gather
        self._in_bf16 = config.grad_reduce_in_bf16
        self._pools: dict[tuple[torch.dtype, bool], BufferPool] = {}
        self.buckets = [self._make(plan, context, fill, sharding) for plan in plans]
        # In the order of the forward: the weights that are needed first are updated and sent first.
        place = {entry.record.name: number for number, entry in enumerate(entries)}
        needed = sorted(self.buckets, key=lambda b: min(place[placed.entry.record.name] for placed in b.plan.params))
        self.groups: list[ShardGroup] = [bucket.make_group() for bucket in needed]
        if self._overlap_gather:
            self._wait_in(units)

    def start_step(self, num_microbatches: int, *, inspect: Inspect | None = None) -> None:
        """See `Provider`."""
        for bucket in self.buckets:
            bucket.start_step(num_microbatches, early=self._overlap_reduce, inspect=inspect)

    def finish_gradients(self) -> None:
        """See `Provider`. With overlap most reductions have started, or ended, before."""
        for bucket in self.buckets:
            bucket.close_step()
        for bucket in self.buckets:
            bucket.finish()
        for pool in self._pools.values():
            pool.settle()
        for bucket in self.buckets:
            bucket.join_ends()

    def sinks(self) -> Iterator[tuple[ParamRecord, GradSink]]:
        """See `Provider`."""
        return (one for bucket in self.buckets for one in bucket.sinks())

    def held(self) -> HeldTensors:
        """See `Provider`."""
        passing = [buffer for pool in self._pools.values() for buffer in pool.buffers]
        return HeldTensors([bucket.weights for bucket in self.buckets], [bucket.own_grads for bucket in self.buckets], passing)

    def finish_publishing(self) -> None:
        """See `Provider`."""
        for bucket in self.buckets:
            bucket.finish_publishing()

    def _make(self, plan: BucketPlan, context: ParallelContext, fill: Fill, sharding: str) -> Bucket:
        narrower = travel_dtype(plan, context, in_bf16=self._in_bf16)
        narrow = None if narrower is None else self._pool(narrower, context, narrow=True)
        if sharding != "optim_grads" or plan.num_slices == 1:
            return WholeBucket(plan, context, sharded=sharding != "no_shard", fill=fill, narrow=narrow)
        pool = self._pool(main_grad_dtype(plan.params[0].entry.param.dtype), context)
        return SlicedBucket(plan, context, fill=fill, pool=pool, narrow=narrow)

    def _pool(self, dtype: torch.dtype, context: ParallelContext, *, narrow: bool = False) -> BufferPool:
        return self._pools.setdefault((dtype, narrow), BufferPool(dtype, context.device))

    def _wait_in(self, units: Sequence[nn.Module]) -> None:
        """Let each unit wait, before its forward, for its own parameters."""
        for unit, modules in zip(units, own_modules(units), strict=True):
            needed = [
                bucket
                for bucket in self.buckets
                if bucket.sharded and any(module in modules for placed in bucket.plan.params for module, _ in placed.entry.holders)
            ]
            if needed:
                unit.register_forward_pre_hook(partial(_finish_publishing, needed))


def _finish_publishing(buckets: Sequence[Bucket], module: nn.Module, args: Any) -> None:
    for bucket in buckets:
        bucket.finish_publishing()


# ---- The provider of what no step changes: the model's own weights beside LoRA's adapters.
#
# Every data rank holds them whole, in the model's dtype. They have no gradient, no main parameters and no state of an optimizer, so
# nothing of them is sent.


class FrozenParams(Provider):
    """Parameters that stay as they are.

    Args:
        entries: the parameters, on the meta device or with values.
        fill: initial values of parameters on the meta device.
    """

    def __init__(self, entries: Iterable[ParamEntry], context: ParallelContext, fill: Fill) -> None:
        self._context, self.groups = context, []
        self.frozen = [self._give(entry, fill) for entry in entries]

    def start_step(self, num_microbatches: int, *, inspect: Inspect | None = None) -> None:
        """See `Provider`: nothing is written."""

    def finish_gradients(self) -> None:
        """See `Provider`: nothing is summed."""

    def sinks(self) -> Iterator[tuple[ParamRecord, GradSink]]:
        """See `Provider`."""
        return iter(())

    def held(self) -> HeldTensors:
        """See `Provider`."""
        return HeldTensors([shard.weights for shard in self.frozen], [], [])

    def _give(self, entry: ParamEntry, fill: Fill) -> Shard:
        """Memory for a parameter, with its values or, where it had none, initial ones."""
        values = torch.empty(entry.param.shape, dtype=entry.param.dtype, device=self._context.device)
        if not entry.param.is_meta:
            values.copy_(entry.param.detach())
        elif not values.is_meta:
            fill(values.view(-1), entry.record, entry.record.boxes(FlatPiece(0, values.numel()), self._context))
        entry.replace(nn.Parameter(values, requires_grad=False))
        piece, context = FlatPiece(0, values.numel()), self._context
        first = context.gradient_group.index == 0 and not (is_tied_apart(entry, context) and context.pipeline_ends.index > 0)
        counted = range(values.numel()) if first and entry.record.counts_at(context) else range(0)
        shard = Shard(entry.record, piece, values.view(-1), values.new_empty(0), counted)
        shard.main, shard.moments = shard.weights, {}
        return shard
