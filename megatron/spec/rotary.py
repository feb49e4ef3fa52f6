"""Rotary positions (Su et al. 2021): which channels turn, how fast, and how frequencies are stretched for longer sequences than
those of the first training.

Two ways to stretch depend on the length of the sequence (`DynamicScaling`, `LongScaling`). The length is that of the whole sequence
that is computed, and known before its first token: in training --seq-length, wherever documents end in it; in a generation the
longest prompt and the tokens that are asked for. So all tokens of a sequence turn alike, those in a cache too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.config.model import ModelConfig


@dataclass(frozen=True)
class LinearScaling:
    """All positions are divided by a factor (Chen et al. 2023, position interpolation)."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Low frequencies are divided by a factor (Llama 3.1). A pair that turns `high` times or more in the original context keeps its
    frequency, one that turns `low` times or less has it divided; between them the two are mixed."""

    factor: float
    low: float
    high: float
    original_context: int
    """Tokens."""


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): low frequencies are divided by a factor, mixed over pairs, and queries and keys are enlarged."""

    factor: float
    original_context: int
    """Tokens."""
    fast: float
    """Pairs that turn more often than this in the original context keep their frequency."""
    slow: float
    """Pairs that turn less often than this have it divided."""
    whole_pairs: bool
    """Whether the two bounds are rounded outwards to a whole pair."""
    magnitude: float


@dataclass(frozen=True)
class DynamicScaling:
    """The base grows with the length of sequences beyond the original context (NTK-aware scaling, "dynamic" in transformers)."""

    factor: float
    original_context: int
    """Tokens."""

    def base(self, base: float, channels: int, length: int) -> float:
        """The base for a sequence of a length."""
        stretched = self.factor * max(length / self.original_context, 1.0) - (self.factor - 1)
        return float(base * stretched ** (channels / (channels - 2)))


@dataclass(frozen=True)
class LongScaling:
    """Each frequency is divided by a factor of its own, from one list for sequences within the original context and another for
    longer ones (LongRoPE, Ding et al. 2024)."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_context: int
    """Tokens."""
    magnitude: float

    def factors(self, length: int) -> tuple[float, ...]:
        """The list for a sequence of a length."""
        return self.long if length > self.original_context else self.short


Scaling = LinearScaling | Llama3Scaling | YarnScaling | DynamicScaling | LongScaling


@dataclass(frozen=True)
class RotarySpec:
    """Rotary positions of a layer."""

    channels: int
    """Leading channels of each head that are rotated."""
    base: float
    scaling: Scaling | None = None
    interleaved: bool = False
    """Whether neighbouring channels are a pair; if not, channel c and c + channels / 2 are."""

    @property
    def magnitude(self) -> float:
        """What rotated queries and keys are multiplied by."""
        return self.scaling.magnitude if isinstance(self.scaling, YarnScaling | LongScaling) else 1.0


def rotated_channels(model: ModelConfig) -> int:
    """Channels of a head that are rotated, by --rotary-percent or those of latent attention. A rule asks for an even number."""
    if model.multi_latent_attention:
        return model.qk_pos_emb_head_dim
    return int(model.head_size * model.rotary_percent)


def rotary_of(model: ModelConfig, *, local: bool = False) -> RotarySpec | None:
    """The rotary positions, or None where the model has others.

    Args:
        local: of layers with a window, which may have a base of their own, and then no scaling.
    """
    if model.position_embedding_type != "rope":
        return None
    if local and model.rotary_base_local is not None:
        return RotarySpec(rotated_channels(model), model.rotary_base_local, None, model.rotary_interleaved)
    return RotarySpec(rotated_channels(model), model.rotary_base, _scaling_of(model), model.rotary_interleaved)


LLAMA3_CONTEXT, OTHER_CONTEXT = 8192, 4096
"""Defaults of --original-max-position-embeddings: that of Llama 3.1, and Megatron-LM's."""


def original_context(model: ModelConfig) -> int:
    """Tokens for which the frequencies were chosen before they were stretched."""
    return model.original_max_position_embeddings or (LLAMA3_CONTEXT if model.use_rope_scaling else OTHER_CONTEXT)


def _scaling_of(model: ModelConfig) -> Scaling | None:
    context, factor = original_context(model), model.rotary_scaling_factor
    if model.use_rope_scaling:
        return Llama3Scaling(model.rope_scaling_factor, model.rope_low_freq_factor, model.rope_high_freq_factor, context)
    if model.rope_type == "yarn":
        whole = model.yarn_correction_range_round_to_int
        return YarnScaling(factor, context, model.beta_fast, model.beta_slow, whole, magnitude_of(model))
    if model.rope_type == "dynamic":
        return DynamicScaling(factor, context)
    if model.rope_type == "longrope":
        return LongScaling(model.rope_short_factors, model.rope_long_factors, context, magnitude_of(model))
    interpolation = model.rotary_seq_len_interpolation_factor
    return None if interpolation == 1.0 else LinearScaling(interpolation)


def magnitude_of(model: ModelConfig) -> float:
    """What rotated queries and keys are multiplied by, with YaRN or LongRoPE: given, or as the papers have it."""
    factor = model.rotary_scaling_factor
    if model.rope_attention_factor is not None:
        return model.rope_attention_factor
    if model.rope_type == "longrope":
        return math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(original_context(model)))
    return yarn_magnitude(factor, model.mscale) / yarn_magnitude(factor, model.mscale_all_dim)


def score_factor(model: ModelConfig) -> float:
    """By what YaRN enlarges the scores of latent attention, beside what it does to rotated channels (DeepSeek-V2)."""
    return yarn_magnitude(model.rotary_scaling_factor, model.mscale_all_dim) ** 2 if model.rope_type == "yarn" else 1.0


def yarn_magnitude(factor: float, weight: float) -> float:
    """YaRN's 0.1 ln(factor) + 1, the logarithm weighted."""
    return 0.1 * weight * math.log(max(factor, 1.0)) + 1.0
