"""What each layer of the model is. A block builds what its spec says, and whoever reasons about layers reads the specs.

Layers may differ from each other: nobody assumes that they are equal, and `alike` says which are.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal, TypeVar

from megatron.config.model import ModelConfig, Normalization, NormPlacement, SoftmaxType
from megatron.config.parallel import ContextWay
from megatron.spec.layer_pattern import marked, read_pattern, read_window
from megatron.spec.mlps import ExpertsSpec, MLPSpec, experts_of, has_experts, mlp_of
from megatron.spec.rotary import RotarySpec, rotary_of, score_factor

Kind = TypeVar("Kind", bound=Hashable)


@dataclass(frozen=True)
class NormSpec:
    """A norm over the last dimension."""

    kind: Normalization
    epsilon: float
    """Added to the variance (or mean square) before the root."""
    weighted: bool = True
    biased: bool = False
    zero_centred: bool = False
    """Whether the weight is kept as its distance from 1."""


@dataclass(frozen=True)
class ScoreSpec:
    """How products of queries and keys become probabilities: scaled, capped, then a softmax over the keys in reach."""

    scale: float | None = None
    """Factor of the products; None for 1 / sqrt(size of a query head)."""
    softcap: float | None = None
    """A score x becomes cap x tanh(x / cap)."""
    window: int | None = None
    """Tokens before its own to which a token attends; None for all of its sample (or document)."""
    softmax: SoftmaxType = "vanilla"
    """What the denominator holds beside exp of the scores: nothing, 1, or exp of a weight for each head."""

    def reach(self, longest: int) -> int | None:
        """The window, if it makes a difference to samples or documents of at most so many tokens."""
        return None if self.window is None or self.window >= longest - 1 else self.window


def context_ways(model: ModelConfig, given: Sequence[ContextWay]) -> tuple[ContextWay, ...]:
    """How context ranks share keys and values in each layer.

    By default they are gathered where they are few, since several query heads share them; else they go round a ring, so that no
    rank has all of them at once.

    Args:
        given: nothing, one for all layers, or one for each.
    """
    few = not model.multi_latent_attention and model.num_key_value_heads < model.num_attention_heads
    return tuple(given) if len(given) > 1 else (*(given or ("all_gather" if few else "p2p",)),) * model.num_layers


PLAIN = ScoreSpec()
"""Scores of all tokens before, over the root of the head size."""

QKNorm = Literal["each_head", "all_heads"]


@dataclass(frozen=True)
class AttentionSpec:
    """Causal self-attention."""

    heads: int
    """Query heads."""
    kv_heads: int
    """Key-value heads; each serves heads / kv_heads consecutive query heads."""
    head_size: int
    rotary: RotarySpec | None
    qkv_bias: bool
    output_bias: bool
    qk_norm: QKNorm | None
    """What of queries, and of keys, is normalised together, if anything is."""
    scores: ScoreSpec = PLAIN

    @property
    def qkv_rows(self) -> int:
        """Rows of the projection to queries, keys and values: its output size."""
        return (self.heads + 2 * self.kv_heads) * self.head_size


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Causal self-attention whose keys and values are made of a latent that all heads share (DeepSeek-V2, section 2.1).

    Rotary positions do not go through the products that make keys, so each query head has rotated channels beside the others, and
    one key, of the hidden state, has those of all heads.
    """

    heads: int
    query_rank: int | None
    """Size of the latent that queries are made of; None where they are made of the hidden state."""
    rank: int
    """Size of the latent that keys and values are made of."""
    plain_size: int
    """Channels of a query or key head that are not rotated."""
    rotary_size: int
    """Channels behind them that are."""
    value_size: int
    """Channels of a value head."""
    rotary: RotarySpec | None
    output_bias: bool
    latent_norm: bool
    """Whether latents are normalised."""
    scores: ScoreSpec

    @property
    def head_size(self) -> int:
        """Channels of a query or key head."""
        return self.plain_size + self.rotary_size


@dataclass(frozen=True)
class LayerSpec:
    """Attention and an MLP (or experts), each with norms before, behind or on both sides of it, added to the residual stream."""

    norm: NormSpec
    """All norms of the layer, and those of query and key heads or of latents."""
    attention: AttentionSpec | LatentAttentionSpec
    mlp: MLPSpec | ExpertsSpec
    placement: NormPlacement = "pre"
    parallel: bool = False
    """Whether the MLP has the same input as attention; if not, what attention has added is in it."""
    residual_multiplier: float = 1.0
    """Factor of what is added."""

    @property
    def norms(self) -> tuple[str, ...]:
        """Names of the norms over the hidden size, in the order of the forward."""
        before, behind = self.placement in ("pre", "sandwich"), self.placement in ("post", "sandwich")
        names = {"attention_norm": before, "attention_post_norm": behind, "mlp_norm": before, "mlp_post_norm": behind}
        return tuple(name for name, is_there in names.items() if is_there)


