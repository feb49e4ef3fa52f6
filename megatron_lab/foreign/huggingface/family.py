"""Declarative description of an architecture of transformers: its fixed settings, its config.json fields and its tensor names.

Both reading and writing follow from this description. An architecture supports a model if the config.json written for the model,
read again, gives an equivalent model.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron.config.checks import experts as expert_rules
from megatron.config.checks import model as model_rules
from megatron.config.checks.finding import collect_rules
from megatron.config.config import Config
from megatron.config.model import CHANGEABLE_FIELDS, ModelConfig
from megatron.config.setting import get_flag_name
from megatron.parallel.params import build_global_records
from megatron.spec.layers import build_layer_specs, build_norm_spec
from megatron.spec.weights import iter_weights, split_layer_name
from megatron_lab.foreign.huggingface.fields import Fields
from megatron_lab.foreign.huggingface.layout import WeightLayout, build_qkv_row_order, merge_shared_tensors
from megatron_lab.foreign.huggingface.neutral_fields import NeutralFields, judge_unread_fields

Settings = dict[str, Any]
"""Some settings of `ModelConfig` by name."""


class FieldGroup(Protocol):
    """Converter between a group of related config.json fields and settings of this framework."""

    def parse(self, fields: Fields) -> Settings:
        """Convert the fields to settings. Unsupported values are recorded as errors in `fields`."""
        ...

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Convert the settings of a model to fields.

        If the fields cannot describe the model, the result describes a different model. `Family.supports` detects this by parsing
        the result.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Family:
    """Description of an architecture of transformers: how its config.json and tensors correspond to settings and parameters of this
    framework."""

    model_type: str
    """`model_type` in config.json, which is also the name of the family in this framework."""
    architecture: str
    """Name of the transformers class of the model with its output layer, such as `LlamaForCausalLM`."""
    fixed_settings: Mapping[str, Any]
    """Values of `ModelConfig` fields that all models of this architecture share, by field name."""
    field_groups: tuple[FieldGroup, ...]
    """Converters of the config.json fields that vary between models of this architecture."""
    ignored_fields: tuple[str, ...] = ()
    """Names of config.json fields of this architecture that do not change the logits."""
    neutral_fields: tuple[NeutralFields, ...] = ()
    """Config.json fields of this architecture that change nothing at some values, in addition to those of all architectures
    (`NEUTRAL_FIELDS`)."""
    mtp_fields: tuple[str, ...] = ()
    """Possible names of the field with the number of multi-token-prediction layers.

    The tensors of these layers are not read, because their architecture differs from that of this framework: the layers get
    normalized hidden states and have their own final norm.
    """

    prefix: str
    """Start of all tensor names except that of the output layer, such as `model.`. Files saved without the output layer do not
    have the prefix."""
    layer_name: str
    """Name of the module of a layer, after the prefix, such as `layers.{}`. `{}` stands for the index of the layer."""
    module_names: Mapping[str, str]
    """Hugging Face module names, by module name of this framework.

    The name of a module in a layer starts after the name of the layer, all other names start after `prefix`. A value may
    contain several names, separated by blanks: the rows of these modules, concatenated, are the rows of the parameter. `{}` in
    a name stands for the index of an expert, because transformers has a separate module for each expert. A key may also name a
    single parameter, if the Hugging Face name of the parameter does not follow from its module.
    """
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Alternative tensor names that some files contain, each mapped to the name according to `module_names`."""
    has_grouped_qkv: bool = False
    """Whether the rows of the fused query-key-value projection are grouped by key-value head, as in this framework."""
    is_transposed: bool = False
    """Whether the weight matrices of linear layers are stored transposed, as [inputs, outputs]."""
    buffer_pattern: str = field(default="(?!)", kw_only=True)
    """Regular expression for the names (after `prefix`) of stored tensors that are not weights: tables and masks (buffers) in
    old files."""

    @property
    def output_name(self) -> str:
        """Name of the output layer's weight. A model with tied embeddings does not have this tensor."""
        return f"{self.module_names['output']}.weight"

    def parse(self, fields: Fields) -> ModelConfig:
        """Convert a config.json to a model configuration. Unsupported values are recorded as errors in `fields`."""
        settings: Settings = dict(self.fixed_settings)
        for group in self.field_groups:
            settings |= group.parse(fields)
        for name in self.mtp_fields:
            if (num_layers := fields.get_raw(name)) is not None and (type(num_layers) is not int or num_layers < 0):
                fields.refuse(name, "must be a number of layers")
        model = ModelConfig(**settings)
        if not fields.errors:
            for rule in (*collect_rules(model_rules), *collect_rules(expert_rules)):
                for finding in rule(Config(model=model), 1):
                    fields.errors.append(f"the described model cannot be built: {finding.message}")
        judge_unread_fields(fields, model, self.architecture, self.neutral_fields)
        return model

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Convert a supported model configuration to config.json fields. `model_type`, `architectures`, `vocab_size` and other
        fields that do not depend on the architecture are left to the exporter."""
        return {name: value for group in self.field_groups for name, value in group.write(model).items()}

    def supports(self, model: ModelConfig) -> bool:
        """Return whether a config.json of this architecture can describe a model."""
        fields = Fields(self.model_type, self.write(model))
        parsed_model = self.parse(fields)
        return not fields.errors and compute_signature(model) == compute_signature(parsed_model)

    def describe_mismatches(self, model: ModelConfig) -> list[str]:
        """Return a message for each property of a model that a config.json of this architecture cannot describe."""
        fields = Fields(self.model_type, self.write(model))
        parsed_model = self.parse(fields)
        return list_different_settings(model, parsed_model) or fields.errors

    def build_layouts(self, model: ModelConfig, vocab_size: int) -> dict[str, WeightLayout]:
        """Return, for each parameter of a model, the Hugging Face tensors and the rows in them that hold the parameter. The
        parameters are in the order of the forward pass."""
        layouts = {}
        for name, record in build_global_records(model, vocab_size).items():
            layer, name_in_layer = split_layer_name(name)
            module, _, attribute = name_in_layer.rpartition(".")
            prefix = (
                "" if module == "output" else self.prefix if layer is None else f"{self.prefix}{self.layer_name.format(layer)}."
            )
            experts = range(model.num_experts or 0) if "{}" in self.module_names[module] else (0,)
            expert_names = (
                f"{template.format(expert)}.{attribute}" for expert in experts for template in self.module_names[module].split()
            )
            hf_names = [
                f"{prefix}{hf_name}"
                for hf_name in ([self.module_names[name_in_layer]] if name_in_layer in self.module_names else expert_names)
            ]
            is_matrix, row_order = record.param_type != "vector", None
            num_rows = math.prod(record.shape[:-1] if is_matrix else record.shape)
            row_counts = [num_rows // len(hf_names)] * len(hf_names)
            if module == "attention.qkv" and not self.has_grouped_qkv:
                qkv_counts, row_order = build_qkv_row_order(model)
                row_counts = qkv_counts if len(hf_names) == len(qkv_counts) else row_counts  # else the three are fused
            is_transposed = self.is_transposed and is_matrix and layer is not None
            layouts[name] = WeightLayout(
                record.shape,
                is_matrix,
                dict(zip(hf_names, row_counts, strict=True)),
                row_order,
                is_transposed,
                record.count_update is not None,
            )
        merge_shared_tensors(layouts)
        return layouts

    def is_mtp_tensor(self, name: str, model: ModelConfig, num_mtp_layers: int) -> bool:
        """Return whether a stored tensor belongs to one of the `num_mtp_layers` multi-token-prediction layers, which are stored
        after the last layer."""
        match = re.match(rf"(?:{re.escape(self.prefix)})?{self.layer_name.format('([0-9]+)')}\.", name)
        return match is not None and model.num_layers <= int(match[1]) < model.num_layers + num_mtp_layers

    def is_buffer(self, name: str) -> bool:
        """Return whether a stored tensor is a buffer that the model recomputes, not a weight."""
        return re.fullmatch(rf"(?:{re.escape(self.prefix)})?(?:{self.buffer_pattern})", name) is not None


SPEC_FIELDS = frozenset(
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
"""Settings whose complete effect is visible in the specs of layers and weights.

