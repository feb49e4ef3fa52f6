"""The reference model's shape: its parts, the names and shapes of its weights, and random values for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_lab.verification.reference.eight_bits import EightBits
from megatron_lab.verification.reference.experts import ExpertsShape
from megatron_lab.verification.reference.rotary import RotaryStretch

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class LatentShape:
    """Sizes of latent attention (DeepSeek-V2), which has heads of `plain` channels and `rotated` ones behind them."""

    query_rank: int | None
    """Size of the latent that queries are made of; None where they are made of the hidden state."""
    rank: int
    """Size of the latent that keys and values are made of."""
    plain: int
    rotated: int
    value: int
    """Size of a value head."""


@dataclass(frozen=True)
class ReferenceShape:
    """Sizes and parts of the model."""

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
    """Rows of the learned position table; by default seq."""
    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    rotary_interleaved: bool = False
    """Whether neighbouring channels are a pair."""
    stretch: RotaryStretch | None = None
    """How rotary frequencies are stretched."""
    norm: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    epsilon: float = 1e-5
    norms: Literal["pre", "post", "sandwich"] = "pre"
    """Whether norms stand before attention and MLP, on what they give, or both."""
    norm_weight: bool = True
    norm_bias: bool = True
    """Whether LayerNorm has one."""
    zero_centred: bool = False
    """Whether norms multiply by 1 + their weights."""
    parallel: bool = False
    """Whether the MLP's input is that of attention."""
    residual_multiplier: float = 1.0
    """Factor of what attention and MLP give."""
    activation: Literal["gelu", "gelu_exact", "relu", "squared_relu", "swiglu", "geglu", "geglu_exact", "quick_geglu"] = "gelu"
    offset: float = 0.0
    """What quick_geglu adds to its second half."""
    clamp: float | None = None
    """The bound to which quick_geglu clamps its input."""
    bias: bool = True
    """Whether all linear layers except the output layer have biases."""
    qkv_bias: bool = False
    """Whether the query-key-value projection has a bias even without the others."""
    output_bias: bool = False
    """Whether attention's output projection has a bias even without the others."""
    mlp_bias: bool = False
    """Whether the MLP's projections have biases even without the others."""
    qk_norm: bool = False
    """Whether heads of queries and keys are normalised; in latent attention the latents."""
    qk_norm_all_heads: bool = False
    """Whether all query heads are normalised as one vector, and all key heads; else each head is."""
    windows: tuple[int | None, ...] = ()
    """For each layer, how many tokens before its own a token attends to; None for all. Empty: all layers attend to all."""
    unrotated: tuple[bool, ...] = ()
    """For each layer, whether it does without the rotary positions. Empty: none does."""
    local_base: float | None = None
    """Rotary base of layers with a window, which have no stretching then; by default as in all."""
    score_scale: float | None = None
    """Factor of the scores; by default 1 / sqrt(head_size)."""
    score_cap: float | None = None
    """Scores are capped softly by this."""
    sink: Literal["none", "one", "learned"] = "none"
    """What the softmax adds to its denominator: nothing, 1, or exp of a weight for each head."""
    latent: LatentShape | None = None
    """Latent attention in all layers; its sizes stand in place of head_size."""
    embedding_multiplier: float = 1.0
    embedding_norm: bool = False
    output_multiplier: float = 1.0
    """Factor of the logits."""
    logit_cap: float | None = None
    """Logits are capped softly by this."""
    tied: bool = True
    z_loss: float = 0.0
    """Beside the cross entropy, this x (log Z)^2 of each token is minimised (but not reported)."""
    mtp_depths: int = 0
    """Tokens beyond the next one that are predicted too."""
    mtp_factor: float = 0.1
    """Weight of their loss where it is minimised (it is not reported)."""
    smoothing: float = 0.0
    """Share of each target that is spread over the vocabulary where the loss is minimised (but not where it is reported)."""
    experts: ExpertsShape | None = None
    """Experts in some layers; None where there are none."""
    width: float = 1.0
    """muP: the logits are divided by this."""
    eight_bits: EightBits | None = None
    """How products of layers are computed, if in 8 bits."""
    in_64_bits: tuple[int, int] = (0, 0)
    """How many of the first and of the last layers are not."""
    lora_rank: int | None = None
    """Rank of adapters beside linear layers, which alone are trained; None where there are none."""
    lora_scale: float = 1.0
    """Factor of what they give."""
    lora_targets: tuple[str, ...] = ()
    """The linear layers of each layer that have one, such as mlp.up."""

    def window_of(self, layer: int) -> int | None:
        """Tokens before its own to which a token of a layer attends; None for all."""
        return self.windows[layer] if self.windows else None

    def is_rotated(self, layer: int) -> bool:
        """Whether a layer has rotary positions."""
        return self.positions == "rope" and not (self.unrotated and self.unrotated[layer])

    def eight_bits_of(self, layer: int) -> EightBits | None:
        """How products of a layer are computed."""
        first, last = self.in_64_bits
        return self.eight_bits if first <= layer < self.num_layers - last else None


