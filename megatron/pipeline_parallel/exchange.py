"""Plans when each pipeline stage posts its receives. `choose_receive_plans` posts them as early as the device's hardware queues
allow.

The plan depends only on the schedule, so every rank computes the same plan without communication.

Between two stages there is one channel per direction. Both ends use the channel in the order in which the sender sends. So messages
carry no header and cannot be confused.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from megatron.pipeline_parallel.simulate import OpSpan, simulate
from megatron.spec.operations import Message, OpType, Schedule

DEFAULT_LOOKAHEAD = 2
"""Number of operations by which a receive is posted ahead of the operation that needs it, where no queue forbids it.

A lookahead of 1 may hide little, since the operation before may be a short weight gradient. More than 2 gained nothing.
"""


class ReceivePlan(NamedTuple):
    """Communication plan of one stage: before which operation the stage posts each receive, and after which operation it waits for
    each send."""

    posts: Sequence[Sequence[tuple[Message, int]]]
    """For each operation, the receives to post before it, as pairs (message, source stage)."""
    completed_sends: Sequence[Sequence[Message]]
    """For each operation, the messages whose sends the stage waits for after the operation. By then the receiver has the messages,
    or gets them soon, so the wait is short."""


class _Delivery(NamedTuple):
    """Message that a stage receives from another stage, and the operation on the source stage that sends the message."""

    source: int
    op_index: int
    """Index of the operation that sends the message, in the list of operations of the source stage."""
    message: Message


def plan_receives(schedule: Schedule, *, lookahead: int = DEFAULT_LOOKAHEAD) -> list[ReceivePlan]:
    """Plan overlapped communication: each stage posts a receive `lookahead` operations before the operation that needs the message.

    Messages then travel while other operations compute, because a transfer starts once both ends have posted it. Receives from a
    stage are posted in the order in which that stage sends. So the receive of a message that is needed late is posted earlier if
    the same stage sends an urgent message after it.

    A recompute and the operation after it count as a single operation. So recompute does not change the order in which messages are
    posted, and no message is posted later because of a recompute.
    """
    completed_sends = _plan_send_waits(schedule)
    return [
        ReceivePlan(_plan_posts(schedule, stage, arriving, lookahead), completed_sends[stage])
        for stage, arriving in enumerate(list_deliveries(schedule))
    ]


def plan_exchanges(schedule: Schedule) -> list[ReceivePlan]:
    """Plan communication without overlap: between two operations, a stage sends, receives and waits for completion.

    The stage sends the result of its last operation, and receives all messages that other stages have sent by then. This cannot
    deadlock, even if a send completes only when its receive is posted.

    Proof: assume that every operation takes the same time, which defines a start and an end for each. A stage posts a receive
    before the first of its operations that starts after the sending operation has ended. So each wait between operations depends
    only on operations that start earlier. By induction, every operation is reached.
    """
    spans, plans = _compute_equal_time_spans(schedule), []
    for stage, deliveries in enumerate(list_deliveries(schedule)):
        arriving = sorted((spans[source][op_index].end, source, message) for source, op_index, message in deliveries)
        posts, num_posted = [], 0
        for span in spans[stage]:
            first_new = num_posted
            while num_posted < len(arriving) and arriving[num_posted][0] <= span.start:
                num_posted += 1
            posts.append([(message, source) for _, source, message in arriving[first_new:num_posted]])
        plans.append(ReceivePlan(posts, [()] * len(posts)))
    return plans


def plan_receives_in_send_order(schedule: Schedule) -> list[ReceivePlan]:
    """Plan overlapped communication for schedules in which a fixed lookahead could deadlock.

    Receives are posted before the same operations as in `plan_exchanges`, but operations do not wait for all transfers. So if every
    operation takes the same time, receives are posted in the order in which messages are sent. This cannot deadlock, even if all
    work of a stage goes through a single queue: what is posted, sent or waited for at a time depends only on earlier operations.
    """
    completed_sends = _plan_send_waits(schedule)
    return [plan._replace(completed_sends=completed_sends[stage]) for stage, plan in enumerate(plan_exchanges(schedule))]


def list_channels(schedule: Schedule) -> list[tuple[int, int]]:
    """List every pair (source stage, destination stage) between which messages pass, in an order in which connecting them is fast.

    Channels between neighboring stages come first, and of these the channels whose lower stage is even. So many pairs of stages
    connect at the same time, and no stage waits for a long chain of connections.
    """
    channels = {(source, stage) for stage, arriving in enumerate(list_deliveries(schedule)) for source, _, _ in arriving}
    return sorted(channels, key=lambda ends: (abs(ends[0] - ends[1]) > 1, min(ends) % 2, ends))


@lru_cache(maxsize=1)
def _compute_equal_time_spans(schedule: Schedule) -> tuple[tuple[OpSpan, ...], ...]:
    """Return the start and end of each operation of each stage, if all operations take the same time. Times are integers, so there
    is no rounding."""
    return simulate(schedule).spans


@lru_cache(maxsize=1)
def list_deliveries(schedule: Schedule) -> list[list[_Delivery]]:
    """List for each stage the messages that it receives from other stages. They are sorted by source stage, then by the order in
    which the source sends."""
    deliveries: list[list[_Delivery]] = [[] for _ in schedule.ops]
    stage_of_chunk = schedule.stage_of_chunk
    for source, ops in enumerate(schedule.linked_ops):
        for op_index, (_, _, message) in enumerate(ops):
            if message is not None and stage_of_chunk[message.chunk] != source:
                deliveries[stage_of_chunk[message.chunk]].append(_Delivery(source, op_index, message))
    return deliveries


def _plan_posts(schedule: Schedule, stage: int, arriving: list[_Delivery], lookahead: int) -> list[list[tuple[Message, int]]]:
    """Return for each operation of a stage the receives to post before it, as pairs (message, source stage).

    Args:
        arriving: messages that the stage receives from other stages, in the order of `list_deliveries`.
        lookahead: number of operations between the post of a receive and the operation that needs the message.
    """
    channels: dict[int, list[Message]] = {}
    channel_index: dict[Message | None, tuple[int, int]] = {}
    for source, _, message in arriving:
        channel = channels.setdefault(source, [])
        channel_index[message] = (source, len(channel))
        channel.append(message)
    num_posted = dict.fromkeys(channels, 0)
    posts: list[list[tuple[Message, int]]] = [[] for _ in schedule.linked_ops[stage]]
    starts, needs = _group_recomputes(schedule, stage)
    for i, needed in enumerate(needs):
        if needed in channel_index:
            source, index = channel_index[needed]
            posts[starts[max(i - lookahead, 0)]] += [
                (message, source) for message in channels[source][num_posted[source] : index + 1]
            ]
            num_posted[source] = max(num_posted[source], index + 1)
    return posts


def _group_recomputes(schedule: Schedule, stage: int) -> tuple[list[int], list[Message | None]]:
    """Group the operations of a stage into units: an operation, together with a recompute directly before it. The lookahead of a
    receive counts units.

    Returns:
        For each unit, the index of its first operation and the message that it needs.
    """
    starts: list[int] = []
    needs: list[Message | None] = []
    start: int | None = None
    for op_index, (op, needed, _) in enumerate(schedule.linked_ops[stage]):
        start = op_index if start is None else start
        if op.type is not OpType.RECOMPUTE:
            starts.append(start)
            needs.append(needed)
            start = None
    return starts, needs


@lru_cache(maxsize=1)
def _plan_send_waits(schedule: Schedule) -> list[list[list[Message]]]:
    """Return for each operation of each stage the messages whose send to wait for after the operation, so that their memory can be
    freed. Each message occurs at most once.

    A stage sends a message after it has received everything that its operations so far needed. So if the receiver of a message has
    needed it and then sends a reply, the reply proves that the message has arrived. The sender then waits for the send without
    delay.

    If no such reply comes soon (forward-only schedules, GPipe), the sender waits for the send some time after the message was used.
    Otherwise messages would pile up on a stage that is faster than the next one. This cannot deadlock: if every operation takes the
    same time, the operation that used the message ends before the sender starts to wait.
    """
    spans, all_deliveries = _compute_equal_time_spans(schedule), list_deliveries(schedule)
    start_times = [[span.start for span in row] for row in spans]
    timeout = 2.0 * schedule.num_stages
    consumer = {linked.receives: op_index for ops in schedule.linked_ops for op_index, linked in enumerate(ops)}
    # For each (stage, peer), in the peer's order: indices of the peer's operations that send a message to the stage, and of the
    # stage's operations that need it.
    replies: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    for stage, arriving in enumerate(all_deliveries):
        for peer, op_index, message in arriving:
            sending_ops, needing_ops = replies.setdefault((stage, peer), ([], []))
            sending_ops.append(op_index)
            needing_ops.append(consumer[message])
    completed_sends: list[list[list[Message]]] = [[[] for _ in ops] for ops in schedule.ops]
    for peer, arriving in enumerate(all_deliveries):
        for stage, _, message in arriving:
            consumer_op = consumer[message]
            sending_ops, needing_ops = replies.get((stage, peer), ([], []))
            reply, deadline = bisect.bisect_left(sending_ops, consumer_op), spans[peer][consumer_op].end + timeout
            if reply < len(sending_ops) and start_times[stage][needing_ops[reply]] < deadline:
                op_index = needing_ops[reply]
            else:
                op_index = bisect.bisect_left(start_times[stage], deadline)
            if op_index < len(completed_sends[stage]):  # otherwise the message is waited for at the end of the step
                completed_sends[stage][op_index].append(message)
    return completed_sends


# ---- Proof that messages pass when CUDA streams share hardware queues, and the lookahead that is safe for receives.
#
# CUDA submits the work of all streams to a device through a few queues (`CUDA_DEVICE_MAX_CONNECTIONS`: 8 by default, 1 in
# Megatron's scripts). A queue is in order: its first entry starts when the earlier work of its stream, and the events that the
# entry waits for, are done. Until then all entries behind it wait, whatever their streams. A running entry does not block the
# queue. So one receive that waits for its message is harmless. A second receive behind it in the same stream cannot start, and so
# blocks all entries that follow, even those that the message depends on.
#
# It is not documented which streams share a queue, and torch takes streams from pools of 32 (c10/cuda/CUDAStream.cpp), more than
# there are queues. Streams that share a queue wait for more, never for less. So a plan that completes with all streams of a device
# in one queue completes with any number of queues, however they are shared. The proof assumes one queue, and so the choice holds
# for every value of `CUDA_DEVICE_MAX_CONNECTIONS`.
#
# The replay models one computing stream, and one stream per channel (source, destination): NCCL has a communicator for each pair of
# ranks in a group (`getKeySendRecv` in torch's ProcessGroupNCCL.cpp), and each direction has a group
# (`ParallelContext.get_pipeline_channel`). Other streams need not be modelled. Copies to and from host memory wait only for work
# that the same rank issued before. Collectives over tensor and data ranks join ranks that issue the same work, so these ranks reach
# the same point. The sum of the token counts over all ranks is issued before the first operation.


class ReceiveChoice(NamedTuple):
    """Receive plans of all stages that `choose_receive_plans` selected, and the lookahead of these plans."""

    plans: list[ReceivePlan]
    """Receive plan of each stage."""
    lookahead: int | None
    """Number of operations by which a receive is posted before the operation that needs it; None for
    `plan_receives_in_send_order`."""


@lru_cache(maxsize=4)
def choose_receive_plans(schedule: Schedule, device_type: str) -> ReceiveChoice:
    """Choose how many operations ahead of their use the receives of a schedule are posted (the lookahead).

    The choice is the largest number up to `DEFAULT_LOOKAHEAD` with which the schedule does not deadlock. If the schedule deadlocks
    with each of these numbers, receives are posted in the order of sending.

    Args:
        device_type: type of the run's devices. On CUDA, streams may share a hardware queue, which runs operations in order, so
            receives that are posted too early can deadlock. Devices of other types have no such queues and always use
            `DEFAULT_LOOKAHEAD`.
    """
    if device_type != "cuda":
        return ReceiveChoice(plan_receives(schedule), DEFAULT_LOOKAHEAD)
    for lookahead in range(DEFAULT_LOOKAHEAD, 0, -1):
        if not find_stuck_messages(schedule, plans := plan_receives(schedule, lookahead=lookahead)):
            return ReceiveChoice(plans, lookahead)
    return ReceiveChoice(plan_receives_in_send_order(schedule), None)


def describe_receive_plans(schedule: Schedule, device_type: str, connections: str | None) -> str:
    """Return the start-up log line that says how early receives are posted.

    Args:
        connections: value of CUDA_DEVICE_MAX_CONNECTIONS, or None if it is not set.
    """
    lookahead = choose_receive_plans(schedule, device_type).lookahead
    timing = "in the order of sending" if lookahead is None else f"{lookahead} operation{'s' * (lookahead != 1)} ahead"
    text = f"stages post their receives {timing}"
    if device_type != "cuda":
        return text
    queues = "not set" if connections is None else connections
    limit_note = (
        "" if lookahead == DEFAULT_LOOKAHEAD else f"; {DEFAULT_LOOKAHEAD} ahead could hang where streams share a hardware queue"
    )
    return f"{text}: safe at any CUDA_DEVICE_MAX_CONNECTIONS ({queues}){limit_note}"


_Entry = tuple[int, int, tuple[Message, ...], Message | None]
"""Work in a hardware queue of a device:

