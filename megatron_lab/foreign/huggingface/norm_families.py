"""OLMo and Gemma: architectures that differ from Llama mainly in their norms.

OLMo has norms after attention and MLP. Gemma has norm weights that are stored as differences from 1.

If a field is absent in config.json, it has the default of the configuration class in transformers.
"""

from __future__ import annotations

from typing import Any

from megatron_lab.foreign.huggingface.family import Family, FieldGroup
from megatron_lab.foreign.huggingface.groups import (
    ActivationField,
    AttentionScaleField,
    FixedField,
    NumberField,
    SizeFields,
    SqrtHiddenEmbeddingScale,
)
from megatron_lab.foreign.huggingface.layer_fields import WindowFields
from megatron_lab.foreign.huggingface.llama_families import ATTENTION_BIAS, build_llama_family
from megatron_lab.foreign.huggingface.neutral_fields import NeutralFields, accept_activation
from megatron_lab.foreign.huggingface.rotary_fields import DEFAULT_THETA, RotaryFields

_NESTED_SCALING_TYPES = ("linear", "llama3", "yarn")
"""Supported scaling types if the rotary parameters are nested by layer type. For all other types, transformers looks for the
parameters in a different place."""
_POST_NORM_NAMES = {"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
_OLMO_SETTINGS = {"norm_placement": "post", "qk_layernorm": True, "qk_layernorm_all_heads": True}
OLMO2 = build_llama_family(
    "olmo2",
    "Olmo2ForCausalLM",
    ATTENTION_BIAS,
    sizes=SizeFields(max_positions=2048),
    epsilon=1e-5,
    fixed_settings=_OLMO_SETTINGS,
    module_names=_POST_NORM_NAMES,
)
OLMO3 = build_llama_family(
    "olmo3",
    "Olmo3ForCausalLM",
    ATTENTION_BIAS,
    WindowFields(default=4096, applies_to="layer_types", interval=4),
    sizes=SizeFields(max_positions=2048),
    rotary=RotaryFields(
        max_positions=2048,
        theta=500000.0,
        local_theta=500000.0,
        local_theta_field="rope_theta",
        scaling_types=_NESTED_SCALING_TYPES,
    ),
    epsilon=1e-5,
    fixed_settings=_OLMO_SETTINGS,
    module_names=_POST_NORM_NAMES,
)
_GEMMA2_SIZES = SizeFields(max_positions=8192, num_kv_heads=4, head_size=256, requires_divisible_hidden=True)
_GEMMA3_SIZES = SizeFields(max_positions=131072, num_kv_heads=4, head_size=256, requires_divisible_hidden=True)


def _build_gemma_family(name: str, architecture: str, *field_groups: FieldGroup, sizes: SizeFields, **options: Any) -> Family:
    """Describe an architecture that has the features shared by all Gemma models.

    Args:
        name: `model_type` in config.json.
        architecture: name of the class in transformers.
        field_groups: converters of config.json fields in addition to those of all Gemma models.
        sizes: converter of the config.json fields for model sizes.
        options: further arguments of `build_llama_family`.
    """
    fixed_settings = {"apply_layernorm_1p": True, **options.pop("fixed_settings", {})}
    common_groups = (
        SqrtHiddenEmbeddingScale(),
        FixedField("use_bidirectional_attention", None, "attention is causal here", equivalent_values=(False,)),
    )
    return build_llama_family(
        name,
        architecture,
        ATTENTION_BIAS,
        *common_groups,
        *field_groups,
        sizes=sizes,
        is_tied=True,
        fixed_settings=fixed_settings,
        **options,
    )


_SANDWICH_OPTIONS: dict[str, Any] = dict(
    activation=ActivationField("hidden_activation", is_gated=True, default="gelu_pytorch_tanh"),
    module_names={**_POST_NORM_NAMES, "mlp_norm": "pre_feedforward_layernorm"},
    neutral_fields=(
        NeutralFields(("hidden_act",), accept_activation("gelu"), "differs from hidden_activation, which replaces it"),
    ),
)
GEMMA = _build_gemma_family(
    "gemma",
    "GemmaForCausalLM",
    sizes=SizeFields(max_positions=8192, num_kv_heads=16, head_size=256),
    activation=ActivationField("hidden_act", is_gated=True, default="gelu_pytorch_tanh", synonyms={"gelu": "gelu_pytorch_tanh"}),
)
GEMMA2 = _build_gemma_family(
    "gemma2",
    "Gemma2ForCausalLM",
    WindowFields(default=4096, applies_to="layer_types", interval=2),
    AttentionScaleField("query_pre_attn_scalar", 256, _GEMMA2_SIZES, is_num_channels=True),
    NumberField("attn_logit_softcapping", "attn_logit_softcapping", 50.0, is_nullable=True),
    NumberField("final_logit_softcapping", "final_logit_softcapping", 30.0, is_nullable=True),
    sizes=_GEMMA2_SIZES,
    fixed_settings={"norm_placement": "sandwich"},
    **_SANDWICH_OPTIONS,
)
GEMMA3 = _build_gemma_family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    WindowFields(default=4096, applies_to="layer_types", interval=6, interval_field="sliding_window_pattern"),
    AttentionScaleField("query_pre_attn_scalar", 256, _GEMMA3_SIZES, is_num_channels=True),
    NumberField("attn_logit_softcapping", "attn_logit_softcapping", None, is_nullable=True),
    NumberField("final_logit_softcapping", "final_logit_softcapping", None, is_nullable=True),
    sizes=_GEMMA3_SIZES,
    rotary=RotaryFields(max_positions=131072, theta=1e6, local_theta=DEFAULT_THETA, scaling_types=_NESTED_SCALING_TYPES),
    fixed_settings={"norm_placement": "sandwich", "qk_layernorm": True},
    **_SANDWICH_OPTIONS,
)
