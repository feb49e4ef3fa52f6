"""Activations over a step: what one rank holds at the peak of its schedule, and what it sends over tensor and pipeline groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.config.config import Config
from megatron.model.build import Model
from megatron.parallel.context import ParallelContext
from megatron.pipeline_parallel.exchange import ReceivePlan, plan_exchanges, plan_receives
from megatron.pipeline_parallel.p2p import TensorSpec
from megatron.planner.activations.chunk_trace import ChunkTrace
from megatron.planner.activations.collective_calls import Transfer, added
from megatron.planner.activations.mail import Mail
from megatron.planner.activations.microbatch import input_bytes
from megatron.spec.operations import Op, OpKind, Schedule


@dataclass(frozen=True)
class Activations:
    """Bytes on one rank at the peak of a step, beside the model's state."""

    at: Op
    """The operation of the peak."""
    live: int
    """Microbatches of a chunk whose forward has ended and whose backward has not, when it begins."""
    kept: int
    """What these keep."""
    deferred: int
    """What weight gradients that are put off keep."""
    passing: int
    """What comes and goes within the operation."""
    messages: int
    """Between stages: received, or not known to have arrived."""
    inputs: int
    """Tokens, labels, masks and positions of all microbatches."""

    @property
    def total(self) -> int:
        """All together."""
        return self.kept + self.deferred + self.passing + self.messages + self.inputs


def receive_plans(schedule: Schedule, *, overlap: bool) -> list[ReceivePlan]:
    """When each stage posts its receives: for `peak_activations` of all stages."""
    return plan_receives(schedule) if overlap else plan_exchanges(schedule)


def peak_activations(
    traces: Mapping[int, ChunkTrace],
    model: Model,
    config: Config,
    context: ParallelContext,
    schedule: Schedule,
    plans: Sequence[ReceivePlan],
) -> Activations:
    """The peak of this rank's operations.

    Args:
        traces: of this rank's chunks.
        plans: of `receive_plans`.
    """
    stage = context.group("pp").index
    boundary = model.boundary(config.training.micro_batch_size, context.topology.tp)
    size, overlap = _bytes(boundary["hidden"]), config.parallel.overlap_p2p_communication
    notices = any(trace.device_type == "cuda" for trace in traces.values())
    mail = Mail(schedule, stage, plans[stage], size, overlap=overlap, notices=notices)
    sorts = any(trace.sorts_documents for trace in traces.values())
    num_sequences = schedule.num_microbatches * config.training.micro_batch_size
    inputs = input_bytes(model, config.data, num_sequences, sorts_documents=sorts)
    live = kept = deferred = 0
    found = Activations(schedule.ops[stage][0], 0, 0, 0, 0, 0, inputs)
    for place, op in enumerate(schedule.ops[stage]):
        ops = traces[op.chunk].ops
        mail.before(place)
        if inputs + kept + deferred + ops[op.kind].peak + mail.bytes > found.total:
            found = Activations(op, live, kept, deferred, ops[op.kind].peak, mail.bytes, inputs)
        held = ops[OpKind.FORWARD].change
        if op.kind is OpKind.FORWARD:
            live, kept = live + 1, kept + held
        elif op.kind is OpKind.WEIGHT_GRAD:
            deferred -= held + ops[OpKind.INPUT_GRAD].change
        else:
            live, kept = live - 1, kept - held
            if op.kind is OpKind.INPUT_GRAD:
                deferred += held + ops[OpKind.INPUT_GRAD].change
        mail.behind(place)
    return found


def step_transfers(
    traces: Mapping[int, ChunkTrace], model: Model, micro_batch_size: int, context: ParallelContext, schedule: Schedule
) -> list[Transfer]:
    """What this rank sends in a step over its tensor group, and to other stages."""
    stage = context.group("pp").index
    size = _bytes(model.boundary(micro_batch_size, context.topology.tp)["hidden"])
    sent: list[Transfer] = []
    for op, _, gives in schedule.linked_ops[stage]:
        sent += traces[op.chunk].ops[op.kind].transfers
        if gives is not None and schedule.stage_of_chunk[gives.chunk] != stage:
            sent.append(Transfer("pp", "send", 1, size, schedule.stage_of_chunk[gives.chunk]))
    return added(sent)


def _bytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize
