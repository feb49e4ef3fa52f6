"""The published config.json files of GPT-OSS: the refusal names exactly what is missing, and all other features are read."""

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
from megatron_lab.foreign.huggingface.families import select_family
from megatron_lab.foreign.huggingface.family import Family
from megatron_lab.foreign.huggingface.fields import Fields
from megatron_lab.foreign.huggingface.folder import HuggingFaceFolder
from megatron_lab.foreign.huggingface.groups import UnsupportedFields
from tests.support.huggingface_models import library

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


def read(config: dict[str, Any]) -> tuple[ModelConfig, Fields]:
    """The model that a config.json describes, and its fields with what is refused."""
    family = _without_refusal()
    fields = Fields("config.json", config, family.ignored_fields)
    fields.get_size("vocab_size")
    return family.parse(fields), fields


def _without_refusal() -> Family:
    groups = tuple(group for group in GPT_OSS.field_groups if not isinstance(group, UnsupportedFields))
    return dataclasses.replace(GPT_OSS, field_groups=groups)


@pytest.mark.parametrize("config", [_GPT_OSS_20B, _GPT_OSS_120B], ids=["20b", "120b"])
def test_all_other_features_of_gpt_oss_are_read(config: dict[str, Any]) -> None:
    """Nothing else is refused, a model without biases can be built, and its number of parameters is that of transformers but for
    the biases."""
    config = {name: value for name, value in config.items() if name != "quantization_config"}
    model, fields = read(config)
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
    _, fields = read({**_GPT_OSS_20B, "quantization_config": None} | changes)
    with pytest.raises(CheckpointError) as error:
        fields.finish()
    assert named in str(error.value)


def test_gpt_oss_cannot_be_written_yet() -> None:
    config = {name: value for name, value in _GPT_OSS_20B.items() if name != "quantization_config"}
    model, _ = read(config)
    with pytest.raises(CheckpointError, match="gpt_oss: num_local_experts = 32: the biases of experts and router"):
        select_family(model, "gpt_oss")
