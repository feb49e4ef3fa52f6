"""Bucket of parameters: one flat buffer for parameters and one for gradients, reduced and gathered together.

`FullGradBucket` keeps the gradients of all its parameters through the step. It reduces them once, after the last microbatch: by an
all-reduce, or by a reduce-scatter if each rank updates only its slice. `ShardedGradBucket` keeps only this rank's slice of the
gradients. The gradients of a microbatch are in a buffer borrowed from a `BufferPool` until they are reduced.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron.data_parallel.bucket_plan import BucketParam, BucketPlan
from megatron.data_parallel.provider import GradInspector
from megatron.parallel.accumulate import GradCounter, GradSink, check_grad_counts
from megatron.parallel.collectives import Pending, all_reduce, start_all_gather, start_all_reduce, start_reduce_scatter
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamRecord, Shard, ShardGroup
from megatron.parallel.tensor_slice import BufferSlice, FlatRange

# Maximum number of buffers whose reductions are in flight. With fewer than four, backward waits if the reductions of a microbatch
# take as long as its forward and backward, which is the most that overlap can hide. Simulated with 9 buckets and 4 microbatches, a
# step takes 1.25 times the computation with 2 buffers, 1.17 times with 3, and 1.11 times with 4 or more.
_MAX_IN_FLIGHT = 4
# Maximum number of elements in flight. Buckets grow with the data group (`get_default_bucket_size`), but buffers in flight should
# not outgrow the sharded gradients.
_MAX_ELEMENTS = 160_000_000


class BufferPool:
    """Pool of flat buffers of one dtype, which buckets borrow for gradients.

    A bucket returns a buffer while a reduction still reads it; the pool lends it again once the reduction has ended. If too many
    buffers wait for their reductions and another one is requested, the pool waits for the oldest reduction. So memory is bounded at
    any network speed, and the pool waits only when a bucket requests a buffer.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._free_buffers: list[torch.Tensor] = []
        self._in_flight: deque[tuple[torch.Tensor, Callable[[], object]]] = deque()
        self.buffers: list[torch.Tensor] = []
        """All buffers that exist, lent or not."""

    def acquire(self, size: int) -> torch.Tensor:
        """Lend a buffer of at least `size` elements, with undefined content.

        The pool lends the smallest free buffer that is large enough. Otherwise it allocates a new buffer, which replaces the
        largest free buffer if there is one. So in the long run the pool holds no more buffers than are needed at once.
        """
        while not (fitting := [buffer for buffer in self._free_buffers if buffer.numel() >= size]) and self._is_full(size):
            self._wait_oldest()
        if not fitting:
            if self._free_buffers:
                largest = max(self._free_buffers, key=torch.Tensor.numel)
                self._free_buffers, self.buffers = (
                    _remove_buffer(self._free_buffers, largest),
                    _remove_buffer(self.buffers, largest),
                )
            new_buffer = torch.empty(size, dtype=self._dtype, device=self._device)
            self.buffers.append(new_buffer)
            return new_buffer
        smallest = min(fitting, key=torch.Tensor.numel)
        self._free_buffers = _remove_buffer(self._free_buffers, smallest)
        return smallest

    def release_after(self, buffer: torch.Tensor, wait: Callable[[], object]) -> None:
        """Return a buffer that a reduction still reads. The pool lends it again only after `wait()` has returned.

        Args:
            wait: waits for the reduction.
        """
        self._in_flight.append((buffer, wait))

    def release(self, buffer: torch.Tensor) -> None:
        """Return a buffer that no operation reads any longer. The pool may lend it again at once."""
        self._free_buffers.append(buffer)

    def wait_all(self) -> None:
        """Wait for all reductions that still read a buffer."""
        while self._in_flight:
            self._wait_oldest()

    def _is_full(self, size: int) -> bool:
        num_waiting = sum(buffer.numel() for buffer, _ in self._in_flight)
        return bool(self._in_flight) and (len(self._in_flight) >= _MAX_IN_FLIGHT or num_waiting + size > _MAX_ELEMENTS)

    def _wait_oldest(self) -> None:
        buffer, wait = self._in_flight.popleft()
        wait()
        self._free_buffers.append(buffer)


def _remove_buffer(buffers: list[torch.Tensor], removed: torch.Tensor) -> list[torch.Tensor]:
    return [buffer for buffer in buffers if buffer is not removed]


