"""Reads Megatron-LM's saved arguments as settings of the model and the tokenizer."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from typing import Any, get_args

from megatron.checkpoint.errors import CheckpointError
from megatron.config.checks import model as model_checks
from megatron.config.checks.finding import rules_in
from megatron.config.config import Config
from megatron.config.data import DataConfig, TokenizerType, tokenizer_settings
from megatron.config.flags import flags
from megatron.config.model import ModelConfig
from megatron.spec.activations import FLAGS

_OTHER_MODELS: dict[str, tuple[Any, ...]] = {
    "num_experts": (None, 0),
    "multi_latent_attention": (None, False),
    "apply_layernorm_1p": (None, False),
    "apply_residual_connection_post_layernorm": (None, False),
    "no_rope_freq": (None,),
    "window_size": (None,),
    "quick_geglu": (None, False),
    "softmax_type": (None, "vanilla"),
    "softmax_scale": (None,),
    "attention_output_gate": (None, False),
    "experimental_attention_variant": (None,),
    "mtp_num_layers": (None, 0),
    "retro_add_retriever": (None, False),
    "is_hybrid_model": (None, False),
    "hybrid_layer_pattern": (None,),
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None,),
    "add_position_embedding": (None, True),
    "use_mup": (None, False),
    "qk_l2_norm": (None, False),
    "rotary_base_per_layer": (None,),
    "glu_linear_offset": (None, 0.0, 0),
    "activation_func_clamp_value": (None,),
    "head_wise_attn_gate": (None, False),
}
"""Arguments that make another model, with the values at which they do not."""

_OF_LATENT_ATTENTION = frozenset(
    {
        *("rope_type", "rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale"),
        *("mscale_all_dim", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    }
)


def model_of(args: Namespace, where: str) -> ModelConfig:
    """The model that the arguments describe.

    Args:
        where: the file, for messages.

    Raises:
        CheckpointError: it has parts that cannot be built here, or an argument is missing or of another type.
    """
    given = vars(args)
    others = [f"{name} = {given[name]!r}" for name, plain in _OTHER_MODELS.items() if name in given and given[name] not in plain]
    if others:
        raise CheckpointError(f"{where} holds a model that cannot be built here: {', '.join(others)}")
    # All other arguments have the same name and meaning here.
    renamed = {"norm_epsilon": given.get("layernorm_epsilon")}  # the name before 2023
    said = renamed | {name: value for name, value in given.items() if value is not None}
    said["disable_bias_linear"] = not given.get("add_bias_linear", True)
    said["rotary_seq_len_interpolation_factor"] = given.get("rotary_seq_len_interpolation_factor") or 1.0
    if given.get("use_rotary_position_embeddings"):
        said["position_embedding_type"] = "rope"
    if not given.get("multi_latent_attention"):  # there these belong to latent attention alone, and have values without it
        said = {name: value for name, value in said.items() if name not in _OF_LATENT_ATTENTION}
    settings, missing = {}, []
    for flag in (flag for flag in flags().values() if flag.topic == "model"):
        value = said.get(flag.field)
        if value is not None:
            try:
                settings[flag.field] = flag.from_plain(value)
            except ValueError as error:
                raise CheckpointError(f"{where}: its args say {flag.field} = {value!r}, but {error}") from error
        if flag.facts.required and settings.get(flag.field, 0) < 1:
            missing.append(flag.field)
    if missing:
        raise CheckpointError(f"{where}: its args say nothing of {', '.join(missing)}, or a number below 1")
    model = ModelConfig(**settings)
    for rule in rules_in(model_checks):
        for finding in rule(Config(model=model), 1):
            raise CheckpointError(f"{where}: its args describe no model: {finding.message}")
    return model


def notes_on(args: Namespace) -> list[str]:
    """Notes on where the model computes a little otherwise here than there."""
    given = vars(args)
    other = any(given.get(flag) for flag in FLAGS)
    if not other and given.get("bias_gelu_fusion") is False and not given.get("openai_gelu"):
        return ["It was trained with the exact GELU; here GELU is the approximation by tanh, which differs by up to 5e-4."]
    return []


def tokenizer_of(args: Namespace) -> DataConfig | None:
    """The tokenizer that the arguments name, if its kind exists here."""
    given = vars(args)
    kind: Any = given.get("tokenizer_type")
    if kind not in get_args(TokenizerType):
        return None
    settings: dict[str, Any] = {}
    for flag in flags().values():
        if flag.field in tokenizer_settings(kind) and flag.field in given:
            with contextlib.suppress(ValueError):
                settings[flag.field] = flag.from_plain(given[flag.field])
    return DataConfig(tokenizer_type=kind, **settings)


def vocabulary_of(args: Namespace) -> int | None:
    """The size of the vocabulary without padding, if the arguments alone give it: NullTokenizer's ids and its end of document."""
    size = vars(args).get("vocab_size")
    return size + 1 if vars(args).get("tokenizer_type") == "NullTokenizer" and isinstance(size, int) else None
