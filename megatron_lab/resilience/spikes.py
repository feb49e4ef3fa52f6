"""Loss spikes (--spike-policy): steps whose loss or gradient norm is far above those of recent steps.

Every rank has equal copies of the step's loss and gradient norm on the host before the update, so all ranks decide equally.
docs/spikes.md contains the definition of a spike and its source.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.config.training import SpikeConfig
from megatron.training.callbacks import Callback
from megatron.training.features import Feature, RunComponents
from megatron.training.progress import Progress
from megatron.training.step import Spike, StepResult
from megatron_lab.resilience.rewind import Rewinder

_MIN_RELATIVE_STD = 1e-3
"""Lower bound of the robust standard deviation, relative to the median. Without it, rounding would count as a spike when the
recent steps are almost equal."""


@dataclass(frozen=True)
class SpikeDetector:
    """Detects a loss spike: a step whose loss or gradient norm is far above those of recent steps.

    Args:
        history: (loss, gradient norm) of recent steps, the oldest first. Only the last --spike-window steps are used.
    """

    config: SpikeConfig
    history: Sequence[tuple[float, float]]

    def __call__(self, loss: float, grad_norm: float) -> Spike | None:
        """Compare a step with the medians of recent steps.

        Returns:
            the spike; None if the step is no spike, or if fewer than half of --spike-window steps are known.
        """
        window = self.history[-self.config.spike_window :]
        if len(window) < self.config.spike_window // 2:
            return None
        losses, norms = zip(*window, strict=True)
        if not (self._is_outlier(loss, losses) or self._is_outlier(grad_norm, norms)):
            return None
        skips_update = self.config.spike_policy != "warn"
        return Spike(loss, grad_norm, statistics.median(losses), statistics.median(norms), skips_update)

    def _is_outlier(self, value: float, history: Sequence[float]) -> bool:
        median = statistics.median(history)
        std = 1.4826 * statistics.median(abs(x - median) for x in history)
        return value > median + self.config.spike_threshold * max(std, _MIN_RELATIVE_STD * abs(median))


def update_window(
    window: Sequence[tuple[float, float]], loss: float, grad_norm: float, config: SpikeConfig
) -> list[tuple[float, float]]:
    """Return the window of recent steps with one more step: (loss, gradient norm) of at most --spike-window steps, the oldest
    first.

    A spike enters the window too. If a run stays at a higher level, steps at that level therefore stop counting as spikes when they
    fill half of the window. A step with overflowed gradients does not enter the window, because its norm is not finite.
    """
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        return list(window)
    return [*window, (loss, grad_norm)][-config.spike_window :]


def format_spike(spike: Spike, iteration: int, sample_range: range) -> str:
    """Format the log line about a loss spike.

    Args:
        sample_range: indices of the training samples of the step, in the order of training.
    """
    return (
        f"loss spike at iteration {iteration}: loss {spike.loss:.6g} (median {spike.median_loss:.6g}), "
        f"gradient norm {spike.grad_norm:.6g} (median {spike.median_norm:.6g}), "
        f"samples {sample_range.start:,} to {sample_range.stop - 1:,}{'; the update is skipped' if spike.skips_update else ''}"
    )


class SpikeCallback(Callback):
    """Callback that checks each step for a loss spike, logs spikes, and remembers the losses and gradient norms of recent steps.

    The check runs before the update (`TrainStep.detect_spike`). With --spike-policy rewind, the callback requests the training loop
    to rewind after a spike.

    Args:
        rewinder: rewinds the run; None with other policies.
    """

    def __init__(self, run: RunComponents, rewinder: Rewinder | None) -> None:
        self._config, self._progress, self._reporter, self._control = run.config.spikes, run.progress, run.reporter, run.control
        self._rewinder = rewinder
        run.step.detect_spike = self._detect_spike

    def on_result(self, progress: Progress, result: StepResult | None, samples: int) -> None:
        """Add the step to the recent steps. If the step is a spike, log it, and with --spike-policy rewind request a rewind."""
        if result is None:
            return
        progress.recent = update_window(progress.recent, result.loss, result.grad_norm, self._config)
        if result.spike is not None:
            message = format_spike(
                result.spike, progress.iteration, range(progress.consumed_samples - samples, progress.consumed_samples)
            )
            self._reporter.log(message)
            self._reporter.record_event("spike", progress, message)
            self._control.rewind = None if self._rewinder is None else self._rewinder.rewind

    def after_save(self, progress: Progress, place: str) -> None:
        """Tell the rewinder about a new checkpoint, to which the run may rewind."""
        if self._rewinder is not None:
            self._rewinder.add_checkpoint(place)

    def _detect_spike(self, loss: float, grad_norm: float) -> Spike | None:
        return SpikeDetector(self._config, self._progress.recent)(loss, grad_norm)


class SpikeFeature(Feature):
    """Feature of --spike-policy: logs loss spikes. Depending on the policy, it also skips their updates or rewinds the run."""

    def build_callbacks(self, run: RunComponents) -> Sequence[Callback]:
        """Build the callback that checks each step for a loss spike."""
        resume_point = run.resume_point
        return [
            SpikeCallback(run, Rewinder.of(run.config, run.context, run.step, resume_point.schedule, run.data, resume_point.path))
        ]
