"""The proof of a schedule: what it accepts and what it refuses. Without a process."""

from __future__ import annotations

import graphlib
import random
from collections.abc import Callable, Collection
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline_parallel.validate import compute_peak_live_activations, validate
from megatron.spec.operations import Message, Op, OpType, Schedule, extract_forwards
from megatron.spec.schedules import SCHEDULES, build_1f1b, build_gpipe, build_schedule
from tests.support.schedule_examples import B, F, I, R, W, first_of, random_schedules, split_backwards

# ---- the validator accepts


@given(random_schedules())
def test_any_order_that_meets_its_needs_is_accepted(schedule: Schedule) -> None:
    """Zero-bubble splits, several chunks a stage; the peak is what counting along each stage gives."""
    peaks = []
    for ops in schedule.ops:
        live = [0]
        for op in ops:
            live.append(live[-1] + (op.type is F) - (op.type in (B, W)))
        assert live[-1] == 0
        peaks.append(max(live))
    validate(schedule)
    assert compute_peak_live_activations(schedule) == tuple(peaks)


@pytest.mark.parametrize("weights_last", [False, True])
def test_split_backwards_are_accepted(weights_last: bool) -> None:
    """An activation lives until its weight gradient, so weight gradients at the end keep all."""
    schedule = split_backwards(build_1f1b(3, 7), weights_last)
    validate(schedule)
    assert compute_peak_live_activations(schedule) == ((7, 7, 7) if weights_last else (3, 2, 1))


@pytest.mark.parametrize("name", SCHEDULES)
def test_recompute_may_stand_anywhere_between_forward_and_gradient(name: str) -> None:
    """Right behind the forward, or where the generator puts it; of some chunks or of all; and it changes no message."""
    chunks = SCHEDULES[name].chunks_per_stage or 2
    plain = build_schedule(name, 3, 5, chunks)
    for recomputed in ({1}, range(3 * chunks)):
        schedule = build_schedule(name, 3, 5, chunks, recomputed_chunks=recomputed)
        soon = tuple(
            tuple(one for op in ops for one in (op, Op(R, op.chunk, op.microbatch)) if one.type is not R or op.type is F)
            for ops in plain.ops
        )
        for tried in (schedule, replace(plain, ops=soon)):
            validate(tried)
            assert tuple(tuple(op for op in ops if op.type is not R) for ops in tried.ops) == plain.ops
            assert [[gives for *_, gives in ops if gives] for ops in tried.linked_ops] == [
                [gives for *_, gives in ops if gives] for ops in plain.linked_ops
            ]
        again = [op for ops in schedule.ops for op in ops if op.type is R]
        assert sorted(again) == [Op(R, chunk, m) for chunk in sorted(recomputed) for m in range(5)]
        assert compute_peak_live_activations(schedule) == compute_peak_live_activations(plain)
        assert extract_forwards(schedule).ops == extract_forwards(plain).ops


# ---- the validator rejects


