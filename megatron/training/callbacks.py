"""Base class of callbacks, by which users and optional features observe a run, and the registry of user-defined metrics."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from megatron.model.inputs import ModelInputs
from megatron.training.progress import Progress
from megatron.training.step import StepResult, TrainStep


class Callback:
    """Base class of callbacks: objects whose methods a run calls at fixed points. All ranks call every method together, so a method
    may communicate.

    To report a fault of the run, raise an AuditError on all ranks. Any other error also ends the training.

    In each step the methods are called in the order in which this class defines them. At the end of the run `close` is called after
    the last save, then the last evaluation runs (`on_evaluation`), then `on_end` is called. After a failure none of these methods
    is called.
    """

    def around_steps(self) -> AbstractContextManager[object]:
        """Return a context manager that is active while steps run. It is entered once for each call of `Trainer.fit`. An error that
        ends the steps is passed to the context manager."""
        return nullcontext()

    def on_phase(self, name: str, iteration: int | None = None) -> None:
        """Called when this rank enters a phase of the training loop. Not called for steps that the user runs with `Trainer.step`.

        Args:
            name: "reading data", "in a step", "between steps", "evaluating", "sampling", "saving" or
                "rewinding".
            iteration: number of the step for which data is read; None in the other phases.
        """

    def before_step(self, batch: Sequence[ModelInputs], iteration: int) -> None:
        """Called before each step.

        Args:
            batch: microbatches of this data-parallel rank.
            iteration: number of the step, counted from 1.
        """

    def on_result(self, progress: Progress, result: StepResult | None, samples: int) -> None:
        """Called after each step, before a log line may be written. `progress` already counts the step.

        Args:
            result: result of the step; None for an iteration that --iterations-to-skip skips.
            samples: global batch size of the step.
        """

    def log_values(self, result: StepResult | None) -> Mapping[str, float]:
        """Return additional values to log, by their names in the metrics file (--metrics-file). Called on all ranks when a log line
        is due."""
        return {}

    def record_values(self) -> Mapping[str, Any]:
        """Return additional values, by name, for the history file of the run (`megatron/metrics/history.py`). Called on all ranks
        when a log line is due."""
        return {}

    def after_step(self, progress: Progress, result: StepResult, samples: int, learning_rate: float, weight_decay: float) -> None:
        """Called after each step, after a log line may have been written. `progress` already counts the step. Not called for
        iterations that --iterations-to-skip skips.

        Args:
            samples: global batch size of the step.
        """

    def on_log(self, progress: Progress, values: Mapping[str, float]) -> None:
        """Called after a log line was written.

        Args:
            values: values that were written to the metrics file (--metrics-file), by name.
        """

    def on_evaluation(self, progress: Progress, values: Mapping[str, float]) -> None:
        """Called after an evaluation.

        Args:
            values: losses by name: `validation_loss` or `test_loss`. If the model predicts several tokens, also
                `validation_mtp_loss` or `test_mtp_loss`. If the validation sets have names, there is also `validation_loss/NAME`
                for each (and `validation_mtp_loss/NAME`), and `validation_loss` is their unweighted mean.
        """

    def before_save(self, progress: Progress) -> None:
        """Called before a checkpoint is written."""

    def after_save(self, progress: Progress, place: str) -> None:
        """Called after a checkpoint is written, or after it is copied for the background writer (--async-save).

        Args:
            place: path or URL of the checkpoint.
        """

    def after_rewind(self, progress: Progress) -> None:
        """Called after the run has gone back to an earlier checkpoint. `progress` is already that of the checkpoint."""

    def close(self) -> None:
        """Called at the end of the steps, before the last evaluation. A callback of the user is closed when `Trainer.fit` returns.
        After steps with `Trainer.step`, it is closed when the trainer is closed."""

    def on_end(self) -> None:
        """Called when the run ends, after its last evaluation."""


def find_overriding_methods(callbacks: Sequence[Callback], name: str) -> list[Callable[..., Any]]:
    """Return the method `name` of each callback that overrides it. Callbacks that only inherit the empty method of `Callback` are
    left out."""
    methods = [getattr(callback, name) for callback in callbacks]
    return [method for method in methods if getattr(method, "__func__", None) is not getattr(Callback, name)]


# ---- User-defined metrics.

Metric = Callable[[TrainStep, StepResult], float]
"""User-defined metric of a step, from its training step and result. Every rank calls it when a log line is due, so it may
communicate. The value of the first rank is logged."""
METRICS: dict[str, Metric] = {}
"""Registered metrics, by name (`register_metric`). They are written to the log line, the metrics file and the curves."""


def register_metric(name: str, metric: Metric) -> None:
    """Log a user-defined metric in all later runs of this process. A metric with the same name is replaced.

    Args:
        name: name of the metric in the log line, the metrics file and the curves.
        metric: function that computes the metric from the training step and its result. Every rank calls it when a log line is due.

    Raises:
        ValueError: the name contains characters that a log line does not allow.
    """
    if not re.fullmatch(r"[A-Za-z][\w /.-]*", name):
        raise ValueError(
            f"{name!r} is not a valid name of a metric: choose a name that starts with a letter and contains only letters, "
            "digits, spaces, "
            "_, -, / and ."
        )
    METRICS[name] = metric