- its stream: 0 computes; the other streams are the rank's channels;
- number of entries of the computing stream that must be done first: all that were issued earlier;
- messages that must have arrived first;
- the message that the entry sends or receives, or None for an entry of the computing stream. A message arrives when both ends have
  started.
"""
QueueOf = Callable[[int, int], int]
"""Function that returns the index of the hardware queue of a (stage, stream)."""


def map_to_single_queue(stage: int, stream: int) -> int:
    """Assign every stream of a device to the same hardware queue. In this worst case, work waits for all work that was issued
    before it, also on other streams."""
    return 0


def find_stuck_messages(
    schedule: Schedule, plans: Sequence[ReceivePlan], queue_of: QueueOf = map_to_single_queue, *, exchanges: bool = False
) -> list[Message]:
    """Simulate the sends, receives and computations that all stages issue to their devices. Return the messages that never arrive;
    empty if all work completes.

    Args:
        plans: receive plan of each stage.
        queue_of: map from streams to hardware queues.
        exchanges: whether each operation first waits for all receives and sends issued before it, as in `plan_exchanges`.
    """
    streams: list[dict[tuple[int, int], int]] = [{} for _ in schedule.ops]
    for ends in list_channels(schedule):
        for stage in ends:
            streams[stage][ends] = 1 + len(streams[stage])
    queues: list[tuple[int, Iterator[_Entry]]] = []
    for stage, plan in enumerate(plans):
        entries = _queue_entries(schedule, stage, streams[stage], plan, exchanges)
        queues += [
            (stage, queue)
            for queue in ([entries] if queue_of is map_to_single_queue else _split_by_queue(entries, stage, queue_of))
        ]
    heads: dict[int, _Entry] = {}
    """For each queue that is blocked, its first entry, which cannot start yet."""
    waiting: dict[Message | int, list[int]] = {}
    """Indices of the queues that wait for a message to pass, or for the computing stream of a stage."""
    num_computed = [0] * schedule.num_stages
    started: set[Message] = set()
    passed: set[Message] = set()
    ready = list(range(len(queues)))
    while ready:
        queue_index = ready.pop()
        stage, queue = queues[queue_index]
        for entry in chain([heads.pop(queue_index)] if queue_index in heads else [], queue):
            _, num_required, awaited, transferred = entry
            if num_required > num_computed[stage] or (awaited and not (awaited[0] in passed and passed.issuperset(awaited[1:]))):
                waits_for = (
                    stage if num_required > num_computed[stage] else next(message for message in awaited if message not in passed)
                )
                waiting.setdefault(waits_for, []).append(queue_index)
                heads[queue_index] = entry
                break
            if transferred is None:
                num_computed[stage] += 1
                ready += waiting.pop(stage, ())
            elif transferred in started:
                started.remove(transferred)
                passed.add(transferred)
                ready += waiting.pop(transferred, ())
            else:
                started.add(transferred)
    return sorted({message for _, _, awaited, _ in heads.values() for message in awaited if message not in passed} | started)


def _split_by_queue(entries: Iterable[_Entry], stage: int, queue_of: QueueOf) -> Iterable[Iterator[_Entry]]:
    """Distribute the work that a stage issues to the hardware queues of its device. Return one iterator for each queue, which
    yields the queue's work in order."""
    queues: dict[int, list[_Entry]] = {}
    for entry in entries:
        queues.setdefault(queue_of(stage, entry[0]), []).append(entry)
    return map(iter, queues.values())


