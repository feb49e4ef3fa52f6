"""Shows two lines below the log on a terminal: a progress bar and the last step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.metrics.log_line import LineNumbers, Printer, progress_bar, short_line
from megatron.training.progress import Progress
from megatron.training.step import StepResult

_SHOW_EVERY_S = 0.2
"""Seconds between changes of the progress bar."""


class LiveLines:
    """A progress bar with a line below it, which change at each step, but not more often than can be read.

    Args:
        total_iterations: of the whole run.
    """

    def __init__(self, printer: Printer, total_iterations: int) -> None:
        self._printer, self._total_iterations, self._shown = printer, total_iterations, 0.0

    def step(self, progress: Progress, result: StepResult | None, place: Mapping[str, Any], now: float) -> None:
        """Show a step, whose line has the numbers of `place`."""
        if now - self._shown < _SHOW_EVERY_S:
            return
        self._shown = now
        made = result is not None and not result.skipped
        line = LineNumbers(
            **place,
            elapsed_ms=0.0,
            lm_loss=result.loss if result is not None and made else None,
            loss_scale=1.0,
            skipped=not made,
            nans=0,
            grad_norm=result.grad_norm if result is not None and made else None,
        )
        self._show(progress, short_line(line))

    def doing(self, what: str, progress: Progress) -> None:
        """Show what is done between steps."""
        self._show(progress, f"it {progress.iteration}/{self._total_iterations} | {what} ...")

    def hide(self) -> None:
        """Show nothing any more."""
        self._printer.show([])

    def _show(self, progress: Progress, line: str) -> None:
        width = min(100, self._printer.width - 1)
        share = progress.iteration / max(1, self._total_iterations)
        self._printer.show([progress_bar(share, width, plain=self._printer.plain), line])
