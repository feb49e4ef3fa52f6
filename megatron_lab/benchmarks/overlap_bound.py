"""How long a step takes at least when communication overlaps with computation: pure arithmetic, on two resources.

A rank computes one thing after another and has one serial link. A bucket can be reduced once the backward of its last unit is
through; the update needs all reductions (for the global norm); a bucket is gathered after its update, and its first unit's
forward needs it. A step in steady state runs from the moment when all is reduced to the same moment of the next step. Buckets go
to the link in the order in which they can, which is also the order in which they are needed, so no other order is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_lab.benchmarks.unit_times import UnitTimes


class BucketTimes(NamedTuple):
    """Seconds of a bucket on the link."""

    unit: int
    """The first of the units that use its parameters: the first to need them, and the last whose backward gives gradients."""
    reduce: float
    gather: float
    """0 if it is not gathered."""


def shortest_step(
    units: Sequence[UnitTimes], rest: float, buckets: Sequence[BucketTimes], num_microbatches: int, *, every_microbatch: bool
) -> float:
    """Seconds of a step.

    Args:
        units: in the order of the forward.
        rest: seconds of the update and whatever else is computed between backward and forward; all buckets have an equal share.
        every_microbatch: buckets are reduced once in each microbatch; else once in the last.
    """
    link, here = 0.0, [0.0] * len(units)
    for updated, bucket in enumerate(sorted(buckets, key=lambda bucket: bucket.unit), 1):  # what is needed first is updated first
        if bucket.gather:
            link = max(link, rest * updated / len(buckets)) + bucket.gather
            here[bucket.unit] = link
    now = rest
    for microbatch in range(num_microbatches):
        for unit, arrives in zip(units, here, strict=True):
            now = max(now, arrives) + unit.forward
        for number in reversed(range(len(units))):
            now += units[number].backward
            if every_microbatch or microbatch == num_microbatches - 1:
                for bucket in buckets:
                    if bucket.unit == number:
                        link = max(link, now) + bucket.reduce
    return max(now, link)
