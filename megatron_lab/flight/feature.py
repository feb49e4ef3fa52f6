"""Monitoring of a run's ranks for hangs and stragglers (--hang-warn-s, --straggler-interval)."""

from __future__ import annotations

from contextlib import ExitStack

from megatron.parallel.context import ParallelContext
from megatron.training.callbacks import Callback
from megatron.training.failure import Explanations
from megatron.training.features import Feature, RunComponents
from megatron_lab.flight.rank_monitor import Flight, get_stack_folder, watch_rank
from megatron_lab.flight.stragglers import StragglerCallback


class _PhaseCallback(Callback):
    """Callback that writes the current phase of the run (such as a step, an evaluation or a save) into the flight record of this
    rank. The hang watcher of the node reads this file."""

    def __init__(self, flight: Flight) -> None:
        self._flight = flight

    def on_phase(self, name: str, iteration: int | None = None) -> None:
        """Write the name of the phase that begins, and the iteration, into the flight record of this rank."""
        self._flight.set_phase(name, iteration)


class HangFeature(Feature):
    """Feature of --hang-warn-s: hang detection. It is also enabled by --straggler-interval, because the flight record also counts
    how long a rank waits for others."""

    def on_connected(self, context: ParallelContext, stack: ExitStack, explanations: Explanations) -> None:
        """Create the flight record of this rank (a file with its current activity), and start the watcher process of its node,
        which reads the record."""
        self._flight = stack.enter_context(watch_rank(context, self.config.parallel, get_stack_folder(self.config.checkpoint.save)))
        explanations.requested_exit_code, explanations.find_lost_rank = (
            self._flight.get_requested_exit_code,
            self._flight.find_lost_rank,
        )

    def build_callbacks(self, run: RunComponents) -> list[Callback]:
        """Build the callback that writes the current phase into this rank's flight record. With --straggler-interval, also build
        the callback that compares the speed of the ranks.

        The flight record is the file in which the watcher process of the node sees the activity of the rank. The method also makes
        the pipeline executor write the start of each operation into the record.
        """
        run.step.executor.on_op_start = self._flight.start_op
        interval = run.config.parallel.straggler_interval
        reports = [] if interval is None else [StragglerCallback(run.context, self._flight, interval, run.reporter)]
        return [_PhaseCallback(self._flight), *reports]
