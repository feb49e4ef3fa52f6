"""Simulation of the shortest possible step when communication overlaps with computation.

The simulation is pure arithmetic on two resources: a rank computes one operation after another and has one serial link. It follows
these rules:

- A bucket can be reduced when the backward of its last unit is complete.
- The update needs all reductions, because it uses the global gradient norm.
- A bucket is gathered after its update, and the forward of its first unit needs it.

A step in steady state runs from the time at which all gradients are reduced to the same time in the next step. Buckets use the link
in the order in which they become ready. They are needed in the same order, so no other order is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_lab.benchmarks.unit_times import UnitTimes


class BucketTimes(NamedTuple):
    """Seconds that one gradient bucket occupies the link, and the model unit (such as the embedding or a block) that needs the
    bucket."""

    unit: int
    """Index of the first unit, in forward order, that uses parameters of the bucket.

    In forward, this unit is the first to need the gathered parameters. In backward, it completes the gradients of the bucket.
    """
    reduce: float
    gather: float
    """Seconds of the all-gather of the bucket's parameters; 0 without such a gather."""


def simulate_shortest_step(
    units: Sequence[UnitTimes], update_time: float, buckets: Sequence[BucketTimes], num_microbatches: int, *, every_microbatch: bool
) -> float:
    """Return the seconds of the shortest possible step, in which communication overlaps with computation wherever possible.

    Args:
        units: forward and backward times of the model's units, in forward order.
        update_time: seconds of the update and of all other computation between backward and the next forward. All buckets have an
            equal share of it.
        buckets: gradient buckets of the model.
        every_microbatch: reduce buckets in every microbatch, instead of only in the last.
    """
    link_time, arrival_times = 0.0, [0.0] * len(units)
    # Buckets are updated in the order in which forward needs them.
    for num_updated, bucket in enumerate(sorted(buckets, key=lambda bucket: bucket.unit), 1):
        if bucket.gather:
            link_time = max(link_time, update_time * num_updated / len(buckets)) + bucket.gather
            arrival_times[bucket.unit] = link_time
    compute_time = update_time
    for microbatch in range(num_microbatches):
        for unit, arrival_time in zip(units, arrival_times, strict=True):
            compute_time = max(compute_time, arrival_time) + unit.forward
        for unit_index in reversed(range(len(units))):
            compute_time += units[unit_index].backward
            if every_microbatch or microbatch == num_microbatches - 1:
                for bucket in buckets:
                    if bucket.unit == unit_index:
                        link_time = max(link_time, compute_time) + bucket.reduce
    return max(compute_time, link_time)
