"""Messages where the streams of a device share hardware queues that keep order: no number of queues and no sharing hangs a run."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline_parallel import validate as validating
from megatron.pipeline_parallel.exchange import (
    DEFAULT_LOOKAHEAD,
    QueueOf,
    choose_receive_plans,
    describe_receive_plans,
    find_stuck_messages,
    plan_exchanges,
    plan_receives,
    plan_receives_in_send_order,
)
from megatron.pipeline_parallel.validate import validate
from megatron.spec.operations import Message, Schedule, extract_forwards
from megatron.spec.schedules import SCHEDULES, build_schedule
from tests.support.covering import Case, covering, product
from tests.support.schedule_examples import generated_schedules, random_schedules

QUEUES = (1, 2, 4, 8)
AXES = {
    "name": tuple(SCHEDULES),
    "stages": (1, 2, 3, 4, 5, 8),
    "microbatches": (1, 2, 3, 4, 7, 8, 16, 21),
    "chunks": (2, 3, 4),
    "recompute": ("none", "first", "all"),
    "training": (True, False),
    "queues": QUEUES,
    "mapping": ("in turn", "at random"),
}


def _makes_sense(case: Case) -> bool:
    return SCHEDULES[case["name"]].chunks_per_stage is None or case["chunks"] == 2


def _schedule(case: Case) -> Schedule:
    chunks = SCHEDULES[case["name"]].chunks_per_stage or case["chunks"]
    again = {"none": (), "first": (0,), "all": range(case["stages"] * chunks)}[case["recompute"]]
    made = build_schedule(case["name"], case["stages"], case["microbatches"], chunks, recomputed_chunks=again)
    return made if case["training"] else extract_forwards(made)


def in_turn(queues: int) -> QueueOf:
    """Streams take queues in turn, in the order in which they are made."""
    return lambda stage, stream: stream % queues


def at_random(queues: int, seed: int) -> QueueOf:
    """Every stream of every stage takes any queue."""
    return lambda stage, stream: random.Random(f"{seed} {stage} {stream}").randrange(queues)


def test_no_schedule_hangs_at_any_number_of_queues(full: bool) -> None:
    """Any mapping is proved by the one queue; others are replayed here too, and exchanges that wait beside."""
    cases = product(AXES, _makes_sense) if full else covering(AXES, 5, _makes_sense)
    chosen = set()
    for number, case in enumerate(cases):
        schedule = _schedule(case)
        validate(schedule, "cuda")
        (plans, ahead), waiting = choose_receive_plans(schedule, "cuda"), plan_exchanges(schedule)
        mapping = in_turn(case["queues"]) if case["mapping"] == "in turn" else at_random(case["queues"], number)
        assert not find_stuck_messages(schedule, plans, mapping), case
        assert not find_stuck_messages(schedule, waiting, mapping, exchanges=True), case
        chosen.add(ahead)
        for more in range((ahead or 0) + 1, DEFAULT_LOOKAHEAD + 1):
            assert find_stuck_messages(schedule, plan_receives(schedule, lookahead=more)), f"{case}: {more} ahead is safe too"
    assert chosen == {1, 2} | ({None} if full else set())


def test_where_no_look_ahead_is_safe_the_order_of_sending_is() -> None:
    """Rounds of unequal length: 21 microbatches on 8 stages."""
    schedule = build_schedule("interleaved", 8, 21, 2)
    assert all(find_stuck_messages(schedule, plan_receives(schedule, lookahead=ahead)) for ahead in range(5))
    plans, ahead = choose_receive_plans(schedule, "cuda")
    assert ahead is None and not find_stuck_messages(schedule, plans)
    validate(schedule, "cuda")


def test_two_ahead_hangs_in_one_queue_and_one_ahead_never() -> None:
    """The reason for the choice."""
    hung = dict.fromkeys(SCHEDULES, 0)
    for name, stages, times in itertools.product(SCHEDULES, (2, 4, 8), (1, 2, 4)):
        schedule = build_schedule(name, stages, times * stages, SCHEDULES[name].chunks_per_stage or 2)
        hung[name] += bool(find_stuck_messages(schedule, plan_receives(schedule, lookahead=2)))
        assert not find_stuck_messages(schedule, plan_receives(schedule, lookahead=1))
        assert choose_receive_plans(schedule, "cpu") == (plan_receives(schedule, lookahead=2), DEFAULT_LOOKAHEAD)
    assert hung == {"gpipe": 9, "1f1b": 0, "interleaved": 9, "zb-h1": 0, "zb-v": 1}


def test_gpipe_by_hand() -> None:
    """Stage 0 posts two gradients before its last forward. The second stands behind the first, and that waits for the forward."""
    schedule = build_schedule("gpipe", 2, 2)
    lost = find_stuck_messages(schedule, plan_receives(schedule, lookahead=2))
    assert lost == [Message(False, 1, 1), Message(True, 0, 0)], "each stage waits for one that the other sends later"
    assert not find_stuck_messages(schedule, plan_receives(schedule, lookahead=2), in_turn(3)), (
        "gradients have a queue of their own"
    )
    assert choose_receive_plans(schedule, "cuda").lookahead == 1


def test_a_recompute_does_not_delay_what_is_posted() -> None:
    """It counts with the backward behind it. Counted by itself it would bring gradients too late for the other stage's queue."""
    schedule = build_schedule("interleaved", 2, 4, 2, recomputed_chunks=range(4))
    plain = build_schedule("interleaved", 2, 4, 2)
    for ahead in (0, 1, 2):
        for again, without in zip(plan_receives(schedule, lookahead=ahead), plan_receives(plain, lookahead=ahead), strict=True):
            assert [due for due in again.posts if due] == [due for due in without.posts if due]


