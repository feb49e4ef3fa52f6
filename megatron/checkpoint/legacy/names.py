"""Names of Megatron-LM's tensors, and how they are cut over tensor ranks."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron.parallel.params import ParamRecord

_PARTS = {
    "attention_norm": ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    "attention.qkv": ("self_attention.linear_qkv.",),
    "attention.q_norm": ("self_attention.q_layernorm.",),
    "attention.k_norm": ("self_attention.k_layernorm.",),
    "attention.output": ("self_attention.linear_proj.",),
    "mlp_norm": ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
    "mlp.up": ("mlp.linear_fc1.",),
    "mlp.down": ("mlp.linear_fc2.",),
}
"""Parts of a layer: their own modules, and, where Transformer Engine joins a norm to the product behind it, the place there."""
WORD = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
_OUTSIDE = {
    "embedding.word.weight": (WORD,),
    "embedding.position.weight": ("embedding.position_embeddings.weight",),
    "final_norm.weight": ("decoder.final_layernorm.weight",),
    "final_norm.bias": ("decoder.final_layernorm.bias",),
    "output.weight": (OUTPUT,),
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")
STORED_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
LEFT_OUT = ("_extra_state", "rotary_pos_emb.inv_freq")
"""Ends of names that hold no parameter: states of 8-bit products, and a table that follows from the settings."""


@dataclass(frozen=True)
class Place:
    """Where a parameter may stand."""

    layer: int | None
    """Its layer; None for what is in front of or behind them."""
    names: tuple[str, ...]
    """Names in the state of a chunk, without the layer's number; one of them is there."""

    def stored_names(self, first_layer: int) -> list[str]:
        """Names in the state of a chunk whose first layer is `first_layer`."""
        before = "" if self.layer is None else f"decoder.layers.{self.layer - first_layer}."
        return [before + name for name in self.names]


def place_of(name: str) -> Place:
    """Where a parameter of ours stands there."""
    found = _LAYER.fullmatch(name)
    if found is None:
        return Place(None, _OUTSIDE[name])
    layer, part, attribute = found.groups()
    return Place(int(layer), tuple(start + attribute for start in _PARTS[part]))


def local_shape(record: ParamRecord, ranks: int, padded_vocabulary: int) -> tuple[int, ...]:
    """Shape of one tensor rank's part, as it is here: where a gated up projection there is [2f/ranks, h], the gate above, it is
    [2, f/ranks, h]."""
    shape = list(record.shape)
    for split in record.splits:
        whole = padded_vocabulary if split.padded_size is not None else shape[split.dim]
        shape[split.dim] = whole // ranks
    return tuple(shape)
