"""An order in which all operations of a schedule can run, and its timeline for given durations of the operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from megatron.spec.operations import Costs, LinkedOp, Message, Op, Schedule


def walk(schedule: Schedule) -> Iterator[tuple[int, LinkedOp]]:
    """Yield every operation with its stage, in an order in which each comes after what it needs. A stage goes on as far as it can.

    Raises:
        ValueError: the stages wait for each other.
    """
    position = [0] * schedule.num_stages
    given: set[Message] = set()
    waiting: dict[Message, int] = {}
    ready = list(range(schedule.num_stages))
    while ready:
        stage = ready.pop()
        ops = schedule.linked_ops[stage]
        for place in range(position[stage], len(ops)):
            _, needed, message = linked = ops[place]
            if needed is not None and needed not in given:
                waiting[needed] = stage
                break
            position[stage] = place + 1
            yield stage, linked
            if message is not None:
                given.add(message)
                if waiting and message in waiting:
                    ready.append(waiting.pop(message))
    stuck = {stage: ops[position[stage]] for stage, ops in enumerate(schedule.ops) if position[stage] < len(ops)}
    if stuck:
        waits = "; ".join(
            f"stage {stage} before {op.kind.value} of chunk {op.chunk}, microbatch {op.microbatch}" for stage, op in stuck.items()
        )
        raise ValueError(f"schedule {schedule.name} deadlocks: {waits}")


@lru_cache(maxsize=2)
def _walked(schedule: Schedule) -> list[tuple[int, Op, int | None, bool]]:
    """The walk, made once: the stage of each operation, the place in this list of the one whose message it needs, and whether that
    is on another stage."""
    found: list[tuple[int, Op, int | None, bool]] = []
    giver: dict[Message, tuple[int, int]] = {}
    for stage, (op, needed, given) in walk(schedule):
        place, source = (None, stage) if needed is None else giver.pop(needed)
        if given is not None:
            giver[given] = len(found), stage
        found.append((stage, op, place, source != stage))
    return found


EQUAL = Costs(recompute=1.0)
"""All kinds of operation take equally long, and messages take no time."""


class OpSpan(NamedTuple):
    """When one operation ran."""

    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When every operation ran on every stage, simulated or measured."""

    name: str
    spans: tuple[tuple[OpSpan, ...], ...]
    """For each stage, its operations in order."""

    @property
    def start(self) -> float:
        """When the first operation begins."""
        return min((spans[0].start for spans in self.spans if spans), default=0.0)

    @property
    def end(self) -> float:
        """When the last operation ends."""
        return max((spans[-1].end for spans in self.spans if spans), default=0.0)

    @property
    def step_time(self) -> float:
        """Time from the first begin to the last end, over all stages."""
        return self.end - self.start

    @property
    def busy(self) -> tuple[float, ...]:
        """For each stage, the time in which it computes."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.spans)

    @property
    def bubble_share(self) -> float:
        """The share of all stages' time in which they wait."""
        whole = self.step_time * len(self.spans)
        return 1.0 - sum(self.busy) / whole if whole else 0.0


def simulate(schedule: Schedule, costs: Costs | Callable[[Op], float] = EQUAL, *, p2p: float | None = None) -> Timeline:
    """Simulate a schedule: an operation begins when its stage is free and its input has arrived.

    Args:
        costs: durations by kind of operation, or a function that gives the duration of each single one.
        p2p: the time of a message where `costs` is a function (else it is part of the costs).

    Raises:
        ValueError: the stages wait for each other.
    """
    assert p2p is None or not isinstance(costs, Costs), "the time of a message is part of the costs"
    duration = costs.of if isinstance(costs, Costs) else costs
    delay = costs.p2p if isinstance(costs, Costs) else p2p or 0.0
    free = [0.0] * schedule.num_stages
    spans: list[list[OpSpan]] = [[] for _ in schedule.ops]
    ends: list[float] = []
    for stage, op, giver, travels in _walked(schedule):
        start = free[stage]
        if giver is not None:
            start = max(start, ends[giver] + delay if travels else ends[giver])
        free[stage] = end = start + duration(op)
        ends.append(end)
        spans[stage].append(OpSpan(op, start, end))
    return Timeline(schedule.name, tuple(map(tuple, spans)))