def _queue_entries(
    schedule: Schedule, stage: int, streams: Mapping[tuple[int, int], int], plan: ReceivePlan, exchanges: bool
) -> Iterator[_Entry]:
    """Yield the sends, receives and computations that a stage issues to its device, for the replay that finds deadlocks. The order
    is that of `Executor.run` and `Messenger`."""
    last_transfer: dict[int, tuple[Message, ...]] = {}
    moving: list[Message] = []
    num_computed = 0

    def transfer(message: Message, source: int, destination: int) -> _Entry:
        stream = streams[source, destination]
        previous, last_transfer[stream] = last_transfer.get(stream, ()), (message,)
        if exchanges:
            moving.append(message)
        return stream, num_computed, previous, message

    for (_, needs, gives), posts, completed_sends in zip(schedule.linked_ops[stage], plan.posts, plan.completed_sends, strict=True):
        for message, source in posts:
            yield transfer(message, source, stage)
        if exchanges:
            yield 0, num_computed, tuple(moving), None
            moving.clear()
            num_computed += 1
        is_received = needs is not None and schedule.stage_of_chunk[_find_sending_chunk(needs)] != stage
        yield 0, num_computed, (needs,) if is_received and needs is not None else (), None
        num_computed += 1
        if gives is not None and schedule.stage_of_chunk[gives.chunk] != stage:
            yield transfer(gives, stage, schedule.stage_of_chunk[gives.chunk])
        if completed_sends:
            yield 0, num_computed, tuple(completed_sends), None
            num_computed += 1


def _find_sending_chunk(message: Message) -> int:
    """Return the index of the chunk that sends a message. (`message.chunk` is the chunk that receives it.)"""
    return message.chunk + 1 if message.is_gradient else message.chunk - 1
