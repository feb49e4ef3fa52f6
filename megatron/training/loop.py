"""Training loop. Each iteration runs a step, then evaluates and saves if that is due, and then checks whether the run must exit."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from megatron.config.config import Config
from megatron.config.outputs import DEFAULT_SAVE_MINUTES
from megatron.metrics.measures import Timers
from megatron.model.inputs import ModelInputs
from megatron.optimizer.grad_scaler import LossScaleError
from megatron.parallel.context import ParallelContext
from megatron.training.callbacks import METRICS, Callback, find_overriding_methods
from megatron.training.failure import SharedError
from megatron.training.inputs import Batches, BatchesBySet, RunBatches
from megatron.training.progress import (
    BatchSizePlan,
    LearningSchedule,
    Progress,
    compute_group_learning_rates,
    compute_learning_rate,
    compute_weight_decay,
)
from megatron.training.reporter import Reporter
from megatron.training.signals import ExitSignals, ProgressFile
from megatron.training.step import NO_VOTES, EvaluationSums, StepResult, StepVotes, TrainStep

if TYPE_CHECKING:
    from megatron.training.saver import Saver

_ON_SIGNAL, _PAUSED = "on a signal", "paused"
_SHARED_ERRORS = (SharedError, LossScaleError)
"""Errors that a step raises on every rank at the same time."""


class NoSaver:
    """Stand-in for `Saver` in runs without --save. Its methods do nothing, except that the path of a checkpoint cannot be
    requested."""

    saves_to_node_memory = False

    def claim_folder(self) -> AbstractContextManager[object]:
        """Return a context manager that does nothing, because the run has no save folder."""
        return nullcontext()

    def save(self, *_: Any, is_timed: bool = False) -> None:
        """Do nothing, because the run has no save folder."""

    save_to_node_memory = poll = wait = on_rewind = finish = save

    def build_checkpoint_path(self, iteration: int) -> str:
        """Raise an error, because the run has no save folder.

        Raises:
            ValueError: always.
        """
        raise ValueError("a run without --save writes no checkpoints, so there is no checkpoint path: set --save")


class RewindResult(NamedTuple):
    """Result of a rewind (the return of a run to an earlier checkpoint): the objects with which the run continues."""

    plan: BatchSizePlan
    batches: RunBatches
    checkpoint: Mapping[str, Any]
    """Content of the `config.json` of the checkpoint to which the run has gone back, not validated."""


Rewind = Callable[[Progress, BatchSizePlan, "Saver | NoSaver", Callable[[str], None]], RewindResult | None]
"""Function that takes the run back to a checkpoint. Returns the objects with which the run continues, or None if it continues
without a rewind. All ranks call it together."""


@dataclass
class Control:
    """State through which features (optional parts of a run) influence the training loop: the loaded checkpoint, additional entries
    for new checkpoints, and a request to rewind."""

    checkpoint: Mapping[str, Any] = field(default_factory=dict)
    """Content of the `config.json` of the checkpoint from which the run continues, not validated; empty without a
    checkpoint."""
    checkpoint_extras: dict[str, Callable[[], Any]] = field(default_factory=dict)
    """Functions that return additional entries for the `config.json` of a new checkpoint, by the name of the entry."""
    rewind: Rewind | None = None
    """Function that takes the run back to a checkpoint. A callback sets it after a step, on all ranks, to request the rewind.
    None if no rewind is requested."""
    save_requested: bool = False
    """Whether a checkpoint of this iteration is to be saved even if none is due. A callback sets it after an evaluation, on all
    ranks."""
    end_reason: str | None = None
    """Reason why the run is complete before its last iteration. A callback sets it on all ranks, before the first step or after an
    evaluation: the run then saves, evaluates and ends as after its last iteration."""
    is_time_short: bool = False
    """Whether the job may be killed soon: a signal has ended the run or its last evaluation, or the time limit of
    --exit-duration-in-mins has passed. The end of the run then leaves out what can be done later. Ranks may disagree about a signal
    or limit that is reached after the last step."""
    notify_phase: Callable[[str], None] = lambda name: None
    """Function that notifies the callbacks of a phase that a callback begins or ends between two steps. Set by the loop."""
    has_exit_signal: Callable[[], bool] = lambda: False
    """Function that returns whether this rank has received an exit signal."""


@dataclass
class Loop:
    """Training loop: runs steps, evaluates, saves and notifies callbacks.

    If the run goes back to an earlier checkpoint (a rewind), the attributes `plan` and `train_batches` are replaced.
    """

    config: Config
    context: ParallelContext
    step: TrainStep
    plan: BatchSizePlan
    schedule: LearningSchedule
    saver: Saver | NoSaver
    reporter: Reporter
    timers: Timers
    train_batches: Callable[[int], Batches]
    """Function that returns the iterator over the training batches that follow after the given number of consumed samples."""
    valid_batches: BatchesBySet
    test_batches: BatchesBySet
    started_at: float
    """Time at which the job started, by time.monotonic()."""
    signals: ExitSignals = field(default_factory=lambda: ExitSignals(0))
    """Handler of the signals that ask the run to exit."""
    build_feature_callbacks: Callable[[], list[Callback]] = list
    """Function that creates the callbacks of the features (optional parts of the run). All ranks call it together, before the
    first step."""
    control: Control = field(default_factory=Control)
    _last_save_at: float = field(default_factory=time.monotonic)
    """Time of the last checkpoint, or of the start, by time.monotonic()."""
    _feature_callbacks: list[Callback] | None = None
    """Callbacks of the features (optional parts of the run). None before the first step and after the end of the run."""
    _callbacks: list[Callback] = field(default_factory=list)
    """Callbacks of the features (optional parts of the run), followed by the user's callbacks."""
    _step_methods: dict[str, list[Callable[..., Any]]] = field(default_factory=dict)
    """Callback methods that are called in every step, by the name of the method. Methods that a callback does not override are
    left out."""

    def run(self, progress: Progress, *, stop_iteration: int | None = None, callbacks: Sequence[Callback] = ()) -> bool:
        """Train until the end of the run, a pause, or an early exit.

        At the end or after an early exit, a checkpoint is saved. At the end, the run is also evaluated.

        Args:
            progress: counters of the run, updated in place.
            stop_iteration: iteration at which to pause. A paused run is neither saved nor evaluated, and `run` can be called again.
            callbacks: user callbacks for these steps, called after the callbacks of the features (optional parts of the run).

        Returns:
            whether a signal ended the run.
        """
        start_iteration, gc_was_enabled = progress.iteration, gc.isenabled()
        if self.config.training.manual_gc:
            gc.disable()
        try:
            with self.signals.deferred():
                try:
                    with self.attach_callbacks(callbacks):
                        stop_reason = None if self.config.training.skip_train else self._train(progress, stop_iteration)
                    if stop_reason == _PAUSED:
                        self.saver.wait(self.reporter.log)
                    elif progress.iteration > start_iteration:  # else a finished run was started again: keep its checkpoint
                        self._save(progress)  # inside the block, so that another signal does not interrupt the save
                except _SHARED_ERRORS:  # raised on every rank, so all ranks can finish the pending save together
                    self.saver.finish(self.reporter.log)
                    raise
                for callback in callbacks if stop_reason == _PAUSED else self._callbacks:
                    callback.close()
                if stop_reason != _PAUSED:
                    self._feature_callbacks = None
                    self.saver.finish(self.reporter.log)
                    self._finish(progress, stop_reason)
        finally:
            if gc_was_enabled:
                gc.enable()
        return stop_reason == _ON_SIGNAL

    @contextmanager
    def attach_callbacks(self, callbacks: Sequence[Callback] = ()) -> Iterator[None]:
        """Enter the context managers of the callbacks (`Callback.around_steps`), and collect the callback methods that each step
        calls. Steps may only run inside this block."""
        if self._feature_callbacks is None:
            self._feature_callbacks = self.build_feature_callbacks()
        self._callbacks, self.control.notify_phase = [*self._feature_callbacks, *callbacks], self._notify_phase
        method_names = ("on_phase", "before_step", "on_result", "after_step", "on_log")
        self._step_methods = {name: find_overriding_methods(self._callbacks, name) for name in method_names}
        with ExitStack() as stack:
            for callback in self._callbacks:
                stack.enter_context(callback.around_steps())
            yield

    def close(self, callbacks: Sequence[Callback] = ()) -> None:
        """Close the given callbacks. Also close the callbacks of the features (optional parts of the run), unless the end of the
        run has already closed them."""
        for callback in (*(self._feature_callbacks or ()), *callbacks):
            callback.close()
        self._feature_callbacks = None

    def _notify_phase(self, name: str, iteration: int | None = None) -> None:
        """Notify the callbacks that this rank enters a phase of the loop, such as "reading data"."""
        for call in self._step_methods["on_phase"]:
            call(name, iteration)

    def _train(self, progress: Progress, stop_iteration: int | None) -> str | None:
        """Run steps until the run ends or must stop. Returns the reason for an early stop, or None at the end of the run."""
        stop_reason = _PAUSED if stop_iteration == progress.iteration < self.plan.total_iterations else None
        batches, progress_file = self.train_batches(progress.consumed_samples), ProgressFile(progress.iteration)
        while not self._is_complete(progress) and stop_reason is None:
            self._notify_phase("reading data", progress.iteration + 1)
            with self.timers("batch-generator", level=1):
                batch = next(batches)
            self._notify_phase("in a step")
            votes = StepVotes(self.signals.received is not None, self._is_time_up(), self._is_timed_save_due())
            result = self.run_step(progress, batch, votes)
            progress_file.record(progress.iteration)
            self._notify_phase("between steps")
            self.saver.poll(self.reporter.log)
            if result is not None and self.control.rewind is not None and self._rewind(progress, self.control.rewind):
                batches.close()  # type: ignore[attr-defined]
                batches = self.train_batches(progress.consumed_samples)
                stop_reason = self._find_voted_exit(result)
                continue
            stop_reason = self._evaluate_and_save(progress, result) or self._find_exit_reason(progress, result, stop_iteration)
        batches.close()  # type: ignore[attr-defined]
        return stop_reason

    def _is_complete(self, progress: Progress) -> bool:
        return progress.iteration >= self.plan.total_iterations or self.control.end_reason is not None

    def run_step(self, progress: Progress, batch: list[ModelInputs], votes: StepVotes = NO_VOTES) -> StepResult | None:
        """Run one step, update `progress`, and log if a log line is due. Call this only inside the block of `attach_callbacks`.

        Args:
            batch: microbatches of this data-parallel rank.
            votes: votes of this rank on what the run does after the step.

        Returns:
            the result of the step, or None if --iterations-to-skip skips the iteration.
        """
        rate = compute_learning_rate(progress.updated_samples, self.schedule.optimizer, self.schedule.lengths)
        decay = compute_weight_decay(progress.updated_samples, self.schedule.optimizer, self.schedule.lengths)
        group_rates = compute_group_learning_rates(
            progress.updated_samples, self.schedule.optimizer, self.schedule.lengths, self.step.optimizer.custom_lr_bounds
        )
        num_samples = self.plan.get_global_batch_size(progress.consumed_samples)
        iteration, result, self.control.rewind = progress.iteration + 1, None, None
        if iteration not in self.config.training.iterations_to_skip:
            for call in self._step_methods["before_step"]:
                call(batch, iteration)
            result = self.step.run(
                batch, iteration=iteration, learning_rate=rate, weight_decay=decay, group_rates=group_rates, votes=votes
            )
        progress.iteration = iteration
        progress.consumed_samples += num_samples
        if result is None or result.skipped:
            progress.skipped_iterations += 1
        else:
            progress.updated_samples += num_samples
        for call in self._step_methods["on_result"]:
            call(progress, result, num_samples)
        logged = self.reporter.step(
            progress, result, rate, num_samples, lambda: self._collect_log_values(result), self._collect_record_values
        )
        if result is not None:
            for call in self._step_methods["after_step"]:
                call(progress, result, num_samples, rate, decay)
        if logged is not None:
            for call in self._step_methods["on_log"]:
                call(progress, logged)
        return result

    def _collect_log_values(self, result: StepResult | None) -> dict[str, float]:
        """Return the values that callbacks and registered metrics add to a log line. All ranks call this function together."""
        values = {name: value for callback in self._callbacks for name, value in callback.log_values(result).items()}
        if result is not None:
            values |= {name: float(metric(self.step, result)) for name, metric in METRICS.items()}
        return values

    def _collect_record_values(self) -> dict[str, Any]:
        """Return the values that callbacks add to the history file of the run (`megatron/metrics/history.py`)."""
        return {name: value for callback in self._callbacks for name, value in callback.record_values().items()}

    def _evaluate_and_save(self, progress: Progress, result: StepResult | None) -> str | None:
        """Evaluate, save a checkpoint, and copy the state to node memory, each only if it is due. Returns the reason to stop if a
        signal interrupted the evaluation, else None.

        Args:
            result: result of the step, or None if the iteration was skipped.
        """
        training = self.config.training
        is_due = bool(self.valid_batches) and progress.is_multiple_of(training.eval_interval)
        if is_due and not self._evaluate(progress, self.valid_batches, "validation"):
            return _ON_SIGNAL
        if progress.is_multiple_of(self.config.checkpoint.save_interval) or self.control.save_requested:
            self._save(progress)
        elif result is not None and result.votes.timed_save:
            self._save(progress, is_timed=True)
        if progress.is_multiple_of(self.config.checkpoint.memory_save_interval):
            self._save_to_node_memory(progress)
        if training.manual_gc and progress.is_multiple_of(training.manual_gc_interval):
            gc.collect()
        return None

    def _rewind(self, progress: Progress, rewind: Rewind) -> bool:
        """Go back to an earlier checkpoint by calling `rewind`. Returns whether the run has gone back; it continues normally if
        there is no suitable checkpoint."""
        self._notify_phase("rewinding")
        old_iteration = progress.iteration
        with self.reporter.pause("going back", progress):
            rewind_result = rewind(progress, self.plan, self.saver, self.reporter.log)
            if rewind_result is not None:
                self.plan, self.train_batches, self.control.checkpoint = (
                    rewind_result.plan,
                    rewind_result.batches.iter_training_batches,
                    rewind_result.checkpoint,
                )
                self.reporter.record_event(
                    "rewind", progress, f"back from iteration {old_iteration} to {progress.iteration}", left=old_iteration
                )
                self.reporter.rewind(progress.iteration)
                for callback in self._callbacks:
                    callback.after_rewind(progress)
        self._notify_phase("between steps")
        return rewind_result is not None

    def _find_voted_exit(self, result: StepResult) -> str | None:
        """Return the reason to stop if any rank has received an exit signal or exceeded its time limit, else None. The votes of all
        ranks are part of `result`."""
        if result.votes.exit_signal:
            return _ON_SIGNAL
        if result.votes.time_limit:
            return f"after {self.config.training.exit_duration_in_mins} minutes (--exit-duration-in-mins)"
        return None

    def _find_exit_reason(self, progress: Progress, result: StepResult | None, stop_iteration: int | None) -> str | None:
        """Return the reason why the loop must stop after this iteration, or None if it continues."""
        training = self.config.training
        if result is not None and (vote_reason := self._find_voted_exit(result)) is not None:
            return vote_reason
        is_complete = self._is_complete(progress)
        if progress.is_multiple_of(training.exit_interval) and not is_complete:
            return f"at iteration {progress.iteration} (--exit-interval {training.exit_interval})"
        return None if is_complete or progress.iteration != stop_iteration else _PAUSED

    def _finish(self, progress: Progress, stop_reason: str | None) -> None:
        """Run the final evaluations, notify the callbacks, and log how the run ended."""
        # Evaluate after the save: a job scheduler may end the job before the evaluations are complete.
        is_interrupted, training = stop_reason == _ON_SIGNAL, self.config.training
        if stop_reason is None:
            if self.valid_batches and (training.skip_train or not progress.is_multiple_of(training.eval_interval)):
                is_interrupted = not self._evaluate(progress, self.valid_batches, "validation")
            if not is_interrupted and self.test_batches:
                is_interrupted = not self._evaluate(progress, self.test_batches, "test")
        self.control.is_time_short = is_interrupted or self.signals.received is not None or self._is_time_up()
        for callback in self._callbacks:
            callback.on_end()
        exit_reason = self.signals.describe() if stop_reason == _ON_SIGNAL else stop_reason
        done = "evaluated" if training.skip_train else "done"
        message = f"{done} after {progress.iteration} iterations" if stop_reason is None else f"exiting {exit_reason}"
        if stop_reason is None and self.control.end_reason is not None:
            message += f": {self.control.end_reason}"
        save = self.config.checkpoint.save
        resume_hint = "" if save is None or stop_reason is None else f" (the same command with --load {save} resumes the run)"
        self.reporter.log(message + resume_hint)
        self.reporter.end = "stopped" if stop_reason is not None and self.control.is_time_short else "finished"
        self.reporter.record_event("end", progress, message, complete=stop_reason is None)

    def _evaluate(self, progress: Progress, batches: BatchesBySet, split: Literal["validation", "test"]) -> bool:
        """Evaluate on the sets of a split and log the losses. Returns False if an exit signal interrupted the evaluation."""
        self._notify_phase("evaluating")
        with self.reporter.pause("evaluating", progress):
            with self.timers("evaluation", level=0):
                losses = evaluate_sets(self.step, batches, lambda: self.signals.received is not None)
            if losses is None:
                self.reporter.log(f"  the evaluation at iteration {progress.iteration} is given up {self.signals.describe()}")
            else:
                values = self.reporter.log_evaluation(progress, losses, split)
                for callback in self._callbacks:
                    callback.on_evaluation(progress, values)
            if self.config.training.manual_gc:
                gc.collect()
        return losses is not None

    def _save(self, progress: Progress, *, is_timed: bool = False) -> None:
        """Write a checkpoint, if the run has a save folder.

        Args:
            is_timed: whether the checkpoint is due because of the time since the last one. The next checkpoint replaces it.
        """
        self._notify_phase("saving")
        self.control.save_requested = False
        with self.reporter.pause("saving", progress):
            self.step.finish_param_gather()  # the gather must not write params while the save reads them
            if self.config.checkpoint.save is not None:
                for callback in self._callbacks:
                    callback.before_save(progress)
            with self.timers("save-checkpoint", level=0):
                optimizer, scaler, log = self.step.optimizer, self.step.scaler, self.reporter.log
                path = self.saver.save(
                    progress, optimizer, scaler, self.schedule, log, self.get_checkpoint_extras(), is_timed=is_timed
                )
                self._last_save_at = time.monotonic()
                if path is not None:
                    self.reporter.record_event("save", progress, f"checkpoint {path}")
                    for callback in self._callbacks:
                        callback.after_save(progress, path)
            if self.config.training.manual_gc:
                gc.collect()

    def _save_to_node_memory(self, progress: Progress) -> None:
        """Start to copy the state of the run to the host memory of the nodes."""
        self._notify_phase("saving")
        with self.reporter.pause("keeping the state", progress), self.timers("keep-state", level=0):
            self.step.finish_param_gather()
            optimizer, scaler, log = self.step.optimizer, self.step.scaler, self.reporter.log
            self.saver.save_to_node_memory(progress, optimizer, scaler, self.schedule, log, self.get_checkpoint_extras())

    def get_checkpoint_extras(self) -> dict[str, Any]:
        """Return the entries that features (optional parts of the run) currently add to the `config.json` of a checkpoint."""
        return {name: value() for name, value in self.control.checkpoint_extras.items()}

    def _is_timed_save_due(self) -> bool:
        """Return whether --save-interval is not set, and the last save was too long ago."""
        checkpoint = self.config.checkpoint
        if checkpoint.save is None or checkpoint.save_interval is not None:
            return False
        return time.monotonic() - self._last_save_at > 60 * DEFAULT_SAVE_MINUTES

    def _is_time_up(self) -> bool:
        limit = self.config.training.exit_duration_in_mins
        return limit is not None and time.monotonic() - self.started_at > 60 * limit


