"""Simulation of the shortest possible training step when data-parallel communication overlaps with computation.

The simulation is pure arithmetic. A rank computes one operation after another, and sends over one link that handles one collective
at a time. The simulation follows these rules, in which a unit is the embedding, a block, the final norm or the output layer:

- A gradient bucket can be reduced when backward has computed the last gradient in the bucket.
- The optimizer update needs all reductions, because it uses the global gradient norm.
- The parameters of a bucket are gathered after their update. The first unit that uses a parameter of the bucket waits for the
  gather in its forward.

A step in steady state lasts from the time at which all gradients are reduced to the same time in the next step. Buckets use the
link in the order in which they become ready. The next step needs the buckets in the same order, so no other order is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_lab.benchmarks.unit_times import UnitTimes


class BucketTimes(NamedTuple):
    """Seconds for which the collectives of one gradient bucket occupy the link, and the unit of the model that needs the bucket
    first.

    A unit is the embedding, a block, the final norm or the output layer.
    """

    unit: int
    """Index of the first unit, in forward order, that uses parameters of the bucket.

    In forward, this unit is the first to need the gathered parameters. In backward, it computes the last gradients of the
    bucket.
    """
    reduce: float
    gather: float
    """Seconds of the all-gather of the bucket's parameters; 0 if parameters are not gathered."""


def simulate_shortest_step(
    units: Sequence[UnitTimes], update_time: float, buckets: Sequence[BucketTimes], num_microbatches: int, *, every_microbatch: bool
) -> float:
    """Return the seconds of the shortest possible step, in which communication overlaps with computation wherever possible.

    Args:
        units: forward and backward times of the model's units (embedding, blocks, final norm, output layer), in forward order.
        update_time: seconds of the optimizer update and of all other computation between backward and the next forward. All buckets
            have an equal share of it.
        buckets: seconds of the collectives of each gradient bucket.
        every_microbatch: reduce gradients in every microbatch, instead of only in the last one.
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
