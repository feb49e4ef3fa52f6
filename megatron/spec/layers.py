"""Specifications of the model's layers.

A transformer block builds its modules from the `LayerSpec` of its layer. FLOP counts, checks and exports read the same
specifications.

Layers may differ from each other, so code that reads specifications must not assume equal layers. `group_equal` finds equal ones.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal, TypeVar

from megatron.config.model import ModelConfig, Normalization, NormPlacement, SoftmaxType
from megatron.config.parallel import CpCommType
from megatron.spec.layer_pattern import is_marked, parse_pattern, parse_window
from megatron.spec.mlps import ExpertsSpec, MLPSpec, build_experts_spec, build_mlp_spec, has_experts
from megatron.spec.rotary import RotarySpec, build_rotary_spec, compute_score_factor

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True)
class NormSpec:
    """Specification of a normalization over the last dimension."""

    normalization: Normalization
    epsilon: float
    """Constant added to the variance (LayerNorm) or the mean square (RMSNorm) before the square root."""
    has_weight: bool = True
    has_bias: bool = False
    zero_centered: bool = False
    """Whether the stored weight is the difference of the norm's weight from 1 (Megatron-LM's --apply-layernorm-1p)."""


@dataclass(frozen=True)
class ScoreSpec:
    """Specification of the attention scores: how queries and keys become probabilities.

    Products of queries and keys are scaled, optionally soft-capped, and normalized by a softmax over the keys that the causal mask
    and the window allow.
    """

    scale: float | None = None
    """Number by which products of queries and keys are multiplied; None for 1 / sqrt(channels of a query head)."""
    softcap: float | None = None
    """Cap c of the scores: a score x becomes c x tanh(x / c). None for no cap."""
    window: int | None = None
    """Number of previous tokens that a token attends to besides itself; None for all previous tokens of its sample or document."""
    softmax: SoftmaxType = "vanilla"
    """Additional term in the softmax denominator.

    "vanilla": none. "off-by-one": 1. "learnable": exp of a learned weight for each head (an attention sink).
    """

    def get_effective_window(self, max_length: int) -> int | None:
        """Return the window, or None if it has no effect because every sample or document has at most `max_length` tokens and fits
        into it entirely."""
        return None if self.window is None or self.window >= max_length - 1 else self.window


def resolve_cp_comm_types(model: ModelConfig, requested: Sequence[CpCommType]) -> tuple[CpCommType, ...]:
    """Return the context-parallel communication type of each layer, which is how context ranks exchange keys and values.

    The default is "all_gather" if several query heads share each key-value head, since keys and values are small then. Otherwise it
    is "p2p", which passes keys and values around a ring, so that no rank stores all of them at once.

    Args:
        requested: values of --cp-comm-type: none, one for all layers, or one per layer.
    """
    has_shared_kv_heads = not model.multi_latent_attention and model.num_key_value_heads < model.num_attention_heads
    return (
        tuple(requested)
        if len(requested) > 1
        else (*(requested or ("all_gather" if has_shared_kv_heads else "p2p",)),) * model.num_layers
    )


DEFAULT_SCORES = ScoreSpec()
"""Attention to all previous tokens, with products scaled by 1 / sqrt(head size)."""

QKNorm = Literal["each_head", "all_heads"]


@dataclass(frozen=True)
class AttentionSpec:
    """Specification of causal multi-head or grouped-query self-attention."""

    num_heads: int
    """Number of query heads."""
    num_kv_heads: int
    """Number of key-value heads. Each serves num_heads / num_kv_heads consecutive query heads."""
    head_size: int
    rotary: RotarySpec | None
    qkv_bias: bool
    output_bias: bool
    qk_norm: QKNorm | None
    """Normalization of queries and keys; None for no normalization.

    "each_head": each head is normalized separately. "all_heads": all heads of a token are normalized together.
    """
    scores: ScoreSpec = DEFAULT_SCORES

    @property
    def qkv_size(self) -> int:
        """Output size of the projection to queries, keys and values."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_size


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Specification of multi-head latent attention: keys and values are up-projected from a latent that all heads share
    (DeepSeek-V2, section 2.1).

    Rotary embeddings are not applied to the up-projected keys. Instead, each query head has additional rotary channels, and one key
    with rotary channels, projected directly from the hidden state, is shared by all heads.
    """

    num_heads: int
    q_lora_rank: int | None
    """Size of the latent that queries are up-projected from; None if queries are projected directly from the hidden state."""
    kv_lora_rank: int
    """Size of the latent that keys and values are up-projected from."""
    qk_head_dim: int
    """Number of channels of a query or key head without rotary embedding. They are the first channels of the head."""
    qk_pos_emb_head_dim: int
    """Number of channels of a query or key head with rotary embedding. They are the last channels of the head."""
    v_head_dim: int
    """Number of channels of a value head."""
    rotary: RotarySpec | None
    output_bias: bool
    has_latent_norm: bool
    """Whether latents are normalized before their up-projection."""
    scores: ScoreSpec

    @property
    def head_size(self) -> int:
        """Number of channels of a query or key head: those without and those with rotary embedding."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim


