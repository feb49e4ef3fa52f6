"""Interface of callbacks, by which users and features observe a run, and the registry of user-defined metrics."""

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
        """Return a context manager that is active while steps run. It is entered once for each `fit`. An error that ends the steps
        is passed to it."""
        return nullcontext()

    def on_phase(self, name: str, iteration: int | None = None) -> None:
        """Called when this rank enters a phase of the loop: "reading data" (for the given iteration), "in a step", "between steps",
        "evaluating", "saving" or "rewinding". Not called for steps that the user runs with `Trainer.step`."""

    def before_step(self, batch: Sequence[ModelInputs], iteration: int) -> None:
        """Called before each step.

        Args:
            batch: this data rank's microbatches.
        """

    def on_result(self, progress: Progress, result: StepResult | None, samples: int) -> None:
        """Called after each step, before a log line may be written. `progress` includes the step.

        Args:
            result: result of the step; None for an iteration that the settings skip (--iterations-to-skip).
            samples: global batch size of the step.
        """

    def log_values(self, result: StepResult | None) -> Mapping[str, float]:
        """Return additional values for the log line that is due now, by their names in the metrics file."""
        return {}

    def record_values(self) -> Mapping[str, Any]:
        """Return additional values, by name, for the history file of the run (`megatron/metrics/history.py`). Called with each log
        line."""
        return {}

    def after_step(self, progress: Progress, result: StepResult, samples: int, learning_rate: float, weight_decay: float) -> None:
        """Called after each step. `progress` includes the step. Not called for iterations that the settings skip
        (--iterations-to-skip).

        Args:
            samples: global batch size of the step.
        """

    def on_log(self, progress: Progress, values: Mapping[str, float]) -> None:
        """Called after a log line, with the values that are written to the metrics file, by their names in the file."""

    def on_evaluation(self, progress: Progress, values: Mapping[str, float]) -> None:
        """Called after an evaluation. `values` contains `validation_loss` or `test_loss`, and the loss of multi-token prediction if
        the model predicts several tokens."""

    def before_save(self, progress: Progress) -> None:
        """Called before a checkpoint is written."""

    def after_save(self, progress: Progress, place: str) -> None:
        """Called after a checkpoint is written, or after it is copied for the background writer (--async-save).

        Args:
            place: path or URL of the checkpoint.
        """

    def after_rewind(self, progress: Progress) -> None:
        """Called after the run has gone back to a checkpoint. `progress` is already restored."""

    def close(self) -> None:
        """Called when the run ends, before its last evaluation. A user's callback is closed when `Trainer.fit` returns; after steps
        with `Trainer.step`, it is closed with the trainer."""

    def on_end(self) -> None:
        """Called when the run ends, after its last evaluation."""


def find_overriding_methods(callbacks: Sequence[Callback], name: str) -> list[Callable[..., Any]]:
    """Return the bound methods called `name` of those callbacks that override the method of `Callback`."""
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

    Raises:
        ValueError: the name contains characters that a log line does not allow.
    """
    if not re.fullmatch(r"[A-Za-z][\w /.-]*", name):
        raise ValueError(
            f"{name!r} is not a valid name of a metric: it must start with a letter, and contain only letters, digits, spaces, "
            "_, -, / and ."
        )
    METRICS[name] = metric
