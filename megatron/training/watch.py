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
    """Observes a run; users call it a callback. All ranks call every method together, so each may communicate. A fault of the run
    itself is raised as an AuditError on all of them; any other error ends the training too."""

    def around_steps(self) -> AbstractContextManager[object]:
        """What is entered while steps are made, and left with the error that ends them, if one does."""
        return nullcontext()

    def on_phase(self, name: str, iteration: int | None = None) -> None:
        """Called when this rank begins something else: "reading data" (of this iteration), "in a step", "between steps",
        "evaluating", "saving" or "rewinding"."""

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
        """Called after the run went back to a checkpoint; `progress` is that of the place where it goes on."""

    def on_end(self) -> None:
        """Called when the run ends, after the last evaluation."""

    def close(self) -> None:
        """Called when the run ends, or when `Trainer.fit` returns before that. A last evaluation may still follow."""


def overridden(watchers: Sequence[Watcher], name: str) -> list[Callable[..., Any]]:
    """Return the methods of this name that do something: a watcher has its own, and not that of the base class."""
    methods = [getattr(watcher, name) for watcher in watchers]
    return [method for method in methods if getattr(method, "__func__", None) is not getattr(Watcher, name)]


# ---- Numbers of the user's own that a run logs.

Metric = Callable[[TrainStep, StepResult], float]
"""A number of the user's own: of a step that was made, with its result. Every rank calls it when a line of the log is due, so
it may communicate; the first rank's number counts."""
METRICS: dict[str, Metric] = {}
"""Those that `register_metric` has added, by name. They stand in the log line, the metrics file and the curves."""


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
