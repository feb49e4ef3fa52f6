"""Runs any schedule: one loop over this stage's operations.

Backward starts from the gradient edge of a chunk's output, not from the output. So the output can be freed once it is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.memory.host import HostMemory
from megatron.memory.recompute import BeforeRemake, Kept, keeping
from megatron.parallel.accumulate import Deferred, deferring
from megatron.parallel.context import ParallelContext
from megatron.pipeline_parallel.exchange import channels
from megatron.pipeline_parallel.p2p import Boundary, Messenger, Tensors
from megatron.pipeline_parallel.validate import validate
from megatron.spec.operations import Message, Op, OpKind, Schedule

# ---- When tensors that a microbatch has in host memory come back: it follows from the operations of its stage.

_TAKES = (OpKind.RECOMPUTE, OpKind.BACKWARD, OpKind.INPUT_GRAD)
"""Operations that read what the forward has saved."""


def back_soon(ops: Sequence[Op]) -> frozenset[tuple[int, int]]:
    """(Chunk, microbatch) of each forward on a stage that is followed by the first of its backward operations, at once or after one
    other operation.

    What it moved last would have gone when that other one has run, and would come back while that one runs.
    """
    after = zip(ops, [*ops[1:], None], [*ops[2:], None, None], strict=False)
    return frozenset(
        (op.chunk, op.microbatch)
        for op, *next_two in after
        if op.kind is OpKind.FORWARD and any(one is not None and one[1:] == op[1:] and one.kind in _TAKES for one in next_two)
    )


def fetched_during(ops: Sequence[Op]) -> list[Op | None]:
    """For each operation of a stage, the next one, if that takes what may be in host memory: it comes back meanwhile."""
    return [op if op is not None and op.kind in _TAKES else None for op in [*ops[1:], None]] if ops else []


ForwardFunction = Callable[[int, int, Tensors], Tensors]
"""Takes (chunk, microbatch, output of the chunk before) and returns the chunk's output; the last chunk returns the scalar loss."""


class Recorder(Protocol):
    """Is called when each operation begins and ends computing."""

    def begin(self, op: Op) -> None:
        """The operation's inputs have arrived."""

    def end(self, op: Op) -> None:
        """The operation has computed; its result is not sent yet."""


@dataclass(frozen=True)
class Step:
    """An operation, the messages before and after it, and what moves between device and host meanwhile."""

    op: Op
    posts: tuple[tuple[Message, int], ...]
    needs: Message | None
    gives: Message | None
    destination: int
    arrived: tuple[Message, ...]
    fetches: Op | None
    """The next operation, if it may need what is in host memory."""
    back_soon: bool
    """A forward whose backward begins so soon that what it saves last is not moved."""


@dataclass
class _InFlight:
    """What is kept between the forward and the last backward operation of one microbatch in one chunk."""

    inputs: Tensors
    edges: dict[str, GradientEdge]
    kept: Kept | None
    gradients: Tensors = field(default_factory=dict)
    """Gradients received for the outputs; a deferred weight gradient may read them."""
    deferred: Deferred = field(default_factory=Deferred)


