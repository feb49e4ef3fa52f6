"""Mixture-of-experts architectures of transformers: Mixtral, Qwen and DeepSeek. The description of GPT-OSS is complete except for
the biases of its experts, which are not supported yet.

If a field is absent in config.json, it has the default of the configuration class in transformers.
"""

from __future__ import annotations

from typing import Any

from megatron.config.model import ModelConfig
from megatron_lab.foreign.huggingface.family import Settings
from megatron_lab.foreign.huggingface.fields import Fields
from megatron_lab.foreign.huggingface.groups import (
    BiasFields,
    BoolField,
    FixedField,
    RepeatedField,
    SizeFields,
    UnsupportedFields,
)
from megatron_lab.foreign.huggingface.latent_fields import LatentSizeFields
from megatron_lab.foreign.huggingface.layer_fields import WindowFields
from megatron_lab.foreign.huggingface.llama_families import build_llama_family
from megatron_lab.foreign.huggingface.mixture_fields import DeepSeekMixtureFields, MixtureFields
from megatron_lab.foreign.huggingface.rotary_fields import RotaryFields

_GATE_FACTOR = 1.702
"""Factor of the gate in the sigmoid of GPT-OSS's activation."""
_GPT_OSS_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_TRAINING_FIELDS = ("output_router_logits", "router_aux_loss_coef")


class _ClampedGateFields:
    """Converter of the config.json fields for the activation of GPT-OSS: gate x sigmoid(1.702 gate) x (up + 1), with limits for
    gate and up."""

    def parse(self, fields: Fields) -> Settings:
        fields.expect("hidden_act", ("silu",), "silu")  # transformers does not use the field
        fields.expect("swiglu_alpha", (_GATE_FACTOR,), _GATE_FACTOR, f"in this framework, the factor is always {_GATE_FACTOR}")
        limit = fields.get_number("swiglu_limit", 7.0)
        if not limit:
            fields.refuse("swiglu_limit", "must be above 0")
        return {"quick_geglu": True, "glu_linear_offset": 1.0, "activation_func_clamp_value": limit}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {"hidden_act": "silu", "swiglu_alpha": _GATE_FACTOR, "swiglu_limit": model.activation_func_clamp_value}


GPT_OSS = build_llama_family(
    "gpt_oss",
    "GptOssForCausalLM",
    BiasFields(layers_by_field={"attention_bias": ("qkv", "output")}, default=True),
    WindowFields(default=128, applies_to="layer_types", interval=2),
    MixtureFields(num_experts_field="num_local_experts", num_experts=128, top_k=4),
    RepeatedField("experts_per_token", "num_experts_per_tok", default=4),
    UnsupportedFields(
        ("num_local_experts",),
        "the biases of experts and router are not supported yet; all other features of the architecture are",
    ),
    sizes=SizeFields(max_positions=131072, num_kv_heads=8, head_size=64),
    rotary=RotaryFields(
        max_positions=131072,
        theta=150000.0,
        default_scaling=_GPT_OSS_YARN,
        original_context_field="initial_context_length",
    ),
    epsilon=1e-5,
    activation=_ClampedGateFields(),
    fixed_settings={"softmax_type": "learnable"},
    ignored_fields=_TRAINING_FIELDS,
)

_QWEN_EXPERT_NAMES = {
    "mlp.router": "mlp.gate",
    "mlp.experts.up": "mlp.experts.{}.gate_proj mlp.experts.{}.up_proj",
    "mlp.experts.down": "mlp.experts.{}.down_proj",
    "mlp.shared.up": "mlp.shared_expert.gate_proj mlp.shared_expert.up_proj",
    "mlp.shared.down": "mlp.shared_expert.down_proj",
    "mlp.shared_gate": "mlp.shared_expert_gate",
}
_NO_WINDOW = FixedField("use_sliding_window", False, "attention windows are not supported for this architecture")
_WINDOW_FIELDS = ("sliding_window", "max_window_layers", "layer_types")