class LowPrecisionReduction(Pending):
    """Running reduction of a low-precision copy of gradients. `wait` writes the reduced copy into the full-precision gradients.

    Args:
        reduction: running collective that reduces the copy.
        grads: full-precision gradients, into which the reduced copy is written.
        accumulates: add the reduced copy to `grads` instead of overwriting them.
    """

    def __init__(self, reduction: Pending, grads: torch.Tensor, *, accumulates: bool = False) -> None:
        super().__init__(grads)
        self._reduction: Pending | None = reduction
        self._accumulates = accumulates
        self._done_event: Any = None

    def wait(self) -> torch.Tensor:
        """Wait for the reduction and return the full-precision gradients. The first call writes the reduced copy into them.

        On CUDA the host does not wait, only the current stream. The method may be called on several streams.
        """
        on_cuda = self._result.device.type == "cuda"
        if self._reduction is not None:
            reduced = self._reduction.wait()
            if self._accumulates:
                self._result.add_(reduced)
            else:
                self._result.copy_(reduced)
            self._reduction = None
            if on_cuda:
                self._done_event = torch.cuda.current_stream().record_event()
        elif on_cuda:
            torch.cuda.current_stream().wait_event(self._done_event)
        return self._result


def select_reduce_dtype(plan: BucketPlan, context: ParallelContext, *, in_bf16: bool) -> torch.dtype | None:
    """Return the narrower dtype to which a bucket's gradients are cast before they are reduced, or None to reduce them uncast.

    With --grad-reduce-in-bf16, the dtype is bfloat16 for bfloat16 parameters whose gradients are summed over several data ranks.
    """
    dtype = plan.params[0].entry.param.dtype
    has_data_ranks = any(context.topology.get_size(axis) > 1 for axis in plan.axes if axis != "tp")
    return dtype if in_bf16 and has_data_ranks and dtype == torch.bfloat16 else None


FillFunction = Callable[[torch.Tensor, ParamRecord, Sequence[BufferSlice]], None]
"""Function that writes the initial values of a parameter into a flat tensor.

Arguments: the tensor, the parameter's record, and the slices of the parameter that the tensor holds.
"""


