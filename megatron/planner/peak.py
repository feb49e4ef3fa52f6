"""Activations over a step: what one rank holds at the peak of its schedule, and what it sends over tensor and pipeline groups.

Messages between stages follow the rules of the executor and the messenger, but with byte counts in place of tensors (`Mail`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from megatron.config.config import Config
from megatron.memory.host import buffer_size
from megatron.model.build import Model
from megatron.parallel.context import ParallelContext
from megatron.pipeline_parallel.exchange import ReceivePlan, plan_exchanges
from megatron.pipeline_parallel.queues import choose_receives
from megatron.pipeline_parallel.returns import back_soon, fetched_during
from megatron.planner.chunk_trace import ChunkTrace
from megatron.planner.planned_inputs import PlaceOfDocuments, input_bytes
from megatron.planner.storages import Transfer, added
from megatron.spec.operations import Message, Op, OpKind, Schedule


class Activations(NamedTuple):
    """Bytes on one rank at the peak of a step, beside the model's state."""

    inputs: int
    """Tokens, labels, masks and positions of all microbatches."""
    others: int
    """What microbatches keep between forward and backward, and deferred weight gradients; what passes within the operation at the
    peak; and messages between stages that are received, or not known to have arrived."""
    host: int = 0
    """Host memory for what is moved there between forward and backward: buffers, which are never given free."""
    to_host: int = 0
    """Bytes that a step moves there, and back."""

    @property
    def total(self) -> int:
        """All together on the device."""
        return self.inputs + self.others


def receive_plans(schedule: Schedule, *, overlap: bool, device_type: str) -> list[ReceivePlan]:
    """When each stage posts its receives. `peak_activations` takes this for all stages."""
    return choose_receives(schedule, device_type).plans if overlap else plan_exchanges(schedule)


class Held(NamedTuple):
    """Bytes of activations and messages on one rank around one operation of its schedule, beside the step's inputs."""

    op: Op
    peak: int
    """The most at once while it runs."""
    after: int
    """What it leaves."""
    host: int
    """Bytes of all buffers in host memory that are there after it."""
    to_host: int = 0
    """Bytes that it moves there."""


def peak_activations(
    traces: Mapping[int, ChunkTrace],
    model: Model,
    config: Config,
    context: ParallelContext,
    schedule: Schedule,
    plans: Sequence[ReceivePlan],
    *,
    device_type: str,
    num_microbatches: int | None = None,
) -> Activations:
    """The peak over this rank's operations. The arguments are those of `held_over_step`.

    Args:
        num_microbatches: those of a step, of which the schedule may have only the first; by default all that it has.
    """
    kept = frozenset[PlaceOfDocuments]().union(*(trace.kept_of_documents for trace in traces.values()))
    sizes = (num_microbatches or schedule.num_microbatches, config.training.micro_batch_size, context.topology.cp)
    inputs = input_bytes(model, config.data, *sizes, kept)
    held = list(held_over_step(traces, model, config, context, schedule, plans, device_type=device_type))
    peak, host = max((one.peak for one in held), default=0), max((one.host for one in held), default=0)
    return Activations(inputs, peak, host, sum(one.to_host for one in held))


def held_over_step(
    traces: Mapping[int, ChunkTrace],
    model: Model,
    config: Config,
    context: ParallelContext,
    schedule: Schedule,
    plans: Sequence[ReceivePlan],
    *,
    device_type: str,
) -> Iterator[Held]:
    """This rank's operations in their order, each with what is held.

    Args:
        traces: those of this rank's chunks.
        plans: the result of `receive_plans`.
        device_type: type of the job's devices, cpu or cuda.
    """
    stage, micro_batch_size = context.group("pp").index, config.training.micro_batch_size
    size, overlap = _message_bytes(model, micro_batch_size, context), config.parallel.overlap_p2p_communication
    mail = Mail(schedule, stage, plans[stage], size, overlap=overlap, notices=device_type == "cuda")
    ops, host = schedule.ops[stage], HostBuffers()
    soon = back_soon(ops)

    def trace_of(op: Op) -> ChunkTrace:
        trace = traces[op.chunk]
        return trace.soon if trace.soon is not None and op[1:] in soon else trace

    kept = leaving = 0
    for place, (op, following) in enumerate(zip(ops, fetched_during(ops), strict=True)):
        trace = trace_of(op)
        mail.before(place)
        if following is not None:
            kept += trace_of(following).fetched[following.kind]
            host.before(following, trace_of(following))
        peak = kept + trace.ops[op.kind].peak + mail.bytes
        kept += trace.ops[op.kind].change - leaving
        leaving = trace.leaving if op.kind is OpKind.FORWARD else 0
        host.within(op, trace)
        mail.after(place)
        to_host = sum(map(sum, trace.away)) if op.kind is OpKind.FORWARD else 0
        yield Held(op, peak, kept + mail.bytes, host.bytes, to_host)


