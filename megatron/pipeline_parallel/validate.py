"""Proves that a schedule is complete and cannot deadlock, and counts its live activations. Pure; needs no process."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from megatron.pipeline_parallel.schedules import Message, Op, OpKind, Schedule


@dataclass(frozen=True)
class ScheduleReport:
    """What the proof found."""

    peak_live_activations: tuple[int, ...]
    """For each stage, the most microbatch activations (of one chunk each) alive at once; one lives until its weight gradient."""


def validate(schedule: Schedule) -> ScheduleReport:
    """Walk all stages at once, each as far as its messages allow.

    Raises:
        ValueError: an operation is missing, doubled or on the wrong stage; a backward stands before its forward, a weight gradient
            before its input gradient; or the stages wait for each other.
    """
    _check_complete(schedule)
    position = [0] * schedule.num_stages
    sent: set[Message] = set()
    live = [0] * schedule.num_stages
    peak = [0] * schedule.num_stages
    done: set[Op] = set()
    moved = True
    while moved:
        moved = False
        for stage, ops in enumerate(schedule.ops):
            while position[stage] < len(ops):
                op = ops[position[stage]]
                needed = schedule.needs(op)
                if needed is not None and needed not in sent:
                    break
                _check_order(op, done)
                done.add(op)
                live[stage] += (op.kind is OpKind.FORWARD) - (op.kind in (OpKind.BACKWARD, OpKind.WEIGHT_GRAD))
                peak[stage] = max(peak[stage], live[stage])
                given = schedule.gives(op)
                if given is not None:
                    sent.add(given)
                position[stage] += 1
                moved = True
    stuck = {stage: ops[position[stage]] for stage, ops in enumerate(schedule.ops) if position[stage] < len(ops)}
    if stuck:
        waits = "; ".join(f"stage {stage} before {op.kind.value} of microbatch {op.microbatch}" for stage, op in stuck.items())
        raise ValueError(f"schedule {schedule.name} deadlocks: {waits}")
    return ScheduleReport(tuple(peak))


def _check_order(op: Op, done: set[Op]) -> None:
    first = {
        OpKind.BACKWARD: OpKind.FORWARD,
        OpKind.INPUT_GRAD: OpKind.FORWARD,
        OpKind.WEIGHT_GRAD: OpKind.INPUT_GRAD,
    }.get(op.kind)
    if first is not None and Op(first, op.chunk, op.microbatch) not in done:
        raise ValueError(f"{op} stands before its {first.name.lower()}")


def _check_complete(schedule: Schedule) -> None:
    counts: Counter[Op] = Counter()
    for stage, ops in enumerate(schedule.ops):
        for op in ops:
            if not 0 <= op.chunk < schedule.num_chunks or schedule.stage_of_chunk[op.chunk] != stage:
                raise ValueError(f"{op} stands on stage {stage}, which does not hold its chunk")
            counts[op] += 1
    has_backward = any(op.kind is not OpKind.FORWARD for op in counts)
    for chunk in range(schedule.num_chunks):
        for m in range(schedule.num_microbatches):
            found = {kind: counts.pop(Op(kind, chunk, m), 0) for kind in OpKind}
            backward = (found[OpKind.BACKWARD], found[OpKind.INPUT_GRAD], found[OpKind.WEIGHT_GRAD])
            allowed = ((1, 0, 0), (0, 1, 1)) if has_backward else ((0, 0, 0),)
            if found[OpKind.FORWARD] != 1 or backward not in allowed:
                raise ValueError(f"chunk {chunk}, microbatch {m}: each must be computed exactly once, found {found}")
    if counts:
        raise ValueError(f"operations on microbatches that do not exist: {sorted(map(str, counts))[:4]}")
