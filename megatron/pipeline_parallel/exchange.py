"""Who posts which receive when. Pure: it follows from the schedule, which both ends of every channel know.

Between two stages there is one channel for each direction, and both ends follow the sender's order on it, so no message carries a
header and none can be taken for another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.pipeline_parallel.schedule import Message, Op, Schedule
from megatron.pipeline_parallel.simulate import simulate


@dataclass(frozen=True)
class ReceivePlan:
    """When one stage posts which receives, and what it then knows of its own messages."""

    before: tuple[tuple[tuple[Message, int], ...], ...]
    """For each operation, the messages to post before it, each with the stage that it comes from."""
    arrived: tuple[tuple[Message, ...], ...]
    """For each operation, the messages of this stage that must have arrived once what the operation needs is here."""


def plan_receives(schedule: Schedule, stage: int, ahead: int = 1) -> ReceivePlan:
    """Overlap: post what an operation needs `ahead` operations earlier, so that a message travels while others compute.

    Within a channel the order is the sender's, so what is needed later but sent earlier is posted on the way.
    """
    order: dict[int, list[Message]] = {}
    place: dict[Message, tuple[int, int]] = {}
    for source, _, message in _deliveries(schedule)[stage]:
        channel = order.setdefault(source, [])
        place[message] = (source, len(channel))
        channel.append(message)
    posted = dict.fromkeys(order, 0)
    mine, before = schedule.ops[stage], []
    for i in range(len(mine)):
        due: list[tuple[Message, int]] = []
        for op in mine[i : i + 1 + ahead]:
            needed = schedule.needs(op)
            if needed in place:
                source, at = place[needed]
                due += [(message, source) for message in order[source][posted[source] : at + 1]]
                posted[source] = max(posted[source], at + 1)
        before.append(tuple(due))
    return ReceivePlan(tuple(before), _arrivals(schedule, stage))


def plan_exchanges(schedule: Schedule) -> tuple[ReceivePlan, ...]:
    """Without overlap: between two operations a stage sends what the former gave, receives what is on its way, and waits for all.

    Even if a send ends only when its receive was posted, nothing can lock up. Let every operation take the same time: that gives
    each a begin and an end. A stage posts a receive before the first of its operations that begins when the sending one has ended.
    So what an exchange waits for depends only on operations with an earlier begin, and by induction every one of them is reached.
    """
    spans = simulate(schedule).spans  # whole numbers: no rounding
    plans = []
    for stage, deliveries in enumerate(_deliveries(schedule)):
        arriving = sorted((spans[source][place].end, source, message) for source, place, message in deliveries)
        before, posted = [], 0
        for span in spans[stage]:
            first = posted
            while posted < len(arriving) and arriving[posted][0] <= span.start:
                posted += 1
            before.append(tuple((message, source) for _, source, message in arriving[first:posted]))
        plans.append(ReceivePlan(tuple(before), ((),) * len(before)))
    return tuple(plans)


def channels(schedule: Schedule) -> list[tuple[int, int]]:
    """Every pair (source stage, destination stage) that messages pass between, in order."""
    return sorted({(source, stage) for stage, deliveries in enumerate(_deliveries(schedule)) for source, _, _ in deliveries})


def check_exchanges(schedule: Schedule) -> None:
    """Run the exchanges of `plan_exchanges` on paper, where neither end of a message goes on before the other has come to it.

    Raises:
        ValueError: stages wait for each other, or the ends of a channel do not agree on the order.
    """
    plans = plan_exchanges(schedule)
    _check_order(schedule, plans)
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
    if any(open_ends) or any(at < len(r) for at, r in zip(position, rounds, strict=True)):
        stuck = ", ".join(f"{message} (offered by stage {stage})" for message, stage in list(offered.items())[:4])
        raise ValueError(f"schedule {schedule.name} locks up when sends and receives wait for each other: {stuck}")


def _deliveries(schedule: Schedule) -> list[list[tuple[int, int, Message]]]:
    """For each stage (source stage, place of the operation there, message) of all that it receives: by source, in its order."""
    found: list[list[tuple[int, int, Message]]] = [[] for _ in schedule.ops]
    for source, ops in enumerate(schedule.ops):
        for place, op in enumerate(ops):
            message = schedule.gives(op)
            if message is not None and schedule.stage_of_chunk[message.chunk] != source:
                found[schedule.stage_of_chunk[message.chunk]].append((source, place, message))
    return found


def _arrivals(schedule: Schedule, stage: int) -> tuple[tuple[Message, ...], ...]:
    """A stage sends a message after it took all that its operations so far needed: hearing from it proves that this arrived."""
    mine = {schedule.gives(op) for op in schedule.ops[stage]}
    proved: dict[Message | None, list[Message]] = {}
    for peer, ops in enumerate(schedule.ops):
        taken: list[Message] = []
        for op in ops if peer != stage else ():
            needed, given = schedule.needs(op), schedule.gives(op)
            if needed is not None and needed in mine:
                taken.append(needed)
            if given is not None and schedule.stage_of_chunk[given.chunk] == stage:
                proved[given], taken = taken, []
    return tuple(tuple(proved.get(schedule.needs(op), ())) for op in schedule.ops[stage])


def _sends(schedule: Schedule, stage: int, op: Op) -> Message | None:
    given = schedule.gives(op)
    return None if given is None or schedule.stage_of_chunk[given.chunk] == stage else given


def _exchanges(schedule: Schedule, stage: int, plan: ReceivePlan) -> Iterator[list[Message]]:
    """What a stage has to exchange before each operation, and after the last."""
    given: Message | None = None
    for op, due in zip(schedule.ops[stage], plan.before, strict=True):
        yield [message for message, _ in due] + ([given] if given is not None else [])
        given = _sends(schedule, stage, op)
    yield [given] if given is not None else []


def _check_order(schedule: Schedule, plans: tuple[ReceivePlan, ...]) -> None:
    for (stage, plan), deliveries in zip(enumerate(plans), _deliveries(schedule), strict=True):
        posted: dict[int, list[Message]] = {}
        for due in plan.before:
            for message, source in due:
                posted.setdefault(source, []).append(message)
        sent: dict[int, list[Message]] = {}
        for source, _, message in deliveries:
            sent.setdefault(source, []).append(message)
        if posted != sent:
            raise ValueError(
                f"schedule {schedule.name}: stage {stage} does not receive what is sent to it, in the order it is sent"
            )
