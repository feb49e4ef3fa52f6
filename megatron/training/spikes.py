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

_LEAST_SPREAD = 1e-3
"""Least robust standard deviation, as a share of the median: where steps are nearly alike, rounding is no spike."""


class SpikeError(RuntimeError):
    """Spikes come again wherever the run goes on."""


@dataclass(frozen=True)
class Spike:
    """A step that stands out, and what it stands out from."""

    loss: float
    grad_norm: float
    median_loss: float
    median_norm: float
    skips: bool
    """Whether its update is not made."""

    def words(self, iteration: int, samples: range) -> str:
        """A line for the log.

        Args:
            samples: the numbers of those of the step.
        """
        return (
            f"loss spike at iteration {iteration}: loss {self.loss:.6g} (median {self.median_loss:.6g}), "
            f"gradient norm {self.grad_norm:.6g} (median {self.median_norm:.6g}), "
            f"samples {samples.start:,} to {samples.stop - 1:,}{'; no update is made' if self.skips else ''}"
        )


@dataclass(frozen=True)
class SpikeJudge:
    """Compares a step with the steps before.

    Args:
        recent: loss and gradient norm of the steps before, the last ones behind; may be longer than the window.
    """

    config: SpikeConfig
    recent: Sequence[tuple[float, float]]

    def __call__(self, loss: float, grad_norm: float) -> Spike | None:
        """What the step stands out from; None if it is no spike, or too few steps are known to say so."""
        window = self.recent[-self.config.spike_window :]
        if self.config.spike_policy == "none" or len(window) < self.config.spike_window // 2:
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


def remembered(
    recent: Sequence[tuple[float, float]], loss: float, grad_norm: float, config: SpikeConfig
) -> list[tuple[float, float]]:
    """The window after a step. A spike enters it too: so a run that stays at another level is judged by that, once half of the
    window has it. A step that overflowed does not: its norm is no number."""
    if config.spike_policy == "none" or not (math.isfinite(loss) and math.isfinite(grad_norm)):
        return list(recent)
    return [*recent, (loss, grad_norm)][-config.spike_window :]
