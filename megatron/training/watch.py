"""The interface of everything that watches a run: callbacks of the user's own, and the optional parts of a run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from megatron.model.inputs import ModelInputs
from megatron.training.progress import Progress
from megatron.training.step import StepResult, TrainStep


class Watcher:
    """Observes a run; users call it a callback. All ranks call every method together, so each may communicate. To report a fault of
    the run, raise an AuditError on all ranks; any other error ends the training too.

    In each step the methods are called in the order in which they stand here. When the run ends, `close` is called after the last
    save, then the last evaluation is made (`on_evaluation`), then `on_end` is called. After a failure none of them is called.
    """

    def around_steps(self) -> AbstractContextManager[object]:
        """Return a context manager that is held while steps are made, once for each `fit`. If an error ends them, it is left with
        that error."""
        return nullcontext()

    def on_phase(self, name: str, iteration: int | None = None) -> None:
        """Called when this rank begins something else: "reading data" (of this iteration), "in a step", "between steps",
        "evaluating", "saving" or "rewinding". Not called for steps that are made by hand."""

    def before_step(self, batch: Sequence[ModelInputs], iteration: int) -> None:
        """Called before the step over this batch."""

    def on_result(self, progress: Progress, result: StepResult | None, samples: int) -> None:
        """Called after a step over so many samples, before a line of the log is due; `progress` includes the step. The result of an
        iteration that the settings skip is None."""

    def log_values(self, result: StepResult | None) -> Mapping[str, float]:
        """Return further numbers for the line of the log that is due now, by their names in the metrics file."""
        return {}

    def record_values(self) -> Mapping[str, Any]:
        """Return what the record of the run gets beside the numbers of a line of the log, by name."""
        return {}

    def after_step(self, progress: Progress, result: StepResult, samples: int, learning_rate: float, weight_decay: float) -> None:
        """Called after a step over so many samples; `progress` includes it."""

    def on_log(self, progress: Progress, values: Mapping[str, float]) -> None:
        """Called when a line of the log is due, with the numbers that go into the metrics file, by their names there."""

    def on_evaluation(self, progress: Progress, values: Mapping[str, float]) -> None:
        """Called after an evaluation with `validation_loss` or `test_loss`, and the loss of multi-token prediction."""

    def before_save(self, progress: Progress) -> None:
        """Called before a checkpoint is written."""

    def after_save(self, progress: Progress, place: str) -> None:
        """Called when a checkpoint is written, or with --async-save copied to be written, with its folder or URL."""

    def after_rewind(self, progress: Progress) -> None:
        """Called after the run went back to a checkpoint; `progress` is already the restored one."""

    def close(self) -> None:
        """Called when the run ends, before its last evaluation. A user's callback is closed when `Trainer.fit` returns, or with the
        trainer after steps by hand."""

    def on_end(self) -> None:
        """Called when the run ends, after its last evaluation."""


def overridden(watchers: Sequence[Watcher], name: str) -> list[Callable[..., Any]]:
    """Return the methods of this name of the watchers that override it."""
    methods = [getattr(watcher, name) for watcher in watchers]
    return [method for method in methods if getattr(method, "__func__", None) is not getattr(Watcher, name)]


# ---- Numbers of the user's own that a run logs.

Metric = Callable[[TrainStep, StepResult], float]
"""A number of the user's own: of a step that was made, with its result. Every rank calls it when a line of the log is due, so
it may communicate; the first rank's number counts."""
METRICS: dict[str, Metric] = {}
"""Registered metrics, by name (`register_metric`). They stand in the log line, the metrics file and the curves."""


def register_metric(name: str, metric: Metric) -> None:
    """Log a number of the user's own, in every run of this process from now on. The same name again replaces it.

    Raises:
        ValueError: the name would not stand in a log line as one word or more.
    """
    if not re.fullmatch(r"[A-Za-z][\w /.-]*", name):
        raise ValueError(
            f"{name!r} is no name for a metric: it must begin with a letter, and hold letters, digits, blanks, _, -, / and ."
        )
    METRICS[name] = metric
