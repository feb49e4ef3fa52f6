"""Runs any schedule: one loop over this stage's operations.

Backward starts from the gradient edge of a chunk's output, so the output itself is dropped once it is sent and its memory is freed
without touching its storage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.parallel.accumulate import Deferred, deferring
from megatron.parallel.context import ParallelContext
from megatron.pipeline_parallel.p2p import Boundary, Messenger, ReceivePlan, Tensors, plan_receives
from megatron.pipeline_parallel.schedules import Op, OpKind, Schedule
from megatron.pipeline_parallel.validate import validate

ForwardFunction = Callable[[int, int, Tensors], Tensors]
"""(chunk, microbatch, what the chunk before gave) to what it gives; the last chunk gives one scalar, the root of backward."""


@dataclass
class _InFlight:
    """What lives between the forward and the last backward operation of one microbatch in one chunk."""

    inputs: Tensors
    edges: dict[str, GradientEdge]
    gradients: Tensors = field(default_factory=dict)
    """Received for the outputs; a deferred weight gradient may read them."""
    deferred: Deferred = field(default_factory=list)


class Executor:
    """Executes this rank's part of schedules."""

    def __init__(self, context: ParallelContext, boundary: Boundary) -> None:
        self._stage = context.group("pp").index
        self._boundary = boundary
        self._messenger = Messenger(context, boundary)
        self._in_flight: dict[tuple[int, int], _InFlight] = {}
        self._plans: dict[int, ReceivePlan] = {}
        self._checked: list[Schedule] = []  # kept, so that no other schedule takes the identity of one of them

    def run(self, schedule: Schedule, forward: ForwardFunction) -> None:
        """Run one step. Gradients go where the parameters' sinks say; a forward-only schedule keeps nothing."""
        plan = self._plans.get(id(schedule)) or self._check(schedule)
        training = any(op.kind is not OpKind.FORWARD for op in schedule.ops[self._stage])
        for op, due, arrived in zip(schedule.ops[self._stage], plan.before, plan.arrived, strict=True):
            for message, source in due:
                self._messenger.post(message, source)
            if op.kind is OpKind.FORWARD:
                with torch.set_grad_enabled(training):
                    self._forward(schedule, op, forward, training)
            elif op.kind is OpKind.WEIGHT_GRAD:
                deferred = self._in_flight[op.chunk, op.microbatch].deferred
                while deferred:  # each product's inputs are let go as soon as it is done
                    deferred.pop(0)()
                self._retire(op)
            else:
                self._backward(schedule, op)
            for message in arrived:
                self._messenger.settle(message)
        self._messenger.finish()
        assert not self._in_flight, "activations left over"

    def _check(self, schedule: Schedule) -> ReceivePlan:
        """The receive plan of a schedule, after the schedule was proved valid. Once for each schedule."""
        validate(schedule)
        self._checked.append(schedule)
        plan = self._plans[id(schedule)] = plan_receives(schedule, self._stage)
        return plan

    def _forward(self, schedule: Schedule, op: Op, forward: ForwardFunction, training: bool) -> None:
        needed = schedule.needs(op)
        received = {} if needed is None else self._messenger.receive(needed)
        inputs = {name: _leaf(t, training and self._boundary[name].requires_grad) for name, t in received.items()}
        outputs = forward(op.chunk, op.microbatch, inputs)
        given = schedule.gives(op)
        if training:
            roots = {name: t for name, t in outputs.items() if given is None or self._boundary[name].requires_grad}
            edges = {name: get_gradient_edge(t) for name, t in roots.items() if t.requires_grad}
            self._in_flight[op.chunk, op.microbatch] = _InFlight(inputs, edges)
        if given is not None:
            destination = schedule.stage_of_chunk[given.chunk]
            self._messenger.send(given, destination, {name: t.detach() for name, t in outputs.items()})
        if not training:
            self._messenger.recycle(received)

    def _backward(self, schedule: Schedule, op: Op) -> None:
        state = self._in_flight[op.chunk, op.microbatch]
        needed = schedule.needs(op)
        state.gradients = {} if needed is None else self._messenger.receive(needed)
        edges = list(state.edges.values())
        grads = [state.gradients.get(name) for name in state.edges]
        if op.kind is OpKind.INPUT_GRAD:
            with deferring() as state.deferred:
                torch.autograd.backward(edges, grads)
        else:
            torch.autograd.backward(edges, grads)
        state.edges.clear()
        given = schedule.gives(op)
        if given is not None:
            grads_in = {name: t.grad for name, t in state.inputs.items() if t.grad is not None}
            self._messenger.send(given, schedule.stage_of_chunk[given.chunk], grads_in)
        for tensor in state.inputs.values():
            tensor.grad = None
        if op.kind is OpKind.BACKWARD:
            self._retire(op)

    def _retire(self, op: Op) -> None:
        state = self._in_flight.pop((op.chunk, op.microbatch))
        self._messenger.recycle(state.inputs)
        self._messenger.recycle(state.gradients)


def _leaf(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    return tensor.detach().requires_grad_(requires_grad)
