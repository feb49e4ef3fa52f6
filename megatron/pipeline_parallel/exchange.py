"""Who posts which receive when. It follows from the schedule, which both ends of every channel know, so no process is needed.

Between two stages there is one channel for each direction, and both ends follow the sender's order on it. So no message carries a
header, and none can be taken for another.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from megatron.pipeline_parallel.simulate import OpSpan, simulate
from megatron.spec.operations import Message, OpKind, Schedule

AHEAD = 2
"""How many operations a receive is posted before the one that needs it, where nothing forbids it: the operation before may be a
short weight gradient; more gained nothing."""


class ReceivePlan(NamedTuple):
    """When one stage posts its receives, and when it knows that messages it sent have arrived."""

    before: Sequence[Sequence[tuple[Message, int]]]
    """For each operation, the messages to post before it, each with the stage that it comes from."""
    arrived: Sequence[Sequence[Message]]
    """For each operation, messages sent by this stage that have arrived by its end, or may be waited for there."""


class _Delivery(NamedTuple):
    """A message on its way to a stage."""

    source: int
    place: int
    """Index of the operation, on the source stage, that sends it."""
    message: Message


def plan_receives(schedule: Schedule, *, ahead: int = AHEAD) -> list[ReceivePlan]:
    """Overlap: each stage posts what an operation needs `ahead` operations earlier, so that messages travel while others compute.

    A message moves once both its ends have posted it. Within a channel the order is the sender's, so what is sent earlier but
    needed later is posted on the way. A recompute counts with the operation behind it: so where layers run again, messages are
    posted in the order in which they would be without, and no later.
    """
    settled = _arrivals(schedule)
    return [ReceivePlan(_posts(schedule, stage, found, ahead), settled[stage]) for stage, found in enumerate(deliveries(schedule))]


def plan_exchanges(schedule: Schedule) -> list[ReceivePlan]:
    """Without overlap: between two operations a stage sends what the former gave, receives what is on its way, and waits for all.

    This cannot deadlock, even if a send ends only when its receive is posted. Let every operation take the same time, which gives
    each a begin and an end. A stage posts a receive before the first of its operations that begins when the sending one has ended.
    So what an exchange waits for depends only on operations with an earlier begin, and by induction every one of them is reached.
    """
    spans, plans = _spans(schedule), []
    for stage, found in enumerate(deliveries(schedule)):
        arriving = sorted((spans[source][place].end, source, message) for source, place, message in found)
        before, posted = [], 0
        for span in spans[stage]:
            first = posted
            while posted < len(arriving) and arriving[posted][0] <= span.start:
                posted += 1
            before.append([(message, source) for _, source, message in arriving[first:posted]])
        plans.append(ReceivePlan(before, [()] * len(before)))
    return plans


def plan_as_sent(schedule: Schedule) -> list[ReceivePlan]:
    """Overlap, where no fixed number of operations ahead is safe: receives are posted as for exchanges, and nobody waits for them.

    So messages are posted in the order in which they are sent if every operation takes the same time. This cannot lock up, even if
    all that a stage has begun waits in one queue: what is posted, sent or waited for at a time depends only on earlier ones.
    """
    settled = _arrivals(schedule)
    return [plan._replace(arrived=settled[stage]) for stage, plan in enumerate(plan_exchanges(schedule))]


def channels(schedule: Schedule) -> list[tuple[int, int]]:
    """Every pair (source stage, destination stage) that messages pass between, in an order in which they connect quickly.

    Neighbours come first, and among them those of even stages before those of odd ones: so no stage waits for a long chain.
    """
    found = {(source, stage) for stage, arriving in enumerate(deliveries(schedule)) for source, _, _ in arriving}
    return sorted(found, key=lambda ends: (abs(ends[0] - ends[1]) > 1, min(ends) % 2, ends))


@lru_cache(maxsize=1)
def _spans(schedule: Schedule) -> tuple[tuple[OpSpan, ...], ...]:
    """When each operation runs if all take the same time; whole numbers, so there is no rounding."""
    return simulate(schedule).spans


@lru_cache(maxsize=1)
def deliveries(schedule: Schedule) -> list[list[_Delivery]]:
    """All messages that each stage receives from others: by source, each source's in the order in which it sends them."""
    found: list[list[_Delivery]] = [[] for _ in schedule.ops]
    stage_of_chunk = schedule.stage_of_chunk
    for source, ops in enumerate(schedule.linked_ops):
        for place, (_, _, message) in enumerate(ops):
            if message is not None and stage_of_chunk[message.chunk] != source:
                found[stage_of_chunk[message.chunk]].append(_Delivery(source, place, message))
    return found


