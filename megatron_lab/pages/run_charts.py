"""Charts of a report: loss, learning rate, gradient norm, speed and memory of one run, or of several runs that are compared."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from megatron.metrics.history import History
from megatron_lab.pages.curves import DASHES, AxisMark, Curve, build_chart, build_charts, get_curve_colour, smooth
from megatron_lab.pages.run_facts import VALIDATION, Run, list_validation_sets, name_validation_set
from megatron_lab.pages.run_marks import MARK_COLOURS, list_marks

SMOOTHING_DIVISOR = 50
"""The smoothed curve is the moving mean over 1/50 of the steps."""
_MAX_DOTS = 60


def build_run_charts(runs: Sequence[Run]) -> str:
    """Return the HTML of all charts of a report, with the marks of the runs on the horizontal axis.

    In a report of one run, the training loss and each validation set have a colour. With several runs, each run has one colour, and
    each validation set has a chart.
    """
    charts = [_build_loss_chart(runs)]
    if len(runs) > 1:
        keys = dict.fromkeys(key for run in runs for key in list_validation_sets(run.history) if key != VALIDATION)
        charts += [_build_set_chart(runs, key) for key in keys]
    charts += [
        build_chart(
            "learning rate",
            _build_step_curves(runs, "learning_rate"),
            includes_zero=True,
            has_log_button=True,
            has_outliers=False,  # a learning rate is set, so a single high value is no noise
        ),
        build_chart("gradient norm", _build_step_curves(runs, "grad_norm", is_noisy=True), has_log_button=True),
        build_chart("tokens per second", _build_log_curves(runs, "tokens_per_s"), includes_zero=True),
        build_chart("memory (GB), first rank, peak so far", _build_log_curves(runs, "memory_bytes", 1e-9), includes_zero=True),
    ]
    marks = [mark for run in runs for mark in _place_marks(run, name=run.name if len(runs) > 1 else "")]
    return build_charts(charts, marks, MARK_COLOURS, ("save",) if len(runs) == 1 else tuple(MARK_COLOURS))


def _build_loss_chart(runs: Sequence[Run]) -> str:
    curves: list[Curve] = []
    for index, run in enumerate(runs):
        name = "" if len(runs) == 1 else f"{run.name}: "
        steps = _StepColumns(run.history)
        losses = steps.get("lm_loss")
        if len(runs) == 1:
            curves.append(Curve("each step", get_curve_colour(index), *steps.positions, losses, is_faint=True))
        smoothed = _smooth(losses)
        label = f"{name}training" + (" (smoothed)" if len(runs) == 1 else "")
        curves.append(Curve(label, get_curve_colour(index), *steps.positions, smoothed, raw_values=losses))
        keys = list_validation_sets(run.history)
        for set_index, key in enumerate(keys if len(runs) == 1 else [key for key in keys if key == VALIDATION]):
            colour = get_curve_colour(1 + set_index if len(runs) == 1 else index)
            dash = DASHES[set_index % len(DASHES)] if len(runs) == 1 else DASHES[1]
            curves.append(_build_validation_curve(run.history, key, f"{name}{name_validation_set(key, keys)}", colour, dash))
    return build_chart("loss (nats per token)", curves, is_wide=True, has_log_button=True)


def _build_set_chart(runs: Sequence[Run], key: str) -> str:
    curves = [
        _build_validation_curve(run.history, key, run.name, get_curve_colour(index), "")
        for index, run in enumerate(runs)
        if key in list_validation_sets(run.history)
    ]
    return build_chart(f"loss of {name_validation_set(key, [])}", curves)


def _build_validation_curve(history: History, key: str, name: str, colour: str, dash: str) -> Curve:
    records = [record for record in history.evaluations if isinstance(record.get(key), int | float)]
    iterations, tokens = [record["iteration"] for record in records], [record["tokens"] for record in records]
    return Curve(
        name, colour, iterations, tokens, [record[key] for record in records], dash=dash, has_dots=len(records) <= _MAX_DOTS
    )


class _StepColumns:
    """Columns of the steps of a run."""

    def __init__(self, history: History) -> None:
        self._steps = history.steps
        self.positions: tuple[list[int], list[int]] = (
            [step.iteration for step in history.steps],
            [step.tokens for step in history.steps],
        )
        """Iterations and tokens of the steps."""

    def get(self, name: str) -> list[float | None]:
        """Return one value of each step.

        Args:
            name: name of the value in `StepRecord`.
        """
        return [getattr(step, name) for step in self._steps]


def _build_step_curves(runs: Sequence[Run], name: str, *, is_noisy: bool = False) -> list[Curve]:
    """Build curves of a value of each step: one curve for each run. The only run has also a faint curve if the value is noisy, and
    the other curve is smoothed then."""
    curves = []
    for index, run in enumerate(runs):
        colour, steps = get_curve_colour(index), _StepColumns(run.history)
        values = steps.get(name)
        if is_noisy and len(runs) == 1:
            curves.append(Curve("each step", colour, *steps.positions, values, is_faint=True))
        label = run.name if len(runs) > 1 else name.replace("grad_", "gradient ").replace("_", " ")
        if is_noisy:
            curves.append(Curve(f"{label} (smoothed)", colour, *steps.positions, _smooth(values), raw_values=values))
        else:
            curves.append(Curve(label, colour, *steps.positions, values))
    return curves


def _build_log_curves(runs: Sequence[Run], name: str, factor: float = 1.0) -> list[Curve]:
    """Build curves of a value of the log lines, times `factor`: one curve for each run."""
    curves = []
    for index, run in enumerate(runs):
        records = [record for record in run.history.logs if isinstance(record.get(name), int | float)]
        iterations, tokens = [record["iteration"] for record in records], [record["tokens"] for record in records]
        values = [factor * record[name] for record in records]
        label = run.name if len(runs) > 1 else name.removesuffix("_bytes").replace("_per_s", " per second")
        curves.append(Curve(label, get_curve_colour(index), iterations, tokens, values))
    return curves


def _smooth(values: Sequence[float | None]) -> list[float | None]:
    import numpy as np

    numbers = np.array([math.nan if value is None else value for value in values], dtype=float)
    means = smooth(numbers, len(values) // SMOOTHING_DIVISOR // 2)
    return [None if math.isnan(value) else float(value) for value in means]


def _place_marks(run: Run, name: str) -> list[AxisMark]:
    """Return the marks of a run with their positions on both horizontal axes.

    Args:
        name: name of the run, which introduces the texts; empty for none.
    """
    steps: Sequence[Any] = run.history.steps
    iterations = [step.iteration for step in steps]
    prefix = f"{name}: " if name else ""
    marks = []
    for mark in list_marks(run.history):
        index = bisect_left(iterations, mark.iteration)
        tokens = steps[min(index, len(steps) - 1)].tokens if steps and mark.iteration else 0
        marks.append(AxisMark(mark.type, mark.iteration, tokens, prefix + mark.text))
    return marks
