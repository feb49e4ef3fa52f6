"""One bucket: parameters in one flat buffer, their gradients in another, reduced and gathered together.

`WholeBucket` keeps the gradients of all its parameters through the step and reduces them once, after the last microbatch: by an
all-reduce, or by a reduce-scatter where each rank updates only its slice. `SlicedBucket` keeps only this rank's slice. The
gradients of a microbatch lie in a buffer borrowed from a `BufferPool` until they are reduced.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron.data_parallel.bucket_plan import BucketPlan, Placed
from megatron.data_parallel.provider import Inspect
from megatron.parallel.accumulate import GradSink, WriteCount, check_writes
from megatron.parallel.boxes import FlatPiece, PlacedBox
from megatron.parallel.collectives import Pending, all_reduce, start_all_gather, start_all_reduce, start_reduce_scatter
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamRecord, Shard, ShardGroup

# With one microbatch's reductions as long as its forward and backward, which is the most that can be hidden, fewer than four in
# flight make backward wait: at 9 buckets and 4 microbatches a step takes (simulated) 1.25 times the computation with 2, 1.17 with
# 3, 1.11 with 4 and with any number.
_MOST_IN_FLIGHT = 4
# Elements. Buckets grow with the data group (`default_bucket_size`), but what passes through should not outgrow what is sharded.
_MOST_ELEMENTS = 160_000_000


class BufferPool:
    """Flat buffers of one dtype, lent to buckets.

    A buffer is given back while a reduction still reads it, and lent again when that has ended. If too many wait for their
    reductions and one more is needed, the pool waits for the oldest. So memory is bounded whatever the network's speed, and nobody
    waits before there is need.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._free: list[torch.Tensor] = []
        self._in_flight: deque[tuple[torch.Tensor, Callable[[], object]]] = deque()
        self.buffers: list[torch.Tensor] = []
        """All buffers that exist, lent or not."""

    def take(self, size: int) -> torch.Tensor:
        """Lend a buffer of at least `size` elements with any content: the smallest free one that is large enough, else a new one,
        which replaces the largest free one if there is any. So in the end there are no more than are needed at once."""
        while not (fitting := [buffer for buffer in self._free if buffer.numel() >= size]) and self._is_full(size):
            self._settle()
        if not fitting:
            if self._free:
                largest = max(self._free, key=torch.Tensor.numel)
                self._free, self.buffers = _without(self._free, largest), _without(self.buffers, largest)
            made = torch.empty(size, dtype=self._dtype, device=self._device)
            self.buffers.append(made)
            return made
        found = min(fitting, key=torch.Tensor.numel)
        self._free = _without(self._free, found)
        return found

    def give_back(self, buffer: torch.Tensor, wait: Callable[[], object]) -> None:
        """Take back a buffer, which may be written again after `wait()`."""
        self._in_flight.append((buffer, wait))

    def free(self, buffer: torch.Tensor) -> None:
        """Take back a buffer that nobody reads."""
        self._free.append(buffer)

    def settle(self) -> None:
        """Wait for all reductions that still read a buffer."""
        while self._in_flight:
            self._settle()

    def _is_full(self, size: int) -> bool:
        waiting = sum(buffer.numel() for buffer, _ in self._in_flight)
        return bool(self._in_flight) and (len(self._in_flight) >= _MOST_IN_FLIGHT or waiting + size > _MOST_ELEMENTS)

    def _settle(self) -> None:
        buffer, wait = self._in_flight.popleft()
        wait()
        self._free.append(buffer)


def _without(buffers: list[torch.Tensor], one: torch.Tensor) -> list[torch.Tensor]:
    return [buffer for buffer in buffers if buffer is not one]


class Narrowed(Pending):
    """A reduction of a copy of gradients in fewer bits, whose result is taken into the gradients where it is waited for.

    Args:
        reduction: that of the copy.
        into: receives its result.
        adds: whether the result is added to what `into` holds.
    """

    def __init__(self, reduction: Pending, into: torch.Tensor, *, adds: bool = False) -> None:
        super().__init__(into)
        self._reduction: Pending | None = reduction
        self._adds = adds
        self._taken: Any = None

    def wait(self) -> torch.Tensor:
        """Wait (on CUDA: let the current stream wait; several streams may), take the result in, once, and return the gradients."""
        on_cuda = self._result.device.type == "cuda"
        if self._reduction is not None:
            arrived = self._reduction.wait()
            if self._adds:
                self._result.add_(arrived)
            else:
                self._result.copy_(arrived)
            self._reduction = None
            if on_cuda:
                self._taken = torch.cuda.current_stream().record_event()
        elif on_cuda:
            torch.cuda.current_stream().wait_event(self._taken)
        return self._result


