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

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
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
