"""Schedules made from schedules."""

from __future__ import annotations

from dataclasses import replace

from megatron.pipeline_parallel.schedule import OpKind, Schedule


def forward_only(schedule: Schedule) -> Schedule:
    """Evaluation: the forwards of a training schedule, in its order (leaving operations out of a valid order keeps it valid)."""
    ops = tuple(tuple(op for op in stage if op.kind is OpKind.FORWARD) for stage in schedule.ops)
    return replace(schedule, name=f"{schedule.name}, forward only", ops=ops)


def first_microbatches(schedule: Schedule, num_microbatches: int) -> Schedule:
    """The schedule without the microbatches from `num_microbatches` on: those before wait for none of them."""
    ops = tuple(tuple(op for op in stage if op.microbatch < num_microbatches) for stage in schedule.ops)
    return replace(schedule, num_microbatches=num_microbatches, ops=ops)
