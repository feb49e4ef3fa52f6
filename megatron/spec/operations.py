"""A schedule is data: for each stage, a list of operations. A generator makes it, the validator proves it, the simulator times it,
the executor runs it, pictures show it.

Messages between stages are not listed, since they follow from the operations: the result of chunk c goes to chunk c + 1 in forward
and to chunk c - 1 in backward, wherever these lie.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple


class OpKind(enum.StrEnum):
    """What an operation computes. BACKWARD computes input and weight gradients at once; a schedule may split it.

    RECOMPUTE runs the layers again that the gradient reaches first, of those that kept only their input. It needs no message, so it
    fills the time in which the stage would wait for the gradient.
    """

    FORWARD = "F"
    RECOMPUTE = "R"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"


class Op(NamedTuple):
    """One operation on one microbatch of one chunk."""

    kind: OpKind
    chunk: int
    microbatch: int


class Message(NamedTuple):
    """What an operation gives to a neighbouring chunk: an activation (to the next) or a gradient (to the one before)."""

    is_gradient: bool
    chunk: int
    """The chunk that receives it."""
    microbatch: int


class LinkedOp(NamedTuple):
    """An operation, the message that it needs, and the message that it gives."""

    op: Op
    needs: Message | None
    gives: Message | None


@dataclass(frozen=True)
class Schedule:
    """The operations of every stage, in order."""

    name: str
    num_microbatches: int
    stage_of_chunk: tuple[int, ...]
    ops: tuple[tuple[Op, ...], ...]

    @property
    def num_stages(self) -> int:
        """The number of pipeline stages."""
        return len(self.ops)

    @property
    def num_chunks(self) -> int:
        """The number of chunks of the model."""
        return len(self.stage_of_chunk)

    @cached_property
    def linked_ops(self) -> tuple[tuple[LinkedOp, ...], ...]:
        """The operations with their messages, computed once. A message is one object at both its ends."""
        made: dict[tuple[bool, int], list[Message]] = {}
        ends: dict[tuple[OpKind, int], tuple[list[Message] | None, list[Message] | None]] = {}

        def of_all_microbatches(message: Message | None) -> list[Message] | None:
            if message is None:
                return None
            if message[:2] not in made:
                made[message[:2]] = [Message(*message[:2], m) for m in range(self.num_microbatches)]
            return made[message[:2]]

        def linked(op: Op) -> LinkedOp:
            kind, chunk, m = op
            if (kind, chunk) not in ends:
                ends[kind, chunk] = of_all_microbatches(self.needs(op)), of_all_microbatches(self.gives(op))
            needed, given = ends[kind, chunk]
            return LinkedOp(op, None if needed is None else needed[m], None if given is None else given[m])

        return tuple(tuple(map(linked, ops)) for ops in self.ops)

    def needs(self, op: Op) -> Message | None:
        """The message that must have come before an operation, if any."""
        if op.kind is OpKind.FORWARD and op.chunk > 0:
            return Message(False, op.chunk, op.microbatch)
        if op.kind in (OpKind.BACKWARD, OpKind.INPUT_GRAD) and op.chunk < self.num_chunks - 1:
            return Message(True, op.chunk, op.microbatch)
        return None

    def gives(self, op: Op) -> Message | None:
        """The message that an operation sends, if any."""
        if op.kind is OpKind.FORWARD and op.chunk < self.num_chunks - 1:
            return Message(False, op.chunk + 1, op.microbatch)
        if op.kind in (OpKind.BACKWARD, OpKind.INPUT_GRAD) and op.chunk > 0:
            return Message(True, op.chunk - 1, op.microbatch)
        return None


@dataclass(frozen=True)
class Costs:
    """Durations of the operations on one chunk, all in one unit (pictures take milliseconds)."""

    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0
    p2p: float = 0.0
    """Time from the end of an operation until its result has arrived at another stage; 0 between chunks of one stage."""
    recompute: float = 0.0
    """Time to run layers again ahead of backward. What is run again within backward is part of the input gradient."""

    def of(self, op: Op) -> float:
        """Duration of an operation. A whole backward takes the time of an input gradient and a weight gradient."""
        if op.kind is OpKind.FORWARD:
            return self.forward
        if op.kind is OpKind.RECOMPUTE:
            return self.recompute
        if op.kind is OpKind.INPUT_GRAD:
            return self.input_grad
        return self.weight_grad if op.kind is OpKind.WEIGHT_GRAD else self.input_grad + self.weight_grad

    def divided(self, chunks_per_stage: int) -> Costs:
        """The costs of a chunk, if these are the costs of a whole stage."""
        n = chunks_per_stage
        return Costs(self.forward / n, self.input_grad / n, self.weight_grad / n, self.p2p, self.recompute / n)


def loop(num_stages: int, chunks_per_stage: int = 1) -> tuple[int, ...]:
    """The stage of each chunk, round and round: chunk c lies on stage c mod p (Narayanan et al. 2021, section 2.2.2)."""
    return tuple(range(num_stages)) * chunks_per_stage


def v_shape(num_stages: int) -> tuple[int, ...]:
    """The stage of each chunk, down and up again: first and last chunk share stage 0 (Qi et al. 2024, Controllable Memory)."""
    return (*range(num_stages), *reversed(range(num_stages)))


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of a training schedule, for evaluation. (A valid order stays valid when operations are left out.)"""
    ops = tuple(tuple(op for op in stage if op.kind is OpKind.FORWARD) for stage in schedule.ops)
    return replace(schedule, name=f"{schedule.name}, forward only", ops=ops)


def with_recompute(schedule: Schedule, chunks: Collection[int]) -> Schedule:
    """The schedule with an operation that runs layers again before each backward (or input gradient) of these chunks."""

    def added(op: Op) -> tuple[Op, ...]:
        first = op.kind in (OpKind.BACKWARD, OpKind.INPUT_GRAD) and op.chunk in chunks
        return (Op(OpKind.RECOMPUTE, op.chunk, op.microbatch), op) if first else (op,)

    return replace(schedule, ops=tuple(tuple(one for op in stage for one in added(op)) for stage in schedule.ops))


def first_microbatches(schedule: Schedule, num_microbatches: int) -> Schedule:
    """The schedule without the microbatches from `num_microbatches` on. Those before never wait for one of them."""
    ops = tuple(tuple(op for op in stage if op.microbatch < num_microbatches) for stage in schedule.ops)
    return replace(schedule, num_microbatches=num_microbatches, ops=ops)