def main_grad_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients are accumulated: at least float32."""
    return torch.promote_types(dtype, torch.float32)


class Bucket(ABC):
    """Base class of buckets: parameters in one flat buffer, whose gradients are reduced in one collective.

    A bucket gives each parameter a gradient sink, to which layers pass the parameter's gradients instead of to `.grad`. It counts
    the gradients that the sinks receive, to know when the gradients of a microbatch are complete.

    Args:
        plan: offsets of the parameters in the bucket.
        sharded: whether this rank updates only its slice; otherwise it updates all parameters.
        fill: writes initial values of parameters on the meta device; other parameters keep their values.
    """

    def __init__(self, plan: BucketPlan, context: ParallelContext, *, sharded: bool, fill: FillFunction) -> None:
        self.plan, self.context = plan, context
        self.group = context.group(*plan.axes)
        self.sharded = sharded and self.group.size > 1
        dtype = plan.params[0].entry.param.dtype
        self.dtype = main_grad_dtype(dtype)
        self.weights = torch.zeros(plan.size, dtype=dtype, device=context.device)
        self._sinks = [self._attach_param(index, bucket_param, fill) for index, bucket_param in enumerate(plan.params)]
        self._grad_counter = GradCounter([bucket_param.entry.uses_per_microbatch for bucket_param in plan.params])
        self._num_microbatches = 0
        self._overlaps_backward = False
        self._inspect: GradInspector | None = None
        self._param_gather: Pending | None = None

    @property
    def owned_slice(self) -> slice:
        """Range of the bucket's flat buffer whose elements this rank's optimizer updates."""
        start = self.group.rank * self.plan.slice_size
        return slice(start, start + self.plan.slice_size) if self.sharded else slice(0, self.plan.size)

    @property
    @abstractmethod
    def owned_grads(self) -> torch.Tensor:
        """Gradients of the elements that this rank updates, flat. Their values are complete after `finish_reduction`."""

    @abstractmethod
    def _allocate_grads(self) -> None:
        """Allocate memory for the gradients of all parameters, and make each parameter's `GradSink`, to which backward adds the
        gradient, write there."""

    @abstractmethod
    def _on_microbatch_complete(self, num_complete: int) -> None:
        """React to the completion of all gradients of a microbatch, for example by starting a reduction.

        Args:
            num_complete: number of microbatches of this step whose gradients are complete.
        """

    def finish_backward(self) -> None:
        """After all backwards of a step, check that no gradient is missing, and start the remaining reductions.

        Raises:
            RuntimeError: a parameter received too few or too many gradients.
        """
        if self._grad_counter.num_complete != self._num_microbatches:
            self._check_grad_counts()

    @abstractmethod
    def finish_reduction(self) -> None:
        """Wait until this rank's gradients are reduced over the bucket's group.

        The gradient of a tied embedding is not complete yet: `reduce_tied_grads` adds the gradient of the other pipeline stage.
        """

    def build_shard_group(self) -> ShardGroup:
        """Build the group of shards that this rank updates: one shard for each parameter of the bucket, or only for the parameters
        that overlap this rank's slice if the bucket is sharded."""
        owned_slice, grads = self.owned_slice, self.owned_grads
        covered_ranges = (
            self.plan.get_params_in_slice(self.group.rank)
            if self.sharded
            else [(p, FlatRange(0, p.numel)) for p in self.plan.params]
        )
        range_in_slice = {
            bucket_param.entry.record.name: flat_range
            for bucket_param, flat_range in self.plan.get_params_in_slice(self.group.rank)
        }
        shards = []
        for bucket_param, flat_range in covered_ranges:
            start, stop = bucket_param.offset + flat_range.start, bucket_param.offset + flat_range.stop
            record, slice_range = bucket_param.entry.record, range_in_slice.get(bucket_param.entry.record.name)
            local_range = (
                range(0)
                if slice_range is None
                else range(slice_range.start - flat_range.start, slice_range.stop - flat_range.start)
            )
            is_counted = record.is_counted_at(self.context) and not (self.plan.tied and self.context.pipeline_ends.rank > 0)
            norm_range, duplicate_range = (local_range, range(0)) if is_counted else (range(0), local_range)
            grad = grads[start - owned_slice.start : stop - owned_slice.start]
            shards.append(Shard(record, flat_range, self.weights[start:stop], grad, norm_range, duplicate_range))
        partitions = self.plan.get_param_partitions(grads.dtype, sharded=self.sharded)
        self.shard_group = ShardGroup(shards, self._start_param_gather, partitions)
        return self.shard_group

    def iter_grad_sinks(self) -> Iterator[tuple[ParamRecord, GradSink]]:
        """Yield each parameter's `ParamRecord` (name, shape, split over ranks) and the sink that receives its gradients."""
        return ((bucket_param.entry.record, sink) for bucket_param, sink in zip(self.plan.params, self._sinks, strict=True))

    def start_step(self, num_microbatches: int, *, overlaps_backward: bool, inspect: GradInspector | None) -> None:
        """Start a step: discard the gradients of the last step.

        Args:
            overlaps_backward: reduce complete gradients while backward continues.
            inspect: receives each gradient as it is written. Each gradient then gets separate memory, and nothing is reduced.
        """
        self._num_microbatches, self._overlaps_backward, self._inspect = num_microbatches, overlaps_backward, inspect
        self._grad_counter.start_step()
        for sink in self._sinks:
            sink.main_grad, sink.is_written = None, False

    def reduce_tied_grads(self) -> None:
        """Sum the gradients of tied parameters over the two pipeline stages that hold the parameters. Only the elements that this
        rank updates are sent."""
        if self.plan.tied:
            all_reduce(self.owned_grads, self.context.pipeline_ends)
            if self.shard_group.on_reduced:
                self.shard_group.notify_reduced(Pending(self.owned_grads))

    def finish_param_gather(self) -> None:
        """Wait until the parameters that other ranks updated have arrived on this rank."""
        if self._param_gather is not None:
            self._param_gather.wait()
            self._param_gather = None

    def _start_param_gather(self) -> None:
        if self.sharded:
            self.finish_param_gather()
            self._param_gather = start_all_gather(self.weights[self.owned_slice], self.group, out=self.weights)

    def _attach_param(self, index: int, bucket_param: BucketParam, fill: FillFunction) -> GradSink:
        """Replace a parameter by a view of the bucket's buffer, and return the new sink that receives the parameter's gradients.

        The view receives the parameter's values, or initial values if the parameter is on the meta device.

        Args:
            index: index of the parameter in the bucket.
        """
        entry, view = bucket_param.entry, self._get_param_view(self.weights, bucket_param)
        if not entry.param.is_meta:
            view.copy_(entry.param.detach())
        elif not view.is_meta:
            fill(view.view(-1), entry.record, entry.record.get_slices(FlatRange(0, bucket_param.numel), self.context))
        param = nn.Parameter(view)
        entry.replace(param)
        sink = GradSink(self.dtype, partial(self._on_grad_written, index), partial(self._provide_main_grad, index))
        param.grad_sink = sink  # type: ignore[attr-defined]
        return sink

    def _on_grad_written(self, index: int) -> None:
        if self._grad_counter.writes[index] == self._grad_counter.uses[index] * self._num_microbatches:
            self._grad_counter.writes[index] += 1
            self._check_grad_counts()
        completes_microbatch = self._grad_counter.count_write(index)
        if self._inspect is not None:
            sink = self._sinks[index]
            grad, sink.main_grad, sink.is_written = sink.main_grad, None, False
            assert grad is not None
            self._inspect(self.plan.params[index].entry, grad)
        elif completes_microbatch:
            self._on_microbatch_complete(self._grad_counter.num_complete)

    def _provide_main_grad(self, index: int) -> torch.Tensor:
        if self._inspect is not None:
            return torch.empty(self.plan.params[index].entry.param.shape, dtype=self.dtype, device=self.context.device)
        self._allocate_grads()
        main_grad = self._sinks[index].main_grad
        assert main_grad is not None
        return main_grad

    def _check_grad_counts(self) -> None:
        counts = zip(self.plan.params, self._grad_counter.writes, self._grad_counter.uses, strict=True)
        check_grad_counts(
            self.context.rank,
            [
                (bucket_param.entry.record.name, num_written, uses * self._num_microbatches)
                for bucket_param, num_written, uses in counts
            ],
        )

    @staticmethod
    def _get_param_view(buffer: torch.Tensor, bucket_param: BucketParam) -> torch.Tensor:
        return buffer[bucket_param.offset : bucket_param.offset + bucket_param.numel].view(bucket_param.entry.param.shape)