def evaluate(
    step: TrainStep, batches: Iterable[list[ModelInputs]], exit_requested: Callable[[], bool] = lambda: False
) -> tuple[float, float | None] | None:
    """Return the mean loss and the mean loss of multi-token prediction over all tokens of all batches. Every rank gets the same
    values.

    A mean is the sum of loss mask * loss over all tokens, divided by the sum of the loss mask.

    Args:
        batches: microbatches of this data-parallel rank, for each batch.
        exit_requested: function that returns whether this rank has received an exit signal. It is called before each batch.

    Returns:
        the two mean losses; the second is None without multi-token prediction. If any rank has received an exit signal, return None
        instead of the pair.
    """
    sums = EvaluationSums(0.0, 0.0)
    for batch in batches:
        sums += step.evaluate(batch, exit_vote=exit_requested())
        if sums.num_exit_requests:
            return None
    loss, mtp_loss = (total / sums.mask_sum if sums.mask_sum else math.nan for total in (sums.loss_sum, sums.mtp_loss_sum))
    return loss, mtp_loss if step.model.config.mtp_num_layers else None


def evaluate_sets(
    step: TrainStep, batches: BatchesBySet, exit_requested: Callable[[], bool] = lambda: False
) -> dict[str, tuple[float, float | None]] | None:
    """Return the two mean losses of each set, as `evaluate` returns them, by the name of the set. If any rank has received an exit
    signal, return None."""
    losses = {}
    for name, build_batches in batches.items():
        if (means := evaluate(step, build_batches(), exit_requested)) is None:
            return None
        losses[name] = means
    return losses
