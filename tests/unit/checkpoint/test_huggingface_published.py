"""Published config.json files: their models have the sizes of transformers, or the refusal names exactly what is missing."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.errors import CheckpointError
from megatron.config.model import ModelConfig
from megatron.parallel.params import build_global_records
from megatron.spec.layers import build_layer_specs
from megatron_lab.foreign.huggingface.expert_families import GPT_OSS
from megatron_lab.foreign.huggingface.families import FAMILIES, select_family
from megatron_lab.foreign.huggingface.family import Family, compute_signature
from megatron_lab.foreign.huggingface.fields import Fields
from megatron_lab.foreign.huggingface.folder import HuggingFaceFolder
from megatron_lab.foreign.huggingface.groups import UnsupportedFields
from tests.support.huggingface_models import library

_STARCODER2: dict[str, Any] = {
    "architectures": ["Starcoder2ForCausalLM"],
    "attention_dropout": 0.1,
    "bos_token_id": 0,
    "embedding_dropout": 0.1,
    "eos_token_id": 0,
    "hidden_act": "gelu_pytorch_tanh",
    "initializer_range": 0.018042,
    "max_position_embeddings": 16384,
    "mlp_type": "default",
    "model_type": "starcoder2",
    "norm_epsilon": 1e-05,
    "norm_type": "layer_norm",
    "residual_dropout": 0.1,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.37.0.dev0",
    "use_bias": True,
    "use_cache": True,
    "vocab_size": 49152,
}
_NEMOTRON: dict[str, Any] = {
    "architectures": ["NemotronForCausalLM"],
    "bos_token_id": 2,
    "eos_token_id": 3,
    "hidden_act": "relu2",
    "initializer_range": 0.0134,
    "max_position_embeddings": 4096,
    "model_type": "nemotron",
    "norm_eps": 1e-05,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 256000,
}
_OLMO: dict[str, Any] = {
    "architectures": ["OlmoForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "clip_qkv": None,
    "eos_token_id": 50279,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 2048,
    "model_type": "olmo",
    "pad_token_id": 1,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": 50304,
}
_MINISTRAL3: dict[str, Any] = {
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 262144,
    "model_type": "ministral3",
    "num_attention_heads": 32,
    "num_hidden_layers": 34,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 16.0,
        "llama_4_scaling_beta": 0.1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16384,
        "rope_theta": 1000000.0,
        "rope_type": "yarn",
        "type": "yarn",
    },
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 131072,
}
_GLM: dict[str, Any] = {
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 13696,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "pad_token_id": 151329,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 151552,
}
MODELS: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "StarCoder2 3B": (
        _STARCODER2
        | {"hidden_size": 3072, "intermediate_size": 12288, "num_attention_heads": 24, "num_hidden_layers": 30}
        | {"num_key_value_heads": 2, "rope_theta": 999999.4420358813},
        3_030_371_328,
        {"head_size": 128, "window_size": "4095,0", "hidden_dropout": 0.1, "attention_dropout": 0.1, "has_tied_embeddings": True},
    ),
    "StarCoder2 7B": (
        _STARCODER2
        | {"hidden_size": 4608, "intermediate_size": 18432, "num_attention_heads": 36, "num_hidden_layers": 32}
        | {"num_key_value_heads": 4, "rope_theta": 1000000},
        7_173_923_840,
        {"rotary_base": 1e6, "num_key_value_heads": 4},
    ),
    "StarCoder2 15B": (
        _STARCODER2
        | {"hidden_size": 6144, "intermediate_size": 24576, "num_attention_heads": 48, "num_hidden_layers": 40}
        | {"num_key_value_heads": 4, "rope_theta": 100000, "initializer_range": 0.01275},
        0,
        {"rotary_base": 1e5, "init_method_std": 0.01275},
    ),
    "Minitron 4B": (
        _NEMOTRON | {"hidden_size": 3072, "intermediate_size": 9216, "num_attention_heads": 24, "kv_channels": 128},
        4_190_509_056,
        {"head_size": 128, "rotary_percent": 0.5, "squared_relu": True, "apply_layernorm_1p": True, "swiglu": False},
    ),
    "Minitron 8B": (
        _NEMOTRON
        | {"attention_bias": False, "attention_dropout": 0.0, "head_dim": 128, "mlp_bias": False}
        | {"hidden_size": 4096, "intermediate_size": 16384, "num_attention_heads": 48},
        0,
        {"head_size": 128, "num_attention_heads": 48},
    ),
    "Nemotron-4 340B": (
        _NEMOTRON
        | {"hidden_size": 18432, "intermediate_size": 73728, "num_attention_heads": 96, "num_hidden_layers": 96}
        | {"layer_norm_eps": 1e-5, "pretraining_tp": 1, "initializer_range": 0.0063},
        0,
        {"head_size": 192, "num_layers": 96},
    ),
    "OLMo 1B": (
        _OLMO
        | {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_hidden_layers": 16}
        | {"num_key_value_heads": 16, "tie_word_embeddings": True},
        1_176_764_416,
        {"norm_weight": False, "norm_epsilon": 1e-5, "has_tied_embeddings": True, "normalization": "LayerNorm"},
    ),
    "OLMo 7B": (
        _OLMO
        | {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_hidden_layers": 32}
        | {"num_key_value_heads": 32, "tie_word_embeddings": False},
        6_888_095_744,
        {"has_tied_embeddings": False},
    ),
    "AFM 4.5B": (
        {"architectures": ["ArceeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128}
        | {"hidden_act": "relu2", "hidden_size": 2560, "initializer_range": 0.02, "intermediate_size": 18432, "mlp_bias": False}
        | {"max_position_embeddings": 65536, "model_type": "arcee", "num_attention_heads": 20, "num_hidden_layers": 36}
        | {"num_key_value_heads": 4, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": False}
        | {"vocab_size": 128004}
        | {
            "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 20.0, "mscale": 1.0, "rope_type": "yarn"}
            | {"original_max_position_embeddings": 4096, "type": "yarn"}
        },
        0,
        {"rope_type": "yarn", "rotary_scaling_factor": 20.0, "squared_relu": True, "seq_length": 65536},
    ),
    "Seed-OSS 36B": (
        {"architectures": ["SeedOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.1, "attention_out_bias": False}
        | {"head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 27648}
        | {"max_position_embeddings": 524288, "mlp_bias": False, "model_type": "seed_oss", "num_attention_heads": 80}
        | {"num_hidden_layers": 64, "num_key_value_heads": 8, "residual_dropout": 0.1, "rms_norm_eps": 1e-06}
        | {"rope_scaling": {"rope_type": "default"}, "rope_theta": 10000000.0, "tie_word_embeddings": False}
        | {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "vocab_size": 155136},
        0,
        {"add_qkv_bias": True, "add_attn_output_bias": False, "hidden_dropout": 0.1, "rotary_base": 1e7, "head_size": 128},
    ),
    "Ministral 8B": (
        {"architectures": ["MinistralForCausalLM"], "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu"}
        | {"hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 12288, "max_position_embeddings": 32768}
        | {"model_type": "ministral", "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8}
        | {"rms_norm_eps": 1e-05, "rope_theta": 100000000.0, "sliding_window": 32768, "tie_word_embeddings": False}
        | {"layer_types": ["sliding_attention"] * 36, "vocab_size": 131072},
        8_019_808_256,
        {"rotary_base": 1e8, "window_size": "32767,0", "head_size": 128},
    ),
    "Ministral 3 8B for 16K tokens": (
        _MINISTRAL3 | {"max_position_embeddings": 16384},
        0,
        {"seq_length": 16384, "rotary_scaling_factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0, "rotary_base": 1e6},
    ),
    "Devstral 2 123B": (
        _MINISTRAL3
        | {"architectures": ["Ministral3ForCausalLM"], "hidden_size": 12288, "intermediate_size": 28672}
        | {"num_attention_heads": 96, "num_hidden_layers": 88}
        | {
            "rope_parameters": _MINISTRAL3["rope_parameters"]
            | {"beta_fast": 4.0, "factor": 64.0, "llama_4_scaling_beta": 0.0, "mscale_all_dim": 0.0}
            | {"original_max_position_embeddings": 4096}
        },
        0,
        {"seq_length": 262144, "beta_fast": 4.0, "mscale_all_dim": 0.0, "num_layers": 88},
    ),
    "GLM-4 9B": (
        _GLM
        | {"architectures": ["GlmForCausalLM"], "model_type": "glm", "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-07},
        9_399_951_360,
        {"rotary_percent": 0.5, "rotary_interleaved": True, "add_qkv_bias": True, "norm_placement": "pre"},
    ),
    "GLM-4 9B 0414": (
        _GLM
        | {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "max_position_embeddings": 32768, "rms_norm_eps": 1e-05},
        0,
        {"norm_placement": "sandwich", "num_key_value_heads": 2},
    ),
    "GLM-4 32B 0414": (
        _GLM
        | {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "max_position_embeddings": 32768, "rms_norm_eps": 1e-05}
        | {"attention_bias": False, "hidden_size": 6144, "intermediate_size": 23040, "num_attention_heads": 48}
        | {"num_hidden_layers": 61},
        0,
        {"add_qkv_bias": False, "num_layers": 61},
    ),
    "ERNIE 4.5 0.3B": (
        {"architectures": ["Ernie4_5ForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "head_dim": 128, "hidden_act": "silu"}
        | {"hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 131072, "model_type": "ernie4_5"}
        | {"num_attention_heads": 16, "num_hidden_layers": 18, "num_key_value_heads": 2, "pad_token_id": 0}
        | {"rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 500000.0, "tie_word_embeddings": True, "use_bias": False}
        | {"vocab_size": 103424},
        360_748_032,
        {"disable_bias_linear": True, "has_tied_embeddings": True, "rotary_interleaved": True, "rotary_percent": 1.0},
    ),
}
"""Config.json of a published model, its number of parameters (0 if only transformers tells it), and what the fields mean."""


def read(config: dict[str, Any], family: Family | None = None) -> tuple[ModelConfig, Fields]:
    family = family or FAMILIES[config["model_type"]]
    fields = Fields("config.json", config, family.ignored_fields)
    fields.get_size("vocab_size")
    return family.parse(fields), fields


@pytest.mark.parametrize("name", MODELS)
def test_a_published_model_has_its_true_size(name: str) -> None:
    """As many parameters as transformers gives it, and again after it is written."""
    config, num_params, settings = MODELS[name]
    model, fields = read(config)
    fields.finish()
    assert {setting: getattr(model, setting) for setting in settings} == settings
    counts = [math.prod(record.shape) for record in build_global_records(model, config["vocab_size"]).values()]
    transformers = library(config["model_type"])
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    assert sum(counts) == sum(param.numel() for param in theirs.parameters()) and num_params in (0, sum(counts))
    written = {"model_type": config["model_type"], "vocab_size": 5, **FAMILIES[config["model_type"]].write(model)}
    again, fields = read(json.loads(json.dumps(written)))
    fields.finish()
    assert compute_signature(again) == compute_signature(model)
    assert select_family(model, config["model_type"]).model_type == config["model_type"]


def test_ministral_3_is_refused_where_the_position_scales_queries() -> None:
    _, fields = read(_MINISTRAL3)
    with pytest.raises(CheckpointError, match=r"after the first 16384 tokens .* set max_position_embeddings to 16384$") as error:
        fields.finish()
    assert len(str(error.value).splitlines()) == 2


_GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": [
            *("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"),
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}
_GPT_OSS_120B = _GPT_OSS_20B | {
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "num_hidden_layers": 36,
    "num_local_experts": 128,
}


@pytest.mark.parametrize("config", [_GPT_OSS_20B, _GPT_OSS_120B], ids=["20b", "120b"])
def test_of_gpt_oss_only_expert_biases_and_4_bit_weights_are_missing(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as error:
        HuggingFaceFolder(tmp_path)
    _, quantization, biases = str(error.value).splitlines()
    assert quantization.startswith("  quantization_config = {") and "'mxfp4'}: the weights are quantized" in quantization
    assert biases == (
        f"  num_local_experts = {config['num_local_experts']}: the biases of experts and router are not supported yet; all other "
        "features of the architecture are"
    )


def _without_refusal() -> Family:
    groups = tuple(group for group in GPT_OSS.field_groups if not isinstance(group, UnsupportedFields))
    return dataclasses.replace(GPT_OSS, field_groups=groups)


@pytest.mark.parametrize("config", [_GPT_OSS_20B, _GPT_OSS_120B], ids=["20b", "120b"])
def test_all_other_features_of_gpt_oss_are_read(config: dict[str, Any]) -> None:
    """Nothing else is refused, a model without biases can be built, and its number of parameters is that of transformers but for
    the biases."""
    config = {name: value for name, value in config.items() if name != "quantization_config"}
    model, fields = read(config, _without_refusal())
    fields.finish()
    first, second, *_ = build_layer_specs(model)
    assert (first.attention.scores.window, second.attention.scores.window) == (127, None)
    expected = {
        "num_experts": config["num_local_experts"],
        "moe_router_topk": 4,
        "moe_router_pre_softmax": False,
        "quick_geglu": True,
        "swiglu": False,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": 7.0,
        "softmax_type": "learnable",
        "rope_type": "yarn",
        "yarn_correction_range_round_to_int": False,
        "original_max_position_embeddings": 4096,
        "rotary_base": 150000.0,
        "add_qkv_bias": True,
        "add_attn_output_bias": True,
    }
    assert {name: getattr(model, name) for name in expected} == expected
    counts = {name: math.prod(record.shape) for name, record in build_global_records(model, config["vocab_size"]).items()}
    transformers = library("gpt_oss")
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    biases = ("experts.gate_up_proj_bias", "experts.down_proj_bias", "router.bias")
    assert sum(counts.values()) == sum(p.numel() for name, p in theirs.named_parameters() if not name.endswith(biases))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"swiglu_alpha": 1.0}, "swiglu_alpha = 1.0"),
        ({"swiglu_limit": 0}, "swiglu_limit = 0"),
        ({"experts_per_token": 2}, "experts_per_token = 2: differs from num_experts_per_tok = 4"),
        ({"initial_context_length": 8192}, "initial_context_length = 8192: differs from rope_scaling"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ],
)
def test_fields_of_gpt_oss_that_contradict_are_refused(changes: dict[str, Any], named: str) -> None:
    _, fields = read({**_GPT_OSS_20B, "quantization_config": None} | changes, _without_refusal())
    with pytest.raises(CheckpointError) as error:
        fields.finish()
    assert named in str(error.value)


def test_gpt_oss_cannot_be_written_yet() -> None:
    config = {name: value for name, value in _GPT_OSS_20B.items() if name != "quantization_config"}
    model, _ = read(config, _without_refusal())
    with pytest.raises(CheckpointError, match="gpt_oss: num_local_experts = 32: the biases of experts and router"):
        select_family(model, "gpt_oss")