def _posts(schedule: Schedule, stage: int, arriving: list[_Delivery], ahead: int) -> list[list[tuple[Message, int]]]:
    order: dict[int, list[Message]] = {}
    place: dict[Message | None, tuple[int, int]] = {}
    for source, _, message in arriving:
        channel = order.setdefault(source, [])
        place[message] = (source, len(channel))
        channel.append(message)
    posted = dict.fromkeys(order, 0)
    before: list[list[tuple[Message, int]]] = [[] for _ in schedule.linked_ops[stage]]
    places, needs = _units(schedule, stage)
    for i, needed in enumerate(needs):
        if needed in place:
            source, at = place[needed]
            before[places[max(i - ahead, 0)]] += [(message, source) for message in order[source][posted[source] : at + 1]]
            posted[source] = max(posted[source], at + 1)
    return before


def _units(schedule: Schedule, stage: int) -> tuple[list[int], list[Message | None]]:
    """The operations of a stage but for recomputes, each with one that stands right before it: where they begin, what they need."""
    places: list[int] = []
    needs: list[Message | None] = []
    begin: int | None = None
    for place, (op, needed, _) in enumerate(schedule.linked_ops[stage]):
        begin = place if begin is None else begin
        if op.kind is not OpKind.RECOMPUTE:
            places.append(begin)
            needs.append(needed)
            begin = None
    return places, needs


@lru_cache(maxsize=1)
def _arrivals(schedule: Schedule) -> list[list[list[Message]]]:
    """For each operation of each stage, the messages of that stage that may be settled after it, each at most once.

    A stage sends a message after it took all that its operations so far needed: so a message from it proves that what it had to
    receive before has arrived. Where no such answer comes soon (forwards alone, GPipe), a message is waited for some time after its
    use. Otherwise messages would pile up on a stage that is quicker than the next. This cannot deadlock: let every operation take
    the same time. Then the operation that used the message ended before the one began after which it is settled.
    """
    spans, found = _spans(schedule), deliveries(schedule)
    begins = [[span.start for span in row] for row in spans]
    patience = 2.0 * schedule.num_stages
    user = {linked.needs: place for ops in schedule.linked_ops for place, linked in enumerate(ops)}
    # For each (stage, peer), in the peer's order: indices of the peer's operations that give a message, and of ours that need it
    answers: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    for stage, arriving in enumerate(found):
        for peer, place, message in arriving:
            given, needed = answers.setdefault((stage, peer), ([], []))
            given.append(place)
            needed.append(user[message])
    settled: list[list[list[Message]]] = [[[] for _ in ops] for ops in schedule.ops]
    for peer, arriving in enumerate(found):
        for stage, _, message in arriving:
            used = user[message]
            given, needed = answers.get((stage, peer), ([], []))
            answer, latest = bisect.bisect_left(given, used), spans[peer][used].end + patience
            if answer < len(given) and begins[stage][needed[answer]] < latest:
                place = needed[answer]
            else:
                place = bisect.bisect_left(begins[stage], latest)
            if place < len(settled[stage]):  # else at the end of the step
                settled[stage][place].append(message)
    return settled