class Executor:
    """Executes this rank's part of schedules.

    Args:
        boundary: the tensors that travel between chunks.
        overlap: let messages travel while operations compute; without, wait for each exchange (the same results, bit for bit).
        before_backward: are called with the chunk before each of its backwards.
        before_remake: called with the modules of layers before they are run again.
        host: where the saved tensors go of layers that are chosen for that.
        keeps: whether any layer runs again in backward or has its saved tensors in host memory.
    """

    def __init__(
        self,
        context: ParallelContext,
        boundary: Boundary,
        *,
        overlap: bool = True,
        before_backward: Sequence[Callable[[int], None]] = (),
        before_remake: BeforeRemake | None = None,
        host: HostMemory | None = None,
        keeps: bool = True,
    ) -> None:
        self.host = HostMemory(context.device) if host is None else host
        self._stage, self._before_remake, self._keeps = context.group("pp").index, before_remake, keeps
        self._boundary, self._overlap, self._before_backward = boundary, overlap, before_backward
        self._messenger, self._device_type = Messenger(context, boundary), context.device.type
        self._in_flight: dict[tuple[int, int], _InFlight] = {}
        self._prepared: dict[int, tuple[list[Step], Schedule]] = {}
        """By id(); the schedules are kept, so that no other one gets the id() of one of them."""
        self.current: Op | None = None
        """The operation under way, for messages about errors."""
        self._leaving: Kept | None = None
        """What the operation before has moved last, if it was a forward."""
        self.mark: Callable[[Op], None] | None = None
        """Called with each operation before its input is waited for, if set."""
        self.recorder: Recorder | None = None
        """Called for every operation of a training step, if set."""
        self._deferred_bytes = 0
        self.peak_deferred_bytes = 0
        """The most bytes that deferred weight gradients have kept at once: inputs and output gradients of linear layers."""

    def run(self, schedule: Schedule, forward: ForwardFunction) -> None:
        """Run one step. Gradients go where the parameters' sinks say. A forward-only schedule keeps nothing."""
        steps = self.prepare(schedule)
        training = any(step.op.kind is not OpKind.FORWARD for step in steps)
        recorder, messenger = self.recorder if training else None, self._messenger
        for step in steps:
            self.current = step.op
            if self.mark is not None:
                self.mark(step.op)
            for message, source in step.posts:
                messenger.post(message, source)
            if not self._overlap:
                messenger.wait()
            if step.fetches is not None:
                self._fetch(step.fetches)
            received = {} if step.needs is None else messenger.receive(step.needs)
            if recorder is not None:
                recorder.begin(step.op)
            if step.op.kind is OpKind.FORWARD:
                with torch.set_grad_enabled(training):
                    given = self._forward(step, received, forward, training)
            elif step.op.kind is OpKind.WEIGHT_GRAD:
                given = self._weight_grad(step.op)
            elif step.op.kind is OpKind.RECOMPUTE:
                given = self._recompute(step.op)
            else:
                given = self._backward(step.op, received)
            if recorder is not None:
                recorder.end(step.op)
            self._settle(step.op)
            if step.gives is not None:
                messenger.send(step.gives, step.destination, given)
            # Only now: the result may lie in a buffer that was received.
            if training and step.op.kind in (OpKind.BACKWARD, OpKind.WEIGHT_GRAD):
                self._retire(step.op)
            elif received and not training:
                messenger.recycle(received)
            del received, given  # what was sent is not kept here while the next operation computes
            for message in step.arrived:
                messenger.settle(message)
        self.current = None
        if len(schedule.stage_of_chunk) > 1:
            messenger.finish()
        assert not self._in_flight, "activations left over"

    def prepare(self, schedule: Schedule) -> list[Step]:
        """The steps of this stage, after a proof that the schedule is valid. The proof is made once, by all stages together.

        Raises:
            ValueError: the schedule is incomplete or would deadlock.
        """
        if id(schedule) in self._prepared:
            return self._prepared[id(schedule)][0]
        receives, exchanges = validate(schedule, self._device_type)
        self._messenger.connect(channels(schedule))
        plan = (receives if self._overlap else exchanges)[self._stage]
        ops, steps = schedule.ops[self._stage], []
        soon, linked = back_soon(ops), schedule.linked_ops[self._stage]
        for (op, needs, gives), posts, arrived, fetches in zip(linked, plan.before, plan.arrived, fetched_during(ops), strict=True):
            destination = self._stage if gives is None else schedule.stage_of_chunk[gives.chunk]
            steps.append(Step(op, tuple(posts), needs, gives, destination, tuple(arrived), fetches, op[1:] in soon))
        self._prepared[id(schedule)] = steps, schedule
        return steps

    def _forward(self, step: Step, received: Tensors, forward: ForwardFunction, training: bool) -> Tensors:
        op = step.op
        inputs = {name: t.detach().requires_grad_(training and self._boundary[name].requires_grad) for name, t in received.items()}
        if not training:
            return {name: t.detach() for name, t in forward(op.chunk, op.microbatch, inputs).items()}
        kept: Kept | None = None
        if self._keeps:
            with keeping(Kept(self._before_remake, self.host, back_soon=step.back_soon, living=inputs.values())) as kept:
                outputs = forward(op.chunk, op.microbatch, inputs)
        else:
            outputs = forward(op.chunk, op.microbatch, inputs)
        roots = {name: t for name, t in outputs.items() if step.gives is None or self._boundary[name].requires_grad}
        edges = {name: get_gradient_edge(t) for name, t in roots.items() if t.requires_grad}
        self._in_flight[op.chunk, op.microbatch] = _InFlight(inputs, edges, kept)
        return {name: t.detach() for name, t in outputs.items()}

    def _backward(self, op: Op, received: Tensors) -> Tensors:
        state = self._in_flight[op.chunk, op.microbatch]
        state.gradients = received
        for call in self._before_backward:
            call(op.chunk)
        edges = list(state.edges.values())
        grads = [received.get(name) for name in state.edges]
        if op.kind is OpKind.INPUT_GRAD:
            with deferring() as state.deferred:
                torch.autograd.backward(edges, grads)
            self._deferred_bytes += state.deferred.num_bytes
            self.peak_deferred_bytes = max(self.peak_deferred_bytes, self._deferred_bytes)
        else:
            torch.autograd.backward(edges, grads)
        state.edges.clear()
        given = {}
        for name, tensor in state.inputs.items():
            if tensor.requires_grad:  # a chunk that does not use its input gives it no gradient
                given[name] = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            tensor.grad = None
        return given

    def _fetch(self, op: Op) -> None:
        state = self._in_flight.get((op.chunk, op.microbatch))
        if state is not None and state.kept is not None:  # otherwise its forward comes first, and nothing of it has gone
            state.kept.fetch(for_remake=op.kind is OpKind.RECOMPUTE)

    def _settle(self, op: Op) -> None:
        """After an operation: what the forward before it has moved has gone, or is waited for."""
        if self._leaving is not None:
            self._leaving.settle()
        self._leaving = None
        if op.kind is OpKind.FORWARD and (state := self._in_flight.get((op.chunk, op.microbatch))):
            self._leaving = state.kept

    def _recompute(self, op: Op) -> Tensors:
        kept = self._in_flight[op.chunk, op.microbatch].kept
        assert kept is not None, "the schedule runs layers again"
        kept.remake_last()
        return {}

    def _weight_grad(self, op: Op) -> Tensors:
        deferred = self._in_flight[op.chunk, op.microbatch].deferred
        self._deferred_bytes -= deferred.num_bytes
        deferred.run()
        return {}

    def _retire(self, op: Op) -> None:
        state = self._in_flight.pop((op.chunk, op.microbatch))
        for received in (state.inputs, state.gradients):
            if received:
                self._messenger.recycle(received)
