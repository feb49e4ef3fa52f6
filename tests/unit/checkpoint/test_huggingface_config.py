"""Every field of a config.json is understood, known to change nothing, or refused by its name and value."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.errors import CheckpointError
from megatron.config.flags import get_flag
from megatron.config.model import ModelConfig
from megatron.model.rope import compute_frequencies
from megatron.spec.counts import count_parameters
from megatron.spec.layers import build_layer_specs
from megatron.spec.rotary import YarnScaling, build_rotary_spec
from megatron_lab.foreign.huggingface.families import FAMILIES, select_family
from megatron_lab.foreign.huggingface.family import SPEC_FIELDS, compute_signature
from megatron_lab.foreign.huggingface.fields import Fields
from megatron_lab.foreign.huggingface.neutral_fields import NEUTRAL_FIELDS
from megatron_lab.foreign.huggingface.rotary_fields import RotaryFields
from megatron_lab.verification.reference.experts import ExpertsShape
from megatron_lab.verification.reference.rotary import RotaryScaling
from tests.support.huggingface_models import library
from tests.support.layout import model_config
from tests.support.lone_rank import CPU
from tests.support.published_configs import published, read_config
from tests.support.reference_runs import deepseek_like, gpt2_like, llama_like

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
MISTRAL = LLAMA | {"model_type": "mistral", "sliding_window": None}
QWEN2 = LLAMA | {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 32, "max_window_layers": 2}
QWEN3 = QWEN2 | {"model_type": "qwen3", "head_dim": 16}
PHI3 = LLAMA | {"model_type": "phi3"}
STABLELM = {k: v for k, v in LLAMA.items() if k != "rms_norm_eps"} | {"model_type": "stablelm", "hidden_size": 96}
OLMO3 = LLAMA | {"model_type": "olmo3"}
GEMMA3 = {k: v for k, v in LLAMA.items() if k != "hidden_act"} | {"model_type": "gemma3_text", "num_key_value_heads": 2}
SMOLLM3 = LLAMA | {"model_type": "smollm3"}
DEEPSEEK_V2 = LLAMA | {"model_type": "deepseek_v2", "num_key_value_heads": 6, "first_k_dense_replace": 3}
DEEPSEEK_V3 = DEEPSEEK_V2 | {"model_type": "deepseek_v3"}
DEEPSEEK_EXPERTS = {"first_k_dense_replace": 1, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 8, "topk_group": 2}
DEEPSEEK_V2_EXPERTS = DEEPSEEK_V2 | DEEPSEEK_EXPERTS
DEEPSEEK_V3_EXPERTS = DEEPSEEK_V3 | DEEPSEEK_EXPERTS
_NO_EPSILON = {k: v for k, v in LLAMA.items() if k not in ("rms_norm_eps", "hidden_act")}
STARCODER2, NEMOTRON, OLMO, ARCEE = (_NO_EPSILON | {"model_type": name} for name in ("starcoder2", "nemotron", "olmo", "arcee"))
MINISTRAL3 = LLAMA | {"model_type": "ministral3", "rope_parameters": {"rope_type": "default"}}
MINISTRAL = LLAMA | {"model_type": "ministral"}
GLM4 = LLAMA | {"model_type": "glm4", "head_dim": 8}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
GPT2 = {"model_type": "gpt2", "vocab_size": 128, "n_embd": 48, "n_head": 6, "n_layer": 3, "n_positions": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


read = read_config
MODELS = published()
FIRST = {model.config["model_type"]: name for name, model in reversed(MODELS.items())}
"""Of each family, the first published model of the file."""


@pytest.mark.parametrize(
    ("base", "changes", "named"),
    [
        (LLAMA, {"hidden_act": "mish"}, "hidden_act = 'mish'"),
        (LLAMA, {"attention_bias": 1}, "attention_bias = 1"),
        (LLAMA, {"sliding_window": 4096}, "sliding_window = 4096: differs"),
        (LLAMA, {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types"),
        (LLAMA, {"some_new_multiplier": 0.5}, "some_new_multiplier = 0.5: unknown"),
        (LLAMA, {"some_new_switch": False}, "some_new_switch = False: unknown"),
        (LLAMA, {"auto_map": "model.py"}, "auto_map"),
        (LLAMA, {"is_causal": False}, "is_causal = False"),
        (LLAMA, {"pruned_heads": {"1": [0]}}, "pruned_heads"),
        (LLAMA, {"add_cross_attention": True}, "add_cross_attention = True"),
        (LLAMA, {"num_key_value_heads": 4}, "num_key_value_heads"),
        (LLAMA, {"hidden_size": 50}, "hidden_size = 50"),
        (LLAMA, {"head_dim": 7}, "7 channels cannot be rotated in pairs"),
        (LLAMA, {"hidden_size": "48"}, "hidden_size = '48'"),
        (LLAMA, {"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        (LLAMA, {"rms_norm_eps": -1.0}, "rms_norm_eps = -1.0"),
        (LLAMA, {"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no'"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        (
            LLAMA,
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "rotates all channels",
        ),
        (LLAMA, {"rope_scaling": {"type": "proportional", "factor": 2.0}}, "type 'proportional'"),
        (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "original_max_position_embeddings": 32}, "32 must be max_pos"),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "betas": 3}}, "unknown parameters with type 'yarn': betas"),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 0}}, "beta_fast is 0"),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 0.5}}, "--beta-slow 1.0 is not below"),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1}}, "at least 2"),
        (LLAMA, {"rope_scaling": {"rope_type": "longrope", "short_factor": [1], "long_factor": [2]}}, "has 1 factors, but 4 pairs"),
        (LLAMA, {"rope_scaling": {"rope_type": "longrope", "short_factor": 1, "long_factor": [2]}}, "short_factor is 1"),
        (LLAMA, {"rope_scaling": {"type": "linear"}}, "factor is None"),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0"),
        (
            LLAMA,
            {"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 1.0}},
            "unknown parameters with type 'linear': mscale",
        ),
        (LLAMA, {"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 2.0}}, "rope_type and type differ"),
        (LLAMA, {"rope_scaling": LLAMA3 | {"high_freq_factor": 0.5}}, "--rope-high-freq-factor 0.5"),
        (LLAMA, {"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}}, "low_freq_factor is None"),
        (LLAMA, {"rope_scaling": LLAMA3, "original_max_position_embeddings": 4096}, "original_max_position_embeddings"),
        (LLAMA, {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_theta = 10000.0"),
        (LLAMA, {"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_scaling"),
        (
            LLAMA,
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "unknown parameters with type 'default': full_attention",
        ),
        (LLAMA, {"rope_theta": -1}, "rope_theta is -1"),
        (QWEN2, {"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "'linear_attention'"),
        (QWEN2, {"layer_types": ["full_attention"]}, "lists 1 layers, but the model has 3"),
        (QWEN2, {"layer_types": 5}, "must be a list"),
        (QWEN2, {"attention_bias": False}, "attention_bias = False: the biases of attention differ"),
        (MISTRAL, {"sliding_window": 0}, "sliding_window = 0"),
        (SMOLLM3, {"no_rope_layers": [1, 0]}, "no_rope_layers = [1, 0]"),
        (GEMMA3, {"use_bidirectional_attention": True}, "attention is causal here"),
        (GEMMA3, {"hidden_activation": "relu"}, "hidden_activation = 'relu'"),
        (GEMMA3, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0"),
        (STABLELM, {"use_parallel_residual": True}, "use_parallel_residual = True: parallel attention and MLP"),
        (STABLELM, {"qk_layernorm": True}, "qk_layernorm = True: a separate norm"),
        (PHI3, {"partial_rotary_factor": 0.1}, "of a head of 8 channels rotates 0"),
        (DEEPSEEK_V2, {"first_k_dense_replace": 2}, "num_experts_per_tok is missing"),
        (DEEPSEEK_V2, {"first_k_dense_replace": None}, "first_k_dense_replace = None"),
        (DEEPSEEK_V2_EXPERTS, {"topk_method": "group_limited_greedy"}, "num_experts_per_tok / topk_group best = 4 / 2"),
        (DEEPSEEK_V2_EXPERTS, {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'"),
        (DEEPSEEK_V2_EXPERTS, {"norm_topk_prob": True}, "norm_topk_prob = True: transformers never normalizes"),
        (DEEPSEEK_V2_EXPERTS, {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'"),
        (DEEPSEEK_V2_EXPERTS, {"num_experts": 8}, "num_experts = 8: differs from n_routed_experts"),
        (DEEPSEEK_V2_EXPERTS, {"mlp_bias": True}, "experts with biases are not supported yet"),
        (DEEPSEEK_V3_EXPERTS, {"topk_group": 4}, "transformers scores a group by its 2 best experts"),
        (DEEPSEEK_V3_EXPERTS, {"n_group": 5}, "--moe-router-num-groups 5"),
        (DEEPSEEK_V3_EXPERTS, {"n_group": 0}, "n_group = 0"),
        (DEEPSEEK_V3_EXPERTS, {"norm_topk_prob": False}, "norm_topk_prob = False: in this framework the probabilities"),
        (DEEPSEEK_V3_EXPERTS, {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        (DEEPSEEK_V3_EXPERTS, {"topk_method": "greedy"}, "topk_method = 'greedy'"),
        (DEEPSEEK_V3_EXPERTS, {"n_shared_experts": 0}, "n_shared_experts = 0"),
        (DEEPSEEK_V3_EXPERTS, {"routed_scaling_factor": 0}, "routed_scaling_factor = 0"),
        (DEEPSEEK_V3_EXPERTS, {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        (DEEPSEEK_V3_EXPERTS, {"first_k_dense_replace": -1}, "first_k_dense_replace = -1"),
        (DEEPSEEK_V2, {"num_key_value_heads": 3}, "num_key_value_heads = 3"),
        (DEEPSEEK_V2, {"attention_bias": True}, "attention_bias = True"),
        (DEEPSEEK_V2, {"rope_interleave": False}, "rope_interleave = False: differs"),
        (DEEPSEEK_V2, {"qk_rope_head_dim": 7}, "--qk-pos-emb-head-dim 7 is odd"),
        (DEEPSEEK_V2, {"head_dim": 32}, "head_dim = 32"),
        (DEEPSEEK_V3, {"rms_norm_eps": 1e-5}, "rms_norm_eps = 1e-05"),
        (DEEPSEEK_V3, {"mlp_bias": True}, "mlp_bias = True: the biases of the MLP differ"),
        (DEEPSEEK_V3, {"q_lora_rank": 0}, "q_lora_rank = 0"),
        (DEEPSEEK_V3, {"rope_interleave": 1}, "rope_interleave = 1"),
        (STARCODER2, {"mlp_type": "gated"}, "mlp_type = 'gated'"),
        (STARCODER2, {"norm_type": "rms_norm"}, "norm_type = 'rms_norm'"),
        (STARCODER2, {"hidden_act": "silu"}, "hidden_act = 'silu'"),
        (STARCODER2, {"rms_norm_eps": 1e-6}, "rms_norm_eps = 1e-06: differs from"),
        (NEMOTRON, {"kv_channels": 16}, "kv_channels = 16: differs from head_dim = 8"),
        (NEMOTRON, {"head_dim": 16, "kv_channels": 8}, "kv_channels = 8: differs from head_dim = 16"),
        (NEMOTRON, {"rope_percent": 1.0}, "rope_percent = 1.0: differs from partial_rotary_factor = 0.5"),
        (NEMOTRON, {"layer_norm_eps": 1e-6}, "layer_norm_eps = 1e-06: differs from norm_eps = 1e-05"),
        (OLMO, {"clip_qkv": 8.0}, "clip_qkv = 8.0: limits of the values of queries, keys and values"),
        (OLMO, {"rms_norm_eps": 1e-6}, "rms_norm_eps = 1e-06: differs from"),
        (ARCEE, {"hidden_act": "silu"}, "hidden_act = 'silu'"),
        (ARCEE, {"hidden_size": 50, "head_dim": 8}, "hidden_size = 50"),
        (MINISTRAL3, {"rope_parameters": {"llama_4_scaling_beta": 0.1} | YARN}, "queries after the first 32 tokens"),
        (MINISTRAL3, {"rope_parameters": None, "max_position_embeddings": 16385}, "llama_4_scaling_beta 0.1: the factor"),
        (
            MINISTRAL3,
            {"rope_parameters": {"rope_type": "default", "max_position_embeddings": 8}},
            "max_position_embeddings 8 differs from the top-level field, 64",
        ),
        (MINISTRAL3, {"layer_types": ["sliding_attention"] * 3}, "layer_types"),
        (GPT2, {"activation_function": "silu"}, "activation_function = 'silu'"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
        (GPT2, {"scale_attn_weights": False}, "scale_attn_weights = False"),
        (GPT2, {"add_cross_attention": True}, "add_cross_attention = True"),
        (GPT2, {"n_embd": 49}, "n_head = 6"),
        (GPT2, {"hidden_size": 64}, "hidden_size = 64"),
    ],
)
def test_what_changes_the_model_is_refused_by_name(base: dict[str, Any], changes: dict[str, Any], named: str) -> None:
    read(base)
    with pytest.raises(CheckpointError) as error:
        read(base | changes)
    assert named in str(error.value)


@pytest.mark.parametrize(
    ("base", "name", "limit"),
    [(LLAMA, "num_hidden_layers", "10,000"), (GPT2, "n_layer", "10,000"), (LLAMA, "intermediate_size", "2,147,483,647")],
)
def test_a_number_that_no_model_has_is_refused_at_once(base: dict[str, Any], name: str, limit: str) -> None:
    """Before objects are built for each of so many layers."""
    with pytest.raises(CheckpointError, match=f"(?s){name} = 1{'0' * 30}: must be at most {limit}"):
        read(base | {name: 10**30})


def test_everything_that_is_wrong_is_named_at_once() -> None:
    with pytest.raises(CheckpointError, match=r"(?s)rope_scaling.*hidden_act.*one.*two") as error:
        read(LLAMA | {"hidden_act": "relu", "rope_scaling": {"type": "new"}, "one": 1, "two": 2})
    assert len(str(error.value).splitlines()) == 5


def _nested(**changes: Any) -> dict[str, Any]:
    """Rotary parameters by layer type, with those of layers with a window changed."""
    sliding = {"rope_type": "default", "rope_theta": 100.0} | changes
    return {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}, "sliding_attention": sliding}}


@pytest.mark.parametrize(
    ("base", "changes", "named"),
    [
        (LLAMA, {"rope_parameters": {"rope_type": ["yarn"]}}, "rope_type is ['yarn'], but must be a text"),
        (LLAMA, {"rope_scaling": {"type": 3}}, "rope_type is 3, but must be a text"),
        (LLAMA, {"rope_scaling": False}, "rope_scaling = False: must be a mapping"),
        (LLAMA, {"rope_parameters": []}, "rope_parameters = []: must be a mapping"),
        (GEMMA3, {"rope_parameters": {"full_attention": False}}, "False in it must be a mapping"),
        (GEMMA3, _nested(rope_theta="8"), "rope_theta of sliding_attention is '8', but must be a positive number"),
        (GEMMA3, _nested(rope_theta=-1), "rope_theta of sliding_attention is -1"),
        (LLAMA, {"rope_scaling": YARN | {"attention_factor": "1.5"}}, "attention_factor is '1.5', but must be a positive number"),
        (LLAMA, {"rope_scaling": YARN | {"mscale": "0.7", "mscale_all_dim": 1.0}}, "mscale is '0.7'"),
        (LLAMA, {"rope_scaling": YARN | {"mscale": [1], "attention_factor": 1.0}}, "mscale is [1]"),
        (LLAMA, {"rope_scaling": YARN | {"truncate": "false"}}, "truncate is 'false', but must be true or false"),
        (PHI3, {"partial_rotary_factor": "0.5"}, "partial_rotary_factor is '0.5'"),
        (PHI3, {"partial_rotary_factor": -1}, "partial_rotary_factor is -1"),
        (
            MINISTRAL3 | {"max_position_embeddings": 32},
            {"rope_parameters": YARN | {"llama_4_scaling_beta": "x"}},
            "llama_4_scaling_beta is 'x'",
        ),
        (LLAMA | {"model_type": "granite"}, {"hidden_size": "48"}, "hidden_size = '48': must be a positive integer"),
        (DEEPSEEK_V3, {"num_nextn_predict_layers": "one"}, "num_nextn_predict_layers = 'one': must be a number of layers"),
        (QWEN2, {"use_sliding_window": True, "max_window_layers": "2"}, "max_window_layers = '2': must be a number of layers"),
        (QWEN2, {"use_sliding_window": True, "max_window_layers": None}, "max_window_layers = None"),
    ],
    ids=str,
)
def test_values_of_a_wrong_type_are_refused_by_name(base: dict[str, Any], changes: dict[str, Any], named: str) -> None:
    """And not converted: a text is no number, and an empty list is no absent mapping."""
    read(base)
    with pytest.raises(CheckpointError, match=re.escape(named)):
        read(base | changes)


@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"])
def test_a_size_must_be_there(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        read({key: value for key, value in LLAMA.items() if key != name})


@pytest.mark.parametrize(
    "neutral",
    [
        {
            "torch_dtype": "bfloat16",
            "use_cache": False,
            "transformers_version": "4.45.0",
            "bos_token_id": 1,
            "eos_token_id": [2, 3],
        },
        {"pretraining_tp": 2, "_name_or_path": "somewhere", "id2label": {"0": "a"}, "temperature": 0.5},
        {"unknown_but_null": None, "quantization_config": None},
        {"rope_scaling": None, "rope_theta": 10000},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {"rope_parameters": {"rope_theta": 10000.0}, "rope_scaling": {"type": "default"}},
        {"attention_bias": False, "mlp_bias": False, "head_dim": None, "attention_dropout": 0.0, "initializer_range": 0.02},
        {"partial_rotary_factor": 1.0, "is_decoder": True, "pruned_heads": {}, "hidden_act": "swish", "use_mrope": False},
        {"rope_interleaved": False, "is_encoder_decoder": False, "add_cross_attention": False, "seq_length": 32},
        {"head_dim": 8, "original_max_position_embeddings": 17},
    ],
)
def test_what_changes_nothing_changes_nothing(neutral: dict[str, Any]) -> None:
    assert read(LLAMA | neutral) == read(LLAMA)


MEANT: dict[str, dict[str, Any]] = {
    "GPT-2": {"num_layers": 12, "ffn_size": 3072, "has_tied_embeddings": True, "norm_epsilon": 1e-05},
    "Llama 2 7B": {
        "head_size": 128,
        "num_key_value_heads": 32,
        "rotary_base": 10000.0,
        "use_rope_scaling": False,
        "seq_length": 4096,
    },
    "Llama 3.2 1B": {
        "has_tied_embeddings": True,
        "use_rope_scaling": True,
        "rope_scaling_factor": 32.0,
        "rotary_base": 500000.0,
        "num_key_value_heads": 8,
    },
    "Mistral 7B v0.1": {"seq_length": 32768, "head_size": 128, "window_size": "4095,0", "window_attn_skip_freq": None},
    "Qwen2.5 7B": {
        "add_qkv_bias": True,
        "seq_length": 131072,
        "rotary_base": 1000000.0,
        "head_size": 128,
        "has_tied_embeddings": False,
    },
    "Qwen3 0.6B": {"qk_layernorm": True, "head_size": 128, "hidden_size": 1024, "has_tied_embeddings": True},
    "DeepSeek-V2-Lite": {
        "head_size": 192,
        "value_size": 128,
        "q_lora_rank": None,
        "mscale_all_dim": 0.707,
        "rotary_scaling_factor": 40.0,
        "num_experts": 64,
        "moe_router_topk": 6,
        "moe_shared_expert_intermediate_size": 2816,
        "moe_router_pre_softmax": True,
    },
    "DeepSeek-V3": {
        "num_experts": 256,
        "moe_router_topk": 8,
        "moe_shared_expert_intermediate_size": 2048,
        "moe_router_num_groups": 8,
        "moe_router_group_topk": 4,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_ffn_hidden_size": 2048,
        "ffn_size": 18432,
        "moe_layer_freq": f"[{','.join('0' * 3 + '1' * 58)}]",
    },
    "SmolLM2 135M": {"num_query_groups": 3, "head_size": 64},
    "StarCoder2 3B": {
        "head_size": 128,
        "window_size": "4095,0",
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
        "has_tied_embeddings": True,
    },
    "StarCoder2 7B": {"rotary_base": 1000000.0, "num_key_value_heads": 4},
    "StarCoder2 15B": {"rotary_base": 100000.0, "init_method_std": 0.01275},
    "Minitron 4B": {"head_size": 128, "rotary_percent": 0.5, "squared_relu": True, "apply_layernorm_1p": True, "swiglu": False},
    "Minitron 8B": {"head_size": 128, "num_attention_heads": 48},
    "Nemotron-4 340B": {"head_size": 192, "num_layers": 96},
    "OLMo 1B": {"norm_weight": False, "norm_epsilon": 1e-05, "has_tied_embeddings": True, "normalization": "LayerNorm"},
    "OLMo 7B": {"has_tied_embeddings": False},
    "AFM 4.5B": {"rope_type": "yarn", "rotary_scaling_factor": 20.0, "squared_relu": True, "seq_length": 65536},
    "Seed-OSS 36B": {
        "add_qkv_bias": True,
        "add_attn_output_bias": False,
        "hidden_dropout": 0.1,
        "rotary_base": 10000000.0,
        "head_size": 128,
    },
    "Ministral 8B": {"rotary_base": 100000000.0, "window_size": "32767,0", "head_size": 128},
    "Ministral 3 8B for 16K tokens": {
        "seq_length": 16384,
        "rotary_scaling_factor": 16.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "rotary_base": 1000000.0,
    },
    "Devstral 2 123B": {"seq_length": 262144, "beta_fast": 4.0, "mscale_all_dim": 0.0, "num_layers": 88},
    "GLM-4 9B": {"rotary_percent": 0.5, "rotary_interleaved": True, "add_qkv_bias": True, "norm_placement": "pre"},
    "GLM-4 9B 0414": {"norm_placement": "sandwich", "num_key_value_heads": 2},
    "GLM-4 32B 0414": {"add_qkv_bias": False, "num_layers": 61},
    "ERNIE 4.5 0.3B": {"disable_bias_linear": True, "has_tied_embeddings": True, "rotary_interleaved": True, "rotary_percent": 1.0},
}
"""What the files of published models mean."""


@pytest.mark.parametrize("name", MODELS)
def test_published_models_are_read(name: str) -> None:
    """As published, at their true sizes, and again as they are written. A size that is not published is that of transformers."""
    config, parameters = MODELS[name]
    model, notes = read_config(config)
    assert count_parameters(model, config["vocab_size"]) == (parameters or _count_in_transformers(config))
    fields = MEANT.get(name, {})
    assert {field: getattr(model, field) for field in fields} == fields
    assert len(notes) <= 2 and ("auto_map" in config) == any("program (auto_map) is not run" in note for note in notes)
    written = {**FAMILIES[config["model_type"]].write(model), "model_type": config["model_type"], "vocab_size": 5}
    again, _ = read_config(json.loads(json.dumps(written)))
    assert compute_signature(again) == compute_signature(model)
    assert select_family(model, config["model_type"]).model_type == config["model_type"]


def _count_in_transformers(config: dict[str, Any]) -> int:
    transformers = library(config["model_type"])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    return sum(param.numel() for param in model.parameters())


def test_ministral_3_is_refused_where_the_position_scales_queries() -> None:
    config = MODELS["Ministral 3 8B for 16K tokens"].config | {"max_position_embeddings": 262144}  # as it is published
    with pytest.raises(CheckpointError, match=r"after the first 16384 tokens .* set max_position_embeddings to 16384$") as error:
        read_config(config)
    assert len(str(error.value).splitlines()) == 2


@pytest.mark.parametrize("name", FIRST.values())
def test_a_field_that_nobody_knows_is_refused_beside_published_ones(name: str) -> None:
    with pytest.raises(CheckpointError, match="some_new_field = 1: unknown field"):
        read_config(MODELS[name].config | {"some_new_field": 1})


NEUTRAL_NOTES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (LLAMA, {"use_bias": False, "mlp_only_layers": []}, "2 fields of config.json not used, since no logit changes at these values"),
    (LLAMA, {"attention_probs_dropout_prob": 0.1}, "at this value: attention_probs_dropout_prob 0.1"),
    (LLAMA, {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}, "sliding_window 4096"),
    (LLAMA, {"layer_types": ["full_attention"] * 3}, "at this value: layer_types"),
    (LLAMA, {"lm_head_bias": False, "full_attn_mod": 1, "interpolate_factor": 1.0}, "lm_head_bias false, full_attn_mod 1"),
    (LLAMA, {"qk_layernorm": False, "use_parallel_residual": False, "alibi": False}, "use_parallel_residual false"),
    (LLAMA, {"layer_norm_eps": 1e-6, "activation_function": "swish", "residual_multiplier": 1}, "layer_norm_eps 1e-06"),
    (QWEN2, {"attention_bias": True, "mlp_bias": False}, "attention_bias true, mlp_bias false"),
    (MISTRAL, {"sliding_window": 32, "sliding_window_size": 32, "use_sliding_window": True}, "sliding_window_size 32"),
    (GEMMA3, {"hidden_act": "gelu", "sliding_window": 32, "_sliding_window_pattern": 6}, "_sliding_window_pattern 6"),
    (
        GEMMA3 | {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
        {"_sliding_window_pattern": 6},
        "_sliding_window_pattern 6",
    ),
    (GPT2, {"head_dim": 8, "num_key_value_heads": 6, "use_bias": True, "embedding_multiplier": 1.0}, "head_dim 8"),
    (DEEPSEEK_V2, {"rope_interleave": True, "num_nextn_predict_layers": 0}, "at this value: num_nextn_predict_layers 0"),
    (
        LLAMA,
        {"auto_map": {"AutoModelForCausalLM": "a.B"}},
        "own program (auto_map) is not run: the model is LlamaForCausalLM of tr",
    ),
]


@pytest.mark.parametrize(("base", "changes", "told"), NEUTRAL_NOTES)
def test_what_changes_nothing_at_its_value_is_told_in_one_note(base: dict[str, Any], changes: dict[str, Any], told: str) -> None:
    meaningful = {name: value for name, value in changes.items() if base is not LLAMA and name == "sliding_window"}
    model, notes = read(base | changes)
    assert model == read(base | meaningful)[0]
    assert len(notes) == 1 and told in notes[0]


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        (LLAMA, {"lm_head_bias": True}),
        (LLAMA, {"full_attn_mod": 2}),
        (LLAMA, {"full_attn_mod": True}),
        (LLAMA, {"interpolate_factor": 2}),
        (LLAMA, {"use_sliding_window": True}),
        (LLAMA, {"use_sliding_window": True, "sliding_window": 32}),
        (LLAMA, {"max_window_layers": "all"}),
        (LLAMA, {"layer_types": ["full_attention"] * 2}),
        (LLAMA, {"qk_layernorm": True}),
        (LLAMA, {"layer_norm_eps": 1e-5}),
        (LLAMA, {"num_nextn_predict_layers": 1}),
        (LLAMA, {"embedding_multiplier": 12.0}),
        (LLAMA, {"hidden_dropout_prob": 1.5}),
        (LLAMA, {"use_bias": True}),
        (MISTRAL, {"attention_bias": True}),
        (MISTRAL, {"mlp_bias": True}),
        (MISTRAL, {"sliding_window": 32, "use_sliding_window": False}),
        (MISTRAL, {"sliding_window": 32, "sliding_window_size": 16}),
        (PHI3, {"attention_bias": True}),
        (GEMMA3, {"hidden_act": "silu"}),
        (GEMMA3, {"_sliding_window_pattern": 2}),
        (GEMMA3, {"layer_types": ["sliding_attention"] * 3, "_sliding_window_pattern": 0}),
        (GEMMA3, {"sliding_window_size": 16}),
        (GPT2, {"num_key_value_heads": 1}),
        (GPT2, {"hidden_act": "relu"}),
    ],
)
def test_the_same_fields_are_refused_at_other_values(base: dict[str, Any], changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError) as error:
        read(base | changes)
    assert f"{[*changes][-1]} = " in str(error.value) and "unknown field" not in str(error.value)


@pytest.mark.parametrize("name", FIRST)
def test_transformers_does_not_read_what_is_judged_by_its_value(name: str) -> None:
    """Else the family would have to read it too. Two fields are read of which other values are refused or only warned of."""
    transformers = library(name)
    config = transformers.AutoConfig.for_model(name)
    fields = Fields(name, json.loads(config.to_json_string(use_diff=False)), FAMILIES[name].ignored_fields)
    for group in FAMILIES[name].field_groups:
        group.parse(fields)
    judged = fields.get_unread().keys() & {field for entry in NEUTRAL_FIELDS for field in entry.names}
    program = inspect.getsource(inspect.getmodule(transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]) or transformers)
    assert "config.hidden_size" in program
    read_there = {field for field in judged if re.search(rf"config\.{field}\b", program)}
    assert not read_there - {"is_decoder", "add_cross_attention"}


def test_sizes_and_parts_of_a_llama() -> None:
    model, notes = read(LLAMA | {"head_dim": 10, "rope_theta": 7.0, "rms_norm_eps": 1e-3, "attention_dropout": 0.25})
    assert not notes and model == ModelConfig(
        num_layers=3,
        hidden_size=48,
        ffn_hidden_size=40,
        num_attention_heads=6,
        kv_channels=10,
        group_query_attention=True,
        num_query_groups=3,
        seq_length=64,
        max_position_embeddings=64,
        position_embedding_type="rope",
        rotary_base=7.0,
        normalization="RMSNorm",
        norm_epsilon=1e-3,
        swiglu=True,
        untie_embeddings_and_output_weights=True,
        disable_bias_linear=True,
        attention_dropout=0.25,
        hidden_dropout=0.0,
    )


@pytest.mark.parametrize(
    ("base", "changes", "fields"),
    [
        (LLAMA, {"num_key_value_heads": None}, {"num_key_value_heads": 6, "head_size": 8}),
        (LLAMA, {"attention_bias": True, "mlp_bias": True}, {"disable_bias_linear": False}),
        (LLAMA, {"tie_word_embeddings": True}, {"has_tied_embeddings": True}),
        (MISTRAL, {}, {"seq_length": 64, "add_qkv_bias": False, "qk_layernorm": False}),
        (QWEN2, {}, {"add_qkv_bias": True, "disable_bias_linear": True, "seq_length": 64, "head_size": 8}),
        (QWEN3, {}, {"add_qkv_bias": False, "qk_layernorm": True, "head_size": 16}),
        (
            DEEPSEEK_V2,
            {"q_lora_rank": None},
            {"q_lora_rank": None, "kv_lora_rank": 512, "rotary_interleaved": True, "v_head_dim": 128},
        ),
        (
            DEEPSEEK_V3,
            {"n_routed_experts": 8, "num_nextn_predict_layers": 1, "head_dim": 64},
            {"q_lora_rank": 1536, "head_size": 192},
        ),
        (DEEPSEEK_V3, {"rope_interleave": False}, {"rotary_interleaved": False, "qk_layernorm": True}),
        (
            DEEPSEEK_V3,
            {"rope_scaling": {"type": "yarn", "factor": 40, "mscale_all_dim": 1.0, "attention_factor": 1.5}},
            {"rope_attention_factor": 1.5, "mscale_all_dim": 1.0},
        ),
        (
            GPT2,
            {},
            {
                "has_tied_embeddings": True,
                "disable_bias_linear": False,
                "ffn_size": 192,
                "num_positions": 64,
                "squared_relu": False,
            },
        ),
        (
            GPT2,
            {"n_inner": 100, "attn_pdrop": 0.0, "resid_pdrop": 0.2, "embd_pdrop": 0.2},
            {"ffn_size": 100, "hidden_dropout": 0.2},
        ),
        (GPT2, {"activation_function": "gelu_pytorch_tanh", "reorder_and_upcast_attn": True}, {"squared_relu": False}),
        (GPT2, {"activation_function": "relu2"}, {"squared_relu": True}),
        (
            STARCODER2,
            {"mlp_type": "default", "norm_type": "layer_norm"},
            {"disable_bias_linear": False, "normalization": "LayerNorm", "norm_epsilon": 1e-5, "swiglu": False},
        ),
        (STARCODER2, {"use_bias": False}, {"disable_bias_linear": True, "add_qkv_bias": False, "add_mlp_bias": False}),
        (
            NEMOTRON,
            {"kv_channels": 8, "rope_percent": 0.5, "layer_norm_eps": 1e-5},
            {"squared_relu": True, "rotary_percent": 0.5, "apply_layernorm_1p": True, "norm_bias": True, "norm_epsilon": 1e-5},
        ),
        (OLMO, {"clip_qkv": None}, {"norm_weight": False, "norm_epsilon": 1e-5, "swiglu": True, "disable_bias_linear": True}),
        (ARCEE, {"mlp_bias": True}, {"squared_relu": True, "add_mlp_bias": True, "normalization": "RMSNorm"}),
        (MINISTRAL3, {}, {"rotary_base": 1e4, "rope_type": "rope", "head_size": 128, "window_size": None}),
        (GLM4, {}, {"norm_placement": "sandwich", "rotary_percent": 0.5, "rotary_interleaved": True, "add_qkv_bias": True}),
    ],
)
def test_what_the_fields_mean(base: dict[str, Any], changes: dict[str, Any], fields: dict[str, Any]) -> None:
    model, notes = read(base | changes)
    assert not notes and {name: getattr(model, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("model_type", "absent", "fields"),
    [
        (
            "llama",
            ["num_key_value_heads", "head_dim", "max_position_embeddings"],
            {"num_key_value_heads": 6, "num_positions": 2048},
        ),
        ("mistral", ["num_key_value_heads"], {"num_key_value_heads": 8, "head_size": 3}),
        ("qwen2", ["num_key_value_heads"], {"num_key_value_heads": 32}),
        ("qwen3", ["head_dim"], {"head_size": 128, "num_key_value_heads": 3}),
        (
            "llama",
            ["rms_norm_eps", "tie_word_embeddings", "rope_theta"],
            {"norm_epsilon": 1e-6, "has_tied_embeddings": False, "rotary_base": 1e4},
        ),
    ],
)
def test_absent_fields_mean_what_transformers_takes(model_type: str, absent: list[str], fields: dict[str, Any]) -> None:
    """Against its configuration classes."""
    transformers = library(model_type)
    heads = max(fields.get("num_key_value_heads", 6), 6) * (2 if model_type == "mistral" else 1)
    full = QWEN3 | {"model_type": model_type, "num_attention_heads": heads, "hidden_size": 8 * heads, "use_sliding_window": False}
    kept = {"use_sliding_window", "max_window_layers"} if model_type.startswith("qwen") else set()
    config = {k: v for k, v in full.items() if k not in absent and (k in LLAMA or k in kept)}
    if model_type == "mistral":
        config["sliding_window"] = None
        fields = fields | {"head_size": 8}
    model, _ = read(config)
    assert {name: getattr(model, name) for name in fields} == fields
    theirs = transformers.AutoConfig.for_model(**config)
    assert theirs.num_key_value_heads == model.num_key_value_heads
    assert (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads) == model.head_size
    assert (theirs.max_position_embeddings, theirs.rms_norm_eps) == (model.num_positions, model.norm_epsilon)
    assert theirs.tie_word_embeddings == model.has_tied_embeddings


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 4}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
        {
            "rope_theta": 500000,
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5, "attention_factor": None},
        },
    ],
)
def test_linear_scaling_in_every_spelling(spelling: dict[str, Any]) -> None:
    model, _ = read(LLAMA | spelling)
    assert (model.rotary_base, model.rotary_seq_len_interpolation_factor, model.use_rope_scaling) == (5e5, 4.0, False)
    plain, _ = read(LLAMA | {"rope_theta": 5e5})
    stretched, usual = build_rotary_spec(model), build_rotary_spec(plain)
    assert stretched is not None and usual is not None
    assert torch.equal(compute_frequencies(stretched, CPU), compute_frequencies(usual, CPU) / 4)


def test_llama3_scaling_keeps_its_factor() -> None:
    model, _ = read(LLAMA | {"rope_scaling": LLAMA3, "max_position_embeddings": 131072})
    assert (model.use_rope_scaling, model.rope_scaling_factor, model.rotary_seq_len_interpolation_factor) == (True, 32.0, 1.0)


@pytest.mark.parametrize(
    ("base", "changes", "slides"),
    [
        (MISTRAL, {"sliding_window": 32}, "111"),
        (MISTRAL, {"sliding_window": None}, "000"),
        (MINISTRAL, {"sliding_window": 32}, "111"),
        (MINISTRAL, {"sliding_window": None}, "000"),
        (MINISTRAL, {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}, "100"),
        (QWEN2, {}, "000"),
        (QWEN2, {"use_sliding_window": True}, "001"),
        (QWEN2, {"use_sliding_window": True, "max_window_layers": 3}, "000"),
        (QWEN3, {"use_sliding_window": True, "layer_types": ["full_attention"] * 3}, "000"),
        (QWEN3, {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "010"),
        (QWEN3, {"use_sliding_window": True, "sliding_window": None}, "000"),
        (PHI3, {}, "000"),
        (PHI3, {"sliding_window": 32}, "111"),
        (SMOLLM3, {"use_sliding_window": True, "sliding_window": 32, "no_rope_layer_interval": 2}, "010"),
        (SMOLLM3, {"use_sliding_window": True, "sliding_window": 32, "no_rope_layers": [0, 1, 0]}, "101"),
        (OLMO3, {"num_hidden_layers": 5, "sliding_window": 32}, "11101"),
        (GEMMA3, {"num_hidden_layers": 7, "sliding_window": 32}, "1111101"),
        (GEMMA3, {"sliding_window_pattern": 2, "sliding_window": 32}, "101"),
        (OLMO3, {"sliding_window": 32, "layer_types": ["full_attention", "full_attention", "sliding_attention"]}, "001"),
    ],
)
def test_windows_of_layers(base: dict[str, Any], changes: dict[str, Any], slides: str) -> None:
    """A window of 32 tokens has 31 before the own."""
    model, notes = read(base | changes)
    assert model.seq_length == 64 and not notes
    assert [layer.attention.scores.window for layer in build_layer_specs(model)] == [31 if each == "1" else None for each in slides]


def test_a_mistral_without_the_field_has_a_window_of_4096() -> None:
    model, _ = read({k: v for k, v in MISTRAL.items() if k != "sliding_window"} | {"max_position_embeddings": 32768})
    assert (model.seq_length, model.window_size) == (32768, "4095,0")


@pytest.mark.parametrize(
    ("changes", "local", "whole"),
    [
        ({}, 5e5, 5e5),
        ({"rope_theta": 7.0, "rope_scaling": YARN}, 7.0, 7.0),
        ({"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 3.0}}}, 3.0, 5e5),
        ({"rope_parameters": {"full_attention": {"rope_theta": 9.0}, "sliding_attention": {"rope_theta": 3.0}}}, 3.0, 9.0),
    ],
)
def test_layers_with_a_window_have_their_own_base(changes: dict[str, Any], local: float, whole: float) -> None:
    """And no scaling, whatever the others have."""
    model, _ = read(OLMO3 | {"num_hidden_layers": 4} | changes)
    first, *_, last = (layer.attention.rotary for layer in build_layer_specs(model))
    assert first is not None and last is not None
    assert (first.base, first.scaling) == (local, None) and last.base == whole
    assert isinstance(last.scaling, YarnScaling) == ("yarn" in str(changes))
    plain, _ = read(OLMO3 | {"layer_types": ["full_attention"] * 3} | changes)
    assert plain.rotary_base_local is None and plain.rotary_base == whole


@pytest.mark.parametrize(
    ("changes", "rotated"),
    [
        ({}, "111"),
        ({"num_hidden_layers": 8}, "11101110"),
        ({"no_rope_layer_interval": 2}, "101"),
        ({"no_rope_layers": [0, 1, 1]}, "011"),
        ({"no_rope_layers": [1, 1, 0, 0], "no_rope_layer_interval": 1}, "110"),
    ],
)
def test_layers_without_rotary_positions(changes: dict[str, Any], rotated: str) -> None:
    model, _ = read(SMOLLM3 | changes)
    assert [layer.attention.rotary is not None for layer in build_layer_specs(model)] == [each == "1" for each in rotated]


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (GPT2 | {"embd_pdrop": 0.3, "resid_pdrop": 0.2}, "embd_pdrop 0.3"),
        (STARCODER2 | {"embedding_dropout": 0.3, "residual_dropout": 0.2}, "embedding_dropout 0.3"),
        (LLAMA | {"model_type": "seed_oss", "residual_dropout": 0.2}, "none in transformers"),
    ],
)
def test_one_dropout_for_two_is_told(config: dict[str, Any], told: str) -> None:
    model, notes = read(config)
    assert model.hidden_dropout == 0.2 and len(notes) == 1 and told in notes[0]


def test_a_scale_of_queries_that_no_position_reaches_is_told() -> None:
    model, notes = read(MINISTRAL3 | {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}, "max_position_embeddings": 32})
    assert model.seq_length == 32 and "llama_4_scaling_beta 0.1 is not kept" in notes[0]
    assert not read(MINISTRAL3 | {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.0}})[1]


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (
            model_config(gpt2_like(positions="rope", qk_norm=True)),
            "gpt2: --position-embedding-type is rope, there learned_absolute",
        ),
        (model_config(llama_like(positions="learned")), "llama: --position-embedding-type is learned_absolute, there rope"),
        (model_config(llama_like(norm="LayerNorm", qk_norm=True)), "qwen3: --normalization is LayerNorm, there RMSNorm"),
        (model_config(llama_like(activation="relu", qk_norm=True)), "--swiglu is off, there on"),
        (model_config(llama_like(rotary_percent=0.5, qk_norm=True)), "qwen3: --rotary-percent is 0.5, there 1"),
        (model_config(llama_like(qk_norm=True, qkv_bias=True)), "qwen3: --add-qkv-bias is on, there off"),
        (model_config(gpt2_like(heads=4, kv_heads=2)), "gpt2: --group-query-attention is on, there off"),
        (model_config(gpt2_like(head_size=16)), "gpt2: --kv-channels is 16, there by default"),
        (model_config(gpt2_like(bias=False)), "gpt2: --disable-bias-linear is on, there off"),
        (model_config(llama_like(qk_norm=True), rotary_interleaved=True), "qwen3: --rotary-interleaved is on, there off"),
        (model_config(llama_like(), no_rope_freq="2", rotary_percent=0.5), "smollm3: --rotary-percent is 0.5, there 1"),
    ],
)
def test_a_model_that_no_architecture_has_is_refused_nearest_first(model: ModelConfig, named: str) -> None:
    with pytest.raises(CheckpointError) as error:
        select_family(model)
    first = str(error.value).splitlines()[1]
    assert named in str(error.value) and first.count(";") == min(line.count(";") for line in str(error.value).splitlines()[1:])


def test_an_architecture_that_does_not_fit_is_refused() -> None:
    with pytest.raises(CheckpointError, match="qwen3: --qk-layernorm is off, there on"):
        select_family(model_config(llama_like()), "qwen3")
    with pytest.raises(CheckpointError, match="Choose one of gpt2, llama"):
        select_family(model_config(llama_like()), "falcon")
    assert select_family(model_config(llama_like()), "mistral").model_type == "mistral"


SCALINGS: list[dict[str, Any]] = [
    {},
    {"rotary_seq_len_interpolation_factor": 2.5},
    {"use_rope_scaling": True, "rope_scaling_factor": 32.0},
    {"use_rope_scaling": True, "rope_low_freq_factor": 0.5, "rope_high_freq_factor": 3.0, "original_max_position_embeddings": 99},
    {"rope_type": "dynamic", "rotary_scaling_factor": 3.0, "original_max_position_embeddings": 9},
    {"rope_type": "yarn", "rotary_scaling_factor": 3.0, "original_max_position_embeddings": 8, "beta_fast": 3.0, "beta_slow": 0.5},
    {"rope_type": "yarn", "rotary_scaling_factor": 3.0, "mscale": 0.7, "yarn_correction_range_round_to_int": False},
    {"rope_type": "yarn", "rotary_scaling_factor": 3.0, "mscale": 0.7, "mscale_all_dim": 0.4},
    {"rope_type": "yarn", "rotary_scaling_factor": 3.0, "rope_attention_factor": 1.25},
    {"rope_type": "yarn", "rotary_scaling_factor": 3.0, "rope_attention_factor": 1.25, "mscale_all_dim": 0.6},
    {"rope_type": "longrope", "rotary_scaling_factor": 3.0, "rope_short_factors": (1.0, 2.0), "rope_long_factors": (1.5, 4.0)},
]
GEMMA: dict[str, Any] = {"swiglu": False, "geglu": True, "apply_layernorm_1p": True, "embedding_multiplier": 32**0.5}
PARTS: dict[str, dict[str, Any]] = {
    "qwen2": {"add_qkv_bias": True, "window_size": "7,0", "window_attn_skip_freq": "2"},
    "qwen3": {"qk_layernorm": True, "add_qkv_bias": True, "add_attn_output_bias": True},
    "mistral": {"window_size": "7,0"},
    "phi3": {"window_size": "7,0", "rotary_percent": 0.5},
    "stablelm": {"normalization": "LayerNorm", "add_qkv_bias": True, "rotary_percent": 0.5},
    "granite": {
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.3,
        "softmax_scale": 0.2,
        "output_multiplier": 1 / 3,
        "add_mlp_bias": True,
    },
    "gemma": GEMMA,
    "gemma2": GEMMA
    | {"norm_placement": "sandwich", "softmax_scale": 20**-0.5, "attn_logit_softcapping": 5.0, "window_size": "7,0"},
    "gemma3_text": GEMMA
    | {"norm_placement": "sandwich", "qk_layernorm": True, "final_logit_softcapping": 6.0, "window_size": "7,0"}
    | {"window_attn_skip_freq": "2", "rotary_base_local": 5.0},
    "gpt_neox": {"rotary_percent": 0.5, "parallel_residual": True, "gelu_exact": True},
    "olmo2": {"norm_placement": "post", "qk_layernorm": True, "qk_layernorm_all_heads": True},
    "olmo3": {
        "norm_placement": "post",
        "qk_layernorm": True,
        "qk_layernorm_all_heads": True,
        "window_size": "7,0",
        "window_attn_skip_freq": "2",
        "rotary_base_local": 77.0,
    },
    "mixtral": {"num_experts": 6, "moe_router_topk": 3, "window_size": "7,0"},
    "qwen2_moe": {
        "num_experts": 6,
        "moe_ffn_hidden_size": 12,
        "moe_layer_freq": "[0,1]",
        "moe_router_pre_softmax": True,
        "moe_shared_expert_intermediate_size": 20,
        "moe_shared_expert_gate": True,
        "add_qkv_bias": True,
    },
    "qwen3_moe": {"num_experts": 6, "moe_ffn_hidden_size": 12, "qk_layernorm": True},
    "deepseek_v2": {"add_mlp_bias": True},
    "deepseek_v3": {"rotary_interleaved": False},
    "deepseek_v3 with experts": {"num_experts": 8, "moe_router_topk": 4, "moe_router_num_groups": 4, "moe_router_group_topk": 2}
    | {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_ffn_hidden_size": 12}
    | {"moe_layer_freq": "[0,1]", "moe_shared_expert_intermediate_size": 24, "moe_router_topk_scaling_factor": 1.5},
    "smollm3": {"no_rope_freq": "2", "window_size": "7,0", "window_attn_skip_freq": "[0,1]", "add_mlp_bias": True},
    "starcoder2": {"normalization": "LayerNorm", "swiglu": False, "disable_bias_linear": False, "window_size": "7,0"},
    "nemotron": {
        "normalization": "LayerNorm",
        "apply_layernorm_1p": True,
        "swiglu": False,
        "squared_relu": True,
        "rotary_percent": 0.5,
        "add_mlp_bias": True,
    },
    "olmo": {"normalization": "LayerNorm", "norm_weight": False, "norm_epsilon": 1e-5},
    "arcee": {"swiglu": False, "squared_relu": True, "add_mlp_bias": True},
    "seed_oss": {"add_qkv_bias": True, "add_mlp_bias": True},
    "ministral": {"window_size": "7,0", "window_attn_skip_freq": "[0,1]"},
    "ministral3": {"window_size": "7,0"},
    "glm": {"rotary_interleaved": True, "rotary_percent": 0.5, "add_qkv_bias": True},
    "glm4": {"rotary_interleaved": True, "rotary_percent": 0.5, "norm_placement": "sandwich"},
    "ernie4_5": {"rotary_interleaved": True, "disable_bias_linear": False},
}
"""Of each family, something that it has and Llama has not."""


BASES = (
    gpt2_like(),
    gpt2_like(positions="rope", num_layers=4, kv_heads=2, head_size=8, qk_norm=True, windows=(3, None, 3, None), local_base=7.0),
    llama_like(rope_scaling=RotaryScaling("linear", 2.0)),
    llama_like(rope_scaling=RotaryScaling("llama3", 2.0, 99)),
    llama_like(rope_scaling=RotaryScaling("yarn", 2.0, 99)),
    llama_like(rope_scaling=RotaryScaling("longrope", 2.0, 99, short_factors=(1.0,) * 4, long_factors=(2.0,) * 4)),
    llama_like(experts=ExpertsShape((True, True), 8, 2, 12, 8, num_groups=2, group_top_k=1)),
)
OTHERS: dict[str, Any] = {
    "window_size": "5,0",
    "window_attn_skip_freq": "3",
    "no_rope_freq": "2",
    "kv_channels": 4,
    "softmax_scale": 0.5,
    "moe_layer_freq": "2",
}
"""Other values, for settings whose type does not say which there are."""


def test_what_is_left_to_the_specs_is_in_them() -> None:
    """Else two models that compute something else would count as the same, and one would be written as the other."""
    assert not [name for name in sorted(SPEC_FIELDS) if not _tells(name)]


def _tells(name: str) -> bool:
    """Whether a setting with another value makes another model, in some base."""
    for shape in BASES:
        settings: dict[str, Any] = {"rope_attention_factor": None} if name.startswith("mscale") else {}
        model = dataclasses.replace(model_config(shape), **settings)
        value, flag = getattr(model, name), get_flag(name)
        if name in OTHERS:
            others = [OTHERS[name]]
        elif flag.choices:
            others = [choice for choice in flag.choices if choice != value]
        elif isinstance(value, bool):
            others = [not value]
        else:
            others = [tuple(2 * each for each in value) if isinstance(value, tuple) else 2 * (value or 50)]
        if any(compute_signature(dataclasses.replace(model, **{name: other})) != compute_signature(model) for other in others):
            return True
    return False


@pytest.mark.parametrize("case", sorted((FAMILIES.keys() | PARTS.keys()) - {"gpt_oss"}))
def test_what_is_written_is_read_as_the_same_model(case: str) -> None:
    """With every scaling, and with every spelling of rotary positions but one taken out."""
    parts, name = PARTS.get(case, {}), case.split()[0]
    style: dict[str, Any] = {"rotary_base": 77.0, "epsilon": 1e-4, "head_size": 4 if parts.get("rotary_percent") is None else 8}
    base = gpt2_like(**style, positions="rope", tied=False) if name == "gpt_neox" else llama_like(**style)
    if name.startswith("deepseek"):
        base = deepseek_like(rotary_base=77.0, epsilon=1e-6)
    for scaling in SCALINGS:
        rotary = next((group for group in FAMILIES[name].field_groups if isinstance(group, RotaryFields)), None)
        kind = scaling.get("rope_type", "llama3" if "use_rope_scaling" in scaling else "linear")
        if scaling and (
            rotary is None
            or kind not in rotary.scaling_types
            or (rotary.local_theta and "yarn_correction_range_round_to_int" in scaling)
        ):
            continue
        free: dict[str, Any] = {"init_method_std": 0.05, "attention_dropout": 0.25, "max_position_embeddings": 16}
        model = model_config(gpt2_like(tied=False)) if name == "gpt2" else model_config(base, **parts, **scaling, **free)
        family = select_family(model, name)
        config: dict[str, Any] = json.loads(json.dumps({"model_type": name, "vocab_size": 64, **family.write(model)}))
        old = {k: v for k, v in config.items() if k != "rope_parameters"}
        spelled = ("rope_theta", "rope_scaling", "partial_rotary_factor", "rotary_emb_base", "rotary_pct")
        new = {k: v for k, v in config.items() if k not in spelled}
        for written in (config, old, new):
            again, notes = read(written)
            assert compute_signature(again) == compute_signature(model) and not notes, scaling
            assert all(
                getattr(again, each) == getattr(model, each)
                for each in ("init_method_std", "attention_dropout", "has_tied_embeddings")
            )


def test_transformers_reads_what_is_written(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = model_config(llama_like(rotary_base=77.0), use_rope_scaling=True, rope_scaling_factor=16.0)
    config = {"model_type": "llama", "vocab_size": 64, **select_family(model).write(model)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    parameters = getattr(theirs, "rope_parameters", None) or {**theirs.rope_scaling, "rope_theta": theirs.rope_theta}
    assert (parameters["rope_theta"], parameters["rope_type"], parameters["factor"]) == (77.0, "llama3", 16.0)
