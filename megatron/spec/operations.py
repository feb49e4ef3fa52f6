"""Pipeline schedules as data: a list of operations for each stage.

A generator builds a schedule (`megatron.spec.schedules`). In `megatron.pipeline_parallel`, a validator checks it, a simulator times
it and an executor runs it.

Messages between stages are not listed because they follow from the operations: the output of chunk c goes to chunk c + 1 in
forward, and its input gradient goes to chunk c - 1 in backward, whatever stages these chunks are on.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple


class OpType(enum.StrEnum):
    """Type of an operation in a pipeline schedule.

    BACKWARD computes input gradients and weight gradients together. A schedule may split it into INPUT_GRAD and WEIGHT_GRAD.

    RECOMPUTE runs the forward again for those layers of a chunk that backward reaches first, if only their input was saved. It
    needs no message, so it can run while the stage waits for the gradient.
    """

    FORWARD = "F"
    RECOMPUTE = "R"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"


class Op(NamedTuple):
    """Operation in a pipeline schedule, such as the forward of one microbatch in one model chunk."""

    type: OpType
    chunk: int
    microbatch: int


class Message(NamedTuple):
    """Result that an operation sends to a neighboring model chunk: an activation to the next chunk, or a gradient to the previous
    chunk."""

    is_gradient: bool
    chunk: int
    """Index of the model chunk that receives the message."""
    microbatch: int


class LinkedOp(NamedTuple):
    """Operation with the message that it receives and the message that it sends; None if it receives or sends none."""

    op: Op
    receives: Message | None
    sends: Message | None


@dataclass(frozen=True)
class Schedule:
    """Pipeline schedule: the operations of every stage, in the order in which the stage runs them."""

    name: str
    num_microbatches: int
    stage_of_chunk: tuple[int, ...]
    ops: tuple[tuple[Op, ...], ...]

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return len(self.ops)

    @property
    def num_chunks(self) -> int:
        """Number of model chunks over all stages."""
        return len(self.stage_of_chunk)

    @cached_property
    def linked_ops(self) -> tuple[tuple[LinkedOp, ...], ...]:
        """Operations of every stage, each with the messages that it receives and sends. Sender and receiver of a message refer to
        the same `Message` object."""
        messages: dict[tuple[bool, int], list[Message]] = {}
        messages_of_op: dict[tuple[OpType, int], tuple[list[Message] | None, list[Message] | None]] = {}

        def expand_to_microbatches(message: Message | None) -> list[Message] | None:
            if message is None:
                return None
            if message[:2] not in messages:
                messages[message[:2]] = [Message(*message[:2], m) for m in range(self.num_microbatches)]
            return messages[message[:2]]

        def link(op: Op) -> LinkedOp:
            op_type, chunk, m = op
            if (op_type, chunk) not in messages_of_op:
                messages_of_op[op_type, chunk] = (
                    expand_to_microbatches(self.get_received_message(op)),
                    expand_to_microbatches(self.get_sent_message(op)),
                )
            received, sent = messages_of_op[op_type, chunk]
            return LinkedOp(op, None if received is None else received[m], None if sent is None else sent[m])

        return tuple(tuple(map(link, ops)) for ops in self.ops)

    def get_received_message(self, op: Op) -> Message | None:
        """Return the message that must arrive before an operation can run; None if it needs no message."""
        if op.type is OpType.FORWARD and op.chunk > 0:
            return Message(False, op.chunk, op.microbatch)
        if op.type in (OpType.BACKWARD, OpType.INPUT_GRAD) and op.chunk < self.num_chunks - 1:
            return Message(True, op.chunk, op.microbatch)
        return None

    def get_sent_message(self, op: Op) -> Message | None:
        """Return the message that an operation sends; None if it sends no message."""
        if op.type is OpType.FORWARD and op.chunk < self.num_chunks - 1:
            return Message(False, op.chunk + 1, op.microbatch)
        if op.type in (OpType.BACKWARD, OpType.INPUT_GRAD) and op.chunk > 0:
            return Message(True, op.chunk - 1, op.microbatch)
        return None


@dataclass(frozen=True)
class OpCosts:
    """Durations of the operations on one chunk, all in the same unit (the schedule plots use milliseconds)."""

    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0
    p2p: float = 0.0
    """Time from the end of an operation until its result arrives at another stage.

    Messages between chunks of the same stage take no time.
    """
    recompute: float = 0.0
    """Duration of a RECOMPUTE operation, which recomputes layers before the gradient arrives.

    Recomputation within backward counts as part of `input_grad`.
    """

    def get_duration(self, op: Op) -> float:
        """Return the duration of an operation. BACKWARD takes the time of INPUT_GRAD plus WEIGHT_GRAD."""
        if op.type is OpType.FORWARD:
            return self.forward
        if op.type is OpType.RECOMPUTE:
            return self.recompute
        if op.type is OpType.INPUT_GRAD:
            return self.input_grad
        return self.weight_grad if op.type is OpType.WEIGHT_GRAD else self.input_grad + self.weight_grad

    def divide_by_chunks(self, chunks_per_stage: int) -> OpCosts:
        """Return the durations of operations on one chunk, if a stage is divided into `chunks_per_stage` equal chunks and this
        object has the durations of operations on the full stage. The time of a message (`p2p`) does not change."""
        num_chunks = chunks_per_stage
        return OpCosts(
            self.forward / num_chunks,
            self.input_grad / num_chunks,
            self.weight_grad / num_chunks,
            self.p2p,
            self.recompute / num_chunks,
        )


def assign_chunks_round_robin(num_stages: int, chunks_per_stage: int = 1) -> tuple[int, ...]:
    """Return the stage of each chunk: chunk c is on stage c mod p, where p is the number of stages (Narayanan et al. 2021, section
    2.2.2)."""
    return tuple(range(num_stages)) * chunks_per_stage


def assign_chunks_v_shape(num_stages: int) -> tuple[int, ...]:
    """Return the stage of each chunk if each of p stages has two chunks in V shape (Qi et al. 2024, Controllable Memory).

    The stages ascend and then descend, so stage 0 has the first and the last chunk.
    """
    return (*range(num_stages), *reversed(range(num_stages)))


def extract_forwards(schedule: Schedule) -> Schedule:
    """Return a schedule with only the forward operations of a training schedule, for evaluation.

    The order stays valid, because removing operations from a valid order never invalidates it.
    """
    ops = tuple(tuple(op for op in stage if op.type is OpType.FORWARD) for stage in schedule.ops)
    return replace(schedule, name=f"{schedule.name}, forward only", ops=ops)


def add_recompute(schedule: Schedule, chunks: Collection[int]) -> Schedule:
    """Return the schedule with a RECOMPUTE operation before each BACKWARD or INPUT_GRAD operation of the given chunks."""

    def expand(op: Op) -> tuple[Op, ...]:
        needs_recompute = op.type in (OpType.BACKWARD, OpType.INPUT_GRAD) and op.chunk in chunks
        return (Op(OpType.RECOMPUTE, op.chunk, op.microbatch), op) if needs_recompute else (op,)

    return replace(schedule, ops=tuple(tuple(new_op for op in stage for new_op in expand(op)) for stage in schedule.ops))


def truncate_microbatches(schedule: Schedule, num_microbatches: int) -> Schedule:
    """Return a schedule with only the operations of the first `num_microbatches` microbatches.

    The order stays valid, because an operation depends only on operations of its own microbatch.
    """
    ops = tuple(tuple(op for op in stage if op.microbatch < num_microbatches) for stage in schedule.ops)
    return replace(schedule, num_microbatches=num_microbatches, ops=ops)
