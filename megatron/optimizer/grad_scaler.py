"""Scales of the loss: constant, and dynamic for float16.

A float16 gradient below 6e-8 becomes zero. So the loss, and with it every gradient, is multiplied by a scale before
backward and the gradients are divided by it before the update (Micikevicius et al. 2018, "Mixed Precision Training").
The dynamic scale is as large as the gradients bear: it shrinks when one overflows and grows after a long time without.
"""

from __future__ import annotations

import logging
from typing import Any

from megatron.config.precision import LARGEST_LOSS_SCALE, PrecisionConfig

logger = logging.getLogger(__name__)


class LossScaleError(RuntimeError):
    """The gradient overflows although the loss scale is at its minimum."""


class GradScaler:
    """A loss scale that never changes; after a resume it is the one of the command line.

    It is a number on the host and meets tensors only as a factor, which costs no synchronisation.
    """

    def __init__(self, scale: float) -> None:
        self.scale = float(scale)
        """What the loss is multiplied by."""

    def update(self, found_inf: bool) -> None:
        """Take in whether the gradients of a step overflowed (on any rank). The step is skipped then; the scale stays."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next `update` depends on, for JSON and for the reader of a checkpoint."""
        return {"kind": "constant", "scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`. A constant scale has no history."""


class DynamicGradScaler(GradScaler):
    """A scale that follows the gradients.

    `growth_interval` steps in a row without overflow double the scale and refill the hysteresis. An overflow starts the count of
    such steps again. The `hysteresis`-th overflow since the last refill, and every further one, halves the scale, down to
    `min_scale`.

    Args:
        initial_scale: First scale.
        min_scale: Smallest scale; an overflow at it is an error.
        growth_interval: Steps without overflow before the scale grows.
        hysteresis: Overflows before the scale shrinks, that one included; a single clean step refills nothing.
    """

    def __init__(self, initial_scale: float, min_scale: float, growth_interval: int = 1000, hysteresis: int = 2) -> None:
        super().__init__(initial_scale)
        self.min_scale, self.growth_interval, self.hysteresis = min_scale, growth_interval, hysteresis
        self._clean_steps, self._hysteresis_left = 0, hysteresis

    def update(self, found_inf: bool) -> None:
        """Take in whether the gradients of a step overflowed (on any rank).

        Raises:
            LossScaleError: They did, and the scale is already at its minimum.
        """
        if found_inf:
            self._shrink()
            return
        self._clean_steps += 1
        if self._clean_steps >= self.growth_interval:
            self._clean_steps, self._hysteresis_left = 0, self.hysteresis
            if self.scale * 2.0 <= LARGEST_LOSS_SCALE:  # else infinity, for ever
                self.scale *= 2.0

    def state_dict(self) -> dict[str, Any]:
        """The scale and both counts."""
        counts = {"clean_steps": self._clean_steps, "hysteresis_left": self._hysteresis_left}
        return {"kind": "dynamic", "scale": self.scale, **counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`; the settings (minimum, interval, hysteresis) stay those of the command line.

        A run that had a constant scale (another precision, or --loss-scale) leaves nothing to continue from: the dynamic
        scale begins at its first value, and the log says so.
        """
        if state["kind"] != "dynamic":
            logger.warning("the checkpoint holds no dynamic loss scale: it begins at --initial-loss-scale %g", self.scale)
            return
        self.scale = max(float(state["scale"]), self.min_scale)
        self._clean_steps = int(state["clean_steps"])
        self._hysteresis_left = min(int(state["hysteresis_left"]), self.hysteresis)

    def _shrink(self) -> None:
        if self.scale <= self.min_scale:
            raise LossScaleError(
                f"The loss scale is at its minimum --min-loss-scale {self.min_scale:g} and the gradient still overflows: "
                "a smaller scale would not help. Look for a NaN or infinity in the loss (learning rate, data, initial weights), "
                "or train in --bf16, whose range is that of float32; to go on with smaller scales, lower --min-loss-scale."
            )
        self._clean_steps = 0
        self._hysteresis_left = max(self._hysteresis_left - 1, 0)
        if self._hysteresis_left == 0:
            self.scale = max(self.scale / 2.0, self.min_scale)


def make_grad_scaler(precision: PrecisionConfig) -> GradScaler:
    """The scale that the settings ask for: float16 has a dynamic one, or --loss-scale; other formats need none."""
    if not precision.fp16:
        return GradScaler(1.0)
    if precision.loss_scale is not None:
        return GradScaler(precision.loss_scale)
    return DynamicGradScaler(
        initial_scale=precision.initial_loss_scale,
        min_scale=precision.min_loss_scale,
        growth_interval=precision.loss_scale_window,
        hysteresis=precision.hysteresis,
    )
