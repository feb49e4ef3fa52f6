"""What each layer of the model is. A block builds what its spec says, and whoever reasons about layers reads the specs.

Layers may differ from each other: nobody assumes that they are equal, and `alike` says which are.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from megatron.config.model import ModelConfig, Normalization
from megatron.spec.activations import Activation, activation_of
from megatron.spec.rotary import RotarySpec, rotary_of

Kind = TypeVar("Kind", bound=Hashable)


@dataclass(frozen=True)
class NormSpec:
    """A norm over the last dimension."""

    kind: Normalization
    epsilon: float
    """Added to the variance (or mean square) before the root."""


@dataclass(frozen=True)
class AttentionSpec:
    """Causal self-attention over the whole sample (or document)."""

    heads: int
    """Query heads."""
    kv_heads: int
    """Key-value heads; each serves heads / kv_heads consecutive query heads."""
    head_size: int
    rotary: RotarySpec | None
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    """Whether each query and key head is normalised."""

    @property
    def qkv_rows(self) -> int:
        """Rows of the projection to queries, keys and values: its output size."""
        return (self.heads + 2 * self.kv_heads) * self.head_size


@dataclass(frozen=True)
class MLPSpec:
    """Two products with an activation between them."""

    width: int
    activation: Activation
    bias: bool


@dataclass(frozen=True)
class LayerSpec:
    """A pre-norm layer: norm, attention, residual; norm, MLP, residual."""

    norm: NormSpec
    """Both norms of the layer, and those of query and key heads."""
    attention: AttentionSpec
    mlp: MLPSpec


@lru_cache(maxsize=64)
def layers(model: ModelConfig) -> tuple[LayerSpec, ...]:
    """One spec for each layer, in the order of the depth. The shape must be valid (see `config.checks.model`)."""
    bias = not model.disable_bias_linear
    layer = LayerSpec(
        norm_of(model),
        AttentionSpec(
            model.num_attention_heads,
            model.num_key_value_heads,
            model.head_size,
            rotary_of(model),
            qkv_bias=bias or model.add_qkv_bias,
            output_bias=bias,
            qk_norm=model.qk_layernorm,
        ),
        MLPSpec(model.ffn_size, activation_of(model), bias),
    )
    return (layer,) * model.num_layers


def norm_of(model: ModelConfig) -> NormSpec:
    """The spec of every norm in the model, the final one too."""
    return NormSpec(model.normalization, model.norm_epsilon)


def alike(kinds: Iterable[Kind]) -> dict[Kind, list[int]]:
    """The indices of equal items, for example of `layers(model)`, in the order in which each kind first occurs."""
    found: dict[Kind, list[int]] = {}
    before: object = found  # no item
    for place, kind in enumerate(kinds):
        if kind is not before:  # neighbours are mostly one object, and the hash of a spec costs more than all else here
            before, places = kind, found.setdefault(kind, [])
        places.append(place)
    return found
