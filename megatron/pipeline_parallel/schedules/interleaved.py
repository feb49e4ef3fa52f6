"""Interleaved 1F1B: several chunks a stage, so that a microbatch passes through a stage several times and waits less each time."""

from __future__ import annotations

import itertools

from megatron.pipeline_parallel.schedule import Op, OpKind, Schedule
from megatron.pipeline_parallel.schedules.placement import loop


def interleaved(num_stages: int, num_microbatches: int, chunks_per_stage: int) -> Schedule:
    """Interleaved 1F1B (Narayanan et al. 2021, section 2.2.2): the bubble of 1F1B divided by the chunks a stage.

    Microbatches go through the chunks of a stage in rounds. The paper's rounds have `num_stages` microbatches each, which must
    divide. Here what is left over is spread over the rounds, the longer ones first: a round of at least `num_stages` never waits
    for itself, so the bubble is the paper's for every number of microbatches from `num_stages` on, for some more live activations.
    """
    rounds = _rounds(num_stages, num_microbatches)
    depths = range(chunks_per_stage)
    down = [(depth, m) for turn in rounds for depth in depths for m in turn]
    back = [(depth, m) for turn in rounds for depth in reversed(depths) for m in turn]

    def stage_ops(stage: int) -> tuple[Op, ...]:
        forwards = [Op(OpKind.FORWARD, depth * num_stages + stage, m) for depth, m in down]
        backwards = [Op(OpKind.BACKWARD, depth * num_stages + stage, m) for depth, m in back]
        # A round through all but the last chunk, and the way from this stage to the last and back.
        warmup = min(len(forwards), (chunks_per_stage - 1) * len(rounds[0]) + 2 * (num_stages - stage - 1))
        steady = [op for pair in zip(forwards[warmup:], backwards, strict=False) for op in pair]
        return tuple(forwards[:warmup] + steady + backwards[len(forwards) - warmup :])

    stages = tuple(map(stage_ops, range(num_stages)))
    return Schedule("interleaved", num_microbatches, loop(num_stages, chunks_per_stage), stages)


def _rounds(num_stages: int, num_microbatches: int) -> list[range]:
    """Runs of microbatches, as many as have room for `num_stages` each; their lengths differ by at most one."""
    count = max(1, num_microbatches // num_stages)
    length, longer = divmod(num_microbatches, count)
    starts = [turn * length + min(turn, longer) for turn in range(count + 1)]
    return [range(*ends) for ends in itertools.pairwise(starts)]