@lru_cache(maxsize=64)
def layers(model: ModelConfig) -> tuple[LayerSpec, ...]:
    """One spec for each layer, in the order of the depth. The shape must be valid (see `config.checks.model`)."""
    kind = functools.cache(partial(_layer, model))
    marks = ((_has_window(model, i), _is_rotated(model, i), has_experts(model, i)) for i in range(model.num_layers))
    return tuple(kind(*each) for each in marks)


def _layer(model: ModelConfig, window: bool, rotated: bool, experts: bool) -> LayerSpec:
    """A layer with or without the window, rotary positions and experts."""
    return LayerSpec(
        norm_of(model),
        _attention(model, window, rotated),
        experts_of(model) if experts else mlp_of(model, model.ffn_size),
        model.norm_placement,
        model.parallel_residual,
        model.residual_multiplier,
    )


def _attention(model: ModelConfig, window: bool, rotated: bool) -> AttentionSpec | LatentAttentionSpec:
    """The attention of such a layer."""
    rotary = rotary_of(model, local=window) if rotated else None
    bias, scores = not model.disable_bias_linear, scores_of(model, window=window)
    if model.multi_latent_attention:
        return LatentAttentionSpec(
            model.num_attention_heads,
            model.q_lora_rank,
            model.kv_lora_rank,
            plain_size=model.qk_head_dim,
            rotary_size=model.qk_pos_emb_head_dim,
            value_size=model.v_head_dim,
            rotary=rotary,
            output_bias=bias or model.add_attn_output_bias,
            latent_norm=model.qk_layernorm,
            scores=scores,
        )
    return AttentionSpec(
        model.num_attention_heads,
        model.num_key_value_heads,
        model.head_size,
        rotary,
        qkv_bias=bias or model.add_qkv_bias,
        output_bias=bias or model.add_attn_output_bias,
        qk_norm=("all_heads" if model.qk_layernorm_all_heads else "each_head") if model.qk_layernorm else None,
        scores=scores,
    )


def scores_of(model: ModelConfig, *, window: bool) -> ScoreSpec:
    """How a layer with or without the window makes probabilities."""
    scale = model.softmax_scale
    if model.mup_base_kv_channels is not None:
        scale = model.mup_base_kv_channels**0.5 / model.head_size  # Yang et al. 2022, definition 4.1
    if scale is None and model.multi_latent_attention and (factor := score_factor(model)) != 1.0:
        scale = factor * model.head_size**-0.5
    return ScoreSpec(
        scale,
        model.attn_logit_softcapping,
        read_window(model.window_size) if window else None,
        model.softmax_type,
    )


def _has_window(model: ModelConfig, layer: int) -> bool:
    """Whether a layer, counted from 0, has the window. A number N marks those that have not, a list those that have."""
    if model.window_size is None:
        return False
    pattern = read_pattern(model.window_attn_skip_freq)
    return marked(pattern, layer) is isinstance(pattern, tuple)


def _is_rotated(model: ModelConfig, layer: int) -> bool:
    """Whether a layer, counted from 0, has rotary positions if the model has."""
    return not marked(read_pattern(model.no_rope_freq), layer)


def depths(model: ModelConfig) -> tuple[LayerSpec, ...]:
    """The layers of multi-token prediction, one a depth: as the model's last one."""
    return layers(model)[-1:] * model.mtp_num_layers


def norm_of(model: ModelConfig) -> NormSpec:
    """The spec of every norm in the model, the final one too."""
    biased = model.normalization == "LayerNorm" and model.norm_weight and model.norm_bias
    return NormSpec(model.normalization, model.norm_epsilon, model.norm_weight, biased, model.apply_layernorm_1p)


def alike(kinds: Iterable[Kind]) -> dict[Kind, list[int]]:
    """The indices of equal items, for example of `layers(model)`, in the order in which each kind first occurs."""
    found: dict[Kind, list[int]] = {}
    before: object = found  # no item
    for place, kind in enumerate(kinds):
        if kind is not before:  # neighbours are mostly one object, and the hash of a spec costs more than all else here
            before, places = kind, found.setdefault(kind, [])
        places.append(place)
    return found
