"""What makes an architecture of transformers: its fields and its tensors, as data."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.checkpoint.huggingface.fields import Fields
from megatron.checkpoint.huggingface.layout import Layout, Recipe
from megatron.config.model import ModelConfig
from megatron.model.records import global_records

_OUTPUT = "lm_head.weight"


@dataclass(frozen=True)
class Family:
    """An architecture."""

    model_type: str
    """Its name in config.json, which is also its name here."""
    architecture: str
    """The class with the output layer."""
    prefix: str
    """Before the names of all tensors but the output layer's; absent in files saved without the output layer."""
    layer: str
    """Name of layer {} after the prefix."""
    outside: Mapping[str, Recipe]
    """By our names: parameters in no layer. The names are those after the prefix."""
    inside: Mapping[str, Recipe]
    """By our names after `layers.N.`: parameters of a layer."""
    buffers: str
    """Regular expression of tensors after the prefix that old files hold and that are no weights (tables, masks)."""
    without_effect: tuple[str, ...]
    """Fields of its own that do not change the logits."""
    read: Callable[[Fields], ModelConfig]
    """The model that a config.json describes; what cannot be is noted in the fields."""
    misfits: Callable[[ModelConfig], list[str]]
    """What of a model this architecture cannot say, each as a text: the setting, then what it would have to be."""
    write: Callable[[ModelConfig], dict[str, Any]]
    """The fields of config.json that describe a fitting model, but for those that all architectures have."""

    def layouts(self, model: ModelConfig, vocab_size: int) -> dict[str, Layout]:
        """Where every parameter of the model is in their tensors, in the order of the forward."""
        found = {}
        for name, record in global_records(model, vocab_size).items():
            layer = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
            if layer:
                prefix, recipe = f"{self.prefix}{self.layer.format(layer[1])}.", self.inside[layer[2]]
            else:
                recipe = self.outside[name]
                prefix = "" if recipe.names == (_OUTPUT,) else self.prefix
            found[name] = recipe.layout(prefix, model, record.shape, is_matrix=record.matrix_dims is not None)
        return found

    def is_buffer(self, name: str) -> bool:
        """Whether a tensor in a file is a table that is computed anew, not a weight."""
        return re.fullmatch(rf"(?:{re.escape(self.prefix)})?(?:{self.buffers})", name) is not None
