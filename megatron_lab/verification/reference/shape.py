"""Options of the reference model, the names and shapes of its weights, and random weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_lab.verification.reference.eight_bits import Fp8Spec
from megatron_lab.verification.reference.experts import ExpertsShape
from megatron_lab.verification.reference.rotary import RotaryScaling

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class LatentShape:
    """Sizes of multi-head latent attention (DeepSeek-V2). A query or key head has `qk_head_dim` channels without rotary positions,
    followed by `qk_pos_emb_head_dim` rotated channels."""

    q_lora_rank: int | None
    """Size of the latent from which queries are projected; None if they are projected from the hidden state."""
    kv_lora_rank: int
    """Size of the latent from which keys and values are projected."""
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int
    """Size of a value head."""


@dataclass(frozen=True)
class ReferenceShape:
    """Sizes and options of the reference model."""

    num_layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    seq: int
    positions: Literal["learned", "rope", "none"] = "learned"
    num_positions: int | None = None
    """Rows of the learned position table; by default `seq`."""
    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    rotary_interleaved: bool = False
    """Whether neighboring channels form a rotary pair. Otherwise a channel of the first half of the rotated channels forms a
    pair with a channel of the second half."""
    rope_scaling: RotaryScaling | None = None
    """Method that scales the rotary frequencies, with its options; None for unscaled frequencies."""
    norm: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    epsilon: float = 1e-5
    norms: Literal["pre", "post", "sandwich"] = "pre"
    """Position of the norms: before attention and MLP ("pre"), after them ("post"), or both ("sandwich")."""
    norm_weight: bool = True
    norm_bias: bool = True
    """Whether LayerNorm has a bias."""
    zero_centred: bool = False
    """Whether norms multiply by 1 + weight instead of by the weight."""
    parallel: bool = False
    """Whether attention and MLP read the same input (parallel residual)."""
    residual_multiplier: float = 1.0
    """Factor by which the outputs of attention and MLP are multiplied before they are added to the residual stream."""
    activation: Literal["gelu", "gelu_exact", "relu", "squared_relu", "swiglu", "geglu", "geglu_exact", "quick_geglu"] = "gelu"
    offset: float = 0.0
    """quick_geglu: constant that is added to the up projection before it is multiplied by the activated gate."""
    clamp: float | None = None
    """quick_geglu: upper bound of the gate, and bound of the absolute value of the up projection; None for no bounds."""
    bias: bool = True
    """Whether all linear layers except the output layer have biases."""
    qkv_bias: bool = False
    """Whether the query-key-value projection has a bias even if `bias` is False."""
    output_bias: bool = False
    """Whether the output projection of attention has a bias even if `bias` is False."""
    mlp_bias: bool = False
    """Whether the projections of the MLP have biases even if `bias` is False."""
    qk_norm: bool = False
    """Whether query and key heads are normalized; in latent attention, whether the latents are."""
    qk_norm_all_heads: bool = False
    """Whether all query heads are normalized together as one vector, and all key heads as another. Otherwise each head is
    normalized separately."""
    windows: tuple[int | None, ...] = ()
    """Attention window of each layer: the number of preceding tokens to which a token attends, or None for all. Empty if all
    layers attend to all tokens."""
    unrotated: tuple[bool, ...] = ()
    """Whether each layer omits rotary positions. Empty if no layer omits them."""
    local_base: float | None = None
    """Rotary base of layers with an attention window; their frequencies are not scaled. With None, they are rotated like other
    layers."""
    score_scale: float | None = None
    """Number by which the attention scores are multiplied; by default 1 / sqrt(head_size)."""
    score_cap: float | None = None
    """Soft cap of the attention scores, which become cap x tanh(score / cap); None for no cap."""
    sink: Literal["none", "one", "learned"] = "none"
    """Attention sink: term that is added to the denominator of the softmax. "none": no term. "one": 1. "learned": the
    exponential of a trained weight for each head."""
    latent: LatentShape | None = None
    """Sizes of multi-head latent attention in all layers, which replace `head_size`; None for ordinary attention."""
    embedding_multiplier: float = 1.0
    embedding_norm: bool = False
    output_multiplier: float = 1.0
    """Number by which the logits are multiplied."""
    logit_cap: float | None = None
    """Soft cap of the logits, which become cap x tanh(logit / cap); None for no cap."""
    tied: bool = True
    z_loss: float = 0.0
    """Coefficient of the z-loss (log Z)^2 of each token. Training minimizes the z-loss, but it is not part of the reported
    loss."""
    mtp_depths: int = 0
    """Number of multi-token-prediction layers. Each predicts a token that is one position further ahead than the layer before
    it."""
    mtp_factor: float = 0.1
    """Weight of the multi-token-prediction loss. Training minimizes this loss, but it is not part of the reported loss."""
    smoothing: float = 0.0
    """Label smoothing: share of each label's probability that is spread over the vocabulary. It affects the loss that training
    minimizes, not the reported loss."""
    experts: ExpertsShape | None = None
    """Sizes and options of the mixture-of-experts layers; None for a model without experts."""
    width_multiplier: float = 1.0
    """Hidden size divided by the base width of muP; the logits are divided by this number. 1 without muP."""
    fp8: Fp8Spec | None = None
    """FP8 recipe of the linear layers; None to compute them in float64."""
    num_unquantized_layers: tuple[int, int] = (0, 0)
    """(number of first layers, number of last layers) that are computed in float64 instead of FP8."""
    lora_rank: int | None = None
    """Rank of the LoRA adapters, which are then the only trained weights; None without adapters."""
    lora_scale: float = 1.0
    """Factor by which the outputs of the LoRA adapters are multiplied."""
    lora_targets: tuple[str, ...] = ()
    """Names of the linear layers with a LoRA adapter, such as mlp.up."""

    def get_window(self, layer: int) -> int | None:
        """Return the attention window of a layer: the number of preceding tokens to which a token attends, or None for all."""
        return self.windows[layer] if self.windows else None

    def is_rotated(self, layer: int) -> bool:
        """Check whether a layer has rotary positions."""
        return self.positions == "rope" and not (self.unrotated and self.unrotated[layer])

    def get_fp8(self, layer: int) -> Fp8Spec | None:
        """Return the FP8 recipe of the linear layers in a transformer layer; None if they are computed in float64."""
        first, last = self.num_unquantized_layers
        return self.fp8 if first <= layer < self.num_layers - last else None


def build_weight_shapes(shape: ReferenceShape) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight of the reference model, by name, in the order of the forward pass. Matrices are [output
    features, input features].

    The query-key-value projection is grouped by key-value head: a group has the rows of its query heads, of its key head and of its
    value head, `head_size` rows each. In latent attention, the rows of a query head are its channels without rotary positions, then
    the rotated channels. The rows of a head of `kv_up` are the key channels without rotary positions, then the value. The `up`
    weight of a gated MLP is [2, ffn, hidden]: gate, then up projection.
    """
    h, d = shape.hidden, shape.head_size
    qkv_rows = (shape.heads + 2 * shape.kv_heads) * d
    up = (2, shape.ffn) if shape.activation.endswith("glu") or shape.activation == "geglu_exact" else (shape.ffn,)
    shapes: dict[str, tuple[int, ...]] = {}

    def add_norm(name: str, size: int) -> None:
        if shape.norm_weight:
            shapes[f"{name}.weight"] = (size,)
        if shape.norm_weight and shape.norm_bias and shape.norm == "LayerNorm":
            shapes[f"{name}.bias"] = (size,)

    def add_linear(name: str, out_shape: tuple[int, ...], in_features: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (*out_shape, in_features)
        if bias:
            shapes[f"{name}.bias"] = out_shape
        if shape.lora_rank is not None and name.endswith(tuple(f".{target}" for target in shape.lora_targets)):
            shapes[f"{name}.lora_a.weight"] = (shape.lora_rank, in_features)
            shapes[f"{name}.lora_b.weight"] = (*out_shape, shape.lora_rank)

    def add_heads(name: str) -> None:
        add_linear(f"{name}.qkv", (qkv_rows,), h, shape.bias or shape.qkv_bias)
        if shape.qk_norm:
            add_norm(f"{name}.q_norm", shape.heads * d if shape.qk_norm_all_heads else d)
            add_norm(f"{name}.k_norm", shape.kv_heads * d if shape.qk_norm_all_heads else d)

    def add_latent(name: str, latent: LatentShape) -> None:
        query_inputs = h
        if latent.q_lora_rank is not None:
            query_inputs = latent.q_lora_rank
            add_linear(f"{name}.q_down", (query_inputs,), h, False)
            if shape.qk_norm:
                add_norm(f"{name}.q_latent_norm", query_inputs)
        add_linear(
            f"{name}.{'q' if latent.q_lora_rank is None else 'q_up'}",
            (shape.heads * (latent.qk_head_dim + latent.qk_pos_emb_head_dim),),
            query_inputs,
            False,
        )
        add_linear(f"{name}.kv_down", (latent.kv_lora_rank,), h, False)
        add_linear(f"{name}.k_rotary", (latent.qk_pos_emb_head_dim,), h, False)
        if shape.qk_norm:
            add_norm(f"{name}.kv_latent_norm", latent.kv_lora_rank)
        add_linear(f"{name}.kv_up", (shape.heads * (latent.qk_head_dim + latent.v_head_dim),), latent.kv_lora_rank, False)

    shapes["embedding.word.weight"] = (shape.vocab, h)
    if shape.positions == "learned":
        shapes["embedding.position.weight"] = (shape.num_positions or shape.seq, h)
    if shape.embedding_norm:
        add_norm("embedding.norm", h)

    def add_experts(name: str, experts: ExpertsShape) -> None:
        add_linear(f"{name}.router", (experts.num_experts,), h, False)
        if experts.bias_update_rate is not None:
            shapes[f"{name}.router.bias"] = (experts.num_experts,)
        if experts.aux_loss_scope == "update before":
            shapes[f"{name}.router.shares"] = (experts.num_experts,)
        add_linear(f"{name}.experts.up", (experts.num_experts, *up[:-1], experts.ffn_size), h, False)
        add_linear(f"{name}.experts.down", (experts.num_experts, h), experts.ffn_size, False)
        if experts.shared_ffn_size is not None:
            add_linear(f"{name}.shared.up", (*up[:-1], experts.shared_ffn_size), h, shape.bias or shape.mlp_bias)
            add_linear(f"{name}.shared.down", (h,), experts.shared_ffn_size, shape.bias or shape.mlp_bias)
        if experts.has_shared_gate:
            add_linear(f"{name}.shared_gate", (1,), h, False)

    def add_layer(name: str, layer_index: int) -> None:
        if shape.norms != "post":
            add_norm(f"{name}.attention_norm", h)
        if shape.latent is not None:
            add_latent(f"{name}.attention", shape.latent)
        else:
            add_heads(f"{name}.attention")
        if shape.sink == "learned":
            shapes[f"{name}.attention.sinks"] = (shape.heads,)
        attention_size = shape.heads * (d if shape.latent is None else shape.latent.v_head_dim)
        add_linear(f"{name}.attention.output", (h,), attention_size, shape.bias or shape.output_bias)
        if shape.norms != "pre":
            add_norm(f"{name}.attention_post_norm", h)
        if shape.norms != "post":
            add_norm(f"{name}.mlp_norm", h)
        if shape.experts is not None and shape.experts.layers[layer_index]:
            add_experts(f"{name}.mlp", shape.experts)
        else:
            add_linear(f"{name}.mlp.up", up, h, shape.bias or shape.mlp_bias)
            add_linear(f"{name}.mlp.down", (h,), shape.ffn, shape.bias or shape.mlp_bias)
        if shape.norms != "pre":
            add_norm(f"{name}.mlp_post_norm", h)

    for i in range(shape.num_layers):
        add_layer(f"layers.{i}", i)
    add_norm("final_norm", h)
    if not shape.tied:
        shapes["output.weight"] = (shape.vocab, h)
    for k in range(shape.mtp_depths):
        add_norm(f"mtp.{k}.hidden_norm", h)
        add_norm(f"mtp.{k}.embedding_norm", h)
        shapes[f"mtp.{k}.projection.weight"] = (h, 2 * h)
        add_layer(f"mtp.{k}.layer", shape.num_layers - 1)
    return shapes


def is_trained(shape: ReferenceShape, name: str) -> bool:
    """Check whether the weight with this name is trained. With LoRA adapters, only their weights are."""
    return shape.lora_rank is None or ".lora_" in name


def is_norm(name: str) -> bool:
    """Check whether the weight or bias with this name belongs to a norm."""
    return name.rsplit(".", 1)[0].endswith("norm")


def has_weight_decay(name: str) -> bool:
    """Check whether weight decay applies to the weight with this name. It applies to matrices and embeddings, but not to norms,
    biases and attention sinks."""
    return not is_norm(name) and not name.endswith((".bias", ".sinks"))


def build_random_weights(shape: ReferenceShape, seed: int, std: float = 0.1) -> Weights:
    """Draw all weights from normal distributions with standard deviation `std`. Norm weights have mean 1 (0 if `zero_centred`), all
    other weights mean 0. No bias is exactly zero and no norm weight exactly one, so that a missing one changes the output."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, size in build_weight_shapes(shape).items():
        values = torch.randn(size, generator=generator, dtype=torch.float64) * std
        weights[name] = values + 1 if is_norm(name) and name.endswith(".weight") and not shape.zero_centred else values
    return weights
