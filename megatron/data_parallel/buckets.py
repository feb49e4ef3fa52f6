"""Data parallelism with parameters that every data rank holds in full: no_shard, optim (ZeRO-1), optim_grads (ZeRO-2).

ZeRO: Rajbhandari et al. 2019, sections 5.1 and 5.2. Bucket plans are equal under every strategy, with and without overlap. So
no_shard and optim give bitwise equal sums, if the communication library's reduce-scatter adds in the order of its all-reduce. With
one microbatch, optim_grads gives the same sums too. With several microbatches it adds them after the sum over ranks, whereas the
other strategies add them before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron.config.parallel import ParallelConfig
from megatron.data_parallel.bucket import (
    Bucket,
    BufferPool,
    FillFunction,
    FullGradBucket,
    ShardedGradBucket,
    main_grad_dtype,
    select_reduce_dtype,
)
from megatron.data_parallel.bucket_plan import BucketPlan, is_tied_across_stages, plan_buckets
from megatron.data_parallel.fsdp_plan import find_exclusive_modules
from megatron.data_parallel.provider import GradInspector, PersistentTensors, ShardProvider
from megatron.parallel.accumulate import GradSink
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamEntry, ParamRecord, Shard, ShardGroup
from megatron.parallel.tensor_slice import FlatRange


class BucketedParams(ShardProvider):
    """Keeps parameters and gradients in buckets, for the sharding strategies no_shard, optim and optim_grads.

    Args:
        entries: parameters, on the meta device or with values.
        units: modules that use parameters, in forward order. With --overlap-param-gather each module waits for its parameters.
        fill: writes initial values of parameters on the meta device.
        sharding: no_shard, optim or optim_grads.
    """

    def __init__(
        self,
        entries: Iterable[ParamEntry],
        units: Sequence[nn.Module],
        context: ParallelContext,
        config: ParallelConfig,
        fill: FillFunction,
        *,
        sharding: str,
    ) -> None:
        entries = list(entries)
        plans = plan_buckets(entries, context, bucket_size=config.ddp_bucket_size)
        self._overlap_reduce, self._overlap_gather = config.overlap_grad_reduce, config.overlap_param_gather
        self._in_bf16 = config.grad_reduce_in_bf16
        self._pools: dict[tuple[torch.dtype, bool], BufferPool] = {}
        self.buckets = [self._build_bucket(plan, context, fill, sharding) for plan in plans]
        # In forward order: the parameters that forward needs first are updated and gathered first.
        declaration_index = {entry.record.name: index for index, entry in enumerate(entries)}
        forward_order = sorted(
            self.buckets, key=lambda b: min(declaration_index[param.entry.record.name] for param in b.plan.params)
        )
        self.groups: list[ShardGroup] = [bucket.build_shard_group() for bucket in forward_order]
        if self._overlap_gather:
            self._register_gather_waits(units)

    def start_step(self, num_microbatches: int, *, inspect: GradInspector | None = None) -> None:
        """Start a step of `num_microbatches` microbatches in all buckets: discard the gradients of the last step.

        Args:
            inspect: receives each gradient as it is written. Nothing is then summed or reduced.
        """
        for bucket in self.buckets:
            bucket.start_step(num_microbatches, overlaps_backward=self._overlap_reduce, inspect=inspect)

    def finish_gradients(self) -> None:
        """Complete the gradients of all shards. With --overlap-grad-reduce most reductions have already started or ended."""
        for bucket in self.buckets:
            bucket.finish_backward()
        for bucket in self.buckets:
            bucket.finish_reduction()
        for pool in self._pools.values():
            pool.wait_all()
        for bucket in self.buckets:
            bucket.reduce_tied_grads()

    def iter_grad_sinks(self) -> Iterator[tuple[ParamRecord, GradSink]]:
        """Yield each parameter's `ParamRecord` (name, shape, split over ranks) and the sink that receives its gradients."""
        return (named_sink for bucket in self.buckets for named_sink in bucket.iter_grad_sinks())

    def get_persistent_tensors(self) -> PersistentTensors:
        """Return the parameters, the gradients and the communication buffers that buckets share. Their memory stays allocated
        between steps."""
        pool_buffers = [buffer for pool in self._pools.values() for buffer in pool.buffers]
        return PersistentTensors(
            [bucket.weights for bucket in self.buckets], [bucket.owned_grads for bucket in self.buckets], pool_buffers
        )

    def finish_param_gather(self) -> None:
        """Wait until the parameters that other ranks updated have arrived in all buckets."""
        for bucket in self.buckets:
            bucket.finish_param_gather()

    def _build_bucket(self, plan: BucketPlan, context: ParallelContext, fill: FillFunction, sharding: str) -> Bucket:
        reduce_dtype = select_reduce_dtype(plan, context, in_bf16=self._in_bf16)
        reduce_pool = None if reduce_dtype is None else self._get_pool(reduce_dtype, context, for_reduction=True)
        if sharding != "optim_grads" or plan.num_slices == 1:
            return FullGradBucket(plan, context, sharded=sharding != "no_shard", fill=fill, reduce_pool=reduce_pool)
        grad_pool = self._get_pool(main_grad_dtype(plan.params[0].entry.param.dtype), context)
        return ShardedGradBucket(plan, context, fill=fill, grad_pool=grad_pool, reduce_pool=reduce_pool)

    def _get_pool(self, dtype: torch.dtype, context: ParallelContext, *, for_reduction: bool = False) -> BufferPool:
        return self._pools.setdefault((dtype, for_reduction), BufferPool(dtype, context.device))

    def _register_gather_waits(self, units: Sequence[nn.Module]) -> None:
        """Register a hook that runs before the forward of each unit (such as a layer) and waits for the all-gather of its updated
        parameters.

        Args:
            units: modules that hold parameters, in forward order.
        """
        for unit, modules in zip(units, find_exclusive_modules(units), strict=True):
            unit_buckets = [
                bucket
                for bucket in self.buckets
                if bucket.sharded and any(module in modules for param in bucket.plan.params for module, _ in param.entry.owners)
            ]
            if unit_buckets:
                unit.register_forward_pre_hook(partial(_finish_param_gathers, unit_buckets))