@dataclass(frozen=True)
class LayerSpec:
    """Specification of a transformer layer: attention and an MLP (or experts), each on a residual branch with norms before it,
    after it, or both."""

    norm: NormSpec
    """Specification of all norms of the layer, including those of query and key heads and of latents."""
    attention: AttentionSpec | LatentAttentionSpec
    mlp: MLPSpec | ExpertsSpec
    norm_placement: NormPlacement = "pre"
    parallel_residual: bool = False
    """Whether the MLP reads the input of the attention. Otherwise the MLP reads the sum of that input and the attention output."""
    residual_multiplier: float = 1.0
    """Number by which the outputs of attention and MLP are multiplied before they are added to the residual stream."""

    @property
    def norm_names(self) -> tuple[str, ...]:
        """Names of the layer's norms over the hidden size, in forward order, such as "attention_norm" and "mlp_norm"."""
        has_pre_norm, has_post_norm = self.norm_placement in ("pre", "sandwich"), self.norm_placement in ("post", "sandwich")
        is_used = {
            "attention_norm": has_pre_norm,
            "attention_post_norm": has_post_norm,
            "mlp_norm": has_pre_norm,
            "mlp_post_norm": has_post_norm,
        }
        return tuple(name for name, used in is_used.items() if used)


@lru_cache(maxsize=64)
def build_layer_specs(model: ModelConfig) -> tuple[LayerSpec, ...]:
    """Build the specification of every layer, in order from the first layer to the last.

    The model settings must have passed their checks (`megatron.config.checks.model`).
    """
    build_spec = functools.cache(partial(_build_layer_spec, model))
    layer_properties = ((_has_window(model, i), _has_rotary(model, i), has_experts(model, i)) for i in range(model.num_layers))
    return tuple(build_spec(*layer_property) for layer_property in layer_properties)


def _build_layer_spec(model: ModelConfig, has_window: bool, has_rotary: bool, uses_experts: bool) -> LayerSpec:
    """Build the specification of a layer with or without the attention window, rotary embeddings and experts."""
    return LayerSpec(
        build_norm_spec(model),
        _build_attention_spec(model, has_window, has_rotary),
        build_experts_spec(model) if uses_experts else build_mlp_spec(model, model.ffn_size),
        model.norm_placement,
        model.parallel_residual,
        model.residual_multiplier,
    )


def _build_attention_spec(model: ModelConfig, has_window: bool, has_rotary: bool) -> AttentionSpec | LatentAttentionSpec:
    rotary = build_rotary_spec(model, has_window=has_window) if has_rotary else None
    bias, scores = not model.disable_bias_linear, build_score_spec(model, has_window=has_window)
    if model.multi_latent_attention:
        return LatentAttentionSpec(
            model.num_attention_heads,
            model.q_lora_rank,
            model.kv_lora_rank,
            qk_head_dim=model.qk_head_dim,
            qk_pos_emb_head_dim=model.qk_pos_emb_head_dim,
            v_head_dim=model.v_head_dim,
            rotary=rotary,
            output_bias=bias or model.add_attn_output_bias,
            has_latent_norm=model.qk_layernorm,
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


def build_score_spec(model: ModelConfig, *, has_window: bool) -> ScoreSpec:
    """Build the specification of how an attention layer computes its scores: scale, softcap, window and type of softmax.

    Args:
        has_window: whether the layer uses the attention window of the model (--window-size).
    """
    scale = model.softmax_scale
    if model.mup_base_kv_channels is not None:
        scale = model.mup_base_kv_channels**0.5 / model.head_size  # Yang et al. 2022, definition 4.1
    if scale is None and model.multi_latent_attention and (factor := compute_score_factor(model)) != 1.0:
        scale = factor * model.head_size**-0.5
    return ScoreSpec(
        scale,
        model.attn_logit_softcapping,
        parse_window(model.window_size) if has_window else None,
        model.softmax_type,
    )


def _has_window(model: ModelConfig, layer_index: int) -> bool:
    """Return whether a layer uses the attention window (--window-size).

    In --window-attn-skip-freq, a number N selects the layers without the window (the last of every N layers); a list has a 1 for
    the layers with the window.

    Args:
        layer_index: counted from 0.
    """
    if model.window_size is None:
        return False
    pattern = parse_pattern(model.window_attn_skip_freq)
    return is_marked(pattern, layer_index) is isinstance(pattern, tuple)


def _has_rotary(model: ModelConfig, layer_index: int) -> bool:
    """Return whether a layer has rotary embeddings, if the model uses them. (--no-rope-freq selects the layers without.)

    Args:
        layer_index: counted from 0.
    """
    return not is_marked(parse_pattern(model.no_rope_freq), layer_index)


def build_mtp_layer_specs(model: ModelConfig) -> tuple[LayerSpec, ...]:
    """Build one layer specification per depth of multi-token prediction, each equal to that of the model's last layer."""
    return build_layer_specs(model)[-1:] * model.mtp_num_layers


def build_norm_spec(model: ModelConfig) -> NormSpec:
    """Build the specification that all norms of the model share, including the final norm."""
    biased = model.normalization == "LayerNorm" and model.norm_weight and model.norm_bias
    return NormSpec(model.normalization, model.norm_epsilon, model.norm_weight, biased, model.apply_layernorm_1p)


def group_equal(items: Iterable[T]) -> dict[T, list[int]]:
    """Group equal items: return the indices of each distinct item, in order of first occurrence.

    For `build_layer_specs(model)` the result maps each distinct layer specification to the indices of its layers.
    """
    indices_of_item: dict[T, list[int]] = {}
    previous: object = indices_of_item  # equal to no item
    for index, item in enumerate(items):
        if item is not previous:  # neighbors are usually the same object; hashing a spec dominates the cost
            previous, indices = item, indices_of_item.setdefault(item, [])
        indices.append(index)
    return indices_of_item
