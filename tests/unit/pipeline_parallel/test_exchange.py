"""The plans of receives: complete, in the sender's order, in time, without deadlock. Needs no process."""

from __future__ import annotations

from collections import Counter, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline_parallel import validate as validating
from megatron.pipeline_parallel.exchange import list_channels, plan_exchanges, plan_receives
from megatron.pipeline_parallel.simulate import iterate_runnable_ops, simulate
from megatron.pipeline_parallel.validate import validate
from megatron.spec.operations import Message, Op, Schedule, extract_forwards
from megatron.spec.schedules import SCHEDULES, build_1f1b, build_schedule
from tests.support.schedule_examples import B, R, generated_schedules, greedy, random_schedules

# ---- the plan of receives


def messages_between(schedule: Schedule, source: int, stage: int) -> list[Message]:
    """What a stage sends to another, in its order."""
    given = [schedule.get_sent_message(op) for op in schedule.ops[source]]
    return [message for message in given if message and schedule.stage_of_chunk[message.chunk] == stage and source != stage]


schedules = st.one_of(random_schedules(), generated_schedules())


@given(schedules, st.integers(0, 3))
def test_every_message_is_posted_once_in_the_senders_order_and_in_time(schedule: Schedule, ahead: int) -> None:
    for stage, ops in enumerate(schedule.ops):
        plan = plan_receives(schedule, lookahead=ahead)[stage]
        assert len(plan.posts) == len(ops)
        posted = [(message, source, i) for i, due in enumerate(plan.posts) for message, source in due]
        expected = [(message, s) for s in range(schedule.num_stages) for message in messages_between(schedule, s, stage)]
        assert Counter((message, source) for message, source, _ in posted) == Counter(expected)
        for source in range(schedule.num_stages):
            in_order = [message for message, s, _ in posted if s == source]
            assert in_order == messages_between(schedule, source, stage)
        place = {message: i for message, _, i in posted}
        for i, op in enumerate(ops):
            needed = schedule.get_received_message(op)
            assert needed not in place or place[needed] <= max(0, i - ahead), "posted `ahead` operations before it is needed"


@given(schedules)
def test_what_is_not_needed_soon_is_not_posted_soon(schedule: Schedule) -> None:
    """Each posted message is needed by this or the next two operations, or comes in its channel before one that is: few buffers.
    A recompute counts with the operation behind it."""
    for stage, ops in enumerate(schedule.ops):
        for i, due in enumerate(plan_receives(schedule)[stage].posts):
            wanted = {schedule.get_received_message(op) for op in [op for op in ops[i:] if op.type is not R][:3]}
            last_of_channel = {source: message for message, source in due}
            assert set(last_of_channel.values()) <= wanted


def ancestors(schedule: Schedule) -> dict[Op, set[Op]]:
    """For each operation, all that must have ended before it begins."""
    giver = {schedule.get_sent_message(op): op for ops in schedule.ops for op in ops}
    found: dict[Op, set[Op]] = {}
    before: dict[int, Op] = {}
    for stage, (op, needed, _) in iterate_runnable_ops(schedule):
        direct = [other for other in (before.get(stage), giver[needed] if needed else None) if other is not None]
        found[op] = set(direct).union(*(found[other] for other in direct))
        before[stage] = op
    return found


@given(schedules)
def test_a_message_is_settled_once_and_only_when_it_is_used_or_cannot_hold_that_up(schedule: Schedule) -> None:
    user = {schedule.get_received_message(op): op for ops in schedule.ops for op in ops}
    time = {span.op: span for spans in simulate(schedule).spans for span in spans}
    known = ancestors(schedule)
    for (stage, ops), plan in zip(enumerate(schedule.ops), plan_receives(schedule), strict=True):
        mine = {schedule.get_sent_message(op): i for i, op in enumerate(ops)}
        settled = [(message, i) for i, messages in enumerate(plan.completed_sends) for message in messages]
        assert len({message for message, _ in settled}) == len(settled)
        for message, i in settled:
            assert mine[message] < i and schedule.stage_of_chunk[message.chunk] != stage
            assert user[message] in known[ops[i]] or time[user[message]].end <= time[ops[i]].start


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("evaluates", [False, True])
def test_sent_messages_do_not_pile_up(name: str, evaluates: bool) -> None:
    """However many microbatches there are, and if no answer ever comes."""
    most = []
    for microbatches in (24, 48):
        schedule = build_schedule(name, 4, microbatches, SCHEDULES[name].chunks_per_stage or 2)
        schedule = extract_forwards(schedule) if evaluates else schedule
        kept = []
        for (stage, ops), plan in zip(enumerate(schedule.linked_ops), plan_receives(schedule), strict=True):
            sent = [gives is not None and schedule.stage_of_chunk[gives.chunk] != stage for _, _, gives in ops]
            leaving = [0]
            for sends, settled in zip(sent, plan.completed_sends, strict=True):
                leaving.append(leaving[-1] + sends - len(settled))
            kept.append(max(leaving))
        most.append(max(kept))
    assert most[0] == most[1] <= 2 * 4 + 4


def test_one_f_one_b_learns_of_each_activation_when_its_gradient_comes() -> None:
    plan = plan_receives(build_1f1b(2, 5))[0]
    known = [(op, arrived) for op, arrived in zip(build_1f1b(2, 5).ops[0], plan.completed_sends, strict=True) if arrived]
    assert known == [(Op(B, 0, m), [Message(False, 1, m)]) for m in range(5)]


# ---- communicators that keep order


