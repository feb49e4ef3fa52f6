"""Schedules, their proof and the plan of receives: all without a process."""

from __future__ import annotations

import graphlib
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline_parallel.p2p import plan_receives
from megatron.pipeline_parallel.schedules import GENERATORS, Message, Op, OpKind, Schedule, forward_only, gpipe, one_f_one_b
from megatron.pipeline_parallel.validate import validate
from tests.schedule_examples import B, F, I, W, greedy, interleaved, split_backwards

STAGES, MICROBATCHES = st.integers(1, 16), st.integers(1, 64)
PLACES = [(0,), (0, 1), (0, 1, 2), (0, 0), (0, 1, 1, 0), (0, 1, 0, 1), (0, 1, 2, 2, 1, 0), (0, 1, 2, 0, 1, 2), (0, 1, 0)]
"""Stage of each chunk: one or more chunks a stage, in a V, in a ring."""


@st.composite
def random_schedules(draw: st.DrawFn) -> Schedule:
    """Valid schedules with chunks anywhere, split or not."""
    place = draw(st.sampled_from(PLACES))
    return greedy(place, draw(st.integers(1, 4)), split=draw(st.booleans()), seed=draw(st.integers(0, 999)))


# ---- the generators


@given(STAGES, MICROBATCHES)
def test_one_f_one_b_keeps_as_many_activations_as_stages_that_follow(stages: int, microbatches: int) -> None:
    """Narayanan et al. 2021, section 2.2.1: at most as many as there are stages, whatever the number of microbatches."""
    report = validate(one_f_one_b(stages, microbatches))
    assert report.peak_live_activations == tuple(min(microbatches, stages - stage) for stage in range(stages))


@given(STAGES, MICROBATCHES)
def test_gpipe_keeps_every_activation(stages: int, microbatches: int) -> None:
    assert validate(gpipe(stages, microbatches)).peak_live_activations == (microbatches,) * stages


@given(STAGES, MICROBATCHES)
def test_forward_only_is_valid(stages: int, microbatches: int) -> None:
    schedule = forward_only(stages, microbatches)
    validate(schedule)
    assert all(op.kind is F for ops in schedule.ops for op in ops)


@pytest.mark.parametrize("name", GENERATORS)
def test_generators_are_found_by_their_name(name: str) -> None:
    schedule = GENERATORS[name](3, 5)
    assert (schedule.name, schedule.num_microbatches, schedule.num_stages, schedule.num_chunks) == (name, 5, 3, 3)


def test_one_f_one_b_by_hand() -> None:
    """Fig. 4 (top) of Narayanan et al. 2021, its first and last stages."""
    schedule = one_f_one_b(4, 8)
    words = [" ".join(f"{op.kind.value}{op.microbatch}" for op in ops) for ops in schedule.ops]
    assert words[0] == "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7"
    assert words[3] == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"


# ---- the validator accepts


@given(random_schedules())
def test_any_order_that_meets_its_needs_is_accepted(schedule: Schedule) -> None:
    """Zero-bubble splits, several chunks a stage; the peak is what counting along each stage gives."""
    peaks = []
    for ops in schedule.ops:
        live = [0]
        for op in ops:
            live.append(live[-1] + (op.kind is F) - (op.kind in (B, W)))
        assert live[-1] == 0
        peaks.append(max(live))
    assert validate(schedule).peak_live_activations == tuple(peaks)


@given(st.integers(1, 6), st.integers(1, 3), st.integers(2, 4))
def test_interleaved_one_f_one_b_is_accepted(stages: int, runs: int, chunks: int) -> None:
    """It keeps at most as many as its warm-up and one more."""
    peaks = validate(interleaved(stages, stages * runs, chunks)).peak_live_activations
    total = stages * runs * chunks
    assert peaks == tuple(min(total, (stages - stage - 1) * 2 + (chunks - 1) * stages + 1) for stage in range(stages))


