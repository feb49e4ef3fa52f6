"""Whether messages pass where the streams of a device share hardware queues, and how far ahead receives are posted because of it.

CUDA hands the work of all streams to a device through a few queues (`CUDA_DEVICE_MAX_CONNECTIONS`: 8 by default, 1 in Megatron's
scripts). A queue is in order: its first entry starts when what its stream did before and the events that it waits for are done;
until then all behind it wait, whatever their streams. What runs no longer holds up the queue. So one receive that waits for its
message is harmless, but a second one behind it in its stream stops all that follows, even what the message depends on.

Which streams share a queue is documented nowhere, and torch takes streams from pools of 32 (c10/cuda/CUDAStream.cpp), more than
there are queues. Streams that share wait for more, never for less. So what completes with all streams of a device in one queue
completes with any number of queues, however they are shared, and that is what is proved: the choice holds for every value of
`CUDA_DEVICE_MAX_CONNECTIONS`.

The streams are: one that computes, and one for each channel (source, destination), since NCCL has a communicator for each pair of
ranks in a group (`getKeySendRecv` in torch's ProcessGroupNCCL.cpp), and each direction has a group
(`ParallelContext.pipeline_channel`). The others need no place here. Copies to and from host memory wait only for what the same rank
has issued before. Collectives over tensor and data ranks join ranks that issue the same, so these come equally far. The sum of the
token counts over all ranks is issued before the first operation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from megatron.pipeline_parallel.exchange import AHEAD, ReceivePlan, channels, plan_as_sent, plan_receives
from megatron.spec.operations import Message, Schedule


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


class _Entry(NamedTuple):
    """One entry of a hardware queue."""

    stream: int
    """0 computes; the others are the rank's channels."""
    computed: int
    """Entries of the computing stream that must be done: all that were issued before."""
    waits: tuple[Message, ...] = ()
    """Messages that must have passed."""
    moves: Message | None = None
    """The message that it sends or receives. It passes when both ends have started."""


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
    coming = [_entries(schedule, stage, streams[stage], plan, exchanges) for stage, plan in enumerate(plans)]
    queues: list[dict[int, deque[_Entry]]] = [{} for _ in schedule.ops]
    """What is at or behind a head that cannot start yet."""
    computed = [0] * schedule.num_stages
    started: dict[Message, int] = {}
    passed: set[Message] = set()
    ready = list(range(schedule.num_stages))

    def starts(stage: int, entry: _Entry) -> bool:
        if entry.computed > computed[stage] or not passed.issuperset(entry.waits):
            return False
        if entry.moves is None:
            computed[stage] += 1
        elif entry.moves in started:
            passed.add(entry.moves)
            ready.append(started.pop(entry.moves))
        else:
            started[entry.moves] = stage
        return True

    while ready:
        stage = ready.pop()
        mine, moved = queues[stage], True
        while moved:
            moved = False
            for number, queue in list(mine.items()):
                while queue and starts(stage, queue[0]):
                    queue.popleft()
                    moved = True
                if not queue:
                    del mine[number]
            # A single queue that is blocked needs no more entries; of several, one may still be free.
            while not mine or queue_of is not one_queue:
                entry = next(coming[stage], None)
                if entry is None:
                    break
                number = queue_of(stage, entry.stream)
                if number in mine:
                    mine[number].append(entry)
                elif starts(stage, entry):
                    moved = True
                else:
                    mine[number] = deque([entry])
    waited = {message for mine in queues for queue in mine.values() for message in queue[0].waits}
    return sorted((waited | started.keys()) - passed)


def _entries(
    schedule: Schedule, stage: int, streams: Mapping[tuple[int, int], int], plan: ReceivePlan, exchanges: bool
) -> Iterator[_Entry]:
    """What a stage hands to its device, in the order of `Executor.run` and `Messenger`."""
    last: dict[int, tuple[Message, ...]] = {}
    moving: list[Message] = []
    computed = 0

    def move(message: Message, source: int, destination: int) -> _Entry:
        stream = streams[source, destination]
        entry = _Entry(stream, computed, last.get(stream, ()), message)
        last[stream] = (message,)
        moving.append(message)
        return entry

    for (_, needs, gives), posts, arrived in zip(schedule.linked_ops[stage], plan.before, plan.arrived, strict=True):
        for message, source in posts:
            yield move(message, source, stage)
        if exchanges:
            yield _Entry(0, computed, tuple(moving))
            moving.clear()
            computed += 1
        comes = needs is not None and schedule.stage_of_chunk[_giver(needs)] != stage
        yield _Entry(0, computed, (needs,) if comes and needs is not None else ())
        computed += 1
        if gives is not None and schedule.stage_of_chunk[gives.chunk] != stage:
            yield move(gives, stage, schedule.stage_of_chunk[gives.chunk])
        if arrived:
            yield _Entry(0, computed, tuple(arrived))
            computed += 1


def _giver(message: Message) -> int:
    """The chunk that a message comes from."""
    return message.chunk + 1 if message.is_gradient else message.chunk - 1
