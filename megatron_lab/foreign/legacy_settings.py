"""Conversion of the arguments saved in a Megatron-LM checkpoint to settings of the model and the tokenizer."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from typing import Any, get_args

from megatron.checkpoint.errors import CheckpointError
from megatron.config.checks import model as model_checks
from megatron.config.checks.finding import collect_rules
from megatron.config.config import Config
from megatron.config.data import DataConfig, TokenizerType, get_tokenizer_settings
from megatron.config.flags import get_flags
from megatron.config.model import ModelConfig
from megatron.spec.activations import BUILT_IN_FIELDS

_UNSUPPORTED_ARGS: dict[str, tuple[Any, ...]] = {
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
"""Arguments that select an unsupported model, each with the values at which the model is supported."""

_LATENT_ATTENTION_ARGS = frozenset(
    {
        *("rope_type", "rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale"),
        *("mscale_all_dim", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    }
)
"""Arguments that are used only by latent attention."""


def build_model_config(args: Namespace, path: str) -> ModelConfig:
    """Convert the arguments of a Megatron-LM run to the configuration of its model.

    Args:
        args: arguments of the run.
        path: file of the arguments, for error messages.

    Raises:
        CheckpointError: the model has an unsupported feature, or an argument is missing or has the wrong type.
    """
    args_dict = vars(args)
    unsupported = [
        f"{name} = {args_dict[name]!r}"
        for name, supported_values in _UNSUPPORTED_ARGS.items()
        if name in args_dict and args_dict[name] not in supported_values
    ]
    if unsupported:
        raise CheckpointError(
            f"{path} holds a model with arguments that are not supported: {', '.join(unsupported)}. A model with them cannot be "
            "imported: choose a checkpoint of another model"
        )
    # All other arguments have the same name and meaning in this framework.
    renamed_args = {"norm_epsilon": args_dict.get("layernorm_epsilon")}  # its name before 2023
    values = renamed_args | {name: value for name, value in args_dict.items() if value is not None}
    values["disable_bias_linear"] = not args_dict.get("add_bias_linear", True)
    values["rotary_seq_len_interpolation_factor"] = args_dict.get("rotary_seq_len_interpolation_factor") or 1.0
    if args_dict.get("use_rotary_position_embeddings"):
        values["position_embedding_type"] = "rope"
    if not args_dict.get("multi_latent_attention"):  # without latent attention these arguments have values but no effect
        values = {name: value for name, value in values.items() if name not in _LATENT_ATTENTION_ARGS}
    model_args, problems = {}, []
    for flag in (flag for flag in get_flags().values() if flag.topic == "model"):
        value = values.get(flag.field)
        if value is not None:
            try:
                model_args[flag.field] = flag.from_json(value)
            except ValueError as error:
                raise CheckpointError(
                    f"{path}: its args (the arguments of the run) say {flag.field} = {value!r}, but {error}. The checkpoint was "
                    "altered (copy it again), or is from an unsupported version of Megatron-LM (save it again with another "
                    "version)"
                ) from error
        if flag.metadata.required and model_args.get(flag.field, 0) < 1:
            problems.append(f"lack {flag.field}" if value is None else f"say {flag.field} = {value!r}")
    if problems:
        raise CheckpointError(
            f"{path}: its args (arguments of the run) {', '.join(problems)}; each of these settings must be at least 1. The "
            "checkpoint was altered: copy it again"
        )
    model = ModelConfig(**model_args)
    for rule in collect_rules(model_checks):
        for finding in rule(Config(model=model), 1):
            raise CheckpointError(
                f"{path}: its args (the arguments of the run) describe an invalid model, so the checkpoint was altered "
                f"(copy it again) or its model is not supported (choose another checkpoint): {finding.message}"
            )
    return model


def describe_differences(args: Namespace) -> list[str]:
    """Return notes for the user about small numerical differences between the model in Megatron-LM and in this framework."""
    args_dict = vars(args)
    has_other_activation = any(args_dict.get(name) for name in BUILT_IN_FIELDS)
    if not has_other_activation and args_dict.get("bias_gelu_fusion") is False and not args_dict.get("openai_gelu"):
        return ["It was trained with the exact GELU. This framework uses the tanh approximation, which differs by up to 5e-4."]
    return []


def build_tokenizer_config(args: Namespace) -> DataConfig | None:
    """Return settings for the tokenizer of a Megatron-LM run; None if the type of the tokenizer is not supported."""
    args_dict = vars(args)
    tokenizer_type: Any = args_dict.get("tokenizer_type")
    if tokenizer_type not in get_args(TokenizerType):
        return None
    values: dict[str, Any] = {}
    for flag in get_flags().values():
        if flag.field in get_tokenizer_settings(tokenizer_type) and flag.field in args_dict:
            with contextlib.suppress(ValueError):
                values[flag.field] = flag.from_json(args_dict[flag.field])
    return DataConfig(tokenizer_type=tokenizer_type, **values)


def infer_vocab_size(args: Namespace) -> int | None:
    """Return the vocabulary size without padding if the arguments of the run determine it, else None.

    The arguments determine the size only for NullTokenizer: it has --vocab-size ids and one end-of-document token.
    """
    size = vars(args).get("vocab_size")
    return size + 1 if vars(args).get("tokenizer_type") == "NullTokenizer" and isinstance(size, int) else None
