"""The watching of a run's ranks (--hang-warn-s): what they do now, who keeps the others waiting, and who is slow."""

from __future__ import annotations

from contextlib import ExitStack

from megatron.parallel.context import ParallelContext
from megatron.training.failure import Explanations
from megatron.training.features import Feature, RunParts
from megatron.training.watch import Watcher
from megatron_lab.flight.stragglers import StragglerReports
from megatron_lab.flight.watched import Flight, stack_folder, watched


class _Phases(Watcher):
    """Writes into the record of this rank what it is about."""

    def __init__(self, flight: Flight) -> None:
        self._flight = flight

    def on_phase(self, name: str, iteration: int | None = None) -> None:
        """Write the name of the phase into the record."""
        self._flight.phase(name, iteration)


class HangFeature(Feature):
    """--hang-warn-s, and --straggler-interval, which needs its records."""

    def connected(self, context: ParallelContext, stack: ExitStack, explanations: Explanations) -> None:
        """Make the record of this rank, and start the watcher of its node."""
        self._flight = stack.enter_context(watched(context, self.config.parallel, stack_folder(self.config.checkpoint.save)))
        explanations.code_asked_for, explanations.lost = self._flight.code_asked_for, self._flight.lost

    def watchers(self, run: RunParts) -> list[Watcher]:
        """Record the phases and operations of this rank, and compare ranks if that is asked for."""
        run.step.executor.mark = self._flight.operation
        every = run.config.parallel.straggler_interval
        reports = [] if every is None else [StragglerReports(run.context, self._flight, every, run.reporter)]
        return [_Phases(self._flight), *reports]
