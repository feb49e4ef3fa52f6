"""Detection of slow ranks (--straggler-interval): ranks that compute longer than the other ranks of their pipeline stage.

The duration of a step does not show a slow rank, because all ranks wait for each other and take equally long. This module therefore
subtracts the time that a rank waits for communication calls. On a GPU, the remaining time is that of the host: slow devices are not
detected.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Mapping, Sequence

import torch

from megatron.model.inputs import ModelInputs
from megatron.parallel.collectives import all_gather, gather_objects
from megatron.parallel.context import ParallelContext
from megatron.training.callbacks import Callback
from megatron.training.progress import Progress
from megatron.training.reporter import Reporter
from megatron.training.step import StepResult
from megatron_lab.flight.rank_monitor import Flight

_MIN_RATIO, _MIN_DEVIATIONS = 1.1, 4.0
"""A rank is slow if its time is more than `_MIN_RATIO` times the median of its peers, and exceeds the median by more than
`_MIN_DEVIATIONS` deviations. The deviation is 1.4826 times the median absolute deviation, which equals the standard deviation of a
normal distribution."""
_MIN_CONSECUTIVE = 2
"""Consecutive intervals in which a rank must be slow before it is reported."""


def find_slow_ranks(rank_seconds: Sequence[float], stages: Sequence[int]) -> dict[int, float]:
    """Find the ranks that compute longer than their peers, the other ranks of their pipeline stage.

    Args:
        rank_seconds: computing time of each rank, in seconds.
        stages: pipeline stage of each rank.

    Returns:
        for each slow rank, its time divided by the median time of its peers.
    """
    ratios = {}
    for rank, (rank_s, stage) in enumerate(zip(rank_seconds, stages, strict=True)):
        peer_seconds = [peer_s for peer, peer_s in enumerate(rank_seconds) if stages[peer] == stage and peer != rank]
        if not peer_seconds:
            continue
        median = statistics.median(peer_seconds)
        deviation = 1.4826 * statistics.median(abs(peer_s - median) for peer_s in peer_seconds)
        if rank_s > _MIN_RATIO * median and rank_s > median + _MIN_DEVIATIONS * deviation:
            ratios[rank] = rank_s / median if median else float("inf")
    return ratios


class StragglerCallback(Callback):
    """Callback that logs ranks that compute longer than the other ranks of their pipeline stage.

    Args:
        flight: counts how long this rank waits for other ranks.
        interval: number of steps between comparisons.
    """

    def __init__(self, context: ParallelContext, flight: Flight, interval: int, reporter: Reporter) -> None:
        self._context, self._flight, self._interval, self._reporter = context, flight, interval, reporter
        self._hosts = gather_objects(socket.gethostname(), context.world)
        self._stages = [context.topology.get_coordinates(rank)["pp"] for rank in range(context.world.size)]
        self._busy_s, self._steps, self._step_start = 0.0, 0, (0.0, 0.0)
        self._slow_intervals: dict[int, int] = {}
        """Number of consecutive slow intervals, for each rank that was slow in the last interval."""

    def before_step(self, batch: Sequence[ModelInputs], iteration: int) -> None:
        """Store the start time of the step, and how long this rank has waited until then."""
        self._step_start = time.perf_counter(), self._flight.waited_s

    def after_step(self, progress: Progress, result: StepResult, samples: int, learning_rate: float, weight_decay: float) -> None:
        """Add up the computing times of this rank. At the end of an interval, gather the mean computing times of all ranks and log
        slow ranks."""
        start, start_waited_s = self._step_start
        self._busy_s += time.perf_counter() - start - (self._flight.waited_s - start_waited_s)
        self._steps += 1
        if progress.iteration % self._interval:
            return
        mean_busy_s = torch.tensor([self._busy_s / self._steps], dtype=torch.float64, device=self._context.device)
        self._report_findings(progress, all_gather(mean_busy_s, self._context.world).tolist())
        self._busy_s, self._steps = 0.0, 0

    def _report_findings(self, progress: Progress, rank_seconds: Sequence[float]) -> None:
        slow = find_slow_ranks(rank_seconds, self._stages)
        self._slow_intervals = {rank: self._slow_intervals.get(rank, 0) + 1 for rank in slow}
        reported: Mapping[int, float] = {
            rank: ratio for rank, ratio in slow.items() if self._slow_intervals[rank] >= _MIN_CONSECUTIVE
        }
        for rank, ratio in reported.items():
            self._reporter.log(
                f"  rank {rank} (node {self._hosts[rank]}) computes {ratio:.2f} x as long as the other ranks of its stage, "
                f"for {self._slow_intervals[rank] * self._interval} steps"
            )
        worst = max(reported, key=lambda rank: reported[rank], default=-1)
        self._reporter.log_measurements(progress, {"straggler_rank": worst, "straggler_ratio": reported.get(worst, 1.0)})
