"""Loss scaling: a constant scale, and a dynamic scale for float16.

A float16 gradient below 6e-8 becomes zero. So the loss, and with it every gradient, is multiplied by a scale before backward, and
the gradients are divided by the scale before the update (Micikevicius et al. 2018, "Mixed Precision Training"). The dynamic scale
is as large as possible without overflow: it shrinks when a gradient overflows and grows after many steps without overflow.
"""

from __future__ import annotations

import logging
from typing import Any

from megatron.config.precision import MAX_LOSS_SCALE, PrecisionConfig

logger = logging.getLogger(__name__)


class LossScaleError(RuntimeError):
    """Raised if the gradient overflows although the loss scale is already at its minimum."""


class GradScaler:
    """Constant loss scale, set by the command line. A resumed run does not take the scale from the checkpoint.

    The scale is a Python float and only multiplies tensors, so it needs no synchronization with the device.
    """

    def __init__(self, scale: float) -> None:
        self.scale = float(scale)
        """Factor on the loss."""

    def update(self, found_inf: bool) -> None:
        """Do nothing, because the scale is constant. `DynamicGradScaler` adapts its scale here.

        Args:
            found_inf: whether the gradients of the step overflowed on any rank. That step is then skipped.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state on which future updates of the scale depend, as JSON values for checkpoints."""
        return {"kind": "constant", "scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from `state_dict()`. A constant scale has no state to restore."""


class DynamicGradScaler(GradScaler):
    """Loss scale that adapts to overflows of the gradients.

    After `growth_interval` consecutive steps without overflow, the scale doubles and the hysteresis is reset. An overflow resets
    the count of consecutive steps. Of the overflows since the last reset of the hysteresis, the first `hysteresis` - 1 leave the
    scale unchanged. Every further overflow halves the scale, down to `min_scale`.

    Args:
        initial_scale: first scale.
        min_scale: smallest scale. An overflow at this scale is an error.
        growth_interval: steps without overflow before the scale grows.
        hysteresis: number of overflows since the last reset after which the scale first shrinks. Single steps without overflow do
            not reset the count.
    """

    def __init__(self, initial_scale: float, min_scale: float, growth_interval: int = 1000, hysteresis: int = 2) -> None:
        super().__init__(initial_scale)
        self.min_scale, self.growth_interval, self.hysteresis = min_scale, growth_interval, hysteresis
        self._clean_steps, self._hysteresis_left = 0, hysteresis

    def update(self, found_inf: bool) -> None:
        """Adapt the scale after a step.

        Args:
            found_inf: whether the gradients overflowed on any rank.

        Raises:
            LossScaleError: the gradients overflowed and the scale is already at its minimum.
        """
        if found_inf:
            self._shrink()
            return
        self._clean_steps += 1
        if self._clean_steps >= self.growth_interval:
            self._clean_steps, self._hysteresis_left = 0, self.hysteresis
            if self.scale * 2.0 <= MAX_LOSS_SCALE:  # a larger scale would be infinite and stay so
                self.scale *= 2.0

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, the count of steps without overflow and the remaining hysteresis."""
        counts = {"clean_steps": self._clean_steps, "hysteresis_left": self._hysteresis_left}
        return {"kind": "dynamic", "scale": self.scale, **counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from `state_dict()`. Minimum, interval and hysteresis stay those of the command line.

        The saved run may have had a constant scale (another precision, or --loss-scale). The dynamic scale then starts at
        --initial-loss-scale, and a warning is logged.
        """
        if state["kind"] != "dynamic":
            logger.warning("the checkpoint holds no dynamic loss scale: the scale starts at --initial-loss-scale %g", self.scale)
            return
        self.scale = max(float(state["scale"]), self.min_scale)
        self._clean_steps = int(state["clean_steps"])
        self._hysteresis_left = min(int(state["hysteresis_left"]), self.hysteresis)

    def _shrink(self) -> None:
        if self.scale <= self.min_scale:
            raise LossScaleError(
                f"The loss scale is at its minimum --min-loss-scale {self.min_scale:g} and the gradient still overflows: "
                "probably the loss itself is NaN or infinite (learning rate, data, initial weights). If the gradients are really "
                "that large, train in --bf16, whose range is that of float32, or lower --min-loss-scale."
            )
        self._clean_steps = 0
        self._hysteresis_left = max(self._hysteresis_left - 1, 0)
        if self._hysteresis_left == 0:
            self.scale = max(self.scale / 2.0, self.min_scale)


def make_grad_scaler(precision: PrecisionConfig) -> GradScaler:
    """Build the loss scaler for the precision settings.

    The scale is constant for --loss-scale and dynamic for float16 otherwise. All other formats use a constant scale of 1.
    """
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
