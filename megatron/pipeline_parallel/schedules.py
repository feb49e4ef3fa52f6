"""A schedule is data: for each stage, a list of operations. Generators make it, the validator proves it, the executor runs it.

A new schedule is a new generator and nothing else. Messages between stages are not listed: they follow from the operations, because
the result of chunk c goes to chunk c + 1 forward and to chunk c - 1 backward, wherever these lie.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass


class OpKind(enum.Enum):
    """What an operation computes. A backward is an input gradient and a weight gradient in one; a schedule may split it."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"


@dataclass(frozen=True)
class Op:
    """One operation on one microbatch of one chunk."""

    kind: OpKind
    chunk: int
    microbatch: int


@dataclass(frozen=True)
class Message:
    """What an operation of one chunk gives to a neighbouring one: an activation (to the next) or a gradient (to the one before)."""

    is_gradient: bool
    chunk: int
    """The chunk that receives it."""
    microbatch: int


@dataclass(frozen=True)
class Schedule:
    """Operations of every stage, in order."""

    name: str
    num_microbatches: int
    stage_of_chunk: tuple[int, ...]
    ops: tuple[tuple[Op, ...], ...]

    @property
    def num_stages(self) -> int:
        """Pipeline ranks."""
        return len(self.ops)

    @property
    def num_chunks(self) -> int:
        """Parts of the model."""
        return len(self.stage_of_chunk)

    def needs(self, op: Op) -> Message | None:
        """The message that must have come before an operation, if any."""
        if op.kind is OpKind.FORWARD and op.chunk > 0:
            return Message(False, op.chunk, op.microbatch)
        if op.kind in (OpKind.BACKWARD, OpKind.INPUT_GRAD) and op.chunk < self.num_chunks - 1:
            return Message(True, op.chunk, op.microbatch)
        return None

    def gives(self, op: Op) -> Message | None:
        """The message that an operation results in, if any."""
        if op.kind is OpKind.FORWARD and op.chunk < self.num_chunks - 1:
            return Message(False, op.chunk + 1, op.microbatch)
        if op.kind in (OpKind.BACKWARD, OpKind.INPUT_GRAD) and op.chunk > 0:
            return Message(True, op.chunk - 1, op.microbatch)
        return None


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019): up to `num_microbatches` live activations."""
    ops = tuple(
        tuple(Op(OpKind.FORWARD, stage, m) for m in range(num_microbatches))
        + tuple(Op(OpKind.BACKWARD, stage, m) for m in range(num_microbatches))
        for stage in range(num_stages)
    )
    return Schedule("gpipe", num_microbatches, tuple(range(num_stages)), ops)


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """One forward, one backward in turn (PipeDream-Flush, Narayanan et al. 2021, fig. 4).

    Warm-up is `num_stages - stage - 1` forwards, so at most that many plus one activations are alive.
    """

    def stage_ops(stage: int) -> tuple[Op, ...]:
        warmup = min(num_stages - stage - 1, num_microbatches)
        ops = [Op(OpKind.FORWARD, stage, m) for m in range(warmup)]
        for m in range(num_microbatches - warmup):
            ops += [Op(OpKind.FORWARD, stage, warmup + m), Op(OpKind.BACKWARD, stage, m)]
        return tuple(ops + [Op(OpKind.BACKWARD, stage, m) for m in range(num_microbatches - warmup, num_microbatches)])

    return Schedule("1f1b", num_microbatches, tuple(range(num_stages)), tuple(map(stage_ops, range(num_stages))))


def forward_only(num_stages: int, num_microbatches: int) -> Schedule:
    """Evaluation: every forward, nothing else."""
    ops = tuple(tuple(Op(OpKind.FORWARD, stage, m) for m in range(num_microbatches)) for stage in range(num_stages))
    return Schedule("forward-only", num_microbatches, tuple(range(num_stages)), ops)


GENERATORS: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "forward-only": forward_only,
}