class FullGradBucket(Bucket):
    """Bucket that keeps the gradients of all its parameters through the step (sharding strategies no_shard and optim).

    Args:
        reduce_pool: lends buffers for low-precision copies of the gradients, which are reduced instead of the gradients; None to
            reduce the gradients themselves.
    """

    def __init__(
        self,
        plan: BucketPlan,
        context: ParallelContext,
        *,
        sharded: bool,
        fill: FillFunction,
        reduce_pool: BufferPool | None = None,
    ) -> None:
        super().__init__(plan, context, sharded=sharded, fill=fill)
        self._reduce_pool = reduce_pool
        self.grads = torch.zeros(plan.size, dtype=self.dtype, device=context.device)
        self._views = [self._get_param_view(self.grads, bucket_param) for bucket_param in plan.params]
        self._allocate_grads()
        self._reduction: Pending | None = None

    @property
    def owned_grads(self) -> torch.Tensor:
        """Gradients of the elements that this rank updates: a view of the gradient buffer."""
        return self.grads[self.owned_slice]

    def finish_backward(self) -> None:
        """Start the reduction, unless it has started during backward."""
        super().finish_backward()
        if self._reduction is None:
            self._start_reduction()

    def finish_reduction(self) -> None:
        """Wait until this rank's gradients are reduced over the bucket's group."""
        assert self._reduction is not None
        self._reduction.wait()
        self._reduction = None

    def _allocate_grads(self) -> None:
        for view, sink in zip(self._views, self._sinks, strict=True):
            sink.main_grad = view

    def _on_microbatch_complete(self, num_complete: int) -> None:
        if self._overlaps_backward and num_complete == self._num_microbatches:
            self._start_reduction()

    def _start_reduction(self) -> None:
        if self._reduce_pool is None:
            self._reduction = self._start_collective(self.grads)
        else:
            buffer = self._reduce_pool.acquire(self.plan.size)
            self._reduction = LowPrecisionReduction(
                self._start_collective(buffer[: self.plan.size].copy_(self.grads)), self.owned_grads
            )
            self._reduce_pool.release_after(buffer, self._reduction.wait)
        if self.shard_group.on_reduced and not self.plan.tied:
            self.shard_group.notify_reduced(self._reduction)

    def _start_collective(self, grads: torch.Tensor) -> Pending:
        if self.sharded:
            return start_reduce_scatter(grads, self.group, out=grads[self.owned_slice])
        return start_all_reduce(grads, self.group)


