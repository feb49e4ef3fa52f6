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
    """Callback that writes the current phase of the run (such as a step, an evaluation or a save) into the record of this rank."""

    def __init__(self, flight: Flight) -> None:
        self._flight = flight

    def on_phase(self, name: str, iteration: int | None = None) -> None:
        """Write the phase that begins into the record."""
        self._flight.set_phase(name, iteration)


class HangFeature(Feature):
    """Feature of --hang-warn-s. It is also enabled by --straggler-interval, which uses the records of waiting times."""

    def on_connected(self, context: ParallelContext, stack: ExitStack, explanations: Explanations) -> None:
        """Create the record of this rank, and start the watcher process of its node."""
        self._flight = stack.enter_context(watch_rank(context, self.config.parallel, get_stack_folder(self.config.checkpoint.save)))
        explanations.requested_exit_code, explanations.find_lost_rank = (
            self._flight.requested_exit_code,
            self._flight.find_lost_rank,
        )

    def callbacks(self, run: RunComponents) -> list[Callback]:
        """Build the callbacks that write the current phase into this rank's flight record, which the watcher process of the node
        reads, and that compare ranks if --straggler-interval is set.

        The method also makes the pipeline executor write the start of each operation into the flight record.
        """
        run.step.executor.on_op_start = self._flight.start_op
        interval = run.config.parallel.straggler_interval
        reports = [] if interval is None else [StragglerCallback(run.context, self._flight, interval, run.reporter)]
        return [_PhaseCallback(self._flight), *reports]