def changed(stage: int, change: Callable[[list[Op]], None], recomputed: Collection[int] = ()) -> Schedule:
    """1F1B of 3 stages and 4 microbatches with one stage's list changed."""
    schedule = build_schedule("1f1b", 3, 4, recomputed_chunks=recomputed)
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
        "chunk 1, microbatch 2: each pass must be scheduled exactly once",
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
    "another stage's chunk": (
        changed(0, lambda ops: ops.append(Op(F, 1, 0))),
        "is scheduled on stage 0, which does not hold its chunk",
    ),
    "a chunk that does not exist": (changed(2, lambda ops: ops.append(Op(F, 3, 0))), "does not hold its chunk"),
    "a negative chunk": (changed(2, lambda ops: ops.append(Op(F, -1, 0))), "does not hold its chunk"),
    "backward first on the last stage": (changed(2, swap(Op(F, 2, 1), Op(B, 2, 1))), "is scheduled before its forward"),
    "weight before input gradient": (
        replace(build_gpipe(1, 1), ops=((Op(F, 0, 0), Op(W, 0, 0), Op(I, 0, 0)),)),
        "is scheduled before its input_grad",
    ),
    "a recompute of one microbatch missing": (
        changed(1, lambda ops: ops.remove(Op(R, 1, 2)), {1}),
        "chunk 1, microbatch 2: each pass must be scheduled exactly once",
    ),
    "a doubled recompute": (changed(1, lambda ops: ops.insert(2, Op(R, 1, 0)), {1}), "chunk 1, microbatch 0"),
    "a recompute of a chunk without": (changed(0, lambda ops: ops.insert(2, Op(R, 0, 1)), {1}), "chunk 0, microbatch 0"),
    "a recompute after its backward": (changed(2, swap(Op(R, 2, 1), Op(B, 2, 1)), {2}), "is scheduled before its recompute"),
    "a recompute before its forward": (changed(2, swap(Op(F, 2, 1), Op(R, 2, 1)), {2}), "R.*is scheduled before its forward"),
    "another stage's recompute": (
        changed(0, lambda ops: ops.append(Op(R, 1, 3)), {0}),
        "is scheduled on stage 0, which does not hold",
    ),
    "a recompute without backward": (
        replace(build_gpipe(1, 1), ops=((Op(F, 0, 0), Op(R, 0, 0)),)),
        "chunk 0, microbatch 0: each pass must be scheduled exactly once",
    ),
    "an input gradient before its recompute": (
        replace(build_gpipe(1, 1), ops=((Op(F, 0, 0), Op(I, 0, 0), Op(R, 0, 0), Op(W, 0, 0)),)),
        "is scheduled before its recompute",
    ),
    "forwards in another order than messages allow": (
        # Stage 0 waits for the gradient of microbatch 1 before it gives the forward of 2; stage 1 wants that forward first.
        replace(
            build_gpipe(2, 3),
            ops=(
                (Op(F, 0, 0), Op(F, 0, 1), Op(B, 0, 1), Op(F, 0, 2), Op(B, 0, 0), Op(B, 0, 2)),
                (Op(F, 1, 0), Op(F, 1, 2), Op(F, 1, 1), Op(B, 1, 1), Op(B, 1, 0), Op(B, 1, 2)),
            ),
        ),
        "schedule gpipe deadlocks: stage 0 before B of chunk 0, microbatch 1; stage 1 before F of chunk 1, microbatch 2",
    ),
    "backward too early on the first stage": (
        changed(0, swap(Op(F, 0, 0), Op(B, 0, 0))),
        "deadlocks: stage 0 before B of chunk 0, microbatch 0",
    ),
    "a stage without operations": (changed(1, lambda ops: ops.clear()), "chunk 1, microbatch 0"),
    "a chunk on a stage that is not there": (replace(build_gpipe(2, 1), stage_of_chunk=(0, 2)), "which does not hold its chunk"),
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

    recomputed = {op.chunk for stage_ops in stages for op in stage_ops if op.type is R}
    giver: dict[Message | None, Op] = {swapped.get_sent_message(op): op for ops in swapped.ops for op in ops}
    graph: dict[Op, set[Op]] = {}
    for stage_ops in swapped.ops:
        for before, op in zip((None, *stage_ops), stage_ops, strict=False):
            first = first_of(op, recomputed)
            graph[op] = {before} if before else set()
            graph[op] |= {giver[swapped.get_received_message(op)]} if swapped.get_received_message(op) else set()
            graph[op] |= {Op(first, op.chunk, op.microbatch)} if first else set()
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError:
        with pytest.raises(ValueError, match="deadlocks|is scheduled before its"):
            validate(swapped)
    else:
        validate(swapped)


def test_every_kind_of_operation_has_its_letter() -> None:
    assert [kind.value for kind in OpType] == ["F", "R", "B", "I", "W"]
