"""Schedules with whole backwards: GPipe, 1F1B, and interleaved 1F1B with several chunks a stage."""

from __future__ import annotations

import itertools

from megatron.spec.operations import Op, OpKind, Schedule, loop
from megatron.spec.schedule_spec import ScheduleSpec


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019): up to `num_microbatches` live activations."""
    ops = tuple(
        tuple(Op(OpKind.FORWARD, stage, m) for m in range(num_microbatches))
        + tuple(Op(OpKind.BACKWARD, stage, m) for m in range(num_microbatches))
        for stage in range(num_stages)
    )
    return Schedule("gpipe", num_microbatches, loop(num_stages), ops)


GPIPE = ScheduleSpec("gpipe", make=lambda p, m, v: gpipe(p, m))


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """One forward, one backward in turn (PipeDream-Flush, Narayanan et al. 2021, fig. 4).

    Warm-up is `num_stages - stage - 1` forwards, so at most that many plus one activations are alive.
    """

    def stage_ops(stage: int) -> tuple[Op, ...]:
        warmup = min(num_stages - stage - 1, num_microbatches)
        ops = [Op(OpKind.FORWARD, stage, m) for m in range(warmup)]
        for m in range(num_microbatches - warmup):
            ops += [Op(OpKind.FORWARD, stage, warmup + m), Op(OpKind.BACKWARD, stage, m)]
        return tuple(ops + [Op(OpKind.BACKWARD, stage, m) for m in range(num_microbatches - warmup, num_microbatches)])

    return Schedule("1f1b", num_microbatches, loop(num_stages), tuple(map(stage_ops, range(num_stages))))


ONE_F_ONE_B = ScheduleSpec("1f1b", make=lambda p, m, v: one_f_one_b(p, m))


def interleaved(num_stages: int, num_microbatches: int, chunks_per_stage: int) -> Schedule:
    """Interleaved 1F1B (Narayanan et al. 2021, section 2.2.2): the bubble of 1F1B divided by the chunks a stage.

    Microbatches go through the chunks of a stage in rounds. The paper's rounds have `num_stages` microbatches each, so that number
    must divide. Here the remainder is spread over the rounds, the longer ones first. A round of at least `num_stages` never waits
    for itself: so the bubble is the paper's for every number of microbatches from `num_stages` on, for some more live activations.
    """
    turns = rounds(num_stages, num_microbatches)
    depths = range(chunks_per_stage)
    down = [(depth, m) for turn in turns for depth in depths for m in turn]
    back = [(depth, m) for turn in turns for depth in reversed(depths) for m in turn]

    def stage_ops(stage: int) -> tuple[Op, ...]:
        forwards = [Op(OpKind.FORWARD, depth * num_stages + stage, m) for depth, m in down]
        backwards = [Op(OpKind.BACKWARD, depth * num_stages + stage, m) for depth, m in back]
        # Warm-up: a round through all chunks but the last, and the way from this stage to the last and back.
        warmup = min(len(forwards), (chunks_per_stage - 1) * len(turns[0]) + 2 * (num_stages - stage - 1))
        steady = [op for pair in zip(forwards[warmup:], backwards, strict=False) for op in pair]
        return tuple(forwards[:warmup] + steady + backwards[len(forwards) - warmup :])

    stages = tuple(map(stage_ops, range(num_stages)))
    return Schedule("interleaved", num_microbatches, loop(num_stages, chunks_per_stage), stages)


def rounds(num_stages: int, num_microbatches: int) -> list[range]:
    """Consecutive runs of microbatches: as many as have room for `num_stages` each. Their lengths differ by at most one."""
    count = max(1, num_microbatches // num_stages)
    length, longer = divmod(num_microbatches, count)
    starts = [turn * length + min(turn, longer) for turn in range(count + 1)]
    return [range(*ends) for ends in itertools.pairwise(starts)]


INTERLEAVED = ScheduleSpec(
    "interleaved",
    make=interleaved,
    chunks_per_stage=None,
    about_chunks="It takes turns between two or more virtual stages (chunks) on each pipeline rank.",
)