class Channel:
    """A communicator that runs what each rank issued strictly in order, as NCCL does: nothing moves until both ends are at it."""

    def __init__(self, stages: int) -> None:
        self.queues: list[deque[Message]] = [deque() for _ in range(stages)]
        self.done: list[set[Message]] = [set() for _ in range(stages)]

    def advance(self, source_of: dict[Message, int], destination_of: dict[Message, int]) -> bool:
        moved = False
        for stage, queue in enumerate(self.queues):
            while queue and source_of[queue[0]] == stage:
                message, peer = queue[0], destination_of[queue[0]]
                if not self.queues[peer] or self.queues[peer][0] != message:
                    break
                queue.popleft()
                self.queues[peer].popleft()
                self.done[peer].add(message)
                moved = True
        return moved


def hangs(schedule: Schedule, *, shared: bool = False) -> bool:
    """Whether the plan would hang if every communicator ran what a rank issued strictly in order.

    There is one for each pair of stages and direction, or, if they are shared, one for all upward messages and one for the others.
    """
    source = {message: s for s, ops in enumerate(schedule.ops) for message in map(schedule.get_sent_message, ops) if message}
    destination = {message: schedule.stage_of_chunk[message.chunk] for message in source}
    plans = plan_receives(schedule)
    made: dict[tuple[int, int] | bool, Channel] = {}
    position, entered = [0] * schedule.num_stages, [-1] * schedule.num_stages

    def channel(message: Message) -> Channel:
        ends = (source[message], destination[message])
        return made.setdefault(ends[0] < ends[1] if shared else ends, Channel(schedule.num_stages))

    moved = True
    while moved:
        moved = False
        for stage, ops in enumerate(schedule.ops):
            if (i := position[stage]) == len(ops):
                continue
            if entered[stage] < i:
                entered[stage] = i
                for message, _ in plans[stage].posts[i]:
                    channel(message).queues[stage].append(message)
            needed, given = schedule.get_received_message(ops[i]), schedule.get_sent_message(ops[i])
            if needed and source[needed] != stage and needed not in channel(needed).done[stage]:
                continue
            if given and destination[given] != stage:
                channel(given).queues[stage].append(given)
            position[stage] += 1
            moved = True
        moved |= sum(one.advance(source, destination) for one in made.values()) > 0
    return position != [len(ops) for ops in schedule.ops]


@given(schedules)
def test_no_valid_schedule_hangs_on_communicators_that_keep_order(schedule: Schedule) -> None:
    assert not hangs(schedule)


def test_orders_exist_that_would_hang_if_they_were_shared() -> None:
    """In a ring of three stages messages of both kinds share a direction; so `hangs` is worth asking."""
    assert any(hangs(greedy((0, 1, 2, 0, 1, 2), 2, split=False, seed=seed), shared=True) for seed in range(20))


# ---- exchanges that wait


@given(schedules)
def test_exchanges_that_wait_for_both_ends_do_not_lock_up(schedule: Schedule) -> None:
    validate(schedule)
    for (stage, ops), plan in zip(enumerate(schedule.ops), plan_exchanges(schedule), strict=True):
        posted: set[Message] = set()
        for op, due in zip(ops, plan.posts, strict=True):
            posted |= {message for message, _ in due}
            needed = schedule.get_received_message(op)
            assert needed is None or needed in posted or schedule.stage_of_chunk[_giver(needed)] == stage
        expected = {message for s in range(schedule.num_stages) for message in messages_between(schedule, s, stage)}
        assert posted == expected


def _giver(message: Message) -> int:
    """The chunk that a message comes from."""
    return message.chunk + 1 if message.is_gradient else message.chunk - 1


def test_exchanges_of_one_f_one_b() -> None:
    """The second stage of three takes an activation when the first has ended one, not sooner, and gradients likewise."""
    plan = plan_exchanges(build_1f1b(3, 4))[1]
    words = [" ".join("g" * message.is_gradient or "a" for message, _ in due) for due in plan.posts]
    assert words == ["a", "a", "a g", "", "g", "a", "g", "g"]


def test_receives_just_before_they_are_needed_would_lock_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why the exchanges are planned: where a stage posts what an operation needs right before it, and both ends of a message wait,
    1F1B locks up already. Each of two neighbours would send first."""
    monkeypatch.setattr(validating, "plan_exchanges", lambda schedule: plan_receives(schedule, lookahead=0))
    late = [
        schedule
        for schedule in (greedy((0, 1, 2, 0, 1, 2), 3, split=False, seed=seed) for seed in range(20))
        if _locks_up(schedule)
    ]
    assert late


def _locks_up(schedule: Schedule) -> bool:
    try:
        validate(schedule)
    except ValueError as error:
        assert "deadlocks if each send and receive blocks until the other rank posts the matching call" in str(error)
        return True
    return False


def test_ends_that_do_not_agree_on_the_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = build_1f1b(2, 3)
    plans = list(plan_exchanges(schedule))
    plans[1] = plans[1]._replace(posts=list(reversed(plans[1].posts)))
    monkeypatch.setattr(validating, "plan_exchanges", lambda schedule: plans)
    with pytest.raises(ValueError, match="stage 1 does not receive its messages in the order"):
        validate(schedule)


def test_channels_go_where_messages_go() -> None:
    assert list_channels(build_1f1b(3, 1)) == [(0, 1), (1, 0), (1, 2), (2, 1)]
    assert list_channels(build_schedule("interleaved", 3, 3, 2)) == [(0, 1), (1, 0), (1, 2), (2, 1), (0, 2), (2, 0)]
    assert list_channels(build_1f1b(5, 1))[:4] == [(0, 1), (1, 0), (2, 3), (3, 2)], "pairs that share no stage, so all at once"
    assert list_channels(build_schedule("zb-v", 1, 3, 2)) == []