def travel_dtype(plan: BucketPlan, context: ParallelContext, *, in_bf16: bool) -> torch.dtype | None:
    """The dtype in which the gradients of a bucket travel, if it is narrower than theirs: with --grad-reduce-in-bf16 those of
    bfloat16 parameters that several data ranks add up."""
    dtype = plan.params[0].entry.param.dtype
    over_data = any(context.topology.size(axis) > 1 for axis in plan.axes if axis != "tp")
    return dtype if in_bf16 and over_data and dtype == torch.bfloat16 else None


Fill = Callable[[torch.Tensor, ParamRecord, Sequence[PlacedBox]], None]
"""Writes initial values into a flat tensor, given the parameter's record and the boxes of the parameter that it holds."""


def main_grad_dtype(dtype: torch.dtype) -> torch.dtype:
    """Gradients of 16-bit parameters are summed in float32."""
    return torch.promote_types(dtype, torch.float32)


class Bucket(ABC):
    """The common part of all buckets: weights, sinks, and the count of the gradients that reached them.

    Args:
        plan: which parameter lies where.
        sharded: this rank updates only its slice; else all.
        fill: initial values for parameters that have no memory yet; others keep their values.
    """

    def __init__(self, plan: BucketPlan, context: ParallelContext, *, sharded: bool, fill: Fill) -> None:
        self.plan, self.context = plan, context
        self.group = context.group(*plan.axes)
        self.sharded = sharded and self.group.size > 1
        dtype = plan.params[0].entry.param.dtype
        self.dtype = main_grad_dtype(dtype)
        self.weights = torch.zeros(plan.size, dtype=dtype, device=context.device)
        self._sinks = [self._attach(number, placed, fill) for number, placed in enumerate(plan.params)]
        self._count = WriteCount([placed.entry.uses_per_microbatch for placed in plan.params])
        self._microbatches = 0
        self._early = False
        self._inspect: Inspect | None = None
        self._gathering: Pending | None = None

    @property
    def own(self) -> slice:
        """The elements of the buffer that this rank updates."""
        low = self.group.index * self.plan.slice_size
        return slice(low, low + self.plan.slice_size) if self.sharded else slice(0, self.plan.size)

    @property
    @abstractmethod
    def own_grads(self) -> torch.Tensor:
        """Gradients of the elements that this rank updates, flat, complete after `finish`."""

    @abstractmethod
    def _provide(self) -> None:
        """Give the sinks memory."""

    @abstractmethod
    def _complete(self, microbatches: int) -> None:
        """Called when every parameter's gradient of this many microbatches of the step is written."""

    def close_step(self) -> None:
        """After all backwards of a step: check that nothing is missing, and start what is left to reduce.

        Raises:
            RuntimeError: a parameter got no gradient, or one too many.
        """
        if self._count.rounds != self._microbatches:
            self._check_writes()

    @abstractmethod
    def finish(self) -> None:
        """Wait until the gradients of this rank's elements are complete, but for another pipeline stage's part (tied embedding)."""

    def make_group(self) -> ShardGroup:
        """The shards that this rank owns."""
        own, grads = self.own, self.own_grads
        pieces = self.plan.pieces(self.group.index) if self.sharded else [(p, FlatPiece(0, p.numel)) for p in self.plan.params]
        slice_of = {placed.entry.record.name: piece for placed, piece in self.plan.pieces(self.group.index)}
        shards = []
        for placed, piece in pieces:
            start, stop = placed.start + piece.start, placed.start + piece.stop
            record, part = placed.entry.record, slice_of.get(placed.entry.record.name)
            here = range(0) if part is None else range(part.start - piece.start, part.stop - piece.start)
            counts = record.counts_at(self.context) and not (self.plan.tied and self.context.pipeline_ends.index > 0)
            counted, copied = (here, range(0)) if counts else (range(0), here)
            grad = grads[start - own.start : stop - own.start]
            shards.append(Shard(record, piece, self.weights[start:stop], grad, counted, copied))
        params = self.plan.divided(grads.dtype, sharded=self.sharded)
        self.shard_group = ShardGroup(shards, self._publish, params)
        return self.shard_group

    def sinks(self) -> Iterator[tuple[ParamRecord, GradSink]]:
        """Where the gradient of each parameter is written."""
        return ((placed.entry.record, sink) for placed, sink in zip(self.plan.params, self._sinks, strict=True))

    def start_step(self, num_microbatches: int, *, early: bool, inspect: Inspect | None) -> None:
        """Begin a step: forget the last one's gradients.

        Args:
            early: reduce what is complete while backward goes on.
            inspect: receives each gradient instead. Each then gets memory of its own, and nothing is reduced.
        """
        self._microbatches, self._early, self._inspect = num_microbatches, early, inspect
        self._count.start()
        for sink in self._sinks:
            sink.main_grad, sink.written = None, False

    def join_ends(self) -> None:
        """Add the gradient of the other pipeline stage that holds the parameters. Only this rank's elements travel."""
        if self.plan.tied:
            all_reduce(self.own_grads, self.context.pipeline_ends)
            if self.shard_group.on_reduced:
                self.shard_group.announce(Pending(self.own_grads))

    def finish_publishing(self) -> None:
        """Wait until the other ranks' weights have arrived."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def _publish(self) -> None:
        if self.sharded:
            self.finish_publishing()
            self._gathering = start_all_gather(self.weights[self.own], self.group, out=self.weights)

    def _attach(self, number: int, placed: Placed, fill: Fill) -> GradSink:
        """Move a parameter to its place in the bucket, with its values or, where it had no memory, initial ones. Give it a sink."""
        entry, view = placed.entry, self._view(self.weights, placed)
        if not entry.param.is_meta:
            view.copy_(entry.param.detach())
        elif not view.is_meta:
            fill(view.view(-1), entry.record, entry.record.boxes(FlatPiece(0, placed.numel), self.context))
        param = nn.Parameter(view)
        entry.replace(param)
        sink = GradSink(self.dtype, partial(self._wrote, number), partial(self._provide_for, number))
        param.grad_sink = sink  # type: ignore[attr-defined]
        return sink

    def _wrote(self, number: int) -> None:
        if self._count.writes[number] == self._count.uses[number] * self._microbatches:
            self._count.writes[number] += 1
            self._check_writes()
        completes = self._count.add(number)
        if self._inspect is not None:
            sink = self._sinks[number]
            grad, sink.main_grad, sink.written = sink.main_grad, None, False
            assert grad is not None
            self._inspect(self.plan.params[number].entry, grad)
        elif completes:
            self._complete(self._count.rounds)

    def _provide_for(self, number: int) -> torch.Tensor:
        if self._inspect is not None:
            return torch.empty(self.plan.params[number].entry.param.shape, dtype=self.dtype, device=self.context.device)
        self._provide()
        found = self._sinks[number].main_grad
        assert found is not None
        return found

    def _check_writes(self) -> None:
        counts = zip(self.plan.params, self._count.writes, self._count.uses, strict=True)
        check_writes(
            self.context.rank, [(placed.entry.record.name, found, uses * self._microbatches) for placed, found, uses in counts]
        )

    @staticmethod
    def _view(buffer: torch.Tensor, placed: Placed) -> torch.Tensor:
        return buffer[placed.start : placed.start + placed.numel].view(placed.entry.param.shape)


class WholeBucket(Bucket):
    """A bucket that keeps the gradients of all its parameters through the step (no_shard, optim).

    Args:
        narrow: buffers for copies in which gradients travel, if they do so in fewer bits.
    """

    def __init__(
        self, plan: BucketPlan, context: ParallelContext, *, sharded: bool, fill: Fill, narrow: BufferPool | None = None
    ) -> None:
        super().__init__(plan, context, sharded=sharded, fill=fill)
        self._narrow = narrow
        self.grads = torch.zeros(plan.size, dtype=self.dtype, device=context.device)
        self._views = [self._view(self.grads, placed) for placed in plan.params]
        self._provide()
        self._reducing: Pending | None = None

    @property
    def own_grads(self) -> torch.Tensor:
        """This rank's elements: a view of the buffer."""
        return self.grads[self.own]

    def close_step(self) -> None:
        """Start the reduction, unless it has started already."""
        super().close_step()
        if self._reducing is None:
            self._reduce()

    def finish(self) -> None:
        """Wait for the reduction."""
        assert self._reducing is not None
        self._reducing.wait()
        self._reducing = None

    def _provide(self) -> None:
        for view, sink in zip(self._views, self._sinks, strict=True):
            sink.main_grad = view

    def _complete(self, microbatches: int) -> None:
        if self._early and microbatches == self._microbatches:
            self._reduce()

    def _reduce(self) -> None:
        if self._narrow is None:
            self._reducing = self._start(self.grads)
        else:
            buffer = self._narrow.take(self.plan.size)
            self._reducing = Narrowed(self._start(buffer[: self.plan.size].copy_(self.grads)), self.own_grads)
            self._narrow.give_back(buffer, self._reducing.wait)
        if self.shard_group.on_reduced and not self.plan.tied:
            self.shard_group.announce(self._reducing)

    def _start(self, grads: torch.Tensor) -> Pending:
        if self.sharded:
            return start_reduce_scatter(grads, self.group, out=grads[self.own])
        return start_all_reduce(grads, self.group)


