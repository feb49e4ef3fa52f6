"""The training loop: steps, evaluations, saves and exits, in this order at each iteration."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from megatron.config.config import Config
from megatron.metrics.measures import Timers
from megatron.model.inputs import ModelInputs
from megatron.optimizer.grad_scaler import LossScaleError
from megatron.parallel.context import ParallelContext
from megatron.training.failure import SharedError
from megatron.training.inputs import Batches, RunBatches
from megatron.training.progress import BatchSizePlan, LearningSchedule, Progress, learning_rate, own_rates, weight_decay
from megatron.training.reporter import Reporter
from megatron.training.signals import ExitSignals, LifeNote
from megatron.training.step import Evaluated, StepResult, TrainStep
from megatron.training.watch import METRICS, Watcher, overridden

if TYPE_CHECKING:
    from megatron.training.saver import Saver

_ON_SIGNAL, _PAUSED = "on a signal", "paused"
_SHARED_FAILURES = (SharedError, LossScaleError)
"""Errors that a step raises on every rank at once."""


class NoSaver:
    """Takes the place of a `Saver` in a run without --save, which saves nothing."""

    keeps_in_memory = False

    def owning(self) -> AbstractContextManager[object]:
        """Do nothing, since the run has no folder to own."""
        return nullcontext()

    def save(self, *_: Any) -> None:
        """Save nothing."""

    keep = poll = settle = went_back = finish = save

    def place(self, iteration: int) -> str:
        """Raise an error, since nothing is saved.

        Raises:
            ValueError: always.
        """
        raise ValueError("a run without --save has no checkpoint")


class Rewound(NamedTuple):
    """Holds the parts with which a run continues after it went back to a checkpoint."""

    plan: BatchSizePlan
    batches: RunBatches
    checkpoint: Mapping[str, Any]
    """See `Control`."""


GoBack = Callable[[Progress, BatchSizePlan, "Saver | NoSaver", Callable[[str], None]], Rewound | None]
"""Takes the run back to a checkpoint and returns what to go on with; None if the run goes on as it is. All ranks call it."""


@dataclass
class Control:
    """State that the loop and the features share: the loaded checkpoint, further entries of checkpoints, a request to go back."""

    checkpoint: Mapping[str, Any] = field(default_factory=dict)
    """The `config.json`, unchecked, of the checkpoint from which the run continues; empty if there is none."""
    checkpoint_extras: dict[str, Callable[[], Any]] = field(default_factory=dict)
    """Functions that return further entries of a checkpoint's `config.json`, by the names of the entries."""
    go_back: GoBack | None = None
    """Set by a watcher after a step, if the run must go back to a checkpoint. The same on all ranks."""


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
    """The signals that ask the run to exit."""
    feature_watchers: Callable[[], list[Watcher]] = list
    """Creates the watchers of the features. All ranks call it together, before the first step."""
    control: Control = field(default_factory=Control)
    _feature_watchers: list[Watcher] | None = None
    """The watchers of the features, while the run is under way."""
    _watchers: list[Watcher] = field(default_factory=list)
    """The watchers of the features, and behind them the user's callbacks."""
    _calls: dict[str, list[Callable[..., Any]]] = field(default_factory=dict)
    """Methods of the watchers that are called in every step, by name; without those that only the base class has."""

    def run(self, progress: Progress, *, until: int | None = None, callbacks: Sequence[Watcher] = ()) -> bool:
        """Train from `progress` (updated in place) to an exit or to the end of the run; then save, and evaluate at the end.

        Args:
            until: the iteration at which it pauses: nothing is saved or evaluated then, and it may be called again.
            callbacks: watch these steps. They are called after the watchers of the features.

        Returns:
            whether a signal ended it.
        """
        began_at, collects = progress.iteration, gc.isenabled()
        if self.config.training.manual_gc:
            gc.disable()
        try:
            with self.signals.noted():
                try:
                    with self.watching(callbacks):
                        stopped = self._train(progress, until)
                    if stopped == _PAUSED:
                        self.saver.settle(self.reporter.say)
                    elif progress.iteration > began_at:  # a finished run that is started again leaves its checkpoint as it is
                        self._save(progress)  # inside the block: a further signal must not cut off the save
                except _SHARED_FAILURES:  # on every rank alike, so the save under way can be finished
                    self.saver.finish(self.reporter.say)
                    raise
                for watcher in callbacks if stopped == _PAUSED else self._watchers:
                    watcher.close()
                if stopped != _PAUSED:
                    self._feature_watchers = None
                    self.saver.finish(self.reporter.say)
                    self._finish(progress, stopped)
        finally:
            if collects:
                gc.enable()
        return stopped == _ON_SIGNAL

    @contextmanager
    def watching(self, callbacks: Sequence[Watcher] = ()) -> Iterator[None]:
        """Enter the context managers of all watchers. Steps may be made only within this block."""
        if self._feature_watchers is None:
            self._feature_watchers = self.feature_watchers()
        self._watchers = [*self._feature_watchers, *callbacks]
        names = ("on_phase", "before_step", "on_result", "after_step", "on_log")
        self._calls = {name: overridden(self._watchers, name) for name in names}
        with ExitStack() as stack:
            for watcher in self._watchers:
                stack.enter_context(watcher.around_steps())
            yield

    def close(self, callbacks: Sequence[Watcher] = ()) -> None:
        """Close the watchers of the features, if the run did not come to its end, and these callbacks."""
        for watcher in (*(self._feature_watchers or ()), *callbacks):
            watcher.close()
        self._feature_watchers = None

    def _phase(self, name: str, iteration: int | None = None) -> None:
        """Tell the watchers what this rank does now."""
        for call in self._calls["on_phase"]:
            call(name, iteration)

    def _train(self, progress: Progress, until: int | None) -> str | None:
        """Train until the run or something else ends it. Returns why it stopped before the end of the run, or None."""
        stopped = _PAUSED if until == progress.iteration < self.plan.total_iterations else None
        batches, life = self.train_batches(progress.consumed_samples), LifeNote(progress.iteration)
        while progress.iteration < self.plan.total_iterations and stopped is None:
            self._phase("reading data", progress.iteration + 1)
            with self.timers("batch-generator", level=1):
                batch = next(batches)
            self._phase("in a step")
            result = self.advance(progress, batch, (self.signals.seen is not None, self._time_is_up()))
            life.finished(progress.iteration)
            self._phase("between steps")
            self.saver.poll(self.reporter.say)
            if result is not None and self.control.go_back is not None and self._went_back(progress, self.control.go_back):
                batches.close()  # type: ignore[attr-defined]
                batches = self.train_batches(progress.consumed_samples)
                stopped = self._voted_exit(result)
                continue
            stopped = self._between_steps(progress) or self._exit_reason(progress, result, until)
        batches.close()  # type: ignore[attr-defined]
        return stopped

    def advance(
        self, progress: Progress, batch: list[ModelInputs], exit_votes: tuple[bool, bool] = (False, False)
    ) -> StepResult | None:
        """Make one step, within `watching`, or none where the user skips the iteration; `progress` is updated, and the step logged
        if it is time."""
        rate = learning_rate(progress.updated_samples, self.schedule.optimizer, self.schedule.lengths)
        decay = weight_decay(progress.updated_samples, self.schedule.optimizer, self.schedule.lengths)
        own = own_rates(progress.updated_samples, self.schedule.optimizer, self.schedule.lengths, self.step.optimizer.own_ends)
        samples = self.plan.global_batch_size(progress.consumed_samples)
        iteration, result, self.control.go_back = progress.iteration + 1, None, None
        if iteration not in self.config.training.iterations_to_skip:
            for call in self._calls["before_step"]:
                call(batch, iteration)
            result = self.step.run(
                batch, iteration=iteration, learning_rate=rate, weight_decay=decay, own_rates=own, exit_votes=exit_votes
            )
        progress.iteration = iteration
        progress.consumed_samples += samples
        if result is None or result.skipped:
            progress.skipped_iterations += 1
        else:
            progress.updated_samples += samples
        for call in self._calls["on_result"]:
            call(progress, result, samples)
        logged = self.reporter.step(progress, result, rate, samples, lambda: self._log_values(result), self._record_values)
        if result is not None:
            for call in self._calls["after_step"]:
                call(progress, result, samples, rate, decay)
        if logged is not None:
            for call in self._calls["on_log"]:
                call(progress, logged)
        return result

    def _log_values(self, result: StepResult | None) -> dict[str, float]:
        """Further numbers of a line of the log. All ranks call it together."""
        found = {name: value for watcher in self._watchers for name, value in watcher.log_values(result).items()}
        if result is not None:
            found |= {name: float(metric(self.step, result)) for name, metric in METRICS.items()}
        return found

    def _record_values(self) -> dict[str, Any]:
        return {name: value for watcher in self._watchers for name, value in watcher.record_values().items()}

    def _between_steps(self, progress: Progress) -> str | None:
        """Evaluate and save, if it is time. Returns why the run is to stop, if an evaluation was given up."""
        training = self.config.training
        valid = self.valid_batches if progress.is_multiple_of(training.eval_interval) else None
        if valid is not None and not self._evaluate(progress, valid, "validation"):
            return _ON_SIGNAL
        if progress.is_multiple_of(self.config.checkpoint.save_interval):
            self._save(progress)
        if progress.is_multiple_of(self.config.checkpoint.memory_save_interval):
            self._save_to_node_memory(progress)
        if training.manual_gc and progress.is_multiple_of(training.manual_gc_interval):
            gc.collect()
        return None

    def _went_back(self, progress: Progress, go_back: GoBack) -> bool:
        """Go back to a checkpoint; returns whether that was done."""
        self._phase("rewinding")
        left = progress.iteration
        with self.reporter.paused("going back", progress):
            found = go_back(progress, self.plan, self.saver, self.reporter.say)
            if found is not None:
                self.plan, self.train_batches, self.control.checkpoint = found.plan, found.batches.training, found.checkpoint
                self.reporter.event("rewind", progress, f"back from iteration {left} to {progress.iteration}", left=left)
                for watcher in self._watchers:
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

    def _finish(self, progress: Progress, stopped: str | None) -> None:
        # After the save: evaluations may take longer than a scheduler that ends the job allows.
        if stopped is None:
            done = True
            if self.valid_batches is not None and not progress.is_multiple_of(self.config.training.eval_interval):
                done = self._evaluate(progress, self.valid_batches, "validation")
            if done and self.test_batches is not None:
                self._evaluate(progress, self.test_batches, "test")
        for watcher in self._watchers:
            watcher.on_end()
        why = self.signals.words() if stopped == _ON_SIGNAL else stopped
        words = f"done after {progress.iteration} iterations" if stopped is None else f"exiting {why}"
        self.reporter.say(words)
        self.reporter.event("end", progress, words)

    def _evaluate(self, progress: Progress, make: Callable[[], Batches], split: Literal["validation", "test"]) -> bool:
        """Evaluate; returns whether that came to its end, and was not given up on a signal."""
        self._phase("evaluating")
        with self.reporter.paused("evaluating", progress):
            with self.timers("evaluation", level=0):
                found = evaluate(self.step, make(), lambda: self.signals.seen is not None)
            if found is None:
                self.reporter.say(f"  the evaluation at iteration {progress.iteration} is given up {self.signals.words()}")
            else:
                values = self.reporter.evaluation(progress, *found, split)
                for watcher in self._watchers:
                    watcher.on_evaluation(progress, values)
            if self.config.training.manual_gc:
                gc.collect()
        return found is not None

    def _save(self, progress: Progress) -> None:
        self._phase("saving")
        with self.reporter.paused("saving", progress):
            self.step.finish_publishing()  # no result may be written where it is still read
            if self.config.checkpoint.save is not None:
                for watcher in self._watchers:
                    watcher.before_save(progress)
            with self.timers("save-checkpoint", level=0):
                optimizer, scaler, say = self.step.optimizer, self.step.scaler, self.reporter.say
                place = self.saver.save(progress, optimizer, scaler, self.schedule, say, self.checkpoint_extras())
                if place is not None:
                    self.reporter.event("save", progress, f"checkpoint {place}")
                    for watcher in self._watchers:
                        watcher.after_save(progress, place)
            if self.config.training.manual_gc:
                gc.collect()

    def _save_to_node_memory(self, progress: Progress) -> None:
        """Copy the state into the memory of the nodes."""
        self._phase("saving")
        with self.reporter.paused("keeping the state", progress), self.timers("keep-state", level=0):
            self.step.finish_publishing()
            optimizer, scaler, say = self.step.optimizer, self.step.scaler, self.reporter.say
            self.saver.keep(progress, optimizer, scaler, self.schedule, say, self.checkpoint_extras())

    def checkpoint_extras(self) -> dict[str, Any]:
        """Return the features' entries for the `config.json` of a checkpoint that is written now."""
        return {name: value() for name, value in self.control.checkpoint_extras.items()}

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
