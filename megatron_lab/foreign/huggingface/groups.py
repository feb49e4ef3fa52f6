"""Groups of fields that several architectures have: numbers, switches, sizes, biases."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron.config.model import ModelConfig
from megatron.spec.activations import activation_of, by_hugging_face_name
from megatron.spec.layers import AttentionSpec, layers
from megatron.spec.mlps import MLPSpec
from megatron_lab.foreign.huggingface.family import Settings
from megatron_lab.foreign.huggingface.fields import Fields


@dataclass(frozen=True)
class Number:
    """A number that is a setting of ours."""

    theirs: str
    ours: str
    default: float | None
    """Its value where the field is absent."""
    optional: bool = False
    """Whether null is a value, which is None here."""

    def read(self, fields: Fields) -> Settings:
        if self.optional and fields.raw(self.theirs, self.default) is None:
            return {self.ours: None}
        return {self.ours: fields.number(self.theirs, self.default or 0.0)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {self.theirs: getattr(model, self.ours)}


@dataclass(frozen=True)
class Reciprocal:
    """A number whose reciprocal is a setting of ours."""

    theirs: str
    ours: str

    def read(self, fields: Fields) -> Settings:
        given = fields.number(self.theirs, 1.0)
        if not given:
            fields.refuse(self.theirs, "must be above 0")
        return {self.ours: 1 / given if given else 1.0}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {self.theirs: _whole(1 / getattr(model, self.ours))}


class EmbeddingTimesRoot:
    """The embedding multiplied by the root of the hidden size, for which there is no field."""

    def read(self, fields: Fields) -> Settings:
        return {"embedding_multiplier": fields.size("hidden_size") ** 0.5}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class ScoreScale:
    """The factor of attention's scores, as it is or as a number of channels whose root it is divided by."""

    theirs: str
    default: float
    """Value where the field is absent."""
    sizes: Sizes
    """The same as of the architecture: where the factor is the usual one, no setting gives it here."""
    of_channels: bool = False

    def read(self, fields: Fields) -> Settings:
        given = fields.number(self.theirs, self.default)
        if not given:
            fields.refuse(self.theirs, "must be above 0")
            return {}
        scale = given**-0.5 if self.of_channels else given
        return {"softmax_scale": None if scale == self.sizes.head_channels(fields) ** -0.5 else scale}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        scale = model.softmax_scale
        if self.of_channels:
            return {self.theirs: model.head_size if scale is None else _whole(scale**-2)}
        return {self.theirs: model.head_size**-0.5 if scale is None else scale}


def _whole(number: float) -> float:
    """An integer, where rounding alone made it none."""
    return round(number) if math.isclose(number, round(number), rel_tol=1e-12) else number


@dataclass(frozen=True)
class Switch:
    """A switch that is one of ours, or its opposite."""

    theirs: str
    ours: str
    default: bool
    opposite: bool = False

    def read(self, fields: Fields) -> Settings:
        return {self.ours: fields.switch(self.theirs, self.default) is not self.opposite}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {self.theirs: getattr(model, self.ours) is not self.opposite}


def untied(default: bool) -> Switch:
    """Whether the output layer shares the embedding's matrix, by the name and the sense that all architectures have."""
    return Switch("tie_word_embeddings", "untie_embeddings_and_output_weights", default, opposite=True)


@dataclass(frozen=True)
class Only:
    """A field that must have one value: with another the architecture computes what cannot be computed here."""

    theirs: str
    value: Any
    why: str = ""
    also: tuple[Any, ...] = ()
    """Values that mean the same."""

    def read(self, fields: Fields) -> Settings:
        fields.expect(self.theirs, (self.value, *self.also), self.value, self.why)
        return {}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {self.theirs: self.value}


@dataclass(frozen=True)
class ActivationField:
    """The function of the MLP, by transformers' name."""

    theirs: str
    gated: bool
    default: str
    means: Mapping[str, str] = field(default_factory=dict)
    """Names that mean another function in this architecture."""

    def read(self, fields: Fields) -> Settings:
        known = by_hugging_face_name(gated=self.gated)
        known |= {name: known[other] for name, other in self.means.items()}
        flag = known[fields.expect(self.theirs, tuple(known), self.default)].flag
        return {} if flag is None else {flag: True}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        mine = activation_of(model)
        return {self.theirs: mine.hugging_face[0] if mine.hugging_face else mine.name}  # which nobody there reads


@dataclass(frozen=True)
class NotBuilt:
    """Fields about something that cannot be built here, and that the architecture always has."""

    names: tuple[str, ...]
    """Fields; the first is refused, for all of them."""
    why: str

    def read(self, fields: Fields) -> Settings:
        for name in self.names[1:]:
            fields.raw(name)
        fields.refuse(self.names[0], self.why)
        return {}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {}


BiasPlace = Literal["qkv", "output", "mlp"]


