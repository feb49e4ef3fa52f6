"""The walk through a schedule: an order that could be, and which stages wait where there is none."""

from __future__ import annotations

import contextlib
import graphlib
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline_parallel.simulate import iterate_runnable_ops
from megatron.spec.operations import Message, Op, Schedule
from megatron.spec.schedules import build_gpipe
from tests.support.schedule_examples import B, F, generated_schedules, random_schedules

SCHEDULES = st.one_of(random_schedules(), generated_schedules())


@given(SCHEDULES)
def test_each_operation_comes_after_those_before_it_and_what_it_needs(schedule: Schedule) -> None:
    walked: list[list[Op]] = [[] for _ in schedule.ops]
    given: set[Message | None] = {None}
    for stage, (op, _, _) in iterate_runnable_ops(schedule):
        assert schedule.get_received_message(op) in given
        given.add(schedule.get_sent_message(op))
        walked[stage].append(op)
    assert tuple(map(tuple, walked)) == schedule.ops


@given(SCHEDULES, st.randoms(use_true_random=False))
def test_it_stops_exactly_where_the_needs_go_round_in_a_circle(schedule: Schedule, chooser: random.Random) -> None:
    """With one stage's operations shuffled: what comes is all that does not hang on a circle."""
    stages = [list(ops) for ops in schedule.ops]
    chooser.shuffle(chooser.choice(stages))
    shuffled = replace(schedule, ops=tuple(map(tuple, stages)))
    giver = {message: op for ops in stages for op in ops if (message := shuffled.get_sent_message(op)) is not None}
    graph: dict[Op, set[Op]] = {}
    for ops in stages:
        for before, op in zip((None, *ops), ops, strict=False):
            needed = shuffled.get_received_message(op)
            graph[op] = ({before} if before else set()) | ({giver[needed]} if needed else set())
    sorter = graphlib.TopologicalSorter(graph)
    with contextlib.suppress(graphlib.CycleError):  # which does not keep it from going as far as it can
        sorter.prepare()
    reached: Counter[Op] = Counter()
    while ready := sorter.get_ready():
        reached.update(ready)
        sorter.done(*ready)

    walked: Counter[Op] = Counter()
    try:
        for _, (op, _, _) in iterate_runnable_ops(shuffled):
            walked[op] += 1
    except ValueError:
        assert reached.total() < len(graph)
    else:
        assert reached.total() == len(graph)
    assert walked == reached


def test_it_names_the_stages_that_wait() -> None:
    """Stage 0 wants a gradient before it forwards anything; stage 1 has nothing to do, so stage 2 waits too."""
    schedule = build_gpipe(3, 1)
    ops = ((Op(B, 0, 0), Op(F, 0, 0)), (), (Op(F, 2, 0), Op(B, 2, 0)))
    steps = iterate_runnable_ops(replace(schedule, ops=ops))
    with pytest.raises(ValueError) as failure:
        next(steps)
    assert str(failure.value) == (
        "schedule gpipe deadlocks: stage 0 before B of chunk 0, microbatch 0; stage 2 before F of chunk 2, microbatch 0. "
        "Each of these operations (F forward, B backward, I input gradient) waits for a message that is never sent. "
        "Reorder the operations of the schedule."
    )
