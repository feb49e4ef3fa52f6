"""The training loop: steps, evaluations, saves and exits, in this order at each iteration."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from megatron.checkpoint.storage import Place
from megatron.config.config import Config
from megatron.config.imports import named
from megatron.metrics.measures import Timers
from megatron.model.inputs import ModelInputs
from megatron.optimizer.grad_scaler import LossScaleError
from megatron.optimizer.lr_schedule import learning_rate, own_rates, weight_decay
from megatron.parallel.context import ParallelContext
from megatron.training.failure import AuditError, NonFiniteError
from megatron.training.inputs import Batches, RunBatches
from megatron.training.progress import BatchSizePlan, Goodput, LearningSchedule, Progress, SpikeError, SpikeJudge, remembered
from megatron.training.reporter import Reporter
from megatron.training.signals import ExitSignals, LifeNote
from megatron.training.step import Evaluated, StepResult, TrainStep
from megatron.training.watch import METRICS, Watcher

if TYPE_CHECKING:
    from megatron.training.saver import Saver

_ON_SIGNAL, _PAUSED = "on a signal", "paused"
_SHARED_FAILURES = (NonFiniteError, LossScaleError, AuditError, SpikeError)
"""Errors that a step raises on every rank at once."""


class NoSaver:
    """Takes the place of a `Saver` in a run without --save, which saves nothing."""

    keeps_in_memory = False

    def owning(self) -> AbstractContextManager[object]:
        """There is no folder to own."""
        return nullcontext()

    def save(self, *_: Any) -> None:
        """Save nothing."""

    keep = poll = settle = went_back = finish = save

    def place(self, iteration: int) -> str:
        """There is none.

        Raises:
            ValueError: always.
        """
        raise ValueError("a run without --save has no checkpoint")


class GoesBack(Protocol):
    """Takes a run back to a checkpoint. All ranks call every method together."""

    def saved(self, place: Place | None) -> None:
        """A checkpoint was saved, or begun in the background; None where nothing was to be saved."""

    def rewind(self, progress: Progress, plan: BatchSizePlan, saver: Saver | NoSaver, say: Callable[[str], None]) -> Rewound | None:
        """Go back; returns what to go on with, None if the run goes on as it is."""


class Rewound(NamedTuple):
    """What a run goes on with."""

    plan: BatchSizePlan
    batches: RunBatches
    account: Any
    """What the checkpoint says of the run's time, unchecked (`Goodput`)."""


