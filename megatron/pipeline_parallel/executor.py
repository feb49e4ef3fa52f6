"""Executor of pipeline schedules: one loop over this stage's operations.

Backward starts from the gradient edge of a chunk's output (the autograd node that computed it) instead of the output tensor. So the
output can be freed once it is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.memory.host_buffers import HostBufferPool
from megatron.memory.recompute import ActivationStore, BeforeRecompute, storing_activations
from megatron.parallel.accumulate import DeferredWork, deferring
from megatron.parallel.context import ParallelContext
from megatron.pipeline_parallel.exchange import list_channels
from megatron.pipeline_parallel.p2p import Boundary, Messenger, Tensors
from megatron.pipeline_parallel.validate import validate
from megatron.spec.operations import Message, Op, OpType, Schedule

# ---- When tensors of a microbatch are fetched from host memory. This follows from the order of the stage's operations.

_READS_ACTIVATIONS = (OpType.RECOMPUTE, OpType.BACKWARD, OpType.INPUT_GRAD)
"""Types of operations that read the tensors saved in forward."""


def find_immediate_backwards(ops: Sequence[Op]) -> frozenset[tuple[int, int]]:
    """Return (chunk, microbatch) of each forward whose first backward operation follows directly, or after one other operation.

    For these forwards, it would not pay to move the last layer's saved tensors to host memory. The copy to the host would end only
    after the operation in between, while the copy back would have to run during that operation.
    """
    op_windows = zip(ops, [*ops[1:], None], [*ops[2:], None, None], strict=False)
    return frozenset(
        (op.chunk, op.microbatch)
        for op, *next_ops in op_windows
        if op.type is OpType.FORWARD
        and any(next_op is not None and next_op[1:] == op[1:] and next_op.type in _READS_ACTIVATIONS for next_op in next_ops)
    )


def plan_prefetches(ops: Sequence[Op]) -> list[Op | None]:
    """Return for each operation of a stage the next operation, if that may read tensors from host memory; otherwise None.

    The executor copies the tensors of the next operation back to the device during the current operation.
    """
    return [op if op is not None and op.type in _READS_ACTIVATIONS else None for op in [*ops[1:], None]] if ops else []


ForwardFunction = Callable[[int, int, Tensors], Tensors]
"""Function of (chunk, microbatch, output of the previous chunk) that returns the chunk's output. The last chunk returns the scalar
loss."""


class Recorder(Protocol):
    """Interface of an object that the executor notifies when each operation starts and ends computing, for example to measure
    times."""

    def start(self, op: Op) -> None:
        """Called when the operation's inputs have arrived."""

    def end(self, op: Op) -> None:
        """Called when the operation has computed its result, before the result is sent."""


@dataclass(frozen=True)
class ScheduledOp:
    """Operation of a schedule, with everything that the executor does before and after it: receives, sends, waits, and copies from
    host memory."""

    op: Op
    posts: tuple[tuple[Message, int], ...]
    """Receives to post before the operation, as pairs (message, source stage)."""
    needs: Message | None
    """Message whose tensors are the input of the operation; None if it needs no message."""
    gives: Message | None
    """Message that sends the operation's result to another chunk; None if no chunk needs the result."""
    destination: int
    """Stage that receives the operation's result (the message in the field `gives`). This stage if `gives` is None."""
    completed_sends: tuple[Message, ...]
    """Messages that this stage sent earlier. After the operation, the executor waits until they have been sent."""
    prefetched_op: Op | None
    """The next operation if it may need tensors from host memory, else None. The executor starts to copy these tensors to the
    device before the current operation runs."""
    is_backward_next: bool
    """Whether this operation is a forward whose backward starts so soon that the saved tensors of the last layer are not moved to
    host memory."""


@dataclass
class _MicrobatchState:
    """Tensors of one microbatch in one model chunk, kept from its forward to its last backward operation."""

    inputs: Tensors
    edges: dict[str, GradientEdge]
    activations: ActivationStore | None
    gradients: Tensors = field(default_factory=dict)
    """Gradients of the chunk's outputs, received from the next chunk. A deferred weight gradient may read them."""
    deferred: DeferredWork = field(default_factory=DeferredWork)


