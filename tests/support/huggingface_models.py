"""Small random models of transformers, of odd sizes, in the folders that transformers writes."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config.parallel import ParallelConfig
from megatron.config.training import OptimizerConfig
from megatron.model.build import build_model
from megatron.model.inputs import ModelInputs
from megatron.optimizer.grad_scaler import GradScaler
from megatron.pipeline_parallel.partition import build_layer_table
from megatron.training.step import TrainStep
from megatron_lab.foreign.huggingface.folder import HuggingFaceFolder
from megatron_lab.verification.recording import set_weights
from tests.support.lone_rank import lone_rank

VOCAB = 5003
BIAS_OF_CHOICES = "e_score_correction_bias"
"""DeepSeek-V3's biases that no gradient moves."""
_LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 42,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
    "rope_theta": 5000.0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 2.0,
    "beta_slow": 0.25,
    "mscale": 0.7,
    "mscale_all_dim": 0.4,
}
_LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": [1.0, 2.0, 4.0], "partial_rotary_factor": 0.75}
_WINDOW_LAST = ["full_attention", "full_attention", "sliding_attention"]
_NEOX = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 42,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "max_position_embeddings": 64,
    "rotary_emb_base": 5000,
    "rotary_pct": 0.25,
}
_GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 6, "pad_token_id": None}
SMALL = _LLAMA | {"vocab_size": 131}
_UNPADDED = SMALL | {"pad_token_id": None}
"""For architectures with a padding token by default, whose embedding would get no gradient."""
_DEEPSEEK = SMALL | {
    "num_key_value_heads": 6,
    "first_k_dense_replace": 3,
    "q_lora_rank": 20,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 7,
}
_DEEPSEEK_EXPERTS = _DEEPSEEK | {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 20,
    "routed_scaling_factor": 1.5,
}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 48, "n_head": 6, "n_layer": 3, "n_positions": 64, "n_inner": 80}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", _GPT2),
    "gpt2-untied-relu2": ("gpt2", _GPT2 | {"vocab_size": 131, "tie_word_embeddings": False, "activation_function": "relu2"}),
    "llama": ("llama", _LLAMA),
    "llama-tied-biases-all-heads": (
        "llama",
        _LLAMA | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 6},
    ),
    "llama-linear": ("llama", SMALL | {"rope_scaling": {"type": "linear", "factor": 3.0}}),
    "llama3": ("llama", SMALL | {"max_position_embeddings": 131072, "rope_theta": 5e5, "rope_scaling": _LLAMA3}),
    "mistral": ("mistral", SMALL | {"head_dim": 10, "sliding_window": None}),
    "qwen2-tied": ("qwen2", SMALL | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", SMALL | {"head_dim": 12}),
    "llama-dynamic": ("llama", SMALL | {"rope_scaling": {"type": "dynamic", "factor": 3.0}, "max_position_embeddings": 24}),
    "llama-yarn": ("llama", SMALL | {"rope_scaling": YARN}),
    "mistral-window": ("mistral", SMALL | {"sliding_window": 7}),
    "qwen3-windows-biases": (
        "qwen3",
        SMALL
        | {"head_dim": 10, "use_sliding_window": True, "sliding_window": 5, "layer_types": _WINDOW_LAST, "attention_bias": True},
    ),
    "smollm3": ("smollm3", SMALL | {"no_rope_layer_interval": 2, "pad_token_id": None, "mlp_bias": True}),
    "smollm3-windows": (
        "smollm3",
        SMALL | {"no_rope_layers": [1, 0, 0], "pad_token_id": None, "use_sliding_window": True, "sliding_window": 9},
    ),
    "stablelm": ("stablelm", SMALL | {"hidden_size": 96, "use_qkv_bias": True}),
    "olmo2": ("olmo2", SMALL | {"pad_token_id": None, "attention_bias": True}),
    "olmo3": ("olmo3", SMALL | {"pad_token_id": None, "num_hidden_layers": 4, "sliding_window": 6}),
    "olmo3-yarn": (
        "olmo3",
        SMALL
        | {"pad_token_id": None, "sliding_window": 6, "layer_types": _WINDOW_LAST, "rope_theta": 5e5}
        | {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}},
    ),
    "granite": (
        "granite",
        SMALL
        | {"embedding_multiplier": 6.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 0.4}
        | {"mlp_bias": True},
    ),
    "gemma": ("gemma", SMALL | {"head_dim": 10, "pad_token_id": None}),
    "gemma2": (
        "gemma2",
        SMALL | _GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "num_hidden_layers": 4},
    ),
    "gemma3": ("gemma3_text", SMALL | _GEMMA | {"sliding_window_pattern": 2, "rope_local_base_freq": 100.0}),
    "gemma3-linear": (
        "gemma3_text",
        SMALL | _GEMMA | {"layer_types": _WINDOW_LAST, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "gpt-neox": ("gpt_neox", _NEOX),
    "gpt-neox-in-turn": ("gpt_neox", _NEOX | {"use_parallel_residual": False, "attention_bias": False, "hidden_act": "relu"}),
    "phi3": ("phi3", SMALL | {"pad_token_id": None, "sliding_window": 11}),
    "phi3-longrope": ("phi3", SMALL | {"pad_token_id": None, "original_max_position_embeddings": 24, "rope_scaling": _LONGROPE}),
    "deepseek-v2": ("deepseek_v2", _DEEPSEEK | {"q_lora_rank": None, "mlp_bias": True}),
    "deepseek-v2-yarn": ("deepseek_v2", _DEEPSEEK | {"rope_scaling": YARN}),
    "deepseek-v3": ("deepseek_v3", _DEEPSEEK | {"rope_scaling": {name: YARN[name] for name in YARN if name != "mscale"}}),
    "deepseek-v3-halves": ("deepseek_v3", _DEEPSEEK | {"rope_interleave": False, "tie_word_embeddings": True}),
    "deepseek-v2-experts": (
        "deepseek_v2",
        _DEEPSEEK_EXPERTS | {"first_k_dense_replace": 0, "num_experts_per_tok": 3, "q_lora_rank": None, "rope_scaling": YARN},
    ),
    "deepseek-v2-groups": (
        "deepseek_v2",
        _DEEPSEEK_EXPERTS | {"topk_method": "group_limited_greedy", "num_experts_per_tok": 2},
    ),
    "deepseek-v3-experts": ("deepseek_v3", _DEEPSEEK_EXPERTS),
    "deepseek-v3-one-group": (
        "deepseek_v3",
        _DEEPSEEK_EXPERTS | {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 1, "norm_topk_prob": False},
    ),
    "mixtral": ("mixtral", SMALL | {"num_local_experts": 4, "intermediate_size": 44, "sliding_window": 9, "pad_token_id": None}),
    "qwen2-moe": (
        "qwen2_moe",
        SMALL
        | {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 26}
        | {"mlp_only_layers": [1]},
    ),
    "qwen3-moe": (
        "qwen3_moe",
        SMALL
        | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": True, "head_dim": 12}
        | {"decoder_sparse_step": 2, "attention_bias": True},
    ),
    "starcoder2": ("starcoder2", SMALL | {"sliding_window": 7}),
    "starcoder2-no-biases": (
        "starcoder2",
        SMALL | {"use_bias": False, "tie_word_embeddings": False, "head_dim": 10, "hidden_act": "relu", "rope_scaling": YARN},
    ),
    "nemotron": ("nemotron", SMALL | {"head_dim": 12}),
    "nemotron-biases": (
        "nemotron",
        SMALL
        | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "partial_rotary_factor": 0.25}
        | {"head_dim": 16, "norm_eps": 1e-3, "rope_scaling": {"type": "linear", "factor": 3.0}},
    ),
    "olmo": ("olmo", _UNPADDED | {"tie_word_embeddings": True}),
    "olmo-biases": ("olmo", _UNPADDED | {"attention_bias": True, "rope_scaling": {"type": "dynamic", "factor": 3.0}}),
    "arcee": ("arcee", SMALL | {"head_dim": 12}),
    "arcee-biases-yarn": (
        "arcee",
        SMALL | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "rope_scaling": YARN},
    ),
    "seed-oss": ("seed_oss", _UNPADDED | {"head_dim": 12}),
    "seed-oss-biases": (
        "seed_oss",
        _UNPADDED
        | {"head_dim": 10, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "ministral": ("ministral", SMALL | {"sliding_window": 7, "head_dim": 12}),
    "ministral-some-windows": (
        "ministral",
        SMALL | {"head_dim": 8, "sliding_window": 5, "layer_types": _WINDOW_LAST, "rope_scaling": YARN},
    ),
    "ministral3": (
        "ministral3",
        _UNPADDED | {"head_dim": 12, "rope_parameters": YARN | {"rope_theta": 1e6, "llama_4_scaling_beta": 0.0}},
    ),
    "ministral3-short": (
        "ministral3",
        _UNPADDED
        | {"head_dim": 10, "sliding_window": 7, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "default", "original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.1}},
    ),
    "glm": ("glm", _UNPADDED | {"head_dim": 12}),
    "glm4": ("glm4", _UNPADDED | {"head_dim": 12}),
    "glm4-no-biases": (
        "glm4",
        _UNPADDED | {"head_dim": 16, "attention_bias": False, "partial_rotary_factor": 0.25, "rope_scaling": YARN},
    ),
    "ernie4-5": ("ernie4_5", _UNPADDED | {"head_dim": 12}),
    "ernie4-5-biases": ("ernie4_5", _UNPADDED | {"head_dim": 10, "use_bias": True, "tie_word_embeddings": False}),
}
"""Name -> architecture and settings; grouped queries of 6 heads over 3 unless they say otherwise."""


def library(kind: str) -> Any:
    """transformers, quiet; skips the test where it is not installed, or too old for an architecture."""
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    return transformers


def saved(case: str, folder: Path, *, shard: str = "5GB", **changes: Any) -> Any:
    """Save a `random_model` of a case; returns the model."""
    kind, settings = CASES[case]
    transformers = library(kind)
    torch.manual_seed(1)
    # The special tokens of the defaults lie outside small vocabularies.
    settings = copy.deepcopy(settings)  # transformers writes into the rotary parameters
    config = transformers.AutoConfig.for_model(kind, **(settings | {"bos_token_id": 1, "eos_token_id": 2} | changes))
    model = random_model(config)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def random_model(config: Any) -> Any:
    """The model of transformers with a configuration, in float32, in which every weight and bias is away from its usual start."""
    model = library(config.model_type).AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith(BIAS_OF_CHOICES):
                buffer.add_(torch.randn_like(buffer) * 0.1)
    return model


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(ids).logits
    return found


def train_step(source: HuggingFaceFolder, dtype: torch.dtype, optimizer: OptimizerConfig) -> TrainStep:
    """The step of one process that trains the weights of a folder, without dropout."""
    context, parallel = lone_rank(), ParallelConfig()
    model = dataclasses.replace(source.model, attention_dropout=0.0, hidden_dropout=0.0, make_vocab_size_divisible_by=1)
    built = build_model(
        model,
        context,
        dtype=dtype,
        vocab_size=source.vocab_size,
        sequence_parallel=False,
        seed=1,
        table=build_layer_table(model, parallel, source.vocab_size),
    )
    step = TrainStep(
        built, context, GradScaler(1.0), parallel=parallel, optimizer=optimizer, micro_batch_size=2, skip_overflow=False
    )
    set_weights(step, {name: source.read(name).to(dtype) for name in source.weights})
    return step


def inputs_of(ids: torch.Tensor) -> ModelInputs:
    """The inputs of a step of `train_step` on token ids [b, s + 1]."""
    tokens = ids[:, :-1]
    positions = torch.arange(tokens.shape[1]).unsqueeze(1).expand(-1, len(tokens))
    return ModelInputs(positions, tokens.t().contiguous(), ids[:, 1:].t().contiguous(), torch.ones(tokens.t().shape))


def some_ids(vocab: int = VOCAB, shape: tuple[int, int] = (2, 40)) -> torch.Tensor:
    """Random ids [b, s]."""
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(3))


def opened(folder: Path) -> Any:
    """The model that transformers makes of a folder, in float32; no tensor may be missing or left over."""
    transformers = library(json.loads((folder / "config.json").read_text())["model_type"])
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model.float().eval()