def _finish_param_gathers(buckets: Sequence[Bucket], module: nn.Module, args: Any) -> None:
    for bucket in buckets:
        bucket.finish_param_gather()


# ---- Frozen parameters: the weights of the pretrained model when LoRA adapters are trained.
#
# Every data rank holds the full parameters, in the model's dtype. They have no gradients, main parameters or optimizer state, so
# they need no communication.


class FrozenParams(ShardProvider):
    """Holds frozen parameters, which the optimizer does not update: each data rank has their full values.

    Args:
        entries: parameters, on the meta device or with values.
        fill: writes initial values of parameters on the meta device.
    """

    def __init__(self, entries: Iterable[ParamEntry], context: ParallelContext, fill: FillFunction) -> None:
        self._context, self.groups = context, []
        self.frozen = [self._build_shard(entry, fill) for entry in entries]

    def start_step(self, num_microbatches: int, *, inspect: GradInspector | None = None) -> None:
        """Do nothing: frozen parameters have no gradients."""

    def finish_gradients(self) -> None:
        """Do nothing: frozen parameters have no gradients."""

    def iter_grad_sinks(self) -> Iterator[tuple[ParamRecord, GradSink]]:
        """Yield nothing: frozen parameters receive no gradients."""
        return iter(())

    def get_persistent_tensors(self) -> PersistentTensors:
        """Return the tensors that stay allocated between steps: only the parameters, since frozen parameters have no gradients."""
        return PersistentTensors([shard.weights for shard in self.frozen], [], [])

    def _build_shard(self, entry: ParamEntry, fill: FillFunction) -> Shard:
        """Allocate a frozen parameter and return it as a shard with all its elements.

        The parameter keeps its values. A parameter on the meta device receives initial values.
        """
        values = torch.empty(entry.param.shape, dtype=entry.param.dtype, device=self._context.device)
        if not entry.param.is_meta:
            values.copy_(entry.param.detach())
        elif not values.is_meta:
            fill(values.view(-1), entry.record, entry.record.get_slices(FlatRange(0, values.numel()), self._context))
        entry.replace(nn.Parameter(values, requires_grad=False))
        flat_range, context = FlatRange(0, values.numel()), self._context
        is_first_copy = context.gradient_group.rank == 0 and not (
            is_tied_across_stages(entry, context) and context.pipeline_ends.rank > 0
        )
        norm_range = range(values.numel()) if is_first_copy and entry.record.is_counted_at(context) else range(0)
        shard = Shard(entry.record, flat_range, values.view(-1), values.new_empty(0), norm_range)
        shard.main_param, shard.moments = shard.weights, {}
        return shard
