"""What a step keeps between forward and backward, and what it computes again or moves to host memory instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.config.setting import acts_with, idle_with, setting

RecomputeGranularity = Literal["full", "selective"]
RecomputeMethod = Literal["uniform", "block"]
RecomputeModule = Literal["core_attn", "mlp", "layernorm", "mlp_act"]


@dataclass(frozen=True)
class MemoryConfig:
    """Recompute and offload of activations, and the loss in pieces."""

    recompute_granularity: RecomputeGranularity | None = None
    """What is computed again in backward instead of being kept. full: whole layers, of which only the input is kept; selective:
    the parts that --recompute-modules names."""
    recompute_activations: bool = setting(
        False, idle=idle_with("--recompute-granularity says the same, or more", recompute_granularity=("full", "selective"))
    )
    """The same as --recompute-granularity selective."""
    recompute_method: RecomputeMethod = setting("uniform", acts=acts_with(recompute_granularity="full"))
    """Which layers full recompute takes. uniform: all, in groups of --recompute-num-layers, of which each keeps its input; block:
    the first --recompute-num-layers of each chunk, each by itself."""
    recompute_num_layers: int = setting(1, at_least=1, unit="layers", acts=acts_with(recompute_granularity="full"))
    """Layers of a group (uniform), or layers of each chunk that are computed again (block)."""
    recompute_modules: tuple[RecomputeModule, ...] = setting(("core_attn",), acts=acts_with(recompute_granularity="selective"))
    """Parts that selective recompute takes. core_attn: softmax and dropout of attention, where its kernel keeps them; mlp: the
    whole MLP; layernorm: results of the norms before a product; mlp_act: the result of the MLP's activation function."""

    @property
    def recompute(self) -> RecomputeGranularity | None:
        """The granularity that both flags ask for."""
        return self.recompute_granularity or ("selective" if self.recompute_activations else None)
