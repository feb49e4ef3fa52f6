"""An architecture of transformers, as data: the parts that it always has, the fields of its config.json, the names of its tensors.
What is read and written follows from these; so does which models fit: those that are read from what is written of them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron.config.checks import experts as expert_rules
from megatron.config.checks import model as model_rules
from megatron.config.checks.finding import rules_in
from megatron.config.config import Config
from megatron.config.model import FREE_FIELDS, ModelConfig
from megatron.config.setting import typed
from megatron.parallel.params import global_records
from megatron.spec.layers import layers, norm_of
from megatron.spec.weights import in_layer, model_weights
from megatron_lab.foreign.huggingface.fields import Fields
from megatron_lab.foreign.huggingface.layout import WeightLayout, projection_rows, share_tensors

Settings = dict[str, Any]
"""Some settings of `ModelConfig`, by their names."""


class FieldGroup(Protocol):
    """Some fields of a config.json that are about one thing."""

    def read(self, fields: Fields) -> Settings:
        """What the fields say. What cannot be accepted is recorded in them."""
        ...

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The fields for a model. One that they cannot describe is described as another, which is found when they are read."""
        ...


@dataclass(frozen=True, kw_only=True)
class Family:
    """An architecture of transformers."""

    model_type: str
    """Its name in config.json, which is also its name here."""
    architecture: str
    """The class of transformers that has the output layer."""
    always: Mapping[str, Any]
    """Settings that every model of this architecture has."""
    groups: tuple[FieldGroup, ...]
    """What else its config.json says."""
    without_effect: tuple[str, ...] = ()
    """Fields of this architecture that do not change the logits."""
    later_tokens: tuple[str, ...] = ()
    """Names of the field that says how many layers behind the last predict tokens after the next. They are not read: theirs map
    hidden states that are normed already, and have a final norm of their own."""

    prefix: str
    """The beginning of all tensors' names but the output layer's; absent in files saved without the output layer."""
    layer: str
    """Name of layer {} after the prefix."""
    names: Mapping[str, str]
    """Their modules by ours: the name within the layer, or else after the prefix. Of several, the rows laid end to end are ours. {}
    is the number of an expert: theirs have modules of their own. A parameter that has another name there than ours has its own."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Tensors that some files hold under another name: the name there, and that by `names`."""
    grouped_heads: bool = False
    """Whether rows of their fused projection are grouped by key-value head, as ours are."""
    transposed: bool = False
    """Whether matrices in layers are stored [inputs, outputs]."""
    buffers: str = field(default="(?!)", kw_only=True)
    """Regular expression of tensors after the prefix that old files hold and that are no weights (tables, masks)."""

    @property
    def output(self) -> str:
        """Name of the output layer's matrix, which a tied model does not have."""
        return f"{self.names['output']}.weight"

    def read(self, fields: Fields) -> ModelConfig:
        """The model that a config.json describes. What cannot be accepted is recorded in the fields."""
        settings: Settings = dict(self.always)
        for group in self.groups:
            settings |= group.read(fields)
        model = ModelConfig(**settings)
        if not fields.faults:
            for rule in (*rules_in(model_rules), *rules_in(expert_rules)):
                for finding in rule(Config(model=model), 1):
                    fields.faults.append(f"the model that it describes cannot be built: {finding.message}")
        return model

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The fields of config.json for a fitting model, except those that all architectures have."""
        return {name: value for group in self.groups for name, value in group.write(model).items()}

    def fits(self, model: ModelConfig) -> bool:
        """Whether this architecture expresses a model."""
        fields = Fields(self.model_type, self.write(model))
        again = self.read(fields)
        return not fields.faults and computed(model) == computed(again)

    def misfits(self, model: ModelConfig) -> list[str]:
        """What this architecture cannot express of a model, each as a text."""
        fields = Fields(self.model_type, self.write(model))
        again = self.read(fields)
        return different_settings(model, again) or fields.faults

    def layouts(self, model: ModelConfig, vocab_size: int) -> dict[str, WeightLayout]:
        """Where every parameter of the model is in their tensors, in the order of the forward."""
        found = {}
        for name, record in global_records(model, vocab_size).items():
            layer, part = in_layer(name)
            module, _, attribute = part.rpartition(".")
            before = "" if module == "output" else self.prefix if layer is None else f"{self.prefix}{self.layer.format(layer)}."
            experts = range(model.num_experts or 0) if "{}" in self.names[module] else (0,)
            each_expert = (f"{each.format(expert)}.{attribute}" for expert in experts for each in self.names[module].split())
            theirs = [f"{before}{each}" for each in ([self.names[part]] if part in self.names else each_expert)]
            is_matrix, order = record.kind != "vector", None
            rows = math.prod(record.shape[:-1] if is_matrix else record.shape)
            counts = [rows // len(theirs)] * len(theirs)
            if module == "attention.qkv" and not self.grouped_heads:
                parts, order = projection_rows(model)
                counts = parts if len(theirs) == len(parts) else counts  # or one tensor with all three
            transposed = self.transposed and is_matrix and layer is not None
            found[name] = WeightLayout(
                record.shape, is_matrix, dict(zip(theirs, counts, strict=True)), order, transposed, record.by_counts is not None
            )
        share_tensors(found)
        return found

    def is_of_later_token(self, name: str, model: ModelConfig, depths: int) -> bool:
        """Whether a tensor in a file is of one of so many layers behind the last."""
        found = re.match(rf"(?:{re.escape(self.prefix)})?{self.layer.format('([0-9]+)')}\.", name)
        return found is not None and model.num_layers <= int(found[1]) < model.num_layers + depths

    def is_buffer(self, name: str) -> bool:
        """Whether a tensor in a file is a table that is computed anew, not a weight."""
        return re.fullmatch(rf"(?:{re.escape(self.prefix)})?(?:{self.buffers})", name) is not None


IN_SPECS = frozenset(
    {
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "group_query_attention"),
        *("num_query_groups", "max_position_embeddings", "position_embedding_type", "normalization", "norm_epsilon"),
        *("swiglu", "squared_relu", "untie_embeddings_and_output_weights", "disable_bias_linear", "add_qkv_bias"),
        *("add_attn_output_bias", "add_mlp_bias", "qk_layernorm", "qk_layernorm_all_heads", "window_size", "window_attn_skip_freq"),
        *("no_rope_freq", "softmax_scale", "attn_logit_softcapping", "softmax_type", "rotary_base", "rotary_base_local"),
        *("rotary_percent", "rotary_interleaved", "rotary_seq_len_interpolation_factor", "use_rope_scaling", "rope_scaling_factor"),
        *("rope_low_freq_factor", "rope_high_freq_factor", "rope_type", "rotary_scaling_factor", "beta_fast", "beta_slow"),
        *("original_max_position_embeddings", "mscale", "mscale_all_dim", "yarn_correction_range_round_to_int"),
        *("rope_attention_factor", "rope_short_factors", "rope_long_factors"),
        *("num_experts", "moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk", "moe_shared_expert_intermediate_size"),
        *("moe_shared_expert_gate", "moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor"),
        *("moe_router_num_groups", "moe_router_group_topk", "moe_router_enable_expert_bias"),
    }
)
"""Settings whose whole effect is in the specs of layers and weights, so that two spellings of one model are known as the same. All
others are compared as they are."""


_OF_TRAINING: Settings = {
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": None,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_router_dtype": None,
    "moe_router_bias_update_rate": 1e-3,
    "moe_expert_capacity_factor": None,
    "moe_token_drop_policy": "probs",
    "moe_pad_expert_input_to_capacity": False,
    "moe_input_jitter_eps": None,
}
"""Settings in the specs of layers that change nothing but the training of a model, or rounding, with values for all."""


def computed(model: ModelConfig) -> tuple[Any, ...]:
    """What tells a model from all that compute something else or have other weights; the rest of its settings is spelling."""
    model = dataclasses.replace(model, **_OF_TRAINING)
    weights = tuple((weight.name, weight.shape, weight.tied) for weight in model_weights(model, 1))
    spelling = IN_SPECS | FREE_FIELDS
    others = {name: value for name, value in vars(model).items() if name not in spelling}
    return layers(model), norm_of(model), weights, others


def different_settings(model: ModelConfig, other: ModelConfig) -> list[str]:
    """Where two models compute something else: the settings in which they differ, each as a text."""
    there = computed(other)
    if computed(model) == there:
        return []
    mine, theirs = vars(model), vars(other)
    differ = [name for name in mine if mine[name] != theirs[name] and name not in FREE_FIELDS]
    # A setting may be spelled otherwise and mean the same: those that alone make another model are named, if there are any.
    telling = [name for name in differ if computed(dataclasses.replace(other, **{name: mine[name]})) != there]
    return [f"{typed(name)} is {_said(mine[name])}, there {_said(theirs[name])}" for name in telling or differ]


def _said(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "on" if value else "off" if value is False else "by default"
    return f"{value:g}" if isinstance(value, float) else str(value)
