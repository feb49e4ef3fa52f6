"""Rotary position embeddings (Su et al. 2021): rotated channels, frequencies, and scaling of frequencies for longer sequences.

Two scalings depend on the sequence length (`DynamicScaling`, `LongScaling`). The length is that of the full sequence and is known
before the first token is computed. In training it is --seq-length, even if documents end within the sequence. In generation it is
the longest prompt plus the number of tokens to generate. So all tokens of a sequence, including cached ones, are rotated with the
same frequencies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.config.model import ModelConfig


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation: all positions are divided by a factor (Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1 scaling: only low frequencies are divided by a factor.

    A channel pair that completes at least `high_freq_factor` rotations within the original context keeps its frequency. A pair that
    completes at most `low_freq_factor` rotations has its frequency divided by `factor`. In between, the two frequencies are
    interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int
    """Context length before scaling, in tokens."""


@dataclass(frozen=True)
class YarnScaling:
    """YaRN scaling (Peng et al. 2023).

    High frequencies are unchanged, and low frequencies are divided by a factor. Over a range of channel pairs in between, the
    result is interpolated linearly from the unchanged to the divided frequency. Rotated queries and keys are multiplied by an
    attention factor.
    """

    factor: float
    original_context: int
    """Context length before scaling, in tokens."""
    beta_fast: float
    """Channel pairs that complete more rotations than this in the original context keep their frequency."""
    beta_slow: float
    """Channel pairs that complete fewer rotations than this in the original context have their frequency divided by the factor."""
    rounds_bounds: bool
    """Whether the bounds of the range of channel pairs with interpolated frequencies are rounded outwards to whole pairs."""
    attention_factor: float
    """Number by which queries and keys are multiplied after their rotation."""


@dataclass(frozen=True)
class DynamicScaling:
    """NTK-aware scaling of rotary frequencies ("dynamic" in transformers).

    The frequency base grows with the sequence length beyond the original context.
    """

    factor: float
    original_context: int
    """Context length before scaling, in tokens."""

    def scale_base(self, base: float, rotary_dim: int, length: int) -> float:
        """Return the frequency base for a sequence of `length` tokens: `base` within the original context, a larger base beyond."""
        stretched = self.factor * max(length / self.original_context, 1.0) - (self.factor - 1)
        return float(base * stretched ** (rotary_dim / (rotary_dim - 2)))


@dataclass(frozen=True)
class LongScaling:
    """LongRoPE scaling (Ding et al. 2024): the frequency of each channel pair has its own divisor.

    One list of divisors is for sequences within the original context, the other for longer sequences.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_context: int
    """Context length before scaling, in tokens."""
    attention_factor: float
    """Number by which queries and keys are multiplied after their rotation."""

    def select_factors(self, length: int) -> tuple[float, ...]:
        """Return the list of divisors (for short or for long sequences) that applies to a sequence of `length` tokens."""
        return self.long_factors if length > self.original_context else self.short_factors


Scaling = LinearScaling | Llama3Scaling | YarnScaling | DynamicScaling | LongScaling


@dataclass(frozen=True)
class RotarySpec:
    """Specification of the rotary position embedding of a layer."""

    rotary_dim: int
    """Number of leading channels of each head that are rotated."""
    base: float
    scaling: Scaling | None = None
    is_interleaved: bool = False
    """Whether two consecutive channels form a rotated pair. Otherwise channels c and c + rotary_dim / 2 form a pair."""

    @property
    def attention_factor(self) -> float:
        """Number by which queries and keys are multiplied after their rotation; 1 without YaRN or LongRoPE scaling."""
        return self.scaling.attention_factor if isinstance(self.scaling, YarnScaling | LongScaling) else 1.0


def get_rotary_dim(model: ModelConfig) -> int:
    """Return the number of rotated channels of a head, from --rotary-percent or, in latent attention, --qk-pos-emb-head-dim.

    A check of the settings requires an even number.
    """
    if model.multi_latent_attention:
        return model.qk_pos_emb_head_dim
    return int(model.head_size * model.rotary_percent)


def build_rotary_spec(model: ModelConfig, *, has_window: bool = False) -> RotarySpec | None:
    """Build the specification of a layer's rotary embedding, or return None if the model has other position embeddings.

    Args:
        has_window: whether the layer has an attention window. Layers with a window may have their own frequency base
            (`rotary_base_local`), without scaling.
    """
    if model.position_embedding_type != "rope":
        return None
    if has_window and model.rotary_base_local is not None:
        return RotarySpec(get_rotary_dim(model), model.rotary_base_local, None, model.rotary_interleaved)
    return RotarySpec(get_rotary_dim(model), model.rotary_base, _build_scaling(model), model.rotary_interleaved)


LLAMA3_CONTEXT, DEFAULT_CONTEXT = 8192, 4096
"""Defaults of --original-max-position-embeddings in tokens: for --use-rope-scaling that of Llama 3.1, otherwise Megatron-LM's."""


def get_original_context(model: ModelConfig) -> int:
    """Return the context length in tokens for which the unscaled rotary frequencies were chosen."""
    return model.original_max_position_embeddings or (LLAMA3_CONTEXT if model.use_rope_scaling else DEFAULT_CONTEXT)


def _build_scaling(model: ModelConfig) -> Scaling | None:
    context, factor = get_original_context(model), model.rotary_scaling_factor
    if model.use_rope_scaling:
        return Llama3Scaling(model.rope_scaling_factor, model.rope_low_freq_factor, model.rope_high_freq_factor, context)
    if model.rope_type == "yarn":
        rounds_bounds = model.yarn_correction_range_round_to_int
        return YarnScaling(factor, context, model.beta_fast, model.beta_slow, rounds_bounds, compute_attention_factor(model))
    if model.rope_type == "dynamic":
        return DynamicScaling(factor, context)
    if model.rope_type == "longrope":
        return LongScaling(model.rope_short_factors, model.rope_long_factors, context, compute_attention_factor(model))
    interpolation = model.rotary_seq_len_interpolation_factor
    return None if interpolation == 1.0 else LinearScaling(interpolation)


def compute_attention_factor(model: ModelConfig) -> float:
    """Return the number by which YaRN or LongRoPE multiplies rotated queries and keys: --rope-attention-factor, or else the formula
    of the paper."""
    factor = model.rotary_scaling_factor
    if model.rope_attention_factor is not None:
        return model.rope_attention_factor
    if model.rope_type == "longrope":
        return math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(get_original_context(model)))
    return get_yarn_mscale(factor, model.mscale) / get_yarn_mscale(factor, model.mscale_all_dim)


def compute_score_factor(model: ModelConfig) -> float:
    """Return the number by which YaRN multiplies the attention scores of latent attention (DeepSeek-V2); 1 without YaRN.

    The scores are multiplied by it in addition to the attention factor of the rotated channels.
    """
    return get_yarn_mscale(model.rotary_scaling_factor, model.mscale_all_dim) ** 2 if model.rope_type == "yarn" else 1.0


def get_yarn_mscale(factor: float, mscale: float) -> float:
    """Return YaRN's attention scale, 0.1 x mscale x ln(factor) + 1.

    Args:
        factor: number by which low rotary frequencies are divided; values below 1 count as 1.
        mscale: coefficient of the logarithm.
    """
    return 0.1 * mscale * math.log(max(factor, 1.0)) + 1.0
