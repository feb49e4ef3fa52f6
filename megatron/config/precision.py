"""Number formats and the loss scale."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.setting import acts_with, setting

_LARGEST = 2.0**127  # the scale is a float32
_DYNAMIC = acts_with(
    "with --fp16 and without --loss-scale, when the scale is dynamic", every=True, fix={}, fp16=True, loss_scale=None
)


@dataclass(frozen=True)
class PrecisionConfig:
    """Dtype of the model's parameters and activations (float32 by default) and the scale of the loss in float16."""

    fp16: bool = False
    """Compute in float16 with float32 main parameters and a loss scale."""
    bf16: bool = False
    """Compute in bfloat16 with float32 main parameters."""
    fp64: bool = False
    """Compute in float64 (for proofs)."""
    loss_scale: float | None = setting(None, above=0, at_most=_LARGEST, unit="factor on the loss", acts=acts_with(fp16=True))
    """Constant loss scale; by default float16 uses a dynamic one."""
    initial_loss_scale: float = setting(2.0**32, above=0, at_most=_LARGEST, unit="factor on the loss", acts=_DYNAMIC)
    """First dynamic loss scale."""
    min_loss_scale: float = setting(1.0, above=0, unit="factor on the loss", acts=_DYNAMIC)
    """Smallest dynamic loss scale; an overflow at this scale stops the run."""
    loss_scale_window: int = setting(1000, at_least=1, unit="steps", acts=_DYNAMIC)
    """Steps without overflow after which the dynamic scale doubles."""
    hysteresis: int = setting(2, at_least=1, unit="overflows", acts=_DYNAMIC)
    """Overflows that are tolerated before the dynamic scale halves."""
