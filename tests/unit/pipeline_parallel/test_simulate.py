"""The simulator against a plain longest path, and what a timeline says of itself."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline_parallel.simulate import OpCosts, OpSpan, Timeline, simulate
from megatron.spec.operations import Message, Op, Schedule
from megatron.spec.schedules import build_1f1b, build_gpipe
from megatron_lab.schedule_plots.table import compute_idle_times
from tests.support.schedule_examples import B, F, I, R, W, generated_schedules, random_schedules

SCHEDULES = st.one_of(random_schedules(), generated_schedules(max_stages=4, max_microbatches=6))


def durations(schedule: Schedule, seed: int) -> dict[Op, int]:
    """Whole numbers, so that sums are exact; some operations take none."""
    chooser = random.Random(seed)
    return {op: chooser.randrange(10) for ops in schedule.ops for op in ops}


def longest_path(schedule: Schedule, took: dict[Op, int], p2p: int) -> dict[Op, int]:
    """When each operation begins: the longest way to it, found by pushing begins back until nothing moves any more."""
    stage_of = {op: stage for stage, ops in enumerate(schedule.ops) for op in ops}
    giver: dict[Message, Op] = {message: op for op in stage_of if (message := schedule.get_sent_message(op)) is not None}
    edges = [(a, b, 0) for ops in schedule.ops for a, b in itertools.pairwise(ops)]
    for op in stage_of:
        if (needed := schedule.get_received_message(op)) is not None:
            edges.append((giver[needed], op, p2p if stage_of[giver[needed]] != stage_of[op] else 0))
    begin = dict.fromkeys(stage_of, 0)
    moved = True
    while moved:
        moved = False
        for first, then, delay in edges:
            if begin[then] < (earliest := begin[first] + took[first] + delay):
                begin[then], moved = earliest, True
    return begin


@given(SCHEDULES, st.integers(0, 999), st.integers(0, 12))
def test_every_operation_begins_at_the_end_of_the_longest_way_to_it(schedule: Schedule, seed: int, p2p: int) -> None:
    took = durations(schedule, seed)
    begin = longest_path(schedule, took, p2p)
    timeline = simulate(schedule, took.__getitem__, p2p=p2p)
    assert timeline.name == schedule.name
    assert timeline.spans == tuple(tuple(OpSpan(op, begin[op], begin[op] + took[op]) for op in ops) for ops in schedule.ops)


@given(SCHEDULES, st.lists(st.integers(0, 9), min_size=4, max_size=4), st.integers(0, 12))
def test_costs_are_a_duration_for_each_kind(schedule: Schedule, costs: list[int], p2p: int) -> None:
    f, i, w, r = costs
    took = {op: {F: f, R: r, B: i + w, I: i, W: w}[op.type] for ops in schedule.ops for op in ops}
    assert simulate(schedule, OpCosts(f, i, w, p2p, r)) == simulate(schedule, took.__getitem__, p2p=p2p)


@given(SCHEDULES, st.integers(0, 999), st.integers(0, 999), st.integers(0, 12), st.integers(0, 12))
def test_no_operation_ends_sooner_when_some_are_dearer(schedule: Schedule, seed: int, add: int, p2p: int, later: int) -> None:
    """The order on each stage is fixed, so nothing can be won by it."""
    before, more = durations(schedule, seed), durations(schedule, add)
    cheap = simulate(schedule, before.__getitem__, p2p=p2p)
    dear = simulate(schedule, lambda op: before[op] + more[op], p2p=p2p + later)
    for cheap_spans, dear_spans in zip(cheap.spans, dear.spans, strict=True):
        assert all(b.start >= a.start and b.end >= a.end for a, b in zip(cheap_spans, dear_spans, strict=True))


def test_by_hand() -> None:
    """Two stages, two microbatches, a forward of 2, a backward of 3 + 1, a message of 10."""
    timeline = simulate(build_1f1b(2, 2), OpCosts(2, 3, 1, 10))
    assert timeline.spans == (
        (OpSpan(Op(F, 0, 0), 0, 2), OpSpan(Op(F, 0, 1), 2, 4), OpSpan(Op(B, 0, 0), 28, 32), OpSpan(Op(B, 0, 1), 34, 38)),
        (OpSpan(Op(F, 1, 0), 12, 14), OpSpan(Op(B, 1, 0), 14, 18), OpSpan(Op(F, 1, 1), 18, 20), OpSpan(Op(B, 1, 1), 20, 24)),
    )
    assert (timeline.start, timeline.end, timeline.step_time) == (0, 38, 38)
    assert timeline.busy_times == (12, 12)
    assert compute_idle_times(timeline) == (26, 0)
    assert timeline.bubble_share == pytest.approx(1 - 24 / 76)


def test_chunks_of_one_stage_hand_over_at_once() -> None:
    schedule = Schedule("v", 1, (0, 1, 1, 0), ((Op(F, 0, 0), Op(F, 3, 0)), (Op(F, 1, 0), Op(F, 2, 0))))
    begins = [[span.start for span in spans] for spans in simulate(schedule, OpCosts(forward=1, p2p=5)).spans]
    assert begins == [[0, 13], [6, 7]]


def test_a_deadlock_is_named() -> None:
    backwards_first = replace(build_gpipe(2, 1), ops=((Op(B, 0, 0), Op(F, 0, 0)), build_gpipe(2, 1).ops[1]))
    with pytest.raises(ValueError, match="schedule gpipe deadlocks: stage 0 before B of chunk 0, microbatch 0; stage 1 before F"):
        simulate(backwards_first)


# ---- timelines


def test_a_measured_timeline_need_not_begin_at_zero() -> None:
    """Stage 1 begins first and ends last."""
    spans = ((OpSpan(Op(F, 0, 0), 103.0, 105.0),), (OpSpan(Op(F, 1, 0), 101.0, 102.0), OpSpan(Op(B, 1, 0), 106.0, 111.0)))
    timeline = Timeline("run", spans)
    assert (timeline.start, timeline.end, timeline.step_time) == (101, 111, 10)
    assert timeline.busy_times == (2, 6)
    assert compute_idle_times(timeline) == (0, 4)
    assert timeline.bubble_share == pytest.approx(1 - 8 / 20)


def test_a_stage_without_operations_is_idle_all_the_time() -> None:
    timeline = Timeline("run", ((OpSpan(Op(F, 0, 0), 2.0, 6.0),), ()))
    assert (timeline.step_time, timeline.busy_times, compute_idle_times(timeline)) == (4, (4, 0), (0, 0))
    assert timeline.bubble_share == 0.5


def test_nothing_takes_no_time() -> None:
    for spans in ((), ((), ())):
        timeline = Timeline("empty", spans)
        assert (timeline.start, timeline.end, timeline.step_time, timeline.bubble_share) == (0, 0, 0, 0)
    assert simulate(build_1f1b(2, 3), OpCosts(0, 0, 0)).bubble_share == 0


# ---- costs


def test_costs_of_a_chunk() -> None:
    """Work is divided; a message is as long as before."""
    assert OpCosts(6, 9, 3, 2, 12).divide_by_chunks(3) == OpCosts(2, 3, 1, 2, 4)
    assert OpCosts() == OpCosts(forward=1, input_grad=1, weight_grad=1, p2p=0, recompute=0)