class SlicedBucket(Bucket):
    """A bucket that keeps only this rank's slice of the gradients (optim_grads): it reduces after each microbatch.

    Args:
        pool: buffers for gradients until they are reduced.
        narrow: buffers for copies in which they travel, if they do so in fewer bits.
    """

    def __init__(
        self, plan: BucketPlan, context: ParallelContext, *, fill: Fill, pool: BufferPool, narrow: BufferPool | None = None
    ) -> None:
        super().__init__(plan, context, sharded=True, fill=fill)
        assert self.sharded, "with one rank there is nothing to slice"
        self._pool, self._narrow = pool, narrow
        self._grads = torch.zeros(plan.slice_size, dtype=self.dtype, device=context.device)
        self._borrowed: torch.Tensor | None = None
        self._reducing: Pending | None = None
        self._reduced_once = False

    @property
    def own_grads(self) -> torch.Tensor:
        """This rank's slice."""
        return self._grads

    def start_step(self, num_microbatches: int, *, early: bool, inspect: Inspect | None) -> None:
        """Begin a step: forget the last one's gradients, and what a failed step has left."""
        super().start_step(num_microbatches, early=early, inspect=inspect)
        self.finish()
        self._reduced_once = False
        if self._borrowed is not None:
            self._return(Pending(self._borrowed))

    def finish(self) -> None:
        """Wait for the last reduction, if there is one."""
        if self._reducing is not None:
            self._reducing.wait()
            self._reducing = None

    def _provide(self) -> None:
        self._borrowed = self._pool.take(self.plan.size)
        for placed, sink in zip(self.plan.params, self._sinks, strict=True):
            sink.main_grad = self._view(self._borrowed, placed)

    def _complete(self, microbatches: int) -> None:
        buffer = self._borrowed
        assert buffer is not None
        for placed, sink in zip(self.plan.params, self._sinks, strict=True):
            if not sink.written:  # this parameter was a microbatch ahead
                self._view(buffer, placed).zero_()
        self.finish()
        if self._narrow is not None:
            self._reduce_narrow(buffer[: self.plan.size])
        else:
            if self._reduced_once:  # this rank's own summand carries the sum of the microbatches before
                buffer[self.own].add_(self._grads)
            self._reducing = start_reduce_scatter(buffer[: self.plan.size], self.group, out=self._grads)
            self._return(self._reducing)
        self._reduced_once = True
        assert self._reducing is not None
        if self.shard_group.on_reduced and microbatches == self._microbatches and not self.plan.tied:
            self.shard_group.announce(self._reducing)
        if not self._early:
            (self._narrow or self._pool).settle()

    def _reduce_narrow(self, grads: torch.Tensor) -> None:
        """Send a copy, whose sum is added to those of the microbatches before; nobody reads the gradients any more."""
        assert self._narrow is not None and self._borrowed is not None
        buffer = self._narrow.take(self.plan.size)
        sent = buffer[: self.plan.size].copy_(grads)
        reduction = start_reduce_scatter(sent, self.group, out=sent[self.own])
        self._reducing = Narrowed(reduction, self._grads, adds=self._reduced_once)
        self._narrow.give_back(buffer, self._reducing.wait)
        self._pool.free(self._borrowed)
        self._forget()

    def _return(self, pending: Pending) -> None:
        assert self._borrowed is not None
        self._pool.give_back(self._borrowed, pending.wait)
        self._forget()

    def _forget(self) -> None:
        self._borrowed = None
        for sink in self._sinks:
            sink.main_grad, sink.written = None, False
