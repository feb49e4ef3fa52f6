"""Flags of the two families of models, for `tests.support.runs.arguments`."""

from __future__ import annotations

from typing import Any

_LLAMA: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}
_GROUPED: dict[str, Any] = {"group_query_attention": True, "num_query_groups": 2}
STYLES: dict[str, dict[str, Any]] = {"gpt2": {}, "llama": {**_LLAMA, **_GROUPED}}
_OLMO = {**_LLAMA, "norm_placement": "post", "qk_layernorm": True, "qk_layernorm_all_heads": True}
_GEMMA: dict[str, Any] = {
    **_LLAMA,
    **_GROUPED,
    "swiglu": False,
    "geglu": True,
    "untie_embeddings_and_output_weights": False,
    "norm_placement": "sandwich",
    "apply_layernorm_1p": True,
    "embedding_multiplier": 32**0.5,
    "window_size": "4,0",
}
_LATENT: dict[str, Any] = {
    **_LLAMA,
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "rotary_interleaved": True,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_neox": {
        "position_embedding_type": "rope",
        "rotary_percent": 0.25,
        "parallel_residual": True,
        "gelu_exact": True,
        "untie_embeddings_and_output_weights": True,
    },
    "qwen2": {**_LLAMA, **_GROUPED, "add_qkv_bias": True},
    "qwen3": {**_LLAMA, **_GROUPED, "qk_layernorm": True},
    "mistral": {**_LLAMA, **_GROUPED, "window_size": "5,0"},
    "phi3": {**_LLAMA, "rotary_percent": 0.75, "window_size": "6,0", "kv_channels": 16},
    "smollm3": {**_LLAMA, **_GROUPED, "no_rope_freq": "2"},
    "stablelm": {**_LLAMA, "normalization": "LayerNorm", "rotary_percent": 0.5, "add_qkv_bias": True},
    "olmo2": _OLMO,
    "olmo3": {**_OLMO, "window_size": "4,0", "window_attn_skip_freq": "2"},
    "gemma2": {**_GEMMA, "window_attn_skip_freq": "2", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3": {**_GEMMA, "window_attn_skip_freq": "2", "qk_layernorm": True, "rotary_base": 1e6, "rotary_base_local": 1e4},
    "granite": {
        **_LLAMA,
        **_GROUPED,
        "untie_embeddings_and_output_weights": False,
        "softmax_scale": 0.1,
        "embedding_multiplier": 4.0,
        "residual_multiplier": 0.5,
        "output_multiplier": 0.5,
    },
    "gpt_oss": {
        **_LLAMA,
        **_GROUPED,
        "swiglu": False,
        "quick_geglu": True,
        "glu_linear_offset": 1.0,
        "ffn_hidden_size": 64,
        "activation_func_clamp_value": 7.0,
        "softmax_type": "learnable",
        "window_size": "4,0",
        "window_attn_skip_freq": "2",
        "add_qkv_bias": True,
        "add_attn_output_bias": True,
        "add_mlp_bias": True,
    },
    "deepseek": _LATENT,
    "starcoder2": {**_GROUPED, "position_embedding_type": "rope", "window_size": "5,0"},
    "nemotron": {
        **_LLAMA,
        **_GROUPED,
        "normalization": "LayerNorm",
        "apply_layernorm_1p": True,
        "swiglu": False,
        "squared_relu": True,
        "rotary_percent": 0.5,
    },
    "olmo": {**_LLAMA, "normalization": "LayerNorm", "no_norm_weight": True},
    "glm4": {
        **_LLAMA,
        **_GROUPED,
        "rotary_interleaved": True,
        "rotary_percent": 0.5,
        "add_qkv_bias": True,
        "norm_placement": "sandwich",
    },
}
"""Flags of small models of today's families (docs/models.md)."""
