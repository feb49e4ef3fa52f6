"""Models with experts: Mixtral, Qwen and DeepSeek; of GPT-OSS its attention, and no experts yet.

The defaults of fields that a file leaves out are those of the configuration classes of transformers.
"""

from __future__ import annotations

from megatron_lab.foreign.huggingface.family import Settings
from megatron_lab.foreign.huggingface.groups import (
    Biases,
    NotBuilt,
    Only,
    Sizes,
    Switch,
)
from megatron_lab.foreign.huggingface.latent_fields import LatentSizes
from megatron_lab.foreign.huggingface.layer_fields import WindowFields
from megatron_lab.foreign.huggingface.llama_families import like_llama
from megatron_lab.foreign.huggingface.mixture_fields import DeepSeekExperts, MixtureFields
from megatron_lab.foreign.huggingface.rotary_fields import Rotary

_GPT_OSS_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
GPT_OSS = like_llama(
    "gpt_oss",
    "GptOssForCausalLM",
    Biases(switches={"attention_bias": ("qkv", "output")}, default=True),
    WindowFields(default=128, where="layer_types", every=2),
    NotBuilt(
        (
            *("num_local_experts", "num_experts_per_tok", "router_aux_loss_coef", "output_router_logits", "swiglu_alpha"),
            *("swiglu_limit", "experts_per_token", "initial_context_length"),
        ),
        "its MLPs are mixtures of experts, which are not built yet; its attention is",
    ),
    sizes=Sizes(max_positions=131072, kv_heads=8, head_size=64),
    rotary=Rotary(max_positions=131072, theta=150000.0, default=_GPT_OSS_YARN),
    epsilon=1e-5,
    always={"softmax_type": "learnable"},
)

_EXPERT_TRAINING = ("output_router_logits", "router_aux_loss_coef")
_QWEN_EXPERTS = {
    "mlp.router": "mlp.gate",
    "mlp.experts.up": "mlp.experts.{}.gate_proj mlp.experts.{}.up_proj",
    "mlp.experts.down": "mlp.experts.{}.down_proj",
    "mlp.shared.up": "mlp.shared_expert.gate_proj mlp.shared_expert.up_proj",
    "mlp.shared.down": "mlp.shared_expert.down_proj",
    "mlp.shared_gate": "mlp.shared_expert_gate",
}
_NO_WINDOW = Only("use_sliding_window", False, "windows of this architecture cannot be built here")
_OF_WINDOWS = ("sliding_window", "max_window_layers", "layer_types")

MIXTRAL = like_llama(
    "mixtral",
    "MixtralForCausalLM",
    Biases(),
    WindowFields(default=None),
    MixtureFields(count="num_local_experts", experts=8, chosen=2),
    Only("router_jitter_noise", 0.0, "noise on what the router sees cannot be built here"),
    sizes=Sizes(max_positions=4096 * 32, kv_heads=8),
    rotary=Rotary(max_positions=4096 * 32, theta=1e6),
    epsilon=1e-5,
    names={
        "mlp.router": "block_sparse_moe.gate",
        "mlp.experts.up": "block_sparse_moe.experts.{}.w1 block_sparse_moe.experts.{}.w3",
        "mlp.experts.down": "block_sparse_moe.experts.{}.w2",
    },
    without_effect=_EXPERT_TRAINING,
)
QWEN2_MOE = like_llama(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    Biases(switches={"qkv_bias": ("qkv",)}, default=True),
    _NO_WINDOW,
    MixtureFields(count="num_experts", experts=60, chosen=4, width=1408, may_sum_to_1=True, shared=5632, in_steps=True),
    sizes=Sizes(max_positions=32768, kv_heads=16),
    names=_QWEN_EXPERTS,
    without_effect=(*_EXPERT_TRAINING, *_OF_WINDOWS),
)
QWEN3_MOE = like_llama(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    Biases(switches={"attention_bias": ("qkv", "output")}),
    _NO_WINDOW,
    MixtureFields(count="num_experts", experts=128, chosen=8, width=768, may_sum_to_1=True, in_steps=True),
    sizes=Sizes(max_positions=32768, kv_heads=4),
    always={"qk_layernorm": True},
    names=_QWEN_EXPERTS,
    without_effect=(*_EXPERT_TRAINING, *_OF_WINDOWS),
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
    **_QWEN_EXPERTS,
    "mlp.router.bias": "mlp.gate.e_score_correction_bias",
    "mlp.shared.up": "mlp.shared_experts.gate_proj mlp.shared_experts.up_proj",
    "mlp.shared.down": "mlp.shared_experts.down_proj",
}
_LATENT: Settings = {"multi_latent_attention": True, "qk_layernorm": True}

DEEPSEEK_V2 = like_llama(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    Biases(switches={"mlp_bias": ("mlp",)}),
    DeepSeekExperts(
        score="softmax",
        judged_by=1,
        other_count="num_experts",
        dense=0,
        experts=64,
        chosen=None,
        shared=2,
        width=1407,
        scaling=1.0,
        groups=(None, None),
    ),
    sizes=LatentSizes(max_positions=2048),
    always={**_LATENT, "rotary_interleaved": True},
    names=_DEEPSEEK_NAMES,
)
DEEPSEEK_V3 = like_llama(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    Biases(),
    Switch("rope_interleave", "rotary_interleaved", True),
    DeepSeekExperts(
        score="sigmoid",
        judged_by=2,
        other_count="num_local_experts",
        dense=3,
        experts=256,
        chosen=8,
        shared=1,
        width=2048,
        scaling=2.5,
        groups=(8, 4),
    ),
    sizes=LatentSizes(max_positions=4096),
    always=_LATENT,
    names=_DEEPSEEK_NAMES,
    later_tokens=("num_nextn_predict_layers", "num_mtp_layers"),
)