def test_receives_may_come_too_late_as_well() -> None:
    """Posted just before they are needed, they stand behind sends that wait for the other stage to post its own."""
    schedule = build_schedule("zb-v", 2, 4, 2)
    assert find_stuck_messages(schedule, plan_receives(schedule, lookahead=0)) and not find_stuck_messages(
        schedule, plan_receives(schedule, lookahead=1)
    )
    assert not find_stuck_messages(schedule, plan_receives(schedule, lookahead=0), in_turn(3))


def test_an_exchange_waits_for_all_that_is_posted() -> None:
    """So a receive may not be posted ahead there: stage 0 would wait for a gradient whose forward it has not computed."""
    schedule = build_schedule("1f1b", 2, 2)
    ahead = plan_receives(schedule, lookahead=2)

    def own_queue(stage: int, stream: int) -> int:
        return stream

    assert not find_stuck_messages(schedule, ahead, own_queue) and Message(True, 0, 0) in find_stuck_messages(
        schedule, ahead, own_queue, exchanges=True
    )
    assert not find_stuck_messages(schedule, plan_exchanges(schedule), own_queue, exchanges=True)


@given(st.one_of(random_schedules(), generated_schedules()), st.integers(0, 3), st.sampled_from(QUEUES), st.integers(0, 99))
def test_what_passes_in_one_queue_passes_in_any(schedule: Schedule, ahead: int, queues: int, seed: int) -> None:
    """More sharing only adds waits: the argument on which the choice rests."""
    plans = plan_receives(schedule, lookahead=ahead)
    if not find_stuck_messages(schedule, plans):
        assert not find_stuck_messages(schedule, plans, in_turn(queues)) and not find_stuck_messages(
            schedule, plans, at_random(queues, seed)
        )


@given(st.one_of(random_schedules(), generated_schedules()))
def test_a_queue_for_every_stream_never_hangs(schedule: Schedule) -> None:
    assert not find_stuck_messages(schedule, plan_receives(schedule), lambda stage, stream: stream)


@given(st.one_of(random_schedules(), generated_schedules()))
def test_any_valid_schedule_passes(schedule: Schedule) -> None:
    """Of any order of operations: by the look-ahead that is chosen, and always in the order of sending."""
    assert not find_stuck_messages(schedule, plan_receives_in_send_order(schedule))
    validate(schedule, "cuda")


@pytest.mark.parametrize("waits", [False, True])
def test_a_plan_that_is_stuck_is_refused(monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    lost = [Message(True, 0, 0)]
    monkeypatch.setattr(validating, "find_stuck_messages", lambda schedule, plans, *, exchanges: lost if exchanges == waits else [])
    with pytest.raises(ValueError, match="1f1b deadlocks if all streams share one hardware queue: .* never arrives"):
        validate(build_schedule("1f1b", 2, 2), "cuda")
    validate(build_schedule("1f1b", 2, 2))


def test_the_log_tells_the_choice_and_the_environment() -> None:
    gpipe, plain = build_schedule("gpipe", 2, 4), build_schedule("1f1b", 2, 4)
    assert describe_receive_plans(gpipe, "cpu", "1") == "stages post their receives 2 operations ahead"
    assert describe_receive_plans(plain, "cuda", None).endswith(
        "2 operations ahead: safe at any CUDA_DEVICE_MAX_CONNECTIONS (not set)"
    )
    told = describe_receive_plans(gpipe, "cuda", "1")
    assert "1 operation ahead: safe at any CUDA_DEVICE_MAX_CONNECTIONS (1); 2 ahead could hang" in told
    uneven = build_schedule("interleaved", 8, 21, 2)
    assert describe_receive_plans(uneven, "cuda", "1").startswith("stages post their receives in the order of sending: safe")
