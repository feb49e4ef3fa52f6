"""Checks that a pipeline schedule is complete and cannot deadlock, and computes its peak activation counts. No function needs
process groups."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import TypeVar

from megatron.pipeline_parallel.exchange import (
    ReceivePlan,
    choose_receive_plans,
    find_stuck_messages,
    list_deliveries,
    plan_exchanges,
)
from megatron.pipeline_parallel.simulate import iterate_runnable_ops
from megatron.spec.operations import Message, Op, OpType, Schedule

Num = TypeVar("Num", int, float)


def validate(schedule: Schedule, device_type: str = "cpu") -> tuple[list[ReceivePlan], list[ReceivePlan]]:
    """Check that a pipeline schedule is complete and that its communication cannot deadlock.

    The check runs through all stages together, each as far as its messages allow. Then it proves two properties of the
    communication plans:

    - The sender and the receiver of every channel (messages from one stage to another) follow the same order.
    - Without overlap, communication does not deadlock, even if each send and receive blocks until the other rank makes the matching
      call.

    On CUDA, both plans are also proved under the assumption that all streams of a device share one hardware queue
    (`find_stuck_messages`).

    Args:
        device_type: type of the run's devices.

    Returns:
        Plan of each stage with overlap (`choose_receive_plans`), and without (`plan_exchanges`).

    Raises:
        ValueError: an operation is missing, duplicated or on the wrong stage; only some microbatches of a chunk have a recompute; a
            backward or a recompute precedes its forward, a backward its recompute, or a weight gradient its input gradient; stages,
            or work in a hardware queue, wait for each other; or the ends of a channel do not agree on the order.
    """
    _check_complete(schedule)
    done: set[Op] = set()
    recomputed = {(op.chunk, op.microbatch) for ops in schedule.ops for op in ops if op.type is OpType.RECOMPUTE}
    for _, (op, _, _) in iterate_runnable_ops(schedule):
        _check_order(op, done, recomputed)
        done.add(op)
    receives, exchanges = choose_receive_plans(schedule, device_type).plans, plan_exchanges(schedule)
    for plans in (receives, exchanges):
        _check_channels(schedule, plans)
    _check_exchanges(schedule, exchanges)
    for plans, waits_for_exchanges in ((receives, False), (exchanges, True)) if device_type == "cuda" else ():
        if stuck_messages := find_stuck_messages(schedule, plans, exchanges=waits_for_exchanges):
            raise ValueError(
                f"schedule {schedule.name} deadlocks if all streams share one hardware queue: {stuck_messages[0]} never arrives. "
                "Reorder the operations of the schedule"
            )
    return receives, exchanges


def _check_order(op: Op, done: set[Op], recomputed: set[tuple[int, int]]) -> None:
    prerequisite = OpType.INPUT_GRAD if op.type is OpType.WEIGHT_GRAD else OpType.FORWARD
    if op.type in (OpType.BACKWARD, OpType.INPUT_GRAD) and (op.chunk, op.microbatch) in recomputed:
        prerequisite = OpType.RECOMPUTE
    if op.type is not OpType.FORWARD and Op(prerequisite, op.chunk, op.microbatch) not in done:
        raise ValueError(
            f"the pipeline schedule is wrong: {op} is scheduled before its {prerequisite.name.lower()}. Exchange the two operations"
        )


def _check_complete(schedule: Schedule) -> None:
    counts: Counter[Op] = Counter()
    for stage, ops in enumerate(schedule.ops):
        for op in ops:
            if not 0 <= op.chunk < schedule.num_chunks or schedule.stage_of_chunk[op.chunk] != stage:
                raise ValueError(
                    f"the pipeline schedule is wrong: {op} is scheduled on stage {stage}, which does not hold its chunk. "
                    "Schedule the operation on the stage of the chunk"
                )
            counts[op] += 1
    has_backward = any(op.type is not OpType.FORWARD for op in counts)
    recomputed = {op.chunk for op in counts if op.type is OpType.RECOMPUTE}
    for chunk in range(schedule.num_chunks):
        for m in range(schedule.num_microbatches):
            type_counts = {op_type: counts.pop(Op(op_type, chunk, m), 0) for op_type in OpType}
            backward = (type_counts[OpType.BACKWARD], type_counts[OpType.INPUT_GRAD], type_counts[OpType.WEIGHT_GRAD])
            allowed = ((1, 0, 0), (0, 1, 1)) if has_backward else ((0, 0, 0),)
            if (
                type_counts[OpType.FORWARD] != 1
                or backward not in allowed
                or type_counts[OpType.RECOMPUTE] != (chunk in recomputed)
            ):
                counts_text = ", ".join(f"{op_type.name.lower()} {count} times" for op_type, count in type_counts.items())
                raise ValueError(
                    f"the pipeline schedule is wrong: chunk {chunk}, microbatch {m}: each pass must be scheduled exactly once, "
                    "but the "
                    f"schedule has {counts_text}. Add the missing operations, and remove the others"
                )
    if counts:
        raise ValueError(
            f"the pipeline schedule has operations on microbatches that do not exist: {sorted(map(str, counts))[:4]}. "
            "Remove these operations"
        )


def _check_channels(schedule: Schedule, plans: list[ReceivePlan]) -> None:
    for stage, (plan, arriving) in enumerate(zip(plans, list_deliveries(schedule), strict=True)):
        posted = [(source, message) for due in plan.posts for message, source in due]
        if sorted(posted, key=itemgetter(0)) != [(source, message) for source, _, message in arriving]:  # sorted by source
            raise ValueError(
                f"schedule {schedule.name}: stage {stage} does not receive its messages in the order in which they are sent. "
                "Reorder the operations of the schedule"
            )


def _check_exchanges(schedule: Schedule, plans: list[ReceivePlan]) -> None:
    exchanges = [list(_list_exchanges(schedule, stage, plan)) for stage, plan in enumerate(plans)]
    position = [0] * schedule.num_stages
    offered: dict[Message, int] = {}
    open_ends = [0] * schedule.num_stages
    ready = list(range(schedule.num_stages))
    while ready:
        stage = ready.pop()
        while open_ends[stage] == 0 and position[stage] < len(exchanges[stage]):
            for message in exchanges[stage][position[stage]]:
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
        details = ", ".join(f"{message} (by stage {stage})" for message, stage in list(offered.items())[:4])
        raise ValueError(
            f"schedule {schedule.name} deadlocks if each send and receive blocks until the other rank posts the matching call. "
            f"These messages never get a matching call: {details}. Reorder the operations of the schedule"
        )


def _list_exchanges(schedule: Schedule, stage: int, plan: ReceivePlan) -> Iterator[list[Message]]:
    """Yield, for each operation of a stage, the messages that must be exchanged before the operation runs if sends block like
    receives: the messages that the stage receives before it, and the result of the previous operation. At the end, yield the result
    of the last operation. Results for the same stage are left out."""
    outgoing: list[Message] = []
    for (_, _, sent), due in zip(schedule.linked_ops[stage], plan.posts, strict=True):
        yield [message for message, _ in due] + outgoing
        outgoing = [] if sent is None or schedule.stage_of_chunk[sent.chunk] == stage else [sent]
    yield outgoing


def compute_peak_live_activations(schedule: Schedule) -> tuple[int, ...]:
    """Return for each stage the largest number of activations in memory at a time. One activation here means all saved tensors of
    one microbatch in one model chunk.

    An activation stays in memory until its weight gradient has been computed.
    """
    return _compute_peak_sums(schedule, lambda op: (op.type is OpType.FORWARD) - (op.type in (OpType.BACKWARD, OpType.WEIGHT_GRAD)))


def compute_peak_deferred_memory(schedule: Schedule, deferred_sizes: Sequence[float]) -> tuple[float, ...]:
    """Return for each stage the peak memory of tensors that wait for a deferred weight gradient, in the unit of `deferred_sizes`.

    Args:
        deferred_sizes: memory that one microbatch occupies from its input gradient to its weight gradient, for each chunk.
    """
    signs = {OpType.INPUT_GRAD: 1.0, OpType.WEIGHT_GRAD: -1.0}
    return _compute_peak_sums(schedule, lambda op: signs.get(op.type, 0.0) * deferred_sizes[op.chunk])


def _compute_peak_sums(schedule: Schedule, delta: Callable[[Op], Num]) -> tuple[Num, ...]:
    """Return for each stage the largest value of a running total over its operations, for example of the memory in use.

    Args:
        delta: returns the amount that an operation adds to the total; negative if the operation reduces it.
    """
    return tuple(max(itertools.accumulate(map(delta, ops)), default=0) for ops in schedule.ops)
