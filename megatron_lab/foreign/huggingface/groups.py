"""Converters of config.json fields that several architectures share: numbers, booleans, sizes and biases."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron.config.model import ModelConfig
from megatron.spec.activations import build_hf_name_table, get_activation
from megatron.spec.layers import AttentionSpec, build_layer_specs
from megatron.spec.mlps import MLPSpec
from megatron_lab.foreign.huggingface.family import Settings
from megatron_lab.foreign.huggingface.fields import Fields


@dataclass(frozen=True)
class NumberField:
    """Converter of a config.json field whose value is a number and equals a setting of this framework."""

    field_name: str
    setting: str
    default: float | None
    """Value that applies if config.json does not contain the field."""
    is_nullable: bool = False
    """Whether the field may be `null`, which corresponds to the setting None."""

    def parse(self, fields: Fields) -> Settings:
        if self.is_nullable and fields.get_raw(self.field_name, self.default) is None:
            return {self.setting: None}
        return {self.setting: fields.get_number(self.field_name, self.default or 0.0)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {self.field_name: getattr(model, self.setting)}


@dataclass(frozen=True)
class ReciprocalField:
    """Converter of a config.json field whose value is the reciprocal (1 / x) of a setting of this framework."""

    field_name: str
    setting: str

    def parse(self, fields: Fields) -> Settings:
        value = fields.get_number(self.field_name, 1.0)
        if not value:
            fields.refuse(self.field_name, "must be above 0")
        return {self.setting: 1 / value if value else 1.0}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {self.field_name: _round_if_close(1 / getattr(model, self.setting))}


class SqrtHiddenEmbeddingScale:
    """Converter for architectures that always multiply the embedding by the square root of the hidden size. No config.json field
    describes this factor."""

    def parse(self, fields: Fields) -> Settings:
        return {"embedding_multiplier": fields.get_size("hidden_size") ** 0.5}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class AttentionScaleField:
    """Converter of the config.json field that determines the factor of the attention scores. The field contains the factor itself,
    or a number of channels n that stands for the factor n**-0.5."""

    field_name: str
    default: float
    """Value that applies if config.json does not contain the field."""
    sizes: SizeFields
    """Converter of the size fields of the architecture, from which the head size is read. If the factor is head_size**-0.5, as
    usual, the setting `softmax_scale` is None."""
    is_num_channels: bool = False
    """Whether the value of the field is a number of channels n, which stands for the factor n**-0.5 (1/sqrt(n)). If False, the
    value is the factor itself."""

    def parse(self, fields: Fields) -> Settings:
        value = fields.get_number(self.field_name, self.default)
        if not value:
            fields.refuse(self.field_name, "must be above 0")
            return {}
        scale, head_size = value**-0.5 if self.is_num_channels else value, self.sizes.get_head_size(fields)
        # The head size is 0 if the hidden size is not valid, which is an error already.
        return {"softmax_scale": None if head_size and scale == head_size**-0.5 else scale}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        scale = model.softmax_scale
        if self.is_num_channels:
            return {self.field_name: model.head_size if scale is None else _round_if_close(scale**-2)}
        return {self.field_name: model.head_size**-0.5 if scale is None else scale}


def _round_if_close(value: float) -> float:
    """Return the nearest integer if a value differs from it only by rounding errors, else the value."""
    return round(value) if math.isclose(value, round(value), rel_tol=1e-12) else value


@dataclass(frozen=True)
class BoolField:
    """Converter of a config.json field whose value is a boolean setting of this framework, or the negation of a setting."""

    field_name: str
    setting: str
    default: bool
    is_inverted: bool = False

    def parse(self, fields: Fields) -> Settings:
        return {self.setting: fields.get_bool(self.field_name, self.default) is not self.is_inverted}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {self.field_name: getattr(model, self.setting) is not self.is_inverted}


def build_tied_embeddings_field(default: bool) -> BoolField:
    """Return the converter of the config.json field tie_word_embeddings, which all architectures have.

    Args:
        default: value if config.json does not contain the field: whether embedding and output layer share their weight.
    """
    return BoolField("tie_word_embeddings", "untie_embeddings_and_output_weights", default, is_inverted=True)


@dataclass(frozen=True)
class FixedField:
    """Converter of a config.json field that must have one value, because this framework does not support any other."""

    field_name: str
    value: Any
    reason: str = ""
    equivalent_values: tuple[Any, ...] = ()
    """Other values of the field that mean the same as `value`, and are accepted too. Written files contain `value`."""

    def parse(self, fields: Fields) -> Settings:
        fields.expect(self.field_name, (self.value, *self.equivalent_values), self.value, self.reason)
        return {}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {self.field_name: self.value}


@dataclass(frozen=True)
class ActivationField:
    """Converter of the config.json field with the activation function of the MLP, by its name in transformers."""

    field_name: str
    is_gated: bool
    default: str
    synonyms: Mapping[str, str] = field(default_factory=dict)
    """Names that mean a different function in this architecture than elsewhere, each mapped to the usual transformers name of
    that function."""

    def parse(self, fields: Fields) -> Settings:
        activations = build_hf_name_table(gated=self.is_gated)
        activations |= {name: activations[synonym] for name, synonym in self.synonyms.items()}
        setting = activations[fields.expect(self.field_name, tuple(activations), self.default)].config_field
        return {} if setting is None else {setting: True}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        activation = get_activation(model)
        # Of several names, the usual name in the architecture. transformers cannot read the name of a registered activation.
        names = activation.hf_names or (activation.name,)
        return {self.field_name: self.default if self.default in names else names[0]}


@dataclass(frozen=True)
class RepeatedField:
    """Converter of a config.json field of older files that repeats the value of another field. Written files do not contain it."""

    field_name: str
    repeated: str
    """Name of the field with the same value."""
    default: float | Callable[[Fields], float]
    """Value of the repeated field if config.json does not contain it, or a function that computes this value from the fields."""

    def parse(self, fields: Fields) -> Settings:
        value = fields.get_raw(self.repeated)
        if value is None:
            value = self.default(fields) if callable(self.default) else self.default
        if fields.get_raw(self.field_name) not in (None, value):
            fields.refuse(self.field_name, f"differs from {self.repeated} = {value!r}")
        return {}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class UnsupportedFields:
    """Config.json fields of a feature that every model of an architecture has, but this framework does not support. `parse`
    therefore always records an error."""

    names: tuple[str, ...]
    """Names of the fields. The error message names only the first."""
    reason: str

    def parse(self, fields: Fields) -> Settings:
        for name in self.names[1:]:
            fields.get_raw(name)
        fields.refuse(self.names[0], self.reason)
        return {}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {}


BiasedLayer = Literal["qkv", "output", "mlp"]


@dataclass(frozen=True)
class BiasFields:
    """Converter of the config.json fields that determine which linear layers have biases."""

    always_biased: tuple[BiasedLayer, ...] = ()
    layers_by_field: Mapping[str, tuple[BiasedLayer, ...]] | None = None
    """Boolean fields, each mapped to the linear layers that have biases if the field is true."""
    default: bool = False
    """Value of these fields if config.json does not contain them."""

    def parse(self, fields: Fields) -> Settings:
        biased_layers = set(self.always_biased)
        for name, layers in (self.layers_by_field or {}).items():
            biased_layers |= set(layers) if fields.get_bool(name, self.default) else set()
        if biased_layers == {"qkv", "output", "mlp"}:
            return {"disable_bias_linear": False}
        settings_by_layer = {"qkv": "add_qkv_bias", "output": "add_attn_output_bias", "mlp": "add_mlp_bias"}
        return {"disable_bias_linear": True, **{settings_by_layer[layer]: True for layer in biased_layers}}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        layer = build_layer_specs(model)[0]
        has_bias: dict[BiasedLayer, bool] = {
            "qkv": isinstance(layer.attention, AttentionSpec) and layer.attention.qkv_bias,
            "output": layer.attention.output_bias,
            "mlp": isinstance(layer.mlp, MLPSpec) and layer.mlp.bias,
        }
        return {
            name: all(has_bias[name_of_layer] for name_of_layer in layers) for name, layers in (self.layers_by_field or {}).items()
        }


@dataclass(frozen=True)
class DropoutFields:
    """Converter of the config.json fields for the dropout of the embedding and of the layers.

    This framework has one dropout setting for both. If the two values differ, the value for the layers applies, and a note tells
    the user.
    """

    layers_field: str
    embedding_field: str | None
    """Name of the field for the embedding; None if the embedding of the architecture has no dropout."""
    default: float

    def parse(self, fields: Fields) -> Settings:
        dropout = fields.get_number(self.layers_field, self.default)
        embedding = 0.0 if self.embedding_field is None else fields.get_number(self.embedding_field, self.default)
        if embedding != dropout:
            source = "none in transformers" if self.embedding_field is None else f"{self.embedding_field} {embedding:g}"
            consequence = f"becomes that of the layers ({self.layers_field} {dropout:g})"
            fields.notes.append(f"the dropout of the embedding ({source}) {consequence}")
        return {"hidden_dropout": dropout}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {name: model.hidden_dropout for name in (self.layers_field, self.embedding_field) if name is not None}


@dataclass(frozen=True)
class SizeFields:
    """Converter of the config.json fields for model sizes with the names that Llama uses, including the number of key-value heads
    and the head size."""

    max_positions: int
    """Maximum sequence length if config.json has no field max_position_embeddings."""
    num_kv_heads: int | None = None
    """Number of key-value heads if config.json has no field num_key_value_heads; None for the number of query heads."""
    head_size: int | None = None
    """Number of channels per head if config.json has no field head_dim; None for hidden size / number of heads."""
    has_kv_heads_field: bool = True
    """Whether the architecture has the field num_key_value_heads. Without it, each query head has its own key head and value
    head."""
    has_head_dim_field: bool = True
    """Whether the architecture has the field head_dim. Without it, the head size is hidden size / number of heads."""
    requires_divisible_hidden: bool = False
    """Whether transformers requires that the hidden size is a multiple of the number of heads, even with a head_dim."""

    def parse(self, fields: Fields) -> Settings:
        hidden_size, num_heads, num_layers = (
            fields.get_size(name) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")
        )
        num_kv_heads, head_size = num_heads, 0
        if self.has_kv_heads_field:
            num_kv_heads = _get_nullable_size(fields, "num_key_value_heads", absent=self.num_kv_heads or num_heads, null=num_heads)
        if self.has_head_dim_field:
            head_size = _get_nullable_size(fields, "head_dim", absent=self.head_size or 0, null=0)
        if num_heads % num_kv_heads:
            fields.refuse("num_key_value_heads", f"{num_kv_heads} does not divide num_attention_heads = {num_heads}")
        if hidden_size % num_heads and (not head_size or self.requires_divisible_hidden):
            fields.refuse(
                "hidden_size",
                f"is not a multiple of num_attention_heads = {num_heads}{'' if head_size else ', and there is no head_dim'}",
            )
        head_size = head_size or hidden_size // num_heads
        if head_size % 2:
            fields.refuse("hidden_size", f"heads of {head_size} channels cannot be rotated in pairs: the number must be even")
        num_positions = get_max_positions(fields, self.max_positions)
        return {
            "num_layers": num_layers,
            "hidden_size": hidden_size,
            "ffn_hidden_size": fields.get_size("intermediate_size"),
            "num_attention_heads": num_heads,
            "kv_channels": head_size,
            "group_query_attention": num_kv_heads != num_heads,
            "num_query_groups": num_kv_heads if num_kv_heads != num_heads else 1,
            "seq_length": num_positions,
            "max_position_embeddings": num_positions,
        }

    def get_head_size(self, fields: Fields) -> int:
        """Return the number of channels per head that the fields describe."""
        head_size = _get_nullable_size(fields, "head_dim", absent=self.head_size or 0, null=0) if self.has_head_dim_field else 0
        return head_size or fields.get_size("hidden_size") // fields.get_size("num_attention_heads")

    def write(self, model: ModelConfig) -> dict[str, Any]:
        optional_fields = {"num_key_value_heads": model.num_key_value_heads} if self.has_kv_heads_field else {}
        optional_fields |= {"head_dim": model.head_size} if self.has_head_dim_field else {}
        return {
            "hidden_size": model.hidden_size,
            "intermediate_size": model.ffn_size,
            "num_hidden_layers": model.num_layers,
            "num_attention_heads": model.num_attention_heads,
            **optional_fields,
            "max_position_embeddings": model.num_positions,
        }


def get_max_positions(fields: Fields, default: int) -> int:
    """Return the maximum sequence length, from the field max_position_embeddings.

    Args:
        fields: fields of config.json.
        default: value if the field is absent.
    """
    return fields.get_size("max_position_embeddings", default)


def _get_nullable_size(fields: Fields, name: str, *, absent: int, null: int) -> int:
    """Return a size from a field for which `null` has a different meaning than absence.

    Args:
        fields: config.json.
        name: name of the field.
        absent: value if the field is absent.
        null: value if the field is `null`.
    """
    value = fields.get_raw(name, "absent")
    return absent if value == "absent" else null if value is None else fields.get_size(name)