MIXTRAL = build_llama_family(
    "mixtral",
    "MixtralForCausalLM",
    BiasFields(),
    WindowFields(default=None),
    MixtureFields(num_experts_field="num_local_experts", num_experts=8, top_k=2),
    FixedField("router_jitter_noise", 0.0, "noise on the input of the router is not supported"),
    sizes=SizeFields(max_positions=4096 * 32, num_kv_heads=8),
    rotary=RotaryFields(max_positions=4096 * 32, theta=1e6),
    epsilon=1e-5,
    module_names={
        "mlp.router": "block_sparse_moe.gate",
        "mlp.experts.up": "block_sparse_moe.experts.{}.w1 block_sparse_moe.experts.{}.w3",
        "mlp.experts.down": "block_sparse_moe.experts.{}.w2",
    },
    ignored_fields=_TRAINING_FIELDS,
)
QWEN2_MOE = build_llama_family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    BiasFields(layers_by_field={"qkv_bias": ("qkv",)}, default=True),
    _NO_WINDOW,
    MixtureFields(
        num_experts_field="num_experts",
        num_experts=60,
        top_k=4,
        ffn_size=1408,
        has_norm_topk_field=True,
        shared_ffn_size=5632,
        has_sparse_step_field=True,
    ),
    sizes=SizeFields(max_positions=32768, num_kv_heads=16),
    module_names=_QWEN_EXPERT_NAMES,
    ignored_fields=(*_TRAINING_FIELDS, *_WINDOW_FIELDS),
)
QWEN3_MOE = build_llama_family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    BiasFields(layers_by_field={"attention_bias": ("qkv", "output")}),
    _NO_WINDOW,
    MixtureFields(
        num_experts_field="num_experts",
        num_experts=128,
        top_k=8,
        ffn_size=768,
        has_norm_topk_field=True,
        has_sparse_step_field=True,
    ),
    sizes=SizeFields(max_positions=32768, num_kv_heads=4),
    fixed_settings={"qk_layernorm": True},
    module_names=_QWEN_EXPERT_NAMES,
    ignored_fields=(*_TRAINING_FIELDS, *_WINDOW_FIELDS),
)

_DEEPSEEK_NAMES = {
    "attention.q": "self_attn.q_proj",
    "attention.q_down": "self_attn.q_a_proj",
    "attention.q_latent_norm": "self_attn.q_a_layernorm",
    "attention.q_up": "self_attn.q_b_proj",
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.k_rotary": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_latent_norm": "self_attn.kv_a_layernorm",
    "attention.kv_up": "self_attn.kv_b_proj",
    **_QWEN_EXPERT_NAMES,
    "mlp.router.bias": "mlp.gate.e_score_correction_bias",
    "mlp.shared.up": "mlp.shared_experts.gate_proj mlp.shared_experts.up_proj",
    "mlp.shared.down": "mlp.shared_experts.down_proj",
}
_LATENT_SETTINGS: Settings = {"multi_latent_attention": True, "qk_layernorm": True}

DEEPSEEK_V2 = build_llama_family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    BiasFields(layers_by_field={"mlp_bias": ("mlp",)}),
    DeepSeekMixtureFields(
        score_function="softmax",
        group_score_top_k=1,
        num_experts_alias="num_experts",
        num_dense_layers=0,
        num_experts=64,
        top_k=None,
        num_shared_experts=2,
        ffn_size=1407,
        scaling_factor=1.0,
        groups=(None, None),
    ),
    sizes=LatentSizeFields(max_positions=2048),
    fixed_settings={**_LATENT_SETTINGS, "rotary_interleaved": True},
    module_names=_DEEPSEEK_NAMES,
)
DEEPSEEK_V3 = build_llama_family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    BiasFields(),
    BoolField("rope_interleave", "rotary_interleaved", True),
    DeepSeekMixtureFields(
        score_function="sigmoid",
        group_score_top_k=2,
        num_experts_alias="num_local_experts",
        num_dense_layers=3,
        num_experts=256,
        top_k=8,
        num_shared_experts=1,
        ffn_size=2048,
        scaling_factor=2.5,
        groups=(8, 4),
    ),
    sizes=LatentSizeFields(max_positions=4096),
    fixed_settings=_LATENT_SETTINGS,
    module_names=_DEEPSEEK_NAMES,
    mtp_fields=("num_nextn_predict_layers", "num_mtp_layers"),
)
