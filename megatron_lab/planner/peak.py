"""Activation memory during a step: the peak of one rank over its operations, and the bytes that the rank sends in these operations.

Messages between stages are simulated in the order in which a run sends and receives them. Only the number of messages in memory is
tracked, no tensor (`iter_message_counts`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from megatron.config.config import Config
from megatron.memory.host_buffers import get_buffer_size
from megatron.model.build import Model
from megatron.parallel.context import ParallelContext
from megatron.pipeline_parallel.exchange import ReceivePlan, choose_receive_plans, plan_exchanges
from megatron.pipeline_parallel.executor import find_immediate_backwards, plan_prefetches
from megatron.spec.operations import Message, Op, OpType, Schedule
from megatron_lab.planner.chunk_trace import ChunkTrace
from megatron_lab.planner.planned_inputs import DocumentTensor, count_input_bytes
from megatron_lab.planner.storages import Transfer, merge_transfers


class Activations(NamedTuple):
    """Bytes of activations on one rank at the peak of a step, without the model's state (parameters, gradients, optimizer
    state)."""

    input_bytes: int
    """Bytes of the step's inputs: tokens, labels, masks and positions of all microbatches."""
    schedule_bytes: int
    """All other activations: tensors that microbatches hold between forward and backward, deferred weight gradients, temporary
    tensors of the operation at the peak, and messages between stages that are received, or sent but not yet confirmed."""
    host_bytes: int = 0
    """Bytes of the buffers in host memory for offloaded activations. These buffers are never freed."""
    offloaded_bytes: int = 0
    """Bytes of activations that are copied to host memory and back in a step."""

    @property
    def device_bytes(self) -> int:
        """Bytes of inputs and all other activations on the device."""
        return self.input_bytes + self.schedule_bytes


def build_receive_plans(schedule: Schedule, *, overlap: bool, device_type: str) -> list[ReceivePlan]:
    """Return the operations before which each stage posts its receives, and the operations after which it waits for its sends.

    Args:
        overlap: whether messages are in flight while operations compute.
        device_type: type of the job's devices, "cpu" or "cuda".
    """
    return choose_receive_plans(schedule, device_type).plans if overlap else plan_exchanges(schedule)


class OpMemory(NamedTuple):
    """Bytes of activations and messages on one rank during and after one operation of its schedule. The step's inputs are not
    included."""

    op: Op
    peak_bytes: int
    """Largest number of device bytes at any time during the operation."""
    remaining_bytes: int
    """Bytes that remain on the device after the operation."""
    host_bytes: int
    """Bytes of all host buffers for offloaded activations after the operation. Buffers are never freed."""
    offloaded_bytes: int = 0
    """Bytes that the operation copies to host memory."""


def compute_peak_activations(
    traces_by_chunk: Mapping[int, ChunkTrace],
    model: Model,
    config: Config,
    context: ParallelContext,
    schedule: Schedule,
    plans: Sequence[ReceivePlan],
    *,
    device_type: str,
    num_microbatches: int | None = None,
) -> Activations:
    """Return the activation memory at the peak over this rank's operations.

    Args:
        traces_by_chunk: trace (memory and communication of each operation) of each chunk of this rank, by chunk index.
        plans: result of `build_receive_plans`.
        device_type: type of the job's devices, "cpu" or "cuda".
        num_microbatches: microbatches of a step, if `schedule` contains only the first of them; None if it contains all.
    """
    document_tensors = frozenset[DocumentTensor]().union(*(trace.document_tensors for trace in traces_by_chunk.values()))
    sizes = (num_microbatches or schedule.num_microbatches, config.training.micro_batch_size, context.topology.cp)
    input_bytes = count_input_bytes(model, config.data, *sizes, document_tensors)
    op_memory = list(iter_op_memory(traces_by_chunk, model, config, context, schedule, plans, device_type=device_type))
    peak_bytes, host_bytes = (
        max((memory.peak_bytes for memory in op_memory), default=0),
        max((memory.host_bytes for memory in op_memory), default=0),
    )
    return Activations(input_bytes, peak_bytes, host_bytes, sum(memory.offloaded_bytes for memory in op_memory))


