"""What a terminal shows below the log: how far the run is, and the last step."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from megatron.metrics.log_line import LineNumbers, Printer, progress_bar, short_line
from megatron.training.progress import Progress
from megatron.training.step import StepResult

_SHOW_EVERY_S = 0.2
"""Seconds between changes of the progress bar."""


class Pace:
    """How fast the run goes, and how long it still takes: what is left at the pace of the last steps, with as much beside the steps
    (evaluations, saves) as there has been.

    Args:
        total: samples of the whole run; 0 if that is not to be told.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._began: float | None = None
        self._in_steps = 0.0
        self._last: deque[tuple[float, int]] = deque(maxlen=20)

    def step(self, now: float, seconds: float, samples: int) -> None:
        """A step has been made. The first one, which makes connections and fills caches, is left out."""
        if self._began is None:
            self._began = now
            return
        self._in_steps += seconds
        self._last.append((seconds, samples))

    @property
    def samples_per_s(self) -> float | None:
        """Samples of a second, over the last steps; None before they are known."""
        seconds = sum(each for each, _ in self._last)
        return sum(samples for _, samples in self._last) / seconds if seconds else None

    def seconds_left(self, now: float, consumed_samples: int) -> float | None:
        """To the end of the run; None before it is known."""
        pace = self.samples_per_s
        if pace is None or self._began is None or not self._total:
            return None
        left = self._total - consumed_samples
        return None if left <= 0 else left / pace * max(1.0, (now - self._began) / self._in_steps)


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
