"""The reference model's shape: its parts, the names and shapes of its weights, and random values for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron.verification.reference.eight_bits import EightBits
from megatron.verification.reference.rotary import RotaryStretch

Weights = dict[str, Tensor]


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
    tied: bool = True
    z_loss: float = 0.0
    """Beside the cross entropy, this x (log Z)^2 of each token is minimised (but not reported)."""
    smoothing: float = 0.0
    """Share of each target that is spread over the vocabulary where the loss is minimised (but not where it is reported)."""
    width: float = 1.0
    """muP: the logits are divided by this."""
    eight_bits: EightBits | None = None
    """How products of layers are computed, if in 8 bits."""
    in_64_bits: tuple[int, int] = (0, 0)
    """How many of the first and of the last layers are not."""

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
    value head, each of head_size rows. A gated MLP's `up` is [2, ffn, hidden]: the gate, then the up projection.
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

    shapes["embedding.word.weight"] = (shape.vocab, h)
    if shape.positions == "learned":
        shapes["embedding.position.weight"] = (shape.num_positions or shape.seq, h)
    for i in range(shape.num_layers):
        if shape.norms != "post":
            add_norm(f"layers.{i}.attention_norm", h)
        add_linear(f"layers.{i}.attention.qkv", (qkv_rows,), h, shape.bias or shape.qkv_bias)
        if shape.qk_norm:
            add_norm(f"layers.{i}.attention.q_norm", shape.heads * d if shape.qk_norm_all_heads else d)
            add_norm(f"layers.{i}.attention.k_norm", shape.kv_heads * d if shape.qk_norm_all_heads else d)
        if shape.sink == "learned":
            shapes[f"layers.{i}.attention.sinks"] = (shape.heads,)
        add_linear(f"layers.{i}.attention.output", (h,), shape.heads * d, shape.bias or shape.output_bias)
        if shape.norms != "pre":
            add_norm(f"layers.{i}.attention_post_norm", h)
        if shape.norms != "post":
            add_norm(f"layers.{i}.mlp_norm", h)
        add_linear(f"layers.{i}.mlp.up", up, h, shape.bias or shape.mlp_bias)
        add_linear(f"layers.{i}.mlp.down", (h,), shape.ffn, shape.bias or shape.mlp_bias)
        if shape.norms != "pre":
            add_norm(f"layers.{i}.mlp_post_norm", h)
    add_norm("final_norm", h)
    if not shape.tied:
        shapes["output.weight"] = (shape.vocab, h)
    return shapes


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