class ShardedGradBucket(Bucket):
    """Bucket that keeps only this rank's slice of the gradients (sharding strategy optim_grads) and reduces after each microbatch.

    Args:
        grad_pool: lends buffers for the gradients of all parameters until they are reduced.
        reduce_pool: lends buffers for low-precision copies of the gradients, which are reduced instead of the gradients; None to
            reduce the gradients themselves.
    """

    def __init__(
        self,
        plan: BucketPlan,
        context: ParallelContext,
        *,
        fill: FillFunction,
        grad_pool: BufferPool,
        reduce_pool: BufferPool | None = None,
    ) -> None:
        super().__init__(plan, context, sharded=True, fill=fill)
        assert self.sharded, "with one rank there is nothing to slice"
        self._grad_pool, self._reduce_pool = grad_pool, reduce_pool
        self._grads = torch.zeros(plan.slice_size, dtype=self.dtype, device=context.device)
        self._grad_buffer: torch.Tensor | None = None
        self._reduction: Pending | None = None
        self._has_partial_sum = False

    @property
    def owned_grads(self) -> torch.Tensor:
        """Gradients of the elements that this rank updates: its slice of the bucket."""
        return self._grads

    def start_step(self, num_microbatches: int, *, overlaps_backward: bool, inspect: GradInspector | None) -> None:
        """Start a step: discard the gradients of the last step, including those of a step that failed."""
        super().start_step(num_microbatches, overlaps_backward=overlaps_backward, inspect=inspect)
        self.finish_reduction()
        self._has_partial_sum = False
        if self._grad_buffer is not None:
            self._release_grad_buffer(Pending(self._grad_buffer))

    def finish_reduction(self) -> None:
        """Wait for the reduction of the last microbatch's gradients, if one is running."""
        if self._reduction is not None:
            self._reduction.wait()
            self._reduction = None

    def _allocate_grads(self) -> None:
        self._grad_buffer = self._grad_pool.acquire(self.plan.size)
        for bucket_param, sink in zip(self.plan.params, self._sinks, strict=True):
            sink.main_grad = self._get_param_view(self._grad_buffer, bucket_param)

    def _on_microbatch_complete(self, num_complete: int) -> None:
        buffer = self._grad_buffer
        assert buffer is not None
        for bucket_param, sink in zip(self.plan.params, self._sinks, strict=True):
            if not sink.is_written:  # the parameter's gradient of this microbatch came with an earlier one
                self._get_param_view(buffer, bucket_param).zero_()
        self.finish_reduction()
        if self._reduce_pool is not None:
            self._reduce_in_low_precision(buffer[: self.plan.size])
        else:
            if self._has_partial_sum:  # add the sum of the previous microbatches to this rank's summand
                buffer[self.owned_slice].add_(self._grads)
            self._reduction = start_reduce_scatter(buffer[: self.plan.size], self.group, out=self._grads)
            self._release_grad_buffer(self._reduction)
        self._has_partial_sum = True
        assert self._reduction is not None
        if self.shard_group.on_reduced and num_complete == self._num_microbatches and not self.plan.tied:
            self.shard_group.notify_reduced(self._reduction)
        if not self._overlaps_backward:
            (self._reduce_pool or self._grad_pool).wait_all()

    def _reduce_in_low_precision(self, grads: torch.Tensor) -> None:
        """Start to reduce a low-precision copy of a microbatch's gradients, and return the gradients' buffer to its pool after the
        copy.

        The reduced copy is added to the sum over the previous microbatches.
        """
        assert self._reduce_pool is not None and self._grad_buffer is not None
        buffer = self._reduce_pool.acquire(self.plan.size)
        reduce_buffer = buffer[: self.plan.size].copy_(grads)
        reduction = start_reduce_scatter(reduce_buffer, self.group, out=reduce_buffer[self.owned_slice])
        self._reduction = LowPrecisionReduction(reduction, self._grads, accumulates=self._has_partial_sum)
        self._reduce_pool.release_after(buffer, self._reduction.wait)
        self._grad_pool.release(self._grad_buffer)
        self._detach_grad_buffer()

    def _release_grad_buffer(self, pending: Pending) -> None:
        assert self._grad_buffer is not None
        self._grad_pool.release_after(self._grad_buffer, pending.wait)
        self._detach_grad_buffer()

    def _detach_grad_buffer(self) -> None:
        self._grad_buffer = None
        for sink in self._sinks:
            sink.main_grad, sink.is_written = None, False
