"""Numbers of the user's own that a run logs."""

from __future__ import annotations

import re
from collections.abc import Callable

from megatron.training.step import StepResult, TrainStep

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
