"""Two lines below the log on a terminal: a progress bar and the last step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.metrics.log_line import LogLineValues, Printer, format_progress_bar, format_short_line
from megatron.training.progress import Progress
from megatron.training.step import StepResult

_MIN_INTERVAL_S = 0.2
"""Minimum seconds between updates of the progress bar."""


class LiveLines:
    """Progress bar on a terminal, with a line about the last step below it.

    Both lines are updated after a step, but not more often than every 0.2 s.

    Args:
        printer: writes to the terminal.
        total_iterations: iterations of the complete run.
    """

    def __init__(self, printer: Printer, total_iterations: int) -> None:
        self._printer, self._total_iterations, self._last_shown = printer, total_iterations, 0.0

    def step(self, progress: Progress, result: StepResult | None, line_values: Mapping[str, Any], time: float) -> None:
        """Show the progress of the run, and the loss and other values of the step that has just ended.

        Args:
            result: result of the step; None if the settings skip the iteration (--iterations-to-skip).
            line_values: values that every log line contains, by name.
            time: time.perf_counter() at the end of the step.
        """
        if time - self._last_shown < _MIN_INTERVAL_S:
            return
        self._last_shown = time
        has_update = result is not None and not result.skipped
        log_values = LogLineValues(
            **line_values,
            elapsed_ms=0.0,
            lm_loss=result.loss if result is not None and has_update else None,
            loss_scale=1.0,
            num_skipped=not has_update,
            num_nans=0,
            grad_norm=result.grad_norm if result is not None and has_update else None,
        )
        self._show(progress, format_short_line(log_values))

    def show_activity(self, activity: str, progress: Progress) -> None:
        """Show what the run does between steps.

        Args:
            activity: text such as "evaluating" or "saving".
        """
        self._show(progress, f"it {progress.iteration}/{self._total_iterations} | {activity} ...")

    def hide(self) -> None:
        """Remove the progress bar and the line below it from the terminal."""
        self._printer.show_status([])

    def _show(self, progress: Progress, text: str) -> None:
        width = min(100, self._printer.width - 1)
        share = progress.iteration / max(1, self._total_iterations)
        self._printer.show_status([format_progress_bar(share, width, ascii_only=self._printer.is_ascii_only), text])
