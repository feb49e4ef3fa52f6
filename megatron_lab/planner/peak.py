"""Activations over a step: what one rank holds at the peak of its schedule, and what it sends over tensor and pipeline groups.

Messages between stages follow the rules of the executor and the messenger, but with counts in place of tensors (`messages_held`).
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
from megatron.pipeline_parallel.exchange import ReceivePlan, choose_receives, plan_exchanges
from megatron.pipeline_parallel.executor import back_soon, fetched_during
from megatron.spec.operations import Message, Op, OpKind, Schedule
from megatron_lab.planner.chunk_trace import ChunkTrace
from megatron_lab.planner.planned_inputs import PlaceOfDocuments, input_bytes
from megatron_lab.planner.storages import Transfer, added


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
    size, overlap = message_bytes(model, micro_batch_size, context), config.parallel.overlap_p2p_communication
    mail = messages_held(schedule, stage, plans[stage], overlap=overlap, notices=device_type == "cuda")
    ops, host = schedule.ops[stage], HostBuffers()
    moves = any(trace.away or trace.leaving or any(trace.fetched.values()) for trace in traces.values())
    soon, fetches = (back_soon(ops), fetched_during(ops)) if moves else (frozenset[tuple[int, int]](), [None] * len(ops))

    def trace_of(op: Op) -> ChunkTrace:
        trace = traces[op.chunk]
        return trace.soon if trace.soon is not None and op[1:] in soon else trace

    kept = leaving = to_host = 0
    for op, following, (before, after) in zip(ops, fetches, mail, strict=True):
        trace = trace_of(op)
        if following is not None:
            kept += trace_of(following).fetched[following.kind]
            host.before(following, trace_of(following))
        span = trace.ops[op.kind]
        peak = kept + span.peak + size * before
        kept += span.change - leaving
        if moves:
            leaving = trace.leaving if op.kind is OpKind.FORWARD else 0
            host.within(op, trace)
            to_host = sum(map(sum, trace.away)) if op.kind is OpKind.FORWARD else 0
        yield Held(op, peak, kept + size * after, host.bytes if moves else 0, to_host)


def step_transfers(
    traces: Mapping[int, ChunkTrace], model: Model, micro_batch_size: int, context: ParallelContext, schedule: Schedule
) -> tuple[Transfer, ...]:
    """What this rank sends in a step over its tensor group and to other stages."""
    stage, size = context.group("pp").index, message_bytes(model, micro_batch_size, context)
    sent: list[Transfer] = []
    for (kind, chunk), times in Counter((op.kind, op.chunk) for op in schedule.ops[stage]).items():
        sent += (one.repeated(times) for one in traces[chunk].ops[kind].sent)
        gives = schedule.gives(Op(kind, chunk, 0))
        if gives is not None and schedule.stage_of_chunk[gives.chunk] != stage:
            sent.append(Transfer("pipeline", "send", times, times * size, schedule.stage_of_chunk[gives.chunk]))
    return added(sent)


def message_bytes(model: Model, micro_batch_size: int, context: ParallelContext) -> int:
    """Bytes that a rank sends to another stage for a microbatch."""
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


def messages_held(schedule: Schedule, stage: int, plan: ReceivePlan, *, overlap: bool, notices: bool) -> Iterator[tuple[int, int]]:
    """How many messages a stage holds while each of its operations runs, and after it.

    Args:
        overlap: messages travel while operations compute. Without it, all that was sent has left before the next operation.
        notices: whether the messenger sees that a message has left. NCCL's does, by the time of the next message if no stage is
            late. gloo's knows that one has arrived only when an answer to it comes back.
    """
    stage_of_chunk, last, reads = schedule.stage_of_chunk, schedule.num_chunks - 1, (OpKind.BACKWARD, OpKind.WEIGHT_GRAD)
    received = buffers = 0  # messages that are received or posted; buffers for them, which are reused and never freed
    own: set[Message] = set()  # between two chunks of this stage
    leaving: set[Message] = set()
    for (op, _, gives), posted, arrived in zip(schedule.linked_ops[stage], plan.before, plan.arrived, strict=True):
        received += len(posted)
        buffers = max(buffers, received)
        if not overlap:
            leaving.clear()
        during = buffers + len(own) + len(leaving)
        if gives is not None:
            if stage_of_chunk[gives.chunk] == stage:
                own.add(gives)
            else:
                if notices:
                    leaving.clear()
                leaving.add(gives)
        kind, chunk, microbatch = op
        if kind in reads:  # nobody reads the messages any more that the chunk has got
            for is_gradient, comes in ((False, chunk > 0), (True, chunk < last)):
                if own and (message := Message(is_gradient, chunk, microbatch)) in own:
                    own.remove(message)
                else:
                    received -= comes
        leaving.difference_update(arrived)
        yield during, buffers + len(own) + len(leaving)