Models with equal specs are equivalent, even if these settings differ. All other settings are compared directly.
"""


_TRAINING_SETTINGS: Settings = {
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
"""Settings in the layer specs that affect only training or rounding, with the values that replace them in a comparison."""


def compute_signature(model: ModelConfig) -> tuple[Any, ...]:
    """Return a value that is equal for two model configurations if they describe the same function of the same parameters (names
    and shapes).

    The value does not depend on settings that only describe the same model differently.
    """
    model = dataclasses.replace(model, **_TRAINING_SETTINGS)
    weights = tuple((weight.name, weight.shape, weight.tied) for weight in iter_weights(model, 1))
    excluded = SPEC_FIELDS | CHANGEABLE_FIELDS
    other_settings = {name: value for name, value in vars(model).items() if name not in excluded}
    return build_layer_specs(model), build_norm_spec(model), weights, other_settings


def list_different_settings(model: ModelConfig, candidate: ModelConfig) -> list[str]:
    """Return a message for each setting that makes two models compute different functions; an empty list if the models are
    equivalent.

    A setting may differ without changing the function. If some settings change the function when they alone differ, only these
    settings are listed. If only a combination changes it, all differing settings are listed.

    Args:
        model: model whose values are named first in the messages.
        candidate: model to compare with.
    """
    candidate_signature = compute_signature(candidate)
    if compute_signature(model) == candidate_signature:
        return []
    model_settings, candidate_settings = vars(model), vars(candidate)
    differ = [name for name in model_settings if model_settings[name] != candidate_settings[name] and name not in CHANGEABLE_FIELDS]
    # Different settings may be equivalent. Prefer to list those that change the model on their own.
    decisive = [
        name
        for name in differ
        if compute_signature(dataclasses.replace(candidate, **{name: model_settings[name]})) != candidate_signature
    ]
    return [
        f"{get_flag_name(name)} is {_format_value(model_settings[name])}, there {_format_value(candidate_settings[name])}"
        for name in decisive or differ
    ]


def _format_value(value: Any) -> str:
    """Format the value of a setting for a message: true and false as "on" and "off", None as "by default"."""
    if value is None or isinstance(value, bool):
        return "on" if value else "off" if value is False else "by default"
    return f"{value:g}" if isinstance(value, float) else str(value)
