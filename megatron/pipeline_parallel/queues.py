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

from collections.abc import Callable, Iterator, Sequence
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
    """Replay what all stages hand to their devices, and return the messages that never pass: none if all complete.

    Args:
        plans: when each stage posts its receives.
        queue_of: which streams share a queue.
        exchanges: whether each operation waits for all that was posted and sent before it.
    """
    queues: list[list[list[_Entry]]] = []
    for stage in range(schedule.num_stages):
        mine: dict[int, list[_Entry]] = {}
        for entry in _entries(schedule, stage, plans[stage], exchanges):
            mine.setdefault(queue_of(stage, entry.stream), []).append(entry)
        queues.append(list(mine.values()))
    heads = [[0] * len(mine) for mine in queues]
    computed = [0] * schedule.num_stages
    started: dict[Message, int] = {}
    passed: set[Message] = set()
    ready = list(range(schedule.num_stages))
    while ready:
        stage = ready.pop()
        moved = True
        while moved:
            moved = False
            for number, queue in enumerate(queues[stage]):
                while (head := heads[stage][number]) < len(queue):
                    _, after, waits, message = queue[head]
                    if after > computed[stage] or not passed.issuperset(waits):
                        break
                    heads[stage][number] += 1
                    moved = True
                    if message is None:
                        computed[stage] += 1
                    elif message in started:
                        passed.add(message)
                        ready.append(started.pop(message))
                    else:
                        started[message] = stage
    left = {entry.moves for mine, at in zip(queues, heads, strict=True) for q, h in zip(mine, at, strict=True) for entry in q[h:]}
    return sorted(({message for message in left if message} | started.keys()) - passed)


def _entries(schedule: Schedule, stage: int, plan: ReceivePlan, exchanges: bool) -> Iterator[_Entry]:
    """What a stage hands to its device, in the order of `Executor.run` and `Messenger`."""
    streams = {ends: number for number, ends in enumerate((c for c in channels(schedule) if stage in c), 1)}
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
