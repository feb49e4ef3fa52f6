"""Schedules that the framework has no generator for: split backwards, several chunks a stage, orders drawn at random."""

from __future__ import annotations

import random

from megatron.pipeline_parallel.schedules import Message, Op, OpKind, Schedule

F, B, I, W = OpKind.FORWARD, OpKind.BACKWARD, OpKind.INPUT_GRAD, OpKind.WEIGHT_GRAD


def split_backwards(schedule: Schedule, weights_last: bool = False) -> Schedule:
    """Every backward as an input gradient and a weight gradient, which stands right behind it or at the end of the step."""
    stages = []
    for ops in schedule.ops:
        now: list[Op] = []
        late: list[Op] = []
        for op in ops:
            now.append(Op(I, op.chunk, op.microbatch) if op.kind is B else op)
            if op.kind is B:
                (late if weights_last else now).append(Op(W, op.chunk, op.microbatch))
        stages.append(tuple(now + late))
    return Schedule(f"{schedule.name}-split", schedule.num_microbatches, schedule.stage_of_chunk, tuple(stages))


def greedy(stage_of_chunk: tuple[int, ...], num_microbatches: int, *, split: bool, seed: int) -> Schedule:
    """A valid schedule: in turn each stage runs one of the operations whose needs are met, chosen at random."""
    chooser = random.Random(seed)
    num_stages = max(stage_of_chunk) + 1
    kinds = (F, I, W) if split else (F, B)
    todo = [Op(kind, chunk, m) for kind in kinds for chunk in range(len(stage_of_chunk)) for m in range(num_microbatches)]
    ops: list[list[Op]] = [[] for _ in range(num_stages)]
    plain = Schedule("greedy", num_microbatches, stage_of_chunk, ())
    done: set[Op] = set()
    sent: set[Message | None] = {None}

    def ready(op: Op) -> bool:
        before = {F: None, B: F, I: F, W: I}[op.kind]
        return plain.needs(op) in sent and (before is None or Op(before, op.chunk, op.microbatch) in done)

    while todo:
        for stage in range(num_stages):
            choice = [op for op in todo if stage_of_chunk[op.chunk] == stage and ready(op)]
            if choice:
                op = chooser.choice(choice)
                todo.remove(op)
                done.add(op)
                sent.add(plain.gives(op))
                ops[stage].append(op)
    return Schedule("greedy", num_microbatches, stage_of_chunk, tuple(map(tuple, ops)))


def interleaved(num_stages: int, num_microbatches: int, chunks_a_stage: int) -> Schedule:
    """Interleaved 1F1B (Narayanan et al. 2021, section 2.2.2); microbatches divide by stages."""
    group, total = num_stages * chunks_a_stage, num_microbatches * chunks_a_stage

    def op(kind: OpKind, stage: int, number: int) -> Op:
        run, inner = divmod(number, group)
        depth, place = divmod(inner, num_stages)
        depth = depth if kind is F else chunks_a_stage - 1 - depth
        return Op(kind, depth * num_stages + stage, run * num_stages + place)

    stages = []
    for stage in range(num_stages):
        warmup = min(total, (num_stages - stage - 1) * 2 + (chunks_a_stage - 1) * num_stages)
        ops = [op(F, stage, k) for k in range(warmup)]
        for k in range(total - warmup):
            ops += [op(F, stage, warmup + k), op(B, stage, k)]
        stages.append(tuple(ops + [op(B, stage, k) for k in range(total - warmup, total)]))
    return Schedule("interleaved", num_microbatches, tuple(range(num_stages)) * chunks_a_stage, tuple(stages))
