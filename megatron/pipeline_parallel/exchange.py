"""Who posts which receive when, and how early the hardware queues of a device allow it (`choose_receives`).

The order follows from the schedule, which both ends of every channel know, so no process is needed.

Between two stages there is one channel for each direction, and both ends follow the sender's order on it. So no message carries a
header, and none can be taken for another.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
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


# ---- Whether messages pass where streams share the hardware queues of a device, and how far ahead receives may be posted therefore
#
# CUDA hands the work of all streams to a device through a few queues (`CUDA_DEVICE_MAX_CONNECTIONS`: 8 by default, 1 in Megatron's
# scripts). A queue is in order: its first entry starts when what its stream did before and the events that it waits for are done;
# until then all behind it wait, whatever their streams. What runs no longer holds up the queue. So one receive that waits for its
# message is harmless, but a second one behind it in its stream stops all that follows, even what the message depends on.
#
# Which streams share a queue is documented nowhere, and torch takes streams from pools of 32 (c10/cuda/CUDAStream.cpp), more than
# there are queues. Streams that share wait for more, never for less. So what completes with all streams of a device in one queue
# completes with any number of queues, however they are shared, and that is what is proved: the choice holds for every value of
# `CUDA_DEVICE_MAX_CONNECTIONS`.
#
# The streams are: one that computes, and one for each channel (source, destination), since NCCL has a communicator for each pair of
# ranks in a group (`getKeySendRecv` in torch's ProcessGroupNCCL.cpp), and each direction has a group
# (`ParallelContext.pipeline_channel`). The others need no place here. Copies to and from host memory wait only for what the same
# rank has issued before. Collectives over tensor and data ranks join ranks that issue the same, so these come equally far. The sum
# of the token counts over all ranks is issued before the first operation.


class Chosen(NamedTuple):
    """When the stages post their receives, with overlap."""

    plans: list[ReceivePlan]
    """One for each stage."""
    ahead: int | None
    """How many operations ahead of need; None for `plan_as_sent`."""


@lru_cache(maxsize=4)
def choose_receives(schedule: Schedule, device_type: str) -> Chosen:
    """The largest look-ahead, up to `AHEAD`, with which all messages pass; where none does, the order of sending.

    Args:
        device_type: of the job's devices. Only CUDA has queues that keep order.
    """
    if device_type != "cuda":
        return Chosen(plan_receives(schedule), AHEAD)
    for ahead in range(AHEAD, 0, -1):
        if not stuck(schedule, plans := plan_receives(schedule, ahead=ahead)):
            return Chosen(plans, ahead)
    return Chosen(plan_as_sent(schedule), None)


def describe_receives(schedule: Schedule, device_type: str, connections: str | None) -> str:
    """A line of the start-up log.

    Args:
        connections: the value of CUDA_DEVICE_MAX_CONNECTIONS, if it is set.
    """
    ahead = choose_receives(schedule, device_type).ahead
    when = "in the order of sending" if ahead is None else f"{ahead} operation{'s' * (ahead != 1)} ahead"
    line = f"stages post their receives {when}"
    if device_type != "cuda":
        return line
    queues = "not set" if connections is None else connections
    most = "" if ahead == AHEAD else f"; {AHEAD} ahead could hang where streams share a hardware queue"
    return f"{line}: safe at any CUDA_DEVICE_MAX_CONNECTIONS ({queues}){most}"


_Entry = tuple[int, int, tuple[Message, ...], Message | None]
"""One entry of a hardware queue:

