"""--straggler-interval: ranks that compute longer than their peers, though all wait for each other and so take equally long.

Compared is the time of a step apart from waits, as the rank's record of calls has it (`megatron_lab/flight/`), with that of the
other ranks of the same pipeline stage. On a GPU that is the host's time: of devices that are slow this says nothing.
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
from megatron.training.progress import Progress
from megatron.training.reporter import Reporter
from megatron.training.step import StepResult
from megatron.training.watch import Watcher
from megatron_lab.flight.watched import Flight

_SLOWER, _SPREADS = 1.1, 4.0
"""A rank is slow that takes so many times the median of its peers, and exceeds it by so many of their spreads (1.4826 x the median
absolute deviation, which for a normal distribution is its standard deviation)."""
_IN_A_ROW = 2
"""Intervals in which it must be slow before it is told."""


def slow_ranks(seconds: Sequence[float], stages: Sequence[int]) -> dict[int, float]:
    """Ranks that take longer than their peers, each with how many times as long.

    Args:
        seconds: what each rank took.
        stages: the pipeline stage of each; its other ranks are its peers.
    """
    found = {}
    for rank, (mine, stage) in enumerate(zip(seconds, stages, strict=True)):
        peers = [took for other, took in enumerate(seconds) if stages[other] == stage and other != rank]
        if not peers:
            continue
        middle = statistics.median(peers)
        spread = 1.4826 * statistics.median(abs(took - middle) for took in peers)
        if mine > _SLOWER * middle and mine > middle + _SPREADS * spread:
            found[rank] = mine / middle if middle else float("inf")
    return found


class StragglerReports(Watcher):
    """Says which ranks have been slower than their peers.

    Args:
        every: steps of an interval.
    """

    def __init__(self, context: ParallelContext, flight: Flight, every: int, reporter: Reporter) -> None:
        self._context, self._flight, self._every, self._reporter = context, flight, every, reporter
        self._hosts = gather_objects(socket.gethostname(), context.world)
        self._stages = [context.topology.coordinates(rank)["pp"] for rank in range(context.world.size)]
        self._busy, self._steps, self._since = 0.0, 0, (0.0, 0.0)
        self._slow: dict[int, int] = {}
        """For each rank that was slow in the last interval, in how many in a row."""

    def before_step(self, batch: Sequence[ModelInputs], iteration: int) -> None:
        """See `Watcher`."""
        self._since = time.perf_counter(), self._flight.waited_s

    def after_step(self, progress: Progress, result: StepResult, samples: int, learning_rate: float, weight_decay: float) -> None:
        """See `Watcher`. The ranks tell each other at the end of an interval."""
        began, waited = self._since
        self._busy += time.perf_counter() - began - (self._flight.waited_s - waited)
        self._steps += 1
        if progress.iteration % self._every:
            return
        mine = torch.tensor([self._busy / self._steps], dtype=torch.float64, device=self._context.device)
        self._tell(progress, all_gather(mine, self._context.world).tolist())
        self._busy, self._steps = 0.0, 0

    def _tell(self, progress: Progress, seconds: Sequence[float]) -> None:
        slow = slow_ranks(seconds, self._stages)
        self._slow = {rank: self._slow.get(rank, 0) + 1 for rank in slow}
        told: Mapping[int, float] = {rank: ratio for rank, ratio in slow.items() if self._slow[rank] >= _IN_A_ROW}
        for rank, ratio in told.items():
            self._reporter.say(
                f"  rank {rank} (node {self._hosts[rank]}): {ratio:.2f} x its peers' time of computing "
                f"for {self._slow[rank] * self._every} steps"
            )
        worst = max(told, key=lambda rank: told[rank], default=-1)
        self._reporter.measured(progress, {"straggler_rank": worst, "straggler_ratio": told.get(worst, 1.0)})