def step_transfers(
    traces: Mapping[int, ChunkTrace], model: Model, micro_batch_size: int, context: ParallelContext, schedule: Schedule
) -> tuple[Transfer, ...]:
    """What this rank sends in a step over its tensor group and to other stages."""
    stage, size = context.group("pp").index, _message_bytes(model, micro_batch_size, context)
    sent: list[Transfer] = []
    for op, _, gives in schedule.linked_ops[stage]:
        sent += traces[op.chunk].ops[op.kind].sent
        if gives is not None and schedule.stage_of_chunk[gives.chunk] != stage:
            sent.append(Transfer("pipeline", "send", 1, size, schedule.stage_of_chunk[gives.chunk]))
    return added(sent)


def _message_bytes(model: Model, micro_batch_size: int, context: ParallelContext) -> int:
    hidden = model.boundary(micro_batch_size, context.topology)["hidden"]
    return math.prod(hidden.shape) * hidden.dtype.itemsize


class HostBuffers:
    """The buffers in host memory that layers are moved to, by the rules of `megatron.memory.offload`."""

    def __init__(self) -> None:
        self._used: Counter[int] = Counter()
        self._made: Counter[int] = Counter()
        self._last_is_back: set[tuple[int, int]] = set()

    @property
    def bytes(self) -> int:
        """Bytes of all that were made."""
        return sum(size * count for size, count in self._made.items())

    def before(self, op: Op, trace: ChunkTrace) -> None:
        """What an operation needs first comes back while the one before it runs."""
        if trace.away and op[1:] not in self._last_is_back and (trace.last_remade_ahead or op.kind is not OpKind.RECOMPUTE):
            self._last_is_back.add(op[1:])
            self._give(trace.away[-1])

    def within(self, op: Op, trace: ChunkTrace) -> None:
        """What an operation itself moves, or brings back."""
        if op.kind is OpKind.FORWARD:
            for sizes in trace.away:
                self._used.update(map(buffer_size, sizes))
            self._made |= self._used
        elif op.kind is OpKind.RECOMPUTE and trace.last_remade_ahead:
            for sizes in trace.away[-2:-1]:
                self._give(sizes)
        elif op.kind in (OpKind.BACKWARD, OpKind.INPUT_GRAD):
            for sizes in trace.away[: -2 if trace.last_remade_ahead else -1]:
                self._give(sizes)

    def _give(self, sizes: Sequence[int]) -> None:
        self._used.subtract(map(buffer_size, sizes))


class Mail:
    """The messages that one stage holds while it goes through its operations.

    Args:
        size: bytes of a message.
        overlap: messages travel while operations compute. Without it, all that was sent has left before the next operation.
        notices: whether the messenger sees that a message has left. NCCL's does, by the time of the next message if no stage is
            late. gloo's knows that one has arrived only when an answer to it comes back.
    """

    def __init__(self, schedule: Schedule, stage: int, plan: ReceivePlan, size: int, *, overlap: bool, notices: bool) -> None:
        self._schedule, self._stage, self._plan, self._size = schedule, stage, plan, size
        self._overlap, self._notices = overlap, notices
        self._ops = schedule.linked_ops[stage]
        self._received = self._buffers = 0
        """Messages that are received or posted, and the buffers for them, which are reused and never freed."""
        self._own: set[Message] = set()
        """Messages between two chunks of this stage."""
        self._leaving: set[Message] = set()

    @property
    def bytes(self) -> int:
        """Bytes held now."""
        return self._size * (self._buffers + len(self._own) + len(self._leaving))

    def before(self, place: int) -> None:
        """Post receives before an operation."""
        self._received += len(self._plan.before[place])
        self._buffers = max(self._buffers, self._received)
        if not self._overlap:
            self._leaving.clear()

    def after(self, place: int) -> None:
        """After an operation, send its result and free what nobody reads any more."""
        op, _, gives = self._ops[place]
        if gives is not None:
            if self._schedule.stage_of_chunk[gives.chunk] == self._stage:
                self._own.add(gives)
            else:
                if self._notices:
                    self._leaving.clear()
                self._leaving.add(gives)
        if op.kind in (OpKind.BACKWARD, OpKind.WEIGHT_GRAD):
            for is_gradient in (False, True):
                self._read(Message(is_gradient, op.chunk, op.microbatch))
        self._leaving.difference_update(self._plan.arrived[place])

    def _read(self, message: Message) -> None:
        if message in self._own:
            self._own.remove(message)
        elif message.chunk > 0 if not message.is_gradient else message.chunk < self._schedule.num_chunks - 1:
            self._received -= 1
