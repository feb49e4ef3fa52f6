"""An architecture of transformers, as data: the parts that it has, the fields of its config.json, the names of its tensors. What is
read, what is written, and which models fit, follows from these."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron.checkpoint.huggingface.fields import Fields
from megatron.checkpoint.huggingface.layout import WeightLayout, projection_rows
from megatron.config.model import ModelConfig, Normalization, PositionEmbedding
from megatron.parallel.params import global_records
from megatron.spec.activations import GATED_FLAGS, activation_of, by_hugging_face_name, spelled
from megatron.spec.weights import in_layer

Biases = Literal["none", "qkv", "all"]
_BIASES_SAID: dict[Biases, str] = {
    "none": "linear layers have no biases (--disable-bias-linear)",
    "qkv": "only query, key and value have biases (--add-qkv-bias)",
    "all": "all have biases",
}


def biases_of(model: ModelConfig) -> Biases:
    """Which linear layers have biases."""
    return "all" if not model.disable_bias_linear else "qkv" if model.add_qkv_bias else "none"


OUTPUT = "lm_head.weight"
"""Name of their output layer, which a tied model does not have."""


@dataclass(frozen=True, kw_only=True)
class Family(ABC):
    """An architecture of transformers."""

    model_type: str
    """Its name in config.json, which is also its name here."""
    architecture: str
    """The class of transformers that has the output layer."""

    positions: PositionEmbedding
    normalization: Normalization
    gated: bool
    """Whether the MLP is gated."""
    biases: Mapping[Biases, Mapping[str, Any]]
    """The biases that it can have, with the fields for them. The first is that of files without such fields."""
    qk_norm: bool = False
    free_heads: bool = True
    """Whether several query heads may share a key and a value, and heads may have any size; if not, it is hidden / heads."""
    heads_divide_hidden: bool = False
    """Whether transformers refuses a hidden size that does not divide by the heads, even with heads of another size."""

    activation: str
    """Field of the activation function."""
    numbers: Mapping[str, tuple[str, float]]
    """Fields that are numbers: our setting, and the default."""
    tied: bool
    """Default of tie_word_embeddings."""
    without_effect: tuple[str, ...] = ()
    """Fields of this architecture that do not change the logits."""

    prefix: str
    """The beginning of all tensors' names but the output layer's; absent in files saved without the output layer."""
    layer: str
    """Name of layer {} after the prefix."""
    names: Mapping[str, str]
    """Their modules by ours: the name within the layer, or else after the prefix. Of several, the rows laid end to end are ours."""
    transposed: bool = False
    """Whether matrices in layers are stored [inputs, outputs]."""
    buffers: str
    """Regular expression of tensors after the prefix that old files hold and that are no weights (tables, masks)."""

    @abstractmethod
    def read_shape(self, fields: Fields) -> dict[str, Any]:
        """The settings of `ModelConfig` that the other fields of a config.json give."""

    @abstractmethod
    def write_shape(self, model: ModelConfig) -> dict[str, Any]:
        """These fields for a fitting model."""

    def read(self, fields: Fields) -> ModelConfig:
        """The model that a config.json describes. What cannot be accepted is recorded in the fields."""
        activations = by_hugging_face_name(gated=self.gated)
        flag = activations[fields.expect(self.activation, tuple(activations), next(iter(activations)))].flag
        biases = self._read_biases(fields)
        settings: dict[str, Any] = {ours: fields.number(theirs, default) for theirs, (ours, default) in self.numbers.items()}
        settings |= {} if flag is None else {flag: True}
        return ModelConfig(
            position_embedding_type=self.positions,
            normalization=self.normalization,
            untie_embeddings_and_output_weights=not fields.switch("tie_word_embeddings", self.tied),
            disable_bias_linear=biases != "all",
            add_qkv_bias=biases == "qkv",
            qk_layernorm=self.qk_norm,
            **settings,
            **self.read_shape(fields),
        )

    def _read_biases(self, fields: Fields) -> Biases:
        kinds = list(self.biases)
        given = {name: fields.raw(name, default) for name, default in self.biases[kinds[0]].items()}
        for kind in kinds:
            if self.biases[kind] == given:
                return kind
        for name in given:
            fields.refuse(name, f"only {' or '.join(map(str, self.biases.values()))} can be read")
        return kinds[0]

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The fields of config.json for a fitting model, except those that all architectures have."""
        settings = vars(model)
        return {
            **self.write_shape(model),
            self.activation: activation_of(model).hugging_face[0],
            **{theirs: settings[ours] for theirs, (ours, _) in self.numbers.items()},
            "tie_word_embeddings": model.tied,
            **self.biases[biases_of(model)],
        }

    def misfits(self, model: ModelConfig) -> list[str]:
        """What this architecture cannot express of a model, each as a text."""
        heads, kv_heads, size, hidden = model.num_attention_heads, model.num_key_value_heads, model.head_size, model.hidden_size
        gated, biases = activation_of(model).gated, biases_of(model)
        wrong = {
            f"positions are {model.position_embedding_type}, not {self.positions}": model.position_embedding_type != self.positions,
            f"only {model.rotary_percent:.0%} of a head is rotated": self.positions == "rope" and model.rotary_percent != 1.0,
            f"the norm is {model.normalization}, not {self.normalization}": model.normalization != self.normalization,
            f"the MLP is {'' if gated else 'not '}gated ({' or '.join(map(spelled, GATED_FLAGS))})": gated != self.gated,
            _BIASES_SAID[biases]: biases not in self.biases,
            f"queries and keys are {'' if model.qk_layernorm else 'not '}normalised (--qk-layernorm)": model.qk_layernorm
            != self.qk_norm,
            f"{kv_heads} key-value heads for {heads} query heads": not self.free_heads and kv_heads != heads,
            f"heads of {size} channels x {heads} are not the hidden size {hidden}": not self.free_heads and size * heads != hidden,
            f"the hidden size {hidden} does not divide by {heads} heads": self.heads_divide_hidden and hidden % heads != 0,
        }
        return [text for text, is_so in wrong.items() if is_so]

    def layouts(self, model: ModelConfig, vocab_size: int) -> dict[str, WeightLayout]:
        """Where every parameter of the model is in their tensors, in the order of the forward."""
        found = {}
        for name, record in global_records(model, vocab_size).items():
            layer, part = in_layer(name)
            module, _, attribute = part.rpartition(".")
            before = "" if module == "output" else self.prefix if layer is None else f"{self.prefix}{self.layer.format(layer)}."
            theirs = [f"{before}{each}.{attribute}" for each in self.names[module].split()]
            is_matrix, order = record.kind != "vector", None
            rows = math.prod(record.shape[:-1] if is_matrix else record.shape)
            counts = [rows // len(theirs)] * len(theirs)
            if module == "attention.qkv":
                parts, order = projection_rows(model)
                counts = parts if len(theirs) == len(parts) else counts  # or one tensor with all three
            transposed = self.transposed and is_matrix and layer is not None
            found[name] = WeightLayout(record.shape, is_matrix, dict(zip(theirs, counts, strict=True)), order, transposed)
        return found

    def is_buffer(self, name: str) -> bool:
        """Whether a tensor in a file is a table that is computed anew, not a weight."""
        return re.fullmatch(rf"(?:{re.escape(self.prefix)})?(?:{self.buffers})", name) is not None
