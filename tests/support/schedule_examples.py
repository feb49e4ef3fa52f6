"""Schedules to test with: split backwards, several chunks a stage, orders drawn at random; and drawn from all generators."""

from __future__ import annotations

import random
from collections.abc import Collection

from hypothesis import strategies as st

from megatron.spec.operations import Message, Op, OpType, Schedule, extract_forwards
from megatron.spec.schedules import SCHEDULES, build_schedule

F, R, B, I, W = OpType.FORWARD, OpType.RECOMPUTE, OpType.BACKWARD, OpType.INPUT_GRAD, OpType.WEIGHT_GRAD


def split_backwards(schedule: Schedule, weights_last: bool = False) -> Schedule:
    """Every backward as an input gradient and a weight gradient, which stands right behind it or at the end of the step."""
    stages = []
    for ops in schedule.ops:
        now: list[Op] = []
        late: list[Op] = []
        for op in ops:
            now.append(Op(I, op.chunk, op.microbatch) if op.type is B else op)
            if op.type is B:
                (late if weights_last else now).append(Op(W, op.chunk, op.microbatch))
        stages.append(tuple(now + late))
    return Schedule(f"{schedule.name}-split", schedule.num_microbatches, schedule.stage_of_chunk, tuple(stages))


def greedy(
    stage_of_chunk: tuple[int, ...], num_microbatches: int, *, split: bool, seed: int, recomputed: Collection[int] = ()
) -> Schedule:
    """A valid schedule: in turn each stage runs one of the operations whose needs are met, chosen at random."""
    chooser = random.Random(seed)
    num_stages = max(stage_of_chunk) + 1
    kinds = (F, I, W) if split else (F, B)
    todo = [Op(kind, chunk, m) for kind in kinds for chunk in range(len(stage_of_chunk)) for m in range(num_microbatches)]
    todo += [Op(R, chunk, m) for chunk in recomputed for m in range(num_microbatches)]
    ops: list[list[Op]] = [[] for _ in range(num_stages)]
    plain = Schedule("greedy", num_microbatches, stage_of_chunk, ())
    done: set[Op] = set()
    sent: set[Message | None] = {None}

    def ready(op: Op) -> bool:
        before = first_of(op, recomputed)
        return plain.get_received_message(op) in sent and (before is None or Op(before, op.chunk, op.microbatch) in done)

    while todo:
        for stage in range(num_stages):
            choice = [op for op in todo if stage_of_chunk[op.chunk] == stage and ready(op)]
            if choice:
                op = chooser.choice(choice)
                todo.remove(op)
                done.add(op)
                sent.add(plain.get_sent_message(op))
                ops[stage].append(op)
    return Schedule("greedy", num_microbatches, stage_of_chunk, tuple(map(tuple, ops)))


def first_of(op: Op, recomputed: Collection[int]) -> OpType | None:
    """The kind of operation on the same microbatch and chunk that must come before."""
    return {F: None, R: F, B: R if op.chunk in recomputed else F, I: R if op.chunk in recomputed else F, W: I}[op.type]


PLACES = [(0,), (0, 1), (0, 1, 2), (0, 0), (0, 1, 1, 0), (0, 1, 0, 1), (0, 1, 2, 2, 1, 0), (0, 1, 2, 0, 1, 2), (0, 1, 0)]
"""Stage of each chunk: one or more chunks a stage, in a V, in a ring."""


@st.composite
def random_schedules(draw: st.DrawFn) -> Schedule:
    """Valid schedules with chunks anywhere, split or not, some of them recomputed at any time before the gradient is used."""
    place = draw(st.sampled_from(PLACES))
    microbatches, split, again = draw(st.integers(1, 4)), draw(st.booleans()), draw(_some_of(len(place)))
    return greedy(place, microbatches, split=split, seed=draw(st.integers(0, 999)), recomputed=again)


@st.composite
def generated_schedules(draw: st.DrawFn, max_stages: int = 6, max_microbatches: int = 12) -> Schedule:
    """What the framework makes, for training and for evaluation."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    chunks = SCHEDULES[name].chunks_per_stage or draw(st.integers(1, 4))
    stages = draw(st.integers(1, max_stages))
    again = draw(_some_of(stages * chunks))
    schedule = build_schedule(name, stages, draw(st.integers(1, max_microbatches)), chunks, recomputed_chunks=again)
    return extract_forwards(schedule) if draw(st.booleans()) else schedule


def _some_of(num_chunks: int) -> st.SearchStrategy[frozenset[int]]:
    return st.one_of(st.just(frozenset()), st.frozensets(st.integers(0, num_chunks - 1)))