- its stream: 0 computes; the others are the rank's channels;
- entries of the computing stream that must be done: all that were issued before;
- messages that must have passed;
- the message that it sends or receives, or None for one of the computing stream. It passes when both ends have started."""
QueueOf = Callable[[int, int], int]
"""Gives the queue of (stage, stream)."""


def one_queue(stage: int, stream: int) -> int:
    """All streams of a device share one queue."""
    return 0


def stuck(
    schedule: Schedule, plans: Sequence[ReceivePlan], queue_of: QueueOf = one_queue, *, exchanges: bool = False
) -> list[Message]:
    """Replay what all stages hand to their devices, and return messages that are waited for and never pass: none if all complete.

    Args:
        plans: when each stage posts its receives.
        queue_of: which streams share a queue.
        exchanges: whether each operation waits for all that was posted and sent before it.
    """
    streams: list[dict[tuple[int, int], int]] = [{} for _ in schedule.ops]
    for ends in channels(schedule):
        for stage in ends:
            streams[stage][ends] = 1 + len(streams[stage])
    queues: list[tuple[int, Iterator[_Entry]]] = []
    for stage, plan in enumerate(plans):
        entries = _entries(schedule, stage, streams[stage], plan, exchanges)
        queues += [(stage, queue) for queue in ([entries] if queue_of is one_queue else _shared(entries, stage, queue_of))]
    heads: dict[int, _Entry] = {}
    """For each queue that waits, the entry that cannot start yet."""
    waiting: dict[Message | int, list[int]] = {}
    """Queues that wait for a message to pass, or for the computing stream of a stage."""
    computed = [0] * schedule.num_stages
    started: set[Message] = set()
    passed: set[Message] = set()
    ready = list(range(len(queues)))
    while ready:
        number = ready.pop()
        stage, queue = queues[number]
        for entry in chain([heads.pop(number)] if number in heads else [], queue):
            _, before, waits, moves = entry
            if before > computed[stage] or (waits and not (waits[0] in passed and passed.issuperset(waits[1:]))):
                waits_for = stage if before > computed[stage] else next(message for message in waits if message not in passed)
                waiting.setdefault(waits_for, []).append(number)
                heads[number] = entry
                break
            if moves is None:
                computed[stage] += 1
                ready += waiting.pop(stage, ())
            elif moves in started:
                started.remove(moves)
                passed.add(moves)
                ready += waiting.pop(moves, ())
            else:
                started.add(moves)
    return sorted({message for _, _, waits, _ in heads.values() for message in waits if message not in passed} | started)


def _shared(entries: Iterable[_Entry], stage: int, queue_of: QueueOf) -> Iterable[Iterator[_Entry]]:
    """The entries of each queue of a stage."""
    found: dict[int, list[_Entry]] = {}
    for entry in entries:
        found.setdefault(queue_of(stage, entry[0]), []).append(entry)
    return map(iter, found.values())


def _entries(
    schedule: Schedule, stage: int, streams: Mapping[tuple[int, int], int], plan: ReceivePlan, exchanges: bool
) -> Iterator[_Entry]:
    """What a stage hands to its device, in the order of `Executor.run` and `Messenger`."""
    last: dict[int, tuple[Message, ...]] = {}
    moving: list[Message] = []
    computed = 0

    def move(message: Message, source: int, destination: int) -> _Entry:
        stream = streams[source, destination]
        before, last[stream] = last.get(stream, ()), (message,)
        if exchanges:
            moving.append(message)
        return stream, computed, before, message

    for (_, needs, gives), posts, arrived in zip(schedule.linked_ops[stage], plan.before, plan.arrived, strict=True):
        for message, source in posts:
            yield move(message, source, stage)
        if exchanges:
            yield 0, computed, tuple(moving), None
            moving.clear()
            computed += 1
        comes = needs is not None and schedule.stage_of_chunk[_giver(needs)] != stage
        yield 0, computed, (needs,) if comes and needs is not None else (), None
        computed += 1
        if gives is not None and schedule.stage_of_chunk[gives.chunk] != stage:
            yield move(gives, stage, schedule.stage_of_chunk[gives.chunk])
        if arrived:
            yield 0, computed, tuple(arrived), None
            computed += 1


def _giver(message: Message) -> int:
    """The chunk that a message comes from."""
    return message.chunk + 1 if message.is_gradient else message.chunk - 1
