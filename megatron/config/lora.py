"""LoRA (Hu et al. 2021): the settings of the model about it. docs/fine_tuning.md shows its use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.config.setting import GIVEN, acts_with, setting

LoraTarget = Literal["attention.qkv", "attention.output", "mlp.up", "mlp.down"]
"""Linear layers, in the order of the forward."""

_LORA = acts_with(lora_rank=GIVEN, strict=True)


@dataclass(frozen=True)
class LoraFields:
    """Low-rank adapters beside linear layers, whose own weights are then fixed."""

    lora_rank: int | None = setting(None, at_least=1, unit="channels")
    """Train adapters of so many channels beside linear layers, and nothing else (LoRA, Hu et al. 2021): a layer multiplies with
    weight + alpha / rank x B A, with A [rank, inputs] and B [outputs, rank], which begins at zero."""
    lora_alpha: float | None = setting(None, above=0, unit="plain number", acts=_LORA)
    """What the adapters give is multiplied by this / --lora-rank; by default the rank."""
    lora_targets: tuple[LoraTarget, ...] = setting(("attention.qkv", "attention.output", "mlp.up", "mlp.down"), acts=_LORA)
    """Linear layers of each layer that have adapters; by default all of them."""

    @property
    def lora_scale(self) -> float:
        """Factor of what an adapter gives; 1 without adapters."""
        return 1.0 if self.lora_rank is None or self.lora_alpha is None else self.lora_alpha / self.lora_rank
