"""Number formats and the loss scale."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PrecisionConfig:
    """Dtype of the model's parameters and activations (float32 by default) and the scale of the loss in float16."""

    fp16: bool = False
    """Compute in float16 with float32 main parameters and a loss scale."""
    bf16: bool = False
    """Compute in bfloat16 with float32 main parameters."""
    fp64: bool = False
    """Compute in float64 (for proofs)."""
    loss_scale: float | None = None
    """Constant loss scale; by default float16 uses a dynamic one."""
    initial_loss_scale: float = 2.0**32
    """First dynamic loss scale."""
    min_loss_scale: float = 1.0
    """Smallest dynamic loss scale; an overflow at this scale stops the run."""
    loss_scale_window: int = 1000
    """Steps without overflow after which the dynamic scale doubles."""
    hysteresis: int = 2
    """Overflows that are tolerated before the dynamic scale halves."""
