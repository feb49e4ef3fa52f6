"""What the reference model is, and the names and shapes of its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
    rotary_interpolation: float = 1.0
    """Positions are divided by it."""
    rope_scaling_factor: float | None = None
    """Llama 3.1's stretching of low frequencies."""
    norm: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    epsilon: float = 1e-5
    activation: Literal["gelu", "swiglu", "squared_relu"] = "gelu"
    bias: bool = True
    """Biases on all linear layers except the output layer."""
    qkv_bias: bool = False
    """A bias on the query-key-value projection even without the others."""
    qk_norm: bool = False
    tied: bool = True


def gpt2_like(**changes: object) -> ReferenceShape:
    """A small GPT-2: learned positions, LayerNorm, GELU, biases, tied output."""
    sizes = {"num_layers": 2, "hidden": 32, "ffn": 64, "heads": 4, "kv_heads": 4, "head_size": 8, "vocab": 64, "seq": 16}
    return ReferenceShape(**{**sizes, **changes})  # type: ignore[arg-type]


def llama_like(**changes: object) -> ReferenceShape:
    """A small Llama: rotary positions, RMSNorm, SwiGLU, grouped queries, no biases, untied output."""
    parts = {"positions": "rope", "norm": "RMSNorm", "activation": "swiglu", "bias": False, "tied": False}
    sizes = {"num_layers": 2, "hidden": 32, "ffn": 48, "heads": 4, "kv_heads": 2, "head_size": 8, "vocab": 64, "seq": 16}
    return ReferenceShape(**{**sizes, **parts, **changes})  # type: ignore[arg-type]


def weight_shapes(shape: ReferenceShape) -> dict[str, tuple[int, ...]]:
    """Shape of every weight by name, in the order of the forward pass. Matrices are [out, in].

    The query-key-value projection is grouped by key-value head: the rows of a group are its query heads, its key head and its
    value head, each of head_size rows. A gated MLP's `up` is [2, ffn, hidden]: the gate, then the up projection.
    """
    h, d = shape.hidden, shape.head_size
    qkv_rows = (shape.heads + 2 * shape.kv_heads) * d
    up = (2, shape.ffn) if shape.activation == "swiglu" else (shape.ffn,)
    shapes: dict[str, tuple[int, ...]] = {}

    def add_norm(name: str, size: int) -> None:
        shapes[f"{name}.weight"] = (size,)
        if shape.norm == "LayerNorm":
            shapes[f"{name}.bias"] = (size,)

    def add_linear(name: str, out: tuple[int, ...], inner: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (*out, inner)
        if bias:
            shapes[f"{name}.bias"] = out

    shapes["embedding.word.weight"] = (shape.vocab, h)
    if shape.positions == "learned":
        shapes["embedding.position.weight"] = (shape.num_positions or shape.seq, h)
    for i in range(shape.num_layers):
        add_norm(f"layers.{i}.attention_norm", h)
        add_linear(f"layers.{i}.attention.qkv", (qkv_rows,), h, shape.bias or shape.qkv_bias)
        if shape.qk_norm:
            add_norm(f"layers.{i}.attention.q_norm", d)
            add_norm(f"layers.{i}.attention.k_norm", d)
        add_linear(f"layers.{i}.attention.output", (h,), shape.heads * d, shape.bias)
        add_norm(f"layers.{i}.mlp_norm", h)
        add_linear(f"layers.{i}.mlp.up", up, h, shape.bias)
        add_linear(f"layers.{i}.mlp.down", (h,), shape.ffn, shape.bias)
    add_norm("final_norm", h)
    if not shape.tied:
        shapes["output.weight"] = (shape.vocab, h)
    return shapes


def is_norm(name: str) -> bool:
    """Whether a weight belongs to a norm."""
    return name.rsplit(".", 1)[0].endswith("norm")


def decays(name: str) -> bool:
    """Whether weight decay applies: to matrices and embeddings, not to norms and biases."""
    return not is_norm(name) and not name.endswith(".bias")
