"""Scales of the loss: constant, and dynamic for float16.

A float16 gradient below 6e-8 becomes zero. So the loss, and with it every gradient, is multiplied by a scale before
backward and the gradients are divided by it before the update (Micikevicius et al. 2018, "Mixed Precision Training").
The dynamic scale is as large as the gradients bear: it shrinks when one overflows and grows after a long time without.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from typing import Any

from megatron.config.training import PrecisionConfig

logger = logging.getLogger(__name__)

_LARGEST_SCALE = 2.0**127
"""Largest power of two in float32, in which the loss is scaled. Growing past it would give infinity, for ever."""


class LossScaleError(RuntimeError):
    """The gradient overflows although the loss scale is at its minimum."""


class GradScaler(ABC):
    """A loss scale. It is a number on the host and meets tensors only as a factor, which costs no synchronisation."""

    def __init__(self, scale: float) -> None:
        if not 0.0 < scale <= _LARGEST_SCALE:
            raise ValueError(f"A loss scale must be above 0 and at most 2^127 (it is a float32), not {scale}.")
        self._scale = float(scale)

    @property
    def scale(self) -> float:
        """What the loss is multiplied by."""
        return self._scale

    @abstractmethod
    def update(self, found_inf: bool) -> None:
        """Take in whether the gradients of a step overflowed (on any rank)."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything that the next `update` depends on, for JSON."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""

    def _set_scale(self, scale: float) -> None:
        self._scale = scale


class ConstantGradScaler(GradScaler):
    """A scale that never changes. After a resume the scale is the one of the command line."""

    def update(self, found_inf: bool) -> None:
        """Do nothing: the step is skipped, the scale stays."""

    def state_dict(self) -> dict[str, Any]:
        """The kind and the scale, for the reader of a checkpoint."""
        return {"kind": "constant", "scale": self._scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: there is no history."""


class DynamicGradScaler(GradScaler):
    """A scale that follows the gradients.

    `growth_interval` steps in a row without overflow multiply the scale by `growth_factor` and refill the hysteresis.
    An overflow starts the count of such steps again. The `hysteresis`-th overflow since the last refill, and every further
    one, multiplies the scale by `backoff_factor`, down to `min_scale`.

    Args:
        initial_scale: First scale.
        min_scale: Smallest scale; an overflow at it is an error.
        growth_factor: Above 1.
        backoff_factor: Between 0 and 1.
        growth_interval: Steps without overflow before the scale grows.
        hysteresis: Overflows before the scale shrinks, that one included; a single clean step refills nothing.

    Raises:
        ValueError: A setting is out of range.
    """

    def __init__(
        self,
        initial_scale: float,
        min_scale: float,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
    ) -> None:
        super().__init__(initial_scale)
        if not 0.0 < min_scale <= initial_scale:
            raise ValueError(f"--min-loss-scale {min_scale} must be above 0 and at most --initial-loss-scale {initial_scale}.")
        if growth_interval < 1 or hysteresis < 1:
            raise ValueError(f"--loss-scale-window {growth_interval} and --hysteresis {hysteresis} must be at least 1.")
        if not (math.isfinite(growth_factor) and growth_factor > 1.0 and 0.0 < backoff_factor < 1.0):
            raise ValueError(f"The growth factor {growth_factor} must exceed 1, the backoff {backoff_factor} lie between 0 and 1.")
        self.min_scale = min_scale
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self.hysteresis = hysteresis
        self._clean_steps = 0
        self._hysteresis_left = hysteresis

    def update(self, found_inf: bool) -> None:
        """Take in whether the gradients of a step overflowed (on any rank).

        Raises:
            LossScaleError: They did, and the scale is already at its minimum.
        """
        if found_inf:
            self._shrink()
        else:
            self._clean_steps += 1
            if self._clean_steps >= self.growth_interval:
                self._clean_steps = 0
                self._hysteresis_left = self.hysteresis
                if self._scale * self.growth_factor <= _LARGEST_SCALE:
                    self._set_scale(self._scale * self.growth_factor)

    def state_dict(self) -> dict[str, Any]:
        """The scale and both counts."""
        return {
            "kind": "dynamic",
            "scale": self._scale,
            "clean_steps": self._clean_steps,
            "hysteresis_left": self._hysteresis_left,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`; the settings (minimum, interval, hysteresis) stay those of the command line.

        A run that had a constant scale (another precision, or --loss-scale) leaves nothing to continue from: the dynamic
        scale begins at its first value, and the log says so.
        """
        if state["kind"] != "dynamic":
            logger.warning("the checkpoint holds no dynamic loss scale: it begins at --initial-loss-scale %g", self._scale)
            return
        self._set_scale(max(float(state["scale"]), self.min_scale))
        self._clean_steps = int(state["clean_steps"])
        self._hysteresis_left = min(int(state["hysteresis_left"]), self.hysteresis)

    def _shrink(self) -> None:
        if self._scale <= self.min_scale:
            raise LossScaleError(
                f"The loss scale is at its minimum --min-loss-scale {self.min_scale:g} and the gradient still overflows: "
                "a smaller scale would not help. Look for a NaN or infinity in the loss (learning rate, data, initial weights), "
                "or train in --bf16, whose range is that of float32; to go on with smaller scales, lower --min-loss-scale."
            )
        self._clean_steps = 0
        self._hysteresis_left = max(self._hysteresis_left - 1, 0)
        if self._hysteresis_left == 0:
            self._set_scale(max(self._scale * self.backoff_factor, self.min_scale))


def make_grad_scaler(precision: PrecisionConfig) -> GradScaler:
    """The scale that the settings ask for: float16 has a dynamic one, or --loss-scale; other formats need none."""
    if not precision.fp16:
        return ConstantGradScaler(1.0)
    if precision.loss_scale is not None:
        return ConstantGradScaler(precision.loss_scale)
    return DynamicGradScaler(
        initial_scale=precision.initial_loss_scale,
        min_scale=precision.min_loss_scale,
        growth_interval=precision.loss_scale_window,
        hysteresis=precision.hysteresis,
    )
