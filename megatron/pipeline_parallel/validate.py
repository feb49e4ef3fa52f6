"""Proves that a schedule is complete and cannot deadlock, and counts the activations that it keeps. Needs no processes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import TypeVar

from megatron.pipeline_parallel.exchange import ReceivePlan, choose_receives, deliveries, plan_exchanges, stuck
from megatron.pipeline_parallel.simulate import walk
from megatron.spec.operations import Message, Op, OpKind, Schedule

Number = TypeVar("Number", int, float)


def validate(schedule: Schedule, device_type: str = "cpu") -> tuple[list[ReceivePlan], list[ReceivePlan]]:
    """Walk all stages at once, each as far as its messages allow. Then prove the plans of its messages: both ends of every channel
    follow one order; and exchanges cannot deadlock: they are simulated with messages that let neither end go on before the other
    has come. On CUDA both are proved where all streams of a device share one hardware queue (`queues`).

    Args:
        device_type: of the job's devices.

    Returns:
        the plan of each stage with overlap (`choose_receives`), and without (`plan_exchanges`).

    Raises:
        ValueError: an operation is missing, doubled or on the wrong stage; some microbatches of a chunk have a recompute and others
            none; a backward or a recompute stands before its forward, a backward before its recompute, a weight gradient before its
            input gradient; the stages wait for each other, in a hardware queue too, or the ends of a channel do not agree on the
            order.
    """
    _check_complete(schedule)
    done: set[Op] = set()
    recomputed = {(op.chunk, op.microbatch) for ops in schedule.ops for op in ops if op.kind is OpKind.RECOMPUTE}
    for _, (op, _, _) in walk(schedule):
        _check_order(op, done, recomputed)
        done.add(op)
    receives, exchanges = choose_receives(schedule, device_type).plans, plan_exchanges(schedule)
    for plans in (receives, exchanges):
        _check_channels(schedule, plans)
    _check_exchanges(schedule, exchanges)
    for plans, waits in ((receives, False), (exchanges, True)) if device_type == "cuda" else ():
        if lost := stuck(schedule, plans, exchanges=waits):
            raise ValueError(
                f"schedule {schedule.name} locks up where all streams share one hardware queue: {lost[0]} never passes"
            )
    return receives, exchanges


def _check_order(op: Op, done: set[Op], recomputed: set[tuple[int, int]]) -> None:
    first = OpKind.INPUT_GRAD if op.kind is OpKind.WEIGHT_GRAD else OpKind.FORWARD
    if op.kind in (OpKind.BACKWARD, OpKind.INPUT_GRAD) and (op.chunk, op.microbatch) in recomputed:
        first = OpKind.RECOMPUTE
    if op.kind is not OpKind.FORWARD and Op(first, op.chunk, op.microbatch) not in done:
        raise ValueError(f"{op} stands before its {first.name.lower()}")


def _check_complete(schedule: Schedule) -> None:
    counts: Counter[Op] = Counter()
    for stage, ops in enumerate(schedule.ops):
        for op in ops:
            if not 0 <= op.chunk < schedule.num_chunks or schedule.stage_of_chunk[op.chunk] != stage:
                raise ValueError(f"{op} stands on stage {stage}, which does not hold its chunk")
            counts[op] += 1
    has_backward = any(op.kind is not OpKind.FORWARD for op in counts)
    recomputed = {op.chunk for op in counts if op.kind is OpKind.RECOMPUTE}
    for chunk in range(schedule.num_chunks):
        for m in range(schedule.num_microbatches):
            found = {kind: counts.pop(Op(kind, chunk, m), 0) for kind in OpKind}
            backward = (found[OpKind.BACKWARD], found[OpKind.INPUT_GRAD], found[OpKind.WEIGHT_GRAD])
            allowed = ((1, 0, 0), (0, 1, 1)) if has_backward else ((0, 0, 0),)
            if found[OpKind.FORWARD] != 1 or backward not in allowed or found[OpKind.RECOMPUTE] != (chunk in recomputed):
                raise ValueError(f"chunk {chunk}, microbatch {m}: each must be computed exactly once, found {found}")
    if counts:
        raise ValueError(f"operations on microbatches that do not exist: {sorted(map(str, counts))[:4]}")


def _check_channels(schedule: Schedule, plans: list[ReceivePlan]) -> None:
    for stage, (plan, arriving) in enumerate(zip(plans, deliveries(schedule), strict=True)):
        posted = [(source, message) for due in plan.before for message, source in due]
        if sorted(posted, key=itemgetter(0)) != [(source, message) for source, _, message in arriving]:  # these are by source
            raise ValueError(
                f"schedule {schedule.name}: stage {stage} does not receive what is sent to it, in the order it is sent"
            )


def _check_exchanges(schedule: Schedule, plans: list[ReceivePlan]) -> None:
    rounds = [list(_exchanges(schedule, stage, plan)) for stage, plan in enumerate(plans)]
    position = [0] * schedule.num_stages
    offered: dict[Message, int] = {}
    open_ends = [0] * schedule.num_stages
    ready = list(range(schedule.num_stages))
    while ready:
        stage = ready.pop()
        while open_ends[stage] == 0 and position[stage] < len(rounds[stage]):
            for message in rounds[stage][position[stage]]:
                if message in offered:
                    peer = offered.pop(message)
                    open_ends[peer] -= 1
                    if open_ends[peer] == 0:
                        ready.append(peer)
                else:
                    offered[message] = stage
                    open_ends[stage] += 1
            position[stage] += 1
    if offered:
        stuck = ", ".join(f"{message} (offered by stage {stage})" for message, stage in list(offered.items())[:4])
        raise ValueError(f"schedule {schedule.name} locks up when sends and receives wait for each other: {stuck}")


def _exchanges(schedule: Schedule, stage: int, plan: ReceivePlan) -> Iterator[list[Message]]:
    """The messages that a stage exchanges before each operation, and after the last."""
    given: list[Message] = []
    for (_, _, gives), due in zip(schedule.linked_ops[stage], plan.before, strict=True):
        yield [message for message, _ in due] + given
        given = [] if gives is None or schedule.stage_of_chunk[gives.chunk] == stage else [gives]
    yield given


def peak_live_activations(schedule: Schedule) -> tuple[int, ...]:
    """For each stage, the most microbatch activations (of one chunk each) kept at once. Each is kept until its weight gradient."""
    return _peaks(schedule, lambda op: (op.kind is OpKind.FORWARD) - (op.kind in (OpKind.BACKWARD, OpKind.WEIGHT_GRAD)))


def peak_kept(schedule: Schedule, kept: Sequence[float]) -> tuple[float, ...]:
    """For each stage, the most that is kept at once between the two gradients, if a microbatch keeps `kept[chunk]`."""
    signs = {OpKind.INPUT_GRAD: 1.0, OpKind.WEIGHT_GRAD: -1.0}
    return _peaks(schedule, lambda op: signs.get(op.kind, 0.0) * kept[op.chunk])


def _peaks(schedule: Schedule, change: Callable[[Op], Number]) -> tuple[Number, ...]:
    """For each stage, the largest sum of the changes so far."""
    return tuple(max(itertools.accumulate(map(change, ops)), default=0) for ops in schedule.ops)
