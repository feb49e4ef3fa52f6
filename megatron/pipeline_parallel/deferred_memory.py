"""The memory that weight gradients hold while they are put off. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.spec.operations import OpKind, Schedule


def peak_kept(schedule: Schedule, kept: Sequence[float]) -> tuple[float, ...]:
    """For each stage, the most that is kept at once, where a microbatch keeps `kept[chunk]` between its two gradients."""
    peaks = []
    for ops in schedule.ops:
        held = peak = 0.0
        for op in ops:
            if op.kind is OpKind.INPUT_GRAD:
                held += kept[op.chunk]
                peak = max(peak, held)
            elif op.kind is OpKind.WEIGHT_GRAD:
                held -= kept[op.chunk]
        peaks.append(peak)
    return tuple(peaks)