@dataclass
class Loop:
    """Everything that the loop needs. A rewind replaces the plan and the batches."""

    config: Config
    context: ParallelContext
    step: TrainStep
    plan: BatchSizePlan
    schedule: LearningSchedule
    saver: Saver | NoSaver
    reporter: Reporter
    timers: Timers
    train_batches: Callable[[int], Batches]
    """Makes the iterator of training batches that begins after so many consumed samples."""
    valid_batches: Callable[[], Batches] | None
    test_batches: Callable[[], Batches] | None
    started_at: float
    """When the job started, by time.monotonic()."""
    signals: ExitSignals = field(default_factory=lambda: ExitSignals(0))
    """Those that ask the run to exit."""
    watchers: Callable[[Progress], list[Watcher]] = lambda progress: []
    """Creates the watchers of the optional features. All ranks call it together, before the first step."""
    goodput: Goodput = field(default_factory=Goodput)
    """The account of the run's time."""
    rewinds: GoesBack | None = None
    """Takes the run back where it meets a loss spike, if that is asked for."""
    _watching: list[Watcher] | None = None
    """Those that the settings ask for, while the run is under way."""
    _informed: Sequence[Watcher] = ()
    """All watchers that are told which phase this rank is in, those of the settings and those of the user."""

    def run(self, progress: Progress, *, until: int | None = None, callbacks: Sequence[Watcher] = ()) -> bool:
        """Train from `progress` (updated in place) to an exit or to the end of the run; then save, and evaluate at the end.

        Args:
            until: the iteration at which it pauses: nothing is saved or evaluated then, and it may be called again.
            callbacks: watch these steps, behind what the settings ask for.

        Returns:
            whether a signal ended it.
        """
        began_at = progress.iteration
        if self._watching is None:
            self._watching = self.watchers(progress)
        self._informed = watching = [*self._watching, *callbacks]
        self.goodput.spent("start-up")
        if self.config.training.manual_gc:
            gc.disable()
        try:
            with self.signals.noted():
                try:
                    stopped = self._train(progress, watching, until)
                    if stopped == _PAUSED:
                        self.saver.settle(self.reporter.say)
                    elif progress.iteration > began_at:  # a finished run that is started again leaves its checkpoint as it is
                        self._save(progress, watching)  # inside the block: a further signal must not cut off the save
                except _SHARED_FAILURES:  # on every rank alike, so the save under way can be finished
                    self.saver.finish(self.reporter.say)
                    raise
                for watcher in callbacks if stopped == _PAUSED else watching:
                    watcher.close()
                if stopped != _PAUSED:
                    self._watching = None
                    self.saver.finish(self.reporter.say)
                    self._finish(progress, stopped, callbacks)
        finally:
            gc.enable()
        return stopped == _ON_SIGNAL

    def _phase(self, name: str, iteration: int | None = None) -> None:
        """Tell everybody what this rank is about."""
        for watcher in self._informed:
            watcher.on_phase(name, iteration)

    def _train(self, progress: Progress, watching: Sequence[Watcher], until: int | None) -> str | None:
        """Train until the run or something else ends it. Returns why it stopped before the end of the run, or None."""
        stopped = _PAUSED if until == progress.iteration < self.plan.total_iterations else None
        with ExitStack() as stack:
            for watcher in watching:
                stack.enter_context(watcher.around_steps())
            batches, life = self.train_batches(progress.consumed_samples), LifeNote(progress.iteration)
            while progress.iteration < self.plan.total_iterations and stopped is None:
                self._phase("reading data", progress.iteration + 1)
                with self.timers("batch-generator", level=1):
                    batch = next(batches)
                self._phase("in a step")
                result = self.advance(progress, batch, watching, (self.signals.seen is not None, self._time_is_up()))
                life.finished(progress.iteration)
                self._phase("between steps")
                self.saver.poll(self.reporter.say)
                if result is not None and result.spike is not None and self._rewound(progress, watching):
                    batches.close()  # type: ignore[attr-defined]
                    batches = self.train_batches(progress.consumed_samples)
                    stopped = self._voted_exit(result)
                    continue
                stopped = self._between_steps(progress, watching) or self._exit_reason(progress, result, until)
            batches.close()  # type: ignore[attr-defined]
        return stopped

    def advance(
        self,
        progress: Progress,
        batch: list[ModelInputs],
        watching: Sequence[Watcher] = (),
        exit_votes: tuple[bool, bool] = (False, False),
    ) -> StepResult | None:
        """Make one step, or none where the user skips the iteration; `progress` is updated, and the step logged if it is time."""
        rate = learning_rate(progress.updated_samples, self.schedule.optimizer, self.schedule.lengths)
        decay = weight_decay(progress.updated_samples, self.schedule.optimizer, self.schedule.lengths)
        own = own_rates(progress.updated_samples, self.schedule.optimizer, self.schedule.lengths, self.step.optimizer.own_ends)
        samples = self.plan.global_batch_size(progress.consumed_samples)
        iteration, result = progress.iteration + 1, None
        if iteration not in self.config.training.iterations_to_skip:
            for watcher in watching:
                watcher.before_step(batch, iteration)
            result = self.step.run(
                batch,
                iteration=iteration,
                learning_rate=rate,
                weight_decay=decay,
                own_rates=own,
                exit_votes=exit_votes,
                judge=SpikeJudge(self.config.spikes, progress.recent),
            )
        progress.iteration = iteration
        progress.consumed_samples += samples
        if result is not None:
            progress.recent = remembered(progress.recent, result.loss, result.grad_norm, self.config.spikes)
            if result.spike is not None:
                last = range(progress.consumed_samples - samples, progress.consumed_samples)
                words = result.spike.words(iteration, last)
                self.reporter.say(words)
                self.reporter.event("spike", progress, words)
        if result is None or result.skipped:
            progress.skipped_iterations += 1
        else:
            progress.updated_samples += samples
        self.goodput.spent("steps that do not count" if result is None or result.skipped else "steps")
        logged = self.reporter.step(progress, result, rate, samples, lambda: self._extras(result), self.goodput.seconds)
        if result is not None:
            for watcher in watching:
                watcher.after_step(progress, result, samples, rate, decay)
        if logged is not None:
            for watcher in watching:
                watcher.on_log(progress, logged)
        return result

    def _extras(self, result: StepResult | None) -> dict[str, float]:
        """Further numbers of a log line. All ranks call it together."""
        found = {"goodput": self.goodput.share}
        shards, logging, model = self.step.counted_shards, self.config.logging, self.config.model
        if logging.log_params_norm:
            found["params_norm"] = named("megatron.training.gradient_noise:params_norm")(shards, self.context)
        if logging.log_layer_norms and result is not None:
            from megatron.training.gradient_noise import layer_norms, places

            parts = places(model.num_layers, model.tied, model.mtp_num_layers)
            found |= layer_norms(shards, self.step.counted_squares, result.loss_scale, parts, self.context)
        if result is not None:
            found |= {name: float(metric(self.step, result)) for name, metric in METRICS.items()}
        return found

    def _between_steps(self, progress: Progress, watching: Sequence[Watcher]) -> str | None:
        """Evaluate and save, if it is time. Returns why the run is to stop, if an evaluation was given up."""
        training = self.config.training
        valid = self.valid_batches if progress.is_multiple_of(training.eval_interval) else None
        if valid is not None and not self._evaluate(progress, valid, "validation", watching):
            return _ON_SIGNAL
        if progress.is_multiple_of(self.config.checkpoint.save_interval):
            self._save(progress, watching)
        if progress.is_multiple_of(self.config.checkpoint.memory_save_interval):
            self._keep(progress)
        if training.manual_gc and progress.is_multiple_of(training.manual_gc_interval):
            gc.collect()
        return None

    def _rewound(self, progress: Progress, watching: Sequence[Watcher]) -> bool:
        """Go back behind a loss spike, if that is asked for and there is a checkpoint; returns whether it was done."""
        if self.rewinds is None:
            return False
        self._phase("rewinding")
        left = progress.iteration
        with self.reporter.paused("going back", progress):
            found = self.rewinds.rewind(progress, self.plan, self.saver, self.reporter.say)
            if found is not None:
                self.plan, self.train_batches = found.plan, found.batches.training
                self.goodput.went_back(found.account)
                self.reporter.event("rewind", progress, f"back from iteration {left} to {progress.iteration}", left=left)
                for watcher in watching:
                    watcher.after_rewind(progress)
        self._phase("between steps")
        return found is not None

    def _voted_exit(self, result: StepResult) -> str | None:
        if result.exit_votes[0]:
            return _ON_SIGNAL
        if result.exit_votes[1]:
            return f"after {self.config.training.exit_duration_in_mins} minutes (--exit-duration-in-mins)"
        return None

    def _exit_reason(self, progress: Progress, result: StepResult | None, until: int | None) -> str | None:
        training = self.config.training
        if result is not None and (voted := self._voted_exit(result)) is not None:
            return voted
        done = progress.iteration == self.plan.total_iterations
        if progress.is_multiple_of(training.exit_interval) and not done:
            return f"at iteration {progress.iteration} (--exit-interval {training.exit_interval})"
        return None if done or progress.iteration != until else _PAUSED

    def _finish(self, progress: Progress, stopped: str | None, callbacks: Sequence[Watcher]) -> None:
        # After the save: evaluations may take longer than a scheduler that ends the job allows.
        if stopped is None:
            done = True
            if self.valid_batches is not None and not progress.is_multiple_of(self.config.training.eval_interval):
                done = self._evaluate(progress, self.valid_batches, "validation", callbacks)
            if done and self.test_batches is not None:
                self._evaluate(progress, self.test_batches, "test", callbacks)
        self.reporter.say(self.goodput.words())
        why = self.signals.words() if stopped == _ON_SIGNAL else stopped
        words = f"done after {progress.iteration} iterations" if stopped is None else f"exiting {why}"
        self.reporter.say(words)
        self.reporter.event("end", progress, words)

    def _evaluate(
        self, progress: Progress, make: Callable[[], Batches], split: Literal["validation", "test"], watching: Sequence[Watcher]
    ) -> bool:
        """Evaluate; returns whether that came to its end, and was not given up on a signal."""
        self._phase("evaluating")
        with self.reporter.paused("evaluating", progress):
            with self.timers("evaluation", level=0):
                found = evaluate(self.step, make(), lambda: self.signals.seen is not None)
            if found is None:
                self.reporter.say(f"  the evaluation at iteration {progress.iteration} is given up {self.signals.words()}")
            else:
                values = self.reporter.evaluation(progress, *found, split)
                for watcher in watching:
                    watcher.on_evaluation(progress, values)
            if self.config.training.manual_gc:
                gc.collect()
        self.goodput.spent("evaluations")
        return found is not None

    def _save(self, progress: Progress, watching: Sequence[Watcher]) -> None:
        self._phase("saving")
        with self.reporter.paused("saving", progress):
            self.step.finish_publishing()  # no result may be written where it is still read
            if self.config.checkpoint.save is not None:
                for watcher in watching:
                    watcher.before_save(progress)
            with self.timers("save-checkpoint", level=0):
                account, schedule = self.goodput.to_json(), self.schedule
                place = self.saver.save(progress, self.step.optimizer, self.step.scaler, schedule, self.reporter.say, account)
                if self.rewinds is not None:
                    self.rewinds.saved(place)
                if place is not None:
                    self.reporter.event("save", progress, f"checkpoint {place}")
                    for watcher in watching:
                        watcher.after_save(progress, place)
            if self.config.training.manual_gc:
                gc.collect()
        self.goodput.spent("saves")

    def _keep(self, progress: Progress) -> None:
        """Copy the state into the memory of the nodes."""
        self._phase("saving")
        with self.reporter.paused("keeping the state", progress), self.timers("keep-state", level=0):
            self.step.finish_publishing()
            account, schedule = self.goodput.to_json(), self.schedule
            self.saver.keep(progress, self.step.optimizer, self.step.scaler, schedule, self.reporter.say, account)
        self.goodput.spent("saves")

    def _time_is_up(self) -> bool:
        limit = self.config.training.exit_duration_in_mins
        return limit is not None and time.monotonic() - self.started_at > 60 * limit


def evaluate(
    step: TrainStep, batches: Iterable[list[ModelInputs]], asked_to_exit: Callable[[], bool] = lambda: False
) -> tuple[float, float | None] | None:
    """The mean loss, and that of multi-token prediction if there is any: sums of mask x loss over all tokens of all batches,
    divided by the sum of the mask; the same on every rank. None if it was given up, since a rank was asked to exit.

    Args:
        asked_to_exit: whether this rank was; asked before each batch.
    """
    found = Evaluated(0.0, 0.0)
    for batch in batches:
        found += step.evaluate(batch, exit_vote=asked_to_exit())
        if found.asked_to_exit:
            return None
    loss, mtp_loss = (total / found.mask if found.mask else math.nan for total in (found.loss, found.mtp_loss))
    return loss, mtp_loss if step.model.config.mtp_num_layers else None
