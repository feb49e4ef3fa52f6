"""One chunk a stage, whole backwards: GPipe and 1F1B."""

from __future__ import annotations

from megatron.pipeline_parallel.schedule import Op, OpKind, Schedule
from megatron.pipeline_parallel.schedules.placement import loop


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019): up to `num_microbatches` live activations."""
    ops = tuple(
        tuple(Op(OpKind.FORWARD, stage, m) for m in range(num_microbatches))
        + tuple(Op(OpKind.BACKWARD, stage, m) for m in range(num_microbatches))
        for stage in range(num_stages)
    )
    return Schedule("gpipe", num_microbatches, loop(num_stages), ops)


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
