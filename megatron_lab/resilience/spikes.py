"""Loss spikes (--spike-policy): steps whose loss or gradient norm stands far above those before.

A step is judged by two numbers that every rank has on the host before the update, the same on all. docs/spikes.md has the
definition, and says where it comes from.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.config.training import SpikeConfig
from megatron.training.features import Feature, RunParts
from megatron.training.progress import Progress
from megatron.training.step import Spike, StepResult
from megatron.training.watch import Watcher
from megatron_lab.resilience.rewind import Rewinds

_LEAST_SPREAD = 1e-3
"""Lower bound of the robust standard deviation, as a share of the median: where steps are nearly alike, rounding is no spike."""


@dataclass(frozen=True)
class SpikeJudge:
    """Compares a step with the steps before.

    Args:
        recent: loss and gradient norm of the steps before, the oldest first; may be longer than the window.
    """

    config: SpikeConfig
    recent: Sequence[tuple[float, float]]

    def __call__(self, loss: float, grad_norm: float) -> Spike | None:
        """Return a spike with the medians of the window; None if the step is none, or too few steps are known to say so."""
        window = self.recent[-self.config.spike_window :]
        if len(window) < self.config.spike_window // 2:
            return None
        losses, norms = zip(*window, strict=True)
        if not (self._stands_out(loss, losses) or self._stands_out(grad_norm, norms)):
            return None
        skips = self.config.spike_policy != "warn"
        return Spike(loss, grad_norm, statistics.median(losses), statistics.median(norms), skips)

    def _stands_out(self, value: float, before: Sequence[float]) -> bool:
        middle = statistics.median(before)
        spread = 1.4826 * statistics.median(abs(one - middle) for one in before)
        return value > middle + self.config.spike_threshold * max(spread, _LEAST_SPREAD * abs(middle))


def window_with(
    recent: Sequence[tuple[float, float]], loss: float, grad_norm: float, config: SpikeConfig
) -> list[tuple[float, float]]:
    """The window after a step. A spike enters it too: so a run that stays at another level is judged by that, once half of the
    window has it. A step that overflowed does not: its norm is not finite."""
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        return list(recent)
    return [*recent, (loss, grad_norm)][-config.spike_window :]


def in_words(spike: Spike, iteration: int, samples: range) -> str:
    """A line for the log.

    Args:
        samples: the range of the numbers of the step's samples.
    """
    return (
        f"loss spike at iteration {iteration}: loss {spike.loss:.6g} (median {spike.median_loss:.6g}), "
        f"gradient norm {spike.grad_norm:.6g} (median {spike.median_norm:.6g}), "
        f"samples {samples.start:,} to {samples.stop - 1:,}{'; no update is made' if spike.skips else ''}"
    )


class SpikeWatcher(Watcher):
    """Judges each step before its update (`TrainStep.judge`), logs spikes, and remembers the steps. With policy rewind it asks the
    loop to go back.

    Args:
        rewinds: takes the run back; None with other policies.
    """

    def __init__(self, run: RunParts, rewinds: Rewinds | None) -> None:
        self._config, self._progress, self._reporter, self._control = run.config.spikes, run.progress, run.reporter, run.control
        self._rewinds = rewinds
        run.step.judge = self._judge

    def on_result(self, progress: Progress, result: StepResult | None, samples: int) -> None:
        """Take the step into the window, tell a spike, and ask to go back if that is the policy."""
        if result is None:
            return
        progress.recent = window_with(progress.recent, result.loss, result.grad_norm, self._config)
        if result.spike is not None:
            words = in_words(
                result.spike, progress.iteration, range(progress.consumed_samples - samples, progress.consumed_samples)
            )
            self._reporter.say(words)
            self._reporter.event("spike", progress, words)
            self._control.go_back = None if self._rewinds is None else self._rewinds.rewind

    def after_save(self, progress: Progress, place: str) -> None:
        """Note a checkpoint that the run may go back to."""
        if self._rewinds is not None:
            self._rewinds.saved(place)

    def _judge(self, loss: float, grad_norm: float) -> Spike | None:
        return SpikeJudge(self._config, self._progress.recent)(loss, grad_norm)


class SpikeFeature(Feature):
    """Tells, skips or goes back from loss spikes (--spike-policy)."""

    def watchers(self, run: RunParts) -> Sequence[Watcher]:
        """Watch the losses and gradient norms of all steps."""
        resumed = run.resumed
        return [SpikeWatcher(run, Rewinds.of(run.config, run.context, run.step, resumed.schedule, run.data, resumed.path))]