def iter_op_memory(
    traces: Mapping[int, ChunkTrace],
    model: Model,
    config: Config,
    context: ParallelContext,
    schedule: Schedule,
    plans: Sequence[ReceivePlan],
    *,
    device_type: str,
) -> Iterator[OpMemory]:
    """Yield the memory during and after each operation of this rank, in the order of the schedule.

    Args:
        traces: trace (memory and communication of each operation) of each chunk of this rank, by chunk index.
        plans: result of `build_receive_plans`.
        device_type: type of the job's devices, "cpu" or "cuda".
    """
    stage, micro_batch_size = context.group("pp").rank, config.training.micro_batch_size
    message_bytes, overlap = count_message_bytes(model, micro_batch_size, context), config.parallel.overlap_p2p_communication
    message_counts = iter_message_counts(schedule, stage, plans[stage], overlap=overlap, detects_completion=device_type == "cuda")
    ops, host_buffers = schedule.ops[stage], HostBuffers()
    offloads = any(trace.offloaded_sizes or trace.leaving_bytes or any(trace.fetched_bytes.values()) for trace in traces.values())
    immediate_backwards, prefetches = (
        (find_immediate_backwards(ops), plan_prefetches(ops)) if offloads else (frozenset[tuple[int, int]](), [None] * len(ops))
    )

    def get_trace(op: Op) -> ChunkTrace:
        trace = traces[op.chunk]
        return trace.immediate_trace if trace.immediate_trace is not None and op[1:] in immediate_backwards else trace

    live_bytes = leaving_bytes = offloaded_bytes = 0
    for op, prefetched_op, (num_during, num_remaining) in zip(ops, prefetches, message_counts, strict=True):
        trace = get_trace(op)
        if prefetched_op is not None:
            live_bytes += get_trace(prefetched_op).fetched_bytes[prefetched_op.type]
            host_buffers.start_fetch(prefetched_op, get_trace(prefetched_op))
        span = trace.ops[op.type]
        peak_bytes = live_bytes + span.peak_bytes + message_bytes * num_during
        live_bytes += span.net_bytes - leaving_bytes
        if offloads:
            leaving_bytes = trace.leaving_bytes if op.type is OpType.FORWARD else 0
            host_buffers.run_op(op, trace)
            offloaded_bytes = sum(map(sum, trace.offloaded_sizes)) if op.type is OpType.FORWARD else 0
        yield OpMemory(
            op, peak_bytes, live_bytes + message_bytes * num_remaining, host_buffers.bytes if offloads else 0, offloaded_bytes
        )


def sum_transfers(
    traces: Mapping[int, ChunkTrace], model: Model, micro_batch_size: int, context: ParallelContext, schedule: Schedule
) -> tuple[Transfer, ...]:
    """Return the bytes that this rank sends in the operations of a step, within its stage and to other stages.

    The sums are by process group, communication type and receiving stage. Reductions of gradients and gathers of parameters are not
    included.

    Args:
        traces: trace (memory and communication of each operation) of each chunk of this rank, by chunk index.
    """
    stage, message_bytes = context.group("pp").rank, count_message_bytes(model, micro_batch_size, context)
    transfers: list[Transfer] = []
    for (op_type, chunk), count in Counter((op.type, op.chunk) for op in schedule.ops[stage]).items():
        transfers += (transfer.repeat(count) for transfer in traces[chunk].ops[op_type].transfers)
        message = schedule.get_sent_message(Op(op_type, chunk, 0))
        if message is not None and schedule.stage_of_chunk[message.chunk] != stage:
            transfers.append(Transfer("pipeline", "send", count, count * message_bytes, schedule.stage_of_chunk[message.chunk]))
    return merge_transfers(transfers)


def count_message_bytes(model: Model, micro_batch_size: int, context: ParallelContext) -> int:
    """Return the bytes of a message from one rank to another stage: the hidden states of a microbatch, or their gradient."""
    hidden = model.get_stage_boundary(micro_batch_size, context.topology)["hidden"]
    return math.prod(hidden.shape) * hidden.dtype.itemsize


