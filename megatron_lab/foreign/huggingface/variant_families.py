"""Ministral, Seed-OSS and Arcee: variants of Llama and Mistral that differ in one or two features.

If a field is absent in config.json, it has the default of the configuration class in transformers.
"""

from __future__ import annotations

from megatron_lab.foreign.huggingface.groups import ActivationField, BiasFields, DropoutFields, SizeFields
from megatron_lab.foreign.huggingface.layer_fields import WindowFields
from megatron_lab.foreign.huggingface.layernorm_families import UNGATED_MLP_NAMES
from megatron_lab.foreign.huggingface.llama_families import ATTENTION_AND_MLP_BIAS, build_llama_family
from megatron_lab.foreign.huggingface.rotary_fields import RotaryFields

_QUERY_SCALING = "llama_4_scaling_beta"

MINISTRAL = build_llama_family(
    "ministral",
    "MinistralForCausalLM",
    BiasFields(),
    WindowFields(default=4096, applies_to="layer_types"),
    sizes=SizeFields(max_positions=4096 * 32, num_kv_heads=8),
)
MINISTRAL3 = build_llama_family(
    "ministral3",
    "Ministral3ForCausalLM",
    BiasFields(),
    WindowFields(default=None),
    sizes=SizeFields(max_positions=262144, num_kv_heads=8, head_size=128),
    rotary=RotaryFields(
        max_positions=262144,
        default_scaling={
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            _QUERY_SCALING: 0.1,
        },
        query_scaling_key=_QUERY_SCALING,
    ),
    epsilon=1e-5,
)
SEED_OSS = build_llama_family(
    "seed_oss",
    "SeedOssForCausalLM",
    BiasFields(layers_by_field={"attention_bias": ("qkv",)}, default=True),
    BiasFields(layers_by_field={"attention_out_bias": ("output",), "mlp_bias": ("mlp",)}),
    DropoutFields("residual_dropout", None, 0.1),
    sizes=SizeFields(max_positions=524288, num_kv_heads=8, head_size=128),
    attention_dropout=0.1,
)
ARCEE = build_llama_family(
    "arcee",
    "ArceeForCausalLM",
    ATTENTION_AND_MLP_BIAS,
    sizes=SizeFields(max_positions=4096, requires_divisible_hidden=True),
    epsilon=1e-5,
    activation=ActivationField("hidden_act", is_gated=False, default="relu2"),
    module_names=UNGATED_MLP_NAMES,
)