@pytest.mark.parametrize("weights_last", [False, True])
def test_split_backwards_are_accepted(weights_last: bool) -> None:
    """An activation lives until its weight gradient, so weight gradients at the end keep all."""
    peaks = validate(split_backwards(one_f_one_b(3, 7), weights_last)).peak_live_activations
    assert peaks == ((7, 7, 7) if weights_last else (3, 2, 1))


# ---- the validator rejects


def changed(stage: int, change: Callable[[list[Op]], None]) -> Schedule:
    """1F1B of 3 stages and 4 microbatches with one stage's list changed."""
    schedule = one_f_one_b(3, 4)
    ops = [list(stage_ops) for stage_ops in schedule.ops]
    change(ops[stage])
    return replace(schedule, ops=tuple(map(tuple, ops)))


def swap(a: Op, b: Op) -> Callable[[list[Op]], None]:
    def change(ops: list[Op]) -> None:
        i, j = ops.index(a), ops.index(b)
        ops[i], ops[j] = ops[j], ops[i]

    return change


BROKEN: dict[str, tuple[Schedule, str]] = {
    "missing forward": (
        changed(1, lambda ops: ops.remove(Op(F, 1, 2))),
        "chunk 1, microbatch 2: each must be computed exactly once",
    ),
    "missing backward": (changed(2, lambda ops: ops.remove(Op(B, 2, 0))), "chunk 2, microbatch 0"),
    "doubled forward": (changed(0, lambda ops: ops.append(Op(F, 0, 3))), "chunk 0, microbatch 3"),
    "doubled backward": (changed(1, lambda ops: ops.append(Op(B, 1, 1))), "chunk 1, microbatch 1"),
    "backward and input gradient": (changed(1, lambda ops: ops.append(Op(I, 1, 1))), "chunk 1, microbatch 1"),
    "input without weight gradient": (
        changed(1, lambda ops: ops.__setitem__(ops.index(Op(B, 1, 3)), Op(I, 1, 3))),
        "chunk 1, microbatch 3",
    ),
    "weight without input gradient": (
        changed(1, lambda ops: ops.__setitem__(ops.index(Op(B, 1, 3)), Op(W, 1, 3))),
        "chunk 1, microbatch 3",
    ),
    "one microbatch only forward": (changed(0, lambda ops: ops.remove(Op(B, 0, 3))), "chunk 0, microbatch 3"),
    "a microbatch too many": (changed(0, lambda ops: ops.extend([Op(F, 0, 4), Op(B, 0, 4)])), "microbatches that do not exist"),
    "a negative microbatch": (changed(0, lambda ops: ops.append(Op(F, 0, -1))), "microbatches that do not exist"),
    "another stage's chunk": (changed(0, lambda ops: ops.append(Op(F, 1, 0))), "stands on stage 0, which does not hold its chunk"),
    "a chunk that does not exist": (changed(2, lambda ops: ops.append(Op(F, 3, 0))), "does not hold its chunk"),
    "a negative chunk": (changed(2, lambda ops: ops.append(Op(F, -1, 0))), "does not hold its chunk"),
    "backward first on the last stage": (changed(2, swap(Op(F, 2, 1), Op(B, 2, 1))), "stands before its forward"),
    "weight before input gradient": (
        replace(gpipe(1, 1), ops=((Op(F, 0, 0), Op(W, 0, 0), Op(I, 0, 0)),)),
        "stands before its input_grad",
    ),
    "forwards in another order than messages allow": (
        # Stage 0 waits for the gradient of microbatch 1 before it gives the forward of 2; stage 1 wants that forward first.
        replace(
            gpipe(2, 3),
            ops=(
                (Op(F, 0, 0), Op(F, 0, 1), Op(B, 0, 1), Op(F, 0, 2), Op(B, 0, 0), Op(B, 0, 2)),
                (Op(F, 1, 0), Op(F, 1, 2), Op(F, 1, 1), Op(B, 1, 1), Op(B, 1, 0), Op(B, 1, 2)),
            ),
        ),
        "schedule gpipe deadlocks: stage 0 before B of microbatch 1; stage 1 before F of microbatch 2",
    ),
    "backward too early on the first stage": (
        changed(0, swap(Op(F, 0, 0), Op(B, 0, 0))),
        "deadlocks: stage 0 before B of microbatch 0",
    ),
    "a stage without operations": (changed(1, lambda ops: ops.clear()), "chunk 1, microbatch 0"),
    "a chunk on a stage that is not there": (replace(gpipe(2, 1), stage_of_chunk=(0, 2)), "which does not hold its chunk"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_schedule_is_refused(what: str) -> None:
    schedule, message = BROKEN[what]
    with pytest.raises(ValueError, match=message):
        validate(schedule)


@given(random_schedules(), st.randoms(use_true_random=False))
def test_two_swapped_operations_are_judged_as_the_graph_of_needs_judges(schedule: Schedule, chooser: random.Random) -> None:
    """Order on each stage, messages, and forward before backward make a graph; a schedule is possible if it has no cycle."""
    stages = [list(ops) for ops in schedule.ops]
    ops = chooser.choice([ops for ops in stages if len(ops) > 1])
    i, j = chooser.sample(range(len(ops)), 2)
    ops[i], ops[j] = ops[j], ops[i]
    swapped = replace(schedule, ops=tuple(map(tuple, stages)))

    giver: dict[Message | None, Op] = {swapped.gives(op): op for ops in swapped.ops for op in ops}
    graph: dict[Op, set[Op]] = {}
    for stage_ops in swapped.ops:
        for before, op in zip((None, *stage_ops), stage_ops, strict=False):
            first = {F: None, B: F, I: F, W: I}[op.kind]
            graph[op] = {before} if before else set()
            graph[op] |= {giver[swapped.needs(op)]} if swapped.needs(op) else set()
            graph[op] |= {Op(first, op.chunk, op.microbatch)} if first else set()
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError:
        with pytest.raises(ValueError, match="deadlocks|stands before its"):
            validate(swapped)
    else:
        validate(swapped)


# ---- the plan of receives


def messages_between(schedule: Schedule, source: int, stage: int) -> list[Message]:
    """What a stage sends to another, in its order."""
    given = [schedule.gives(op) for op in schedule.ops[source]]
    return [message for message in given if message and schedule.stage_of_chunk[message.chunk] == stage and source != stage]


schedules = st.one_of(
    random_schedules(),
    st.builds(one_f_one_b, st.integers(1, 6), st.integers(1, 12)),
    st.builds(gpipe, st.integers(1, 4), st.integers(1, 6)),
    st.builds(forward_only, st.integers(1, 4), st.integers(1, 6)),
)


@given(schedules, st.integers(0, 3))
def test_every_message_is_posted_once_in_the_senders_order_and_in_time(schedule: Schedule, ahead: int) -> None:
    for stage, ops in enumerate(schedule.ops):
        plan = plan_receives(schedule, stage, ahead)
        assert len(plan.before) == len(ops)
        posted = [(message, source, i) for i, due in enumerate(plan.before) for message, source in due]
        expected = [(message, s) for s in range(schedule.num_stages) for message in messages_between(schedule, s, stage)]
        assert Counter((message, source) for message, source, _ in posted) == Counter(expected)
        for source in range(schedule.num_stages):
            in_order = [message for message, s, _ in posted if s == source]
            assert in_order == messages_between(schedule, source, stage)
        place = {message: i for message, _, i in posted}
        for i, op in enumerate(ops):
            needed = schedule.needs(op)
            assert needed not in place or place[needed] <= max(0, i - ahead), "posted `ahead` operations before it is needed"


@given(schedules)
def test_what_is_not_needed_soon_is_not_posted_soon(schedule: Schedule) -> None:
    """Each posted message is needed by this or the next operation, or comes in its channel before one that is: few buffers."""
    for stage, ops in enumerate(schedule.ops):
        for i, due in enumerate(plan_receives(schedule, stage).before):
            wanted = {schedule.needs(op) for op in ops[i : i + 2]}
            last_of_channel = {source: message for message, source in due}
            assert set(last_of_channel.values()) <= wanted


@given(schedules)
def test_hearing_from_a_stage_proves_that_what_it_used_before_has_arrived(schedule: Schedule) -> None:
    """A message counts as arrived with the first answer that its receiver gives after using it, and only once."""
    at = {op: (stage, i) for stage, ops in enumerate(schedule.ops) for i, op in enumerate(ops)}
    giver = {schedule.gives(op): at[op] for op in at}
    user = {schedule.needs(op): at[op] for op in at}
    for stage, ops in enumerate(schedule.ops):
        arrived = plan_receives(schedule, stage).arrived
        assert len(arrived) == len(ops)
        for op, fresh in zip(ops, arrived, strict=True):
            expected: set[Message] = set()
            if needed := schedule.needs(op):
                peer, answered = giver[needed]
                answers = [giver[message] for message in messages_between(schedule, peer, stage)]
                before = max((place for place in answers if place < (peer, answered)), default=(peer, -1))
                mine = messages_between(schedule, stage, peer)
                expected = {message for message in mine if before < user[message] <= (peer, answered)}
            assert set(fresh) == expected and len(fresh) == len(expected)


def test_one_f_one_b_learns_of_each_activation_when_its_gradient_comes() -> None:
    plan = plan_receives(one_f_one_b(2, 5), 0)
    known = [(op, arrived) for op, arrived in zip(one_f_one_b(2, 5).ops[0], plan.arrived, strict=True) if arrived]
    assert known == [(Op(B, 0, m), (Message(False, 1, m),)) for m in range(5)]


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


def hangs(schedule: Schedule) -> bool:
    """Whether the plan would hang if every communicator ran what a rank issued strictly in order."""
    source = {message: s for s, ops in enumerate(schedule.ops) for message in map(schedule.gives, ops) if message}
    destination = {message: schedule.stage_of_chunk[message.chunk] for message in source}
    plans = [plan_receives(schedule, stage) for stage in range(schedule.num_stages)]
    up, down = Channel(schedule.num_stages), Channel(schedule.num_stages)
    position, entered = [0] * schedule.num_stages, [-1] * schedule.num_stages

    def channel(message: Message) -> Channel:
        return up if source[message] < destination[message] else down

    moved = True
    while moved:
        moved = False
        for stage, ops in enumerate(schedule.ops):
            if (i := position[stage]) == len(ops):
                continue
            if entered[stage] < i:
                entered[stage] = i
                for message, _ in plans[stage].before[i]:
                    channel(message).queues[stage].append(message)
            needed, given = schedule.needs(ops[i]), schedule.gives(ops[i])
            if needed and source[needed] != stage and needed not in channel(needed).done[stage]:
                continue
            if given and destination[given] != stage:
                channel(given).queues[stage].append(given)
            position[stage] += 1
            moved = True
        moved |= up.advance(source, destination) | down.advance(source, destination)
    return position != [len(ops) for ops in schedule.ops]


@given(st.sampled_from([gpipe, one_f_one_b, forward_only]), st.integers(1, 8), st.integers(1, 20), st.booleans())
def test_no_generated_schedule_hangs_on_communicators_that_keep_order(
    generator: Callable[[int, int], Schedule], stages: int, microbatches: int, split: bool
) -> None:
    schedule = generator(stages, microbatches)
    assert not hangs(split_backwards(schedule) if split else schedule)


@given(st.integers(1, 6), st.integers(1, 3), st.integers(2, 3))
def test_the_interleaved_schedule_does_not_hang_either(stages: int, runs: int, chunks: int) -> None:
    assert not hangs(interleaved(stages, stages * runs, chunks))


def test_orders_exist_that_would_hang() -> None:
    """In a ring of three stages messages of both kinds share a direction; so `hangs` is worth asking."""
    assert any(hangs(greedy((0, 1, 2, 0, 1, 2), 2, split=False, seed=seed)) for seed in range(20))


def test_every_kind_of_operation_has_its_letter() -> None:
    assert [kind.value for kind in OpKind] == ["F", "B", "I", "W"]