class HostBuffers:
    """Simulation of the host buffers for offloaded layers: how many are in use, and how many a run allocates. Buffers are reused by
    the rules of `megatron.memory.offload`."""

    def __init__(self) -> None:
        self._used: Counter[int] = Counter()
        self._allocated: Counter[int] = Counter()
        self._fetched_microbatches: set[tuple[int, int]] = set()

    @property
    def bytes(self) -> int:
        """Bytes of all host buffers allocated so far. Released buffers count too, because they are kept for reuse."""
        return sum(size * count for size, count in self._allocated.items())

    def start_fetch(self, op: Op, trace: ChunkTrace) -> None:
        """Release the host buffers of the offloaded layer that `op` needs first, so that other layers can reuse them. This layer is
        copied to the device during the previous operation."""
        if (
            trace.offloaded_sizes
            and op[1:] not in self._fetched_microbatches
            and (trace.is_last_recomputed_ahead or op.type is not OpType.RECOMPUTE)
        ):
            self._fetched_microbatches.add(op[1:])
            self._release(trace.offloaded_sizes[-1])

    def run_op(self, op: Op, trace: ChunkTrace) -> None:
        """Acquire the host buffers into which `op` offloads layers (in a forward), or release the host buffers from which `op`
        copies layers to the device."""
        if op.type is OpType.FORWARD:
            for sizes in trace.offloaded_sizes:
                self._used.update(map(get_buffer_size, sizes))
            self._allocated |= self._used
        elif op.type is OpType.RECOMPUTE and trace.is_last_recomputed_ahead:
            for sizes in trace.offloaded_sizes[-2:-1]:
                self._release(sizes)
        elif op.type in (OpType.BACKWARD, OpType.INPUT_GRAD):
            for sizes in trace.offloaded_sizes[: -2 if trace.is_last_recomputed_ahead else -1]:
                self._release(sizes)

    def _release(self, sizes: Sequence[int]) -> None:
        self._used.subtract(map(get_buffer_size, sizes))


def iter_message_counts(
    schedule: Schedule, stage: int, plan: ReceivePlan, *, overlap: bool, detects_completion: bool
) -> Iterator[tuple[int, int]]:
    """Yield, for each operation of a stage, the number of messages in memory while the operation runs, and the number after it.

    Args:
        plan: when the stage posts its receives and waits for its sends.
        overlap: whether messages are in flight while operations compute. Without overlap, all sends complete before the next
            operation.
        detects_completion: whether a rank notices that a send has completed, so that it frees the message. With NCCL it does, by
            the time of the next message, if no stage is late. With Gloo it knows only when a later message from the receiver
            arrives.
    """
    stage_of_chunk, last_chunk, last_readers = (
        schedule.stage_of_chunk,
        schedule.num_chunks - 1,
        (OpType.BACKWARD, OpType.WEIGHT_GRAD),
    )
    num_received = num_buffers = 0  # messages received or posted; their buffers, which are reused and never freed
    same_stage_messages: set[Message] = set()  # messages between two chunks of this stage
    unconfirmed_sends: set[Message] = set()
    for (op, _, sent_message), posted, confirmed_sends in zip(
        schedule.linked_ops[stage], plan.posts, plan.completed_sends, strict=True
    ):
        num_received += len(posted)
        num_buffers = max(num_buffers, num_received)
        if not overlap:
            unconfirmed_sends.clear()
        num_during = num_buffers + len(same_stage_messages) + len(unconfirmed_sends)
        if sent_message is not None:
            if stage_of_chunk[sent_message.chunk] == stage:
                same_stage_messages.add(sent_message)
            else:
                if detects_completion:
                    unconfirmed_sends.clear()
                unconfirmed_sends.add(sent_message)
        op_type, chunk, microbatch = op
        if op_type in last_readers:  # this operation is the last reader of the messages that the chunk received
            for is_gradient, is_received in ((False, chunk > 0), (True, chunk < last_chunk)):
                if same_stage_messages and (message := Message(is_gradient, chunk, microbatch)) in same_stage_messages:
                    same_stage_messages.remove(message)
                else:
                    num_received -= is_received
        unconfirmed_sends.difference_update(confirmed_sends)
        yield num_during, num_buffers + len(same_stage_messages) + len(unconfirmed_sends)