def weight_shapes(shape: ReferenceShape) -> dict[str, tuple[int, ...]]:
    """Shape of every weight by name, in the order of the forward pass. Matrices are [out, in].

    The query-key-value projection is grouped by key-value head: the rows of a group are its query heads, its key head and its
    value head, each of head_size rows. In latent attention the rows of a head of queries are its plain channels, then its rotated
    ones; those of a head of `kv_up` the plain channels of its key, then its value. A gated MLP's `up` is [2, ffn, hidden]: the
    gate, then the up projection.
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

    def add_linear(name: str, out: tuple[int, ...], inner: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (*out, inner)
        if bias:
            shapes[f"{name}.bias"] = out
        if shape.lora_rank is not None and name.endswith(tuple(f".{target}" for target in shape.lora_targets)):
            shapes[f"{name}.lora_a.weight"] = (shape.lora_rank, inner)
            shapes[f"{name}.lora_b.weight"] = (*out, shape.lora_rank)

    def add_heads(name: str) -> None:
        add_linear(f"{name}.qkv", (qkv_rows,), h, shape.bias or shape.qkv_bias)
        if shape.qk_norm:
            add_norm(f"{name}.q_norm", shape.heads * d if shape.qk_norm_all_heads else d)
            add_norm(f"{name}.k_norm", shape.kv_heads * d if shape.qk_norm_all_heads else d)

    def add_latent(name: str, latent: LatentShape) -> None:
        query = h
        if latent.query_rank is not None:
            query = latent.query_rank
            add_linear(f"{name}.q_down", (query,), h, False)
            if shape.qk_norm:
                add_norm(f"{name}.q_latent_norm", query)
        add_linear(
            f"{name}.{'q' if latent.query_rank is None else 'q_up'}", (shape.heads * (latent.plain + latent.rotated),), query, False
        )
        add_linear(f"{name}.kv_down", (latent.rank,), h, False)
        add_linear(f"{name}.k_rotary", (latent.rotated,), h, False)
        if shape.qk_norm:
            add_norm(f"{name}.kv_latent_norm", latent.rank)
        add_linear(f"{name}.kv_up", (shape.heads * (latent.plain + latent.value),), latent.rank, False)

    shapes["embedding.word.weight"] = (shape.vocab, h)
    if shape.positions == "learned":
        shapes["embedding.position.weight"] = (shape.num_positions or shape.seq, h)
    if shape.embedding_norm:
        add_norm("embedding.norm", h)

    def add_experts(name: str, experts: ExpertsShape) -> None:
        add_linear(f"{name}.router", (experts.count,), h, False)
        if experts.bias_step is not None:
            shapes[f"{name}.router.bias"] = (experts.count,)
        if experts.balance == "update before":
            shapes[f"{name}.router.shares"] = (experts.count,)
        add_linear(f"{name}.experts.up", (experts.count, *up[:-1], experts.width), h, False)
        add_linear(f"{name}.experts.down", (experts.count, h), experts.width, False)
        if experts.shared is not None:
            add_linear(f"{name}.shared.up", (*up[:-1], experts.shared), h, shape.bias or shape.mlp_bias)
            add_linear(f"{name}.shared.down", (h,), experts.shared, shape.bias or shape.mlp_bias)
        if experts.gate:
            add_linear(f"{name}.shared_gate", (1,), h, False)

    def add_layer(name: str, number: int) -> None:
        if shape.norms != "post":
            add_norm(f"{name}.attention_norm", h)
        if shape.latent is not None:
            add_latent(f"{name}.attention", shape.latent)
        else:
            add_heads(f"{name}.attention")
        if shape.sink == "learned":
            shapes[f"{name}.attention.sinks"] = (shape.heads,)
        inner = shape.heads * (d if shape.latent is None else shape.latent.value)
        add_linear(f"{name}.attention.output", (h,), inner, shape.bias or shape.output_bias)
        if shape.norms != "pre":
            add_norm(f"{name}.attention_post_norm", h)
        if shape.norms != "post":
            add_norm(f"{name}.mlp_norm", h)
        if shape.experts is not None and shape.experts.layers[number]:
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
    """Whether a weight is changed by training: all are, but beside adapters only these."""
    return shape.lora_rank is None or ".lora_" in name


def is_norm(name: str) -> bool:
    """Whether a weight belongs to a norm."""
    return name.rsplit(".", 1)[0].endswith("norm")


def decays(name: str) -> bool:
    """Whether weight decay applies: to matrices and embeddings, not to norms, biases and sinks."""
    return not is_norm(name) and not name.endswith((".bias", ".sinks"))


def random_weights(shape: ReferenceShape, seed: int, std: float = 0.1) -> Weights:
    """Random normal values. Biases are not zero and norm weights not one either, so that a missing one shows."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, size in weight_shapes(shape).items():
        values = torch.randn(size, generator=generator, dtype=torch.float64) * std
        weights[name] = values + 1 if is_norm(name) and name.endswith(".weight") and not shape.zero_centred else values
    return weights