class Executor:
    """Runs this rank's operations of pipeline schedules.

    Args:
        boundary: names, shapes and dtypes of the tensors that are sent between chunks.
        overlap: send and receive while operations compute. If False, each operation first waits for all posted receives and all
            sends; results are bitwise equal.
        before_backward: called with the index of the chunk before each backward of the chunk.
        before_recompute: called with the modules of a segment (layers that are recomputed together) before it is recomputed.
        host: host memory for the saved tensors of offloaded layers.
        uses_activation_store: whether any layer is recomputed in backward or has its saved tensors in host memory.
    """

    def __init__(
        self,
        context: ParallelContext,
        boundary: Boundary,
        *,
        overlap: bool = True,
        before_backward: Sequence[Callable[[int], None]] = (),
        before_recompute: BeforeRecompute | None = None,
        host: HostBufferPool | None = None,
        uses_activation_store: bool = True,
    ) -> None:
        self.host = HostBufferPool(context.device) if host is None else host
        self._stage, self._before_recompute, self._uses_activation_store = (
            context.group("pp").rank,
            before_recompute,
            uses_activation_store,
        )
        self._boundary, self._overlap, self._before_backward = boundary, overlap, before_backward
        self._messenger, self._device_type = Messenger(context, boundary), context.device.type
        self._states: dict[tuple[int, int], _MicrobatchState] = {}
        self._prepared: dict[int, tuple[list[ScheduledOp], Schedule]] = {}
        """Prepared operations by id() of the schedule. The schedule is stored too, so that its id() is not reused."""
        self.current_op: Op | None = None
        """The running operation, for error messages."""
        self._offloading: ActivationStore | None = None
        """Activations of the previous operation, if it was a forward; its last offloaded tensors are leaving the device."""
        self.on_op_start: Callable[[Op], None] | None = None
        """Callback before an operation waits for its input, or None."""
        self.recorder: Recorder | None = None
        """Recorder of the operations of training steps, or None."""
        self._deferred_bytes = 0
        self.peak_deferred_bytes = 0
        """Peak bytes that deferred weight gradients kept at once: inputs and output gradients of linear layers."""

    def run(self, schedule: Schedule, forward: ForwardFunction) -> None:
        """Run the operations of one step.

        Gradients are added to the parameters' gradient sinks (`GradSink`). A forward-only schedule keeps no activations.

        Args:
            forward: computes the forward of a chunk for a microbatch.
        """
        scheduled_ops = self.prepare(schedule)
        is_training = any(scheduled.op.type is not OpType.FORWARD for scheduled in scheduled_ops)
        recorder, messenger = self.recorder if is_training else None, self._messenger
        for scheduled in scheduled_ops:
            self.current_op = scheduled.op
            if self.on_op_start is not None:
                self.on_op_start(scheduled.op)
            for message, source in scheduled.posts:
                messenger.post_receive(message, source)
            if not self._overlap:
                messenger.wait_all()
            if scheduled.prefetched_op is not None:
                self._prefetch(scheduled.prefetched_op)
            received = {} if scheduled.needs is None else messenger.receive(scheduled.needs)
            if recorder is not None:
                recorder.start(scheduled.op)
            if scheduled.op.type is OpType.FORWARD:
                with torch.set_grad_enabled(is_training):
                    outputs = self._forward(scheduled, received, forward, is_training)
            elif scheduled.op.type is OpType.WEIGHT_GRAD:
                outputs = self._compute_weight_grad(scheduled.op)
            elif scheduled.op.type is OpType.RECOMPUTE:
                outputs = self._recompute(scheduled.op)
            else:
                outputs = self._backward(scheduled.op, received)
            if recorder is not None:
                recorder.end(scheduled.op)
            self._release_offloaded(scheduled.op)
            if scheduled.gives is not None:
                messenger.send(scheduled.gives, scheduled.destination, outputs)
            # Only after the send: the result may lie in a receive buffer.
            if is_training and scheduled.op.type in (OpType.BACKWARD, OpType.WEIGHT_GRAD):
                self._release(scheduled.op)
            elif received and not is_training:
                messenger.recycle(received)
            del received, outputs  # frees tensors that were sent before the next operation computes
            for message in scheduled.completed_sends:
                messenger.wait_sent(message)
        self.current_op = None
        if len(schedule.stage_of_chunk) > 1:
            messenger.finish()
        assert not self._states, "activations left over at the end of a step"

    def prepare(self, schedule: Schedule) -> list[ScheduledOp]:
        """Validate the schedule and return this stage's operations with their messages. The returned list is cached.

        This method also opens the communication channels between stages, so all stages must call it together.

        Raises:
            ValueError: the schedule is incomplete or would deadlock.
        """
        if id(schedule) in self._prepared:
            return self._prepared[id(schedule)][0]
        receives, exchanges = validate(schedule, self._device_type)
        self._messenger.connect(list_channels(schedule))
        plan = (receives if self._overlap else exchanges)[self._stage]
        ops, scheduled_ops = schedule.ops[self._stage], []
        immediate_backwards, linked = find_immediate_backwards(ops), schedule.linked_ops[self._stage]
        for (op, needs, gives), posts, completed_sends, prefetched_op in zip(
            linked, plan.posts, plan.completed_sends, plan_prefetches(ops), strict=True
        ):
            destination = self._stage if gives is None else schedule.stage_of_chunk[gives.chunk]
            scheduled_ops.append(
                ScheduledOp(
                    op,
                    tuple(posts),
                    needs,
                    gives,
                    destination,
                    tuple(completed_sends),
                    prefetched_op,
                    op[1:] in immediate_backwards,
                )
            )
        self._prepared[id(schedule)] = scheduled_ops, schedule
        return scheduled_ops

    def _forward(self, scheduled: ScheduledOp, received: Tensors, forward: ForwardFunction, is_training: bool) -> Tensors:
        op = scheduled.op
        inputs = {
            name: t.detach().requires_grad_(is_training and self._boundary[name].requires_grad) for name, t in received.items()
        }
        if not is_training:
            return {name: t.detach() for name, t in forward(op.chunk, op.microbatch, inputs).items()}
        activations: ActivationStore | None = None
        if self._uses_activation_store:
            with storing_activations(
                ActivationStore(
                    self._before_recompute, self.host, is_backward_next=scheduled.is_backward_next, live_tensors=inputs.values()
                )
            ) as activations:
                outputs = forward(op.chunk, op.microbatch, inputs)
        else:
            outputs = forward(op.chunk, op.microbatch, inputs)
        roots = {name: t for name, t in outputs.items() if scheduled.gives is None or self._boundary[name].requires_grad}
        edges = {name: get_gradient_edge(t) for name, t in roots.items() if t.requires_grad}
        self._states[op.chunk, op.microbatch] = _MicrobatchState(inputs, edges, activations)
        return {name: t.detach() for name, t in outputs.items()}

    def _backward(self, op: Op, received: Tensors) -> Tensors:
        state = self._states[op.chunk, op.microbatch]
        state.gradients = received
        for callback in self._before_backward:
            callback(op.chunk)
        edges = list(state.edges.values())
        grads = [received.get(name) for name in state.edges]
        if op.type is OpType.INPUT_GRAD:
            with deferring() as state.deferred:
                torch.autograd.backward(edges, grads)
            self._deferred_bytes += state.deferred.num_bytes
            self.peak_deferred_bytes = max(self.peak_deferred_bytes, self._deferred_bytes)
        else:
            torch.autograd.backward(edges, grads)
        state.edges.clear()
        input_grads = {}
        for name, tensor in state.inputs.items():
            if tensor.requires_grad:  # an input that the chunk does not use has no gradient
                input_grads[name] = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            tensor.grad = None
        return input_grads

    def _prefetch(self, op: Op) -> None:
        state = self._states.get((op.chunk, op.microbatch))
        if state is not None and state.activations is not None:  # otherwise the forward runs first, and has moved nothing yet
            state.activations.fetch(for_recompute=op.type is OpType.RECOMPUTE)

    def _release_offloaded(self, op: Op) -> None:
        """Free the device memory of the tensors that the previous forward moved to host memory. Called after an operation."""
        if self._offloading is not None:
            self._offloading.release_device_copies()
        self._offloading = None
        if op.type is OpType.FORWARD and (state := self._states.get((op.chunk, op.microbatch))):
            self._offloading = state.activations

    def _recompute(self, op: Op) -> Tensors:
        activations = self._states[op.chunk, op.microbatch].activations
        assert activations is not None, "a schedule with recompute needs uses_activation_store"
        activations.recompute_last()
        return {}

    def _compute_weight_grad(self, op: Op) -> Tensors:
        deferred = self._states[op.chunk, op.microbatch].deferred
        self._deferred_bytes -= deferred.num_bytes
        deferred.run()
        return {}

    def _release(self, op: Op) -> None:
        state = self._states.pop((op.chunk, op.microbatch))
        for received in (state.inputs, state.gradients):
            if received:
                self._messenger.recycle(received)