@dataclass(frozen=True)
class Biases:
    """Which linear layers of a layer have biases."""

    always: tuple[BiasPlace, ...] = ()
    switches: Mapping[str, tuple[BiasPlace, ...]] | None = None
    """By field: the places that it switches."""
    default: bool = False
    """Value of absent fields."""

    def read(self, fields: Fields) -> Settings:
        places = set(self.always)
        for name, switched in (self.switches or {}).items():
            places |= set(switched) if fields.switch(name, self.default) else set()
        if places == {"qkv", "output", "mlp"}:
            return {"disable_bias_linear": False}
        flags = {"qkv": "add_qkv_bias", "output": "add_attn_output_bias", "mlp": "add_mlp_bias"}
        return {"disable_bias_linear": True, **{flags[place]: True for place in places}}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        layer = layers(model)[0]
        there: dict[BiasPlace, bool] = {
            "qkv": isinstance(layer.attention, AttentionSpec) and layer.attention.qkv_bias,
            "output": layer.attention.output_bias,
            "mlp": isinstance(layer.mlp, MLPSpec) and layer.mlp.bias,
        }
        return {name: all(there[place] for place in switched) for name, switched in (self.switches or {}).items()}


@dataclass(frozen=True)
class Dropouts:
    """Dropout of the embedding and of the layers, which are one here."""

    layers: str
    embedding: str
    default: float

    def read(self, fields: Fields) -> Settings:
        dropout, embedding = (fields.number(name, self.default) for name in (self.layers, self.embedding))
        if embedding != dropout:
            become = f"becomes that of the layers ({self.layers} {dropout:g})"
            fields.notes.append(f"the dropout of the embedding ({self.embedding} {embedding:g}) {become}")
        return {"hidden_dropout": dropout}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {self.layers: model.hidden_dropout, self.embedding: model.hidden_dropout}


@dataclass(frozen=True)
class Sizes:
    """Llama's names of sizes, with grouped queries and heads of any size."""

    max_positions: int
    """Default of max_position_embeddings."""
    kv_heads: int | None = None
    """Default of key-value heads (None: as many as query heads)."""
    head_size: int | None = None
    """Default of channels of a head (None: hidden / heads)."""
    shared_heads: bool = True
    """Whether several query heads may share a key and a value, for which there is a field."""
    free_heads: bool = True
    """Whether heads may have any size, for which there is a field; if not, it is hidden / heads."""
    heads_divide_hidden: bool = False
    """Whether transformers refuses a hidden size that does not divide by the heads, even with heads of another size."""

    def read(self, fields: Fields) -> Settings:
        hidden, heads, depth = (fields.size(name) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
        kv_heads, size = heads, 0
        if self.shared_heads:
            kv_heads = _or_null(fields, "num_key_value_heads", absent=self.kv_heads or heads, null=heads)
        if self.free_heads:
            size = _or_null(fields, "head_dim", absent=self.head_size or 0, null=0)
        if heads % kv_heads:
            fields.refuse("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads = {heads}")
        if hidden % heads and (not size or self.heads_divide_hidden):
            fields.refuse(
                "hidden_size", f"does not divide by num_attention_heads = {heads}{'' if size else ', and there is no head_dim'}"
            )
        size = size or hidden // heads
        if size % 2:
            fields.refuse("hidden_size", f"heads of {size} channels cannot be rotated in pairs")
        positions = max_positions(fields, self.max_positions)
        return {
            "num_layers": depth,
            "hidden_size": hidden,
            "ffn_hidden_size": fields.size("intermediate_size"),
            "num_attention_heads": heads,
            "kv_channels": size,
            "group_query_attention": kv_heads != heads,
            "num_query_groups": kv_heads if kv_heads != heads else 1,
            "seq_length": positions,
            "max_position_embeddings": positions,
        }

    def head_channels(self, fields: Fields) -> int:
        """Channels of a head."""
        size = _or_null(fields, "head_dim", absent=self.head_size or 0, null=0) if self.free_heads else 0
        return size or fields.size("hidden_size") // fields.size("num_attention_heads")

    def write(self, model: ModelConfig) -> dict[str, Any]:
        heads = {"num_key_value_heads": model.num_key_value_heads} if self.shared_heads else {}
        heads |= {"head_dim": model.head_size} if self.free_heads else {}
        return {
            "hidden_size": model.hidden_size,
            "intermediate_size": model.ffn_size,
            "num_hidden_layers": model.num_layers,
            "num_attention_heads": model.num_attention_heads,
            **heads,
            "max_position_embeddings": model.num_positions,
        }


def max_positions(fields: Fields, default: int) -> int:
    """The longest sequence that the model was made for."""
    return fields.size("max_position_embeddings", default)


def _or_null(fields: Fields, name: str, *, absent: int, null: int) -> int:
    """A size for which absence and null mean different things."""
    value = fields.raw(name, "absent")
    return absent if value == "absent" else null if value is None else fields.size(name)
