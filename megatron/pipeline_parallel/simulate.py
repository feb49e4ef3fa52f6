"""Simulation of a pipeline schedule: an order in which all operations can run, and a timeline for assumed durations of the
operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from megatron.spec.operations import LinkedOp, Message, Op, OpCosts, Schedule


def iterate_runnable_ops(schedule: Schedule) -> Iterator[tuple[int, LinkedOp]]:
    """Yield (stage, operation) for all operations, in an order in which each follows the operations that it depends on.

    The order follows one stage until the stage needs a message that has not been sent yet, and then continues with another stage.

    Raises:
        ValueError: the schedule deadlocks.
    """
    position = [0] * schedule.num_stages
    sent: set[Message] = set()
    waiting: dict[Message, int] = {}
    ready = list(range(schedule.num_stages))
    while ready:
        stage = ready.pop()
        ops = schedule.linked_ops[stage]
        for op_index in range(position[stage], len(ops)):
            _, needed, message = linked = ops[op_index]
            if needed is not None and needed not in sent:
                waiting[needed] = stage
                break
            position[stage] = op_index + 1
            yield stage, linked
            if message is not None:
                sent.add(message)
                if waiting and message in waiting:
                    ready.append(waiting.pop(message))
    blocked = {stage: ops[position[stage]] for stage, ops in enumerate(schedule.ops) if position[stage] < len(ops)}
    if blocked:
        blocked_text = "; ".join(
            f"stage {stage} before {op.type.value} of chunk {op.chunk}, microbatch {op.microbatch}" for stage, op in blocked.items()
        )
        raise ValueError(
            f"schedule {schedule.name} deadlocks: {blocked_text}. "
            "Each of these operations (F forward, B backward, I input gradient) waits for a message that is never sent. "
            "Reorder the operations of the schedule."
        )


@lru_cache(maxsize=2)
def _run_order(schedule: Schedule) -> list[tuple[int, Op, int | None, bool]]:
    """Return the order of `iterate_runnable_ops` as a list, cached for the schedule.

    Returns:
        For each operation: its stage, the operation, the index in this list of the operation whose message it needs, and whether
            that operation runs on another stage.
    """
    order: list[tuple[int, Op, int | None, bool]] = []
    senders: dict[Message, tuple[int, int]] = {}
    for stage, (op, needed, sent) in iterate_runnable_ops(schedule):
        sender_index, source = (None, stage) if needed is None else senders.pop(needed)
        if sent is not None:
            senders[sent] = len(order), stage
        order.append((stage, op, sender_index, source != stage))
    return order


UNIT_COSTS = OpCosts(recompute=1.0)
"""Equal duration for all types of operations, and messages that take no time."""


class OpSpan(NamedTuple):
    """Start and end time of one operation, in the unit of its `Timeline`."""

    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Start and end times of every operation on every stage: measured, or simulated in the unit of the assumed durations."""

    name: str
    spans: tuple[tuple[OpSpan, ...], ...]
    """Operations of each stage in the order in which they run."""

    @property
    def start(self) -> float:
        """Start time of the first operation."""
        return min((spans[0].start for spans in self.spans if spans), default=0.0)

    @property
    def end(self) -> float:
        """End time of the last operation."""
        return max((spans[-1].end for spans in self.spans if spans), default=0.0)

    @property
    def step_time(self) -> float:
        """Time from the first start to the last end, over all stages."""
        return self.end - self.start

    @property
    def busy_times(self) -> tuple[float, ...]:
        """Time that each stage spends computing: the sum of the durations of its operations."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.spans)

    @property
    def bubble_share(self) -> float:
        """Bubble: the fraction of the step in which stages wait instead of computing, averaged over the stages."""
        total_time = self.step_time * len(self.spans)
        return 1.0 - sum(self.busy_times) / total_time if total_time else 0.0


def simulate(schedule: Schedule, costs: OpCosts | Callable[[Op], float] = UNIT_COSTS, *, p2p: float | None = None) -> Timeline:
    """Simulate a schedule and return its timeline. An operation starts when its stage is free and its input has arrived.

    Args:
        costs: durations by type of operation, including the time of a message; or a function that returns the duration of an
            operation.
        p2p: time of a message, if `costs` is a function.

    Raises:
        ValueError: the schedule deadlocks.
    """
    assert p2p is None or not isinstance(costs, OpCosts), "the time of a message is part of the costs"
    duration = costs.get_duration if isinstance(costs, OpCosts) else costs
    delay = costs.p2p if isinstance(costs, OpCosts) else p2p or 0.0
    stage_free_at = [0.0] * schedule.num_stages
    spans: list[list[OpSpan]] = [[] for _ in schedule.ops]
    end_times: list[float] = []
    for stage, op, sender_index, crosses_stages in _run_order(schedule):
        start = stage_free_at[stage]
        if sender_index is not None:
            start = max(start, end_times[sender_index] + delay if crosses_stages else end_times[sender_index])
        stage_free_at[stage] = end = start + duration(op)
        end_times.append(end)
        spans[stage].append(OpSpan(op, start, end))
    return Timeline(schedule.name, tuple(map(tuple, spans)))
