"""Reads Megatron-LM's saved arguments as settings of the model and the tokenizer."""

from __future__ import annotations

from argparse import Namespace
from typing import Any, get_args

from megatron.checkpoint.errors import CheckpointError
from megatron.config.checks import model as model_checks
from megatron.config.checks.finding import rules_in
from megatron.config.config import Config
from megatron.config.data import TOKENIZER_SETTINGS, DataConfig, TokenizerType
from megatron.config.model import ModelConfig, Normalization, PositionEmbedding
from megatron.spec.activations import FLAGS

_SAME = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_channels",
    "group_query_attention",
    "num_query_groups",
    "seq_length",
    "max_position_embeddings",
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "use_rope_scaling",
    "rope_scaling_factor",
    "normalization",
    "norm_epsilon",
    *FLAGS,
    "untie_embeddings_and_output_weights",
    "add_qkv_bias",
    "qk_layernorm",
    "attention_dropout",
    "hidden_dropout",
    "init_method_std",
    "make_vocab_size_divisible_by",
    "fp32_residual_connection",
)
"""Arguments with the same name and meaning here."""
_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
_OTHER_MODELS: dict[str, tuple[Any, ...]] = {
    "num_experts": (None, 0),
    "multi_latent_attention": (None, False),
    "apply_layernorm_1p": (None, False),
    "apply_residual_connection_post_layernorm": (None, False),
    "rotary_interleaved": (None, False),
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


def model_of(args: Namespace, where: str) -> ModelConfig:
    """The model that the arguments describe.

    Args:
        where: the file, for messages.

    Raises:
        CheckpointError: it has parts that cannot be built here, or an argument is missing or of another type.
    """
    given = vars(args)
    others = [f"{name} = {given[name]!r}" for name, plain in _OTHER_MODELS.items() if name in given and given[name] not in plain]
    positions, normalization = given.get("position_embedding_type"), given.get("normalization")
    if positions is not None and positions not in get_args(PositionEmbedding):
        others.append(f"position_embedding_type = {positions!r}")
    if normalization is not None and normalization not in get_args(Normalization):
        others.append(f"normalization = {normalization!r}")
    if others:
        raise CheckpointError(f"{where} holds a model that cannot be built here: {', '.join(others)}")
    settings = {name: given[name] for name in _SAME if given.get(name) is not None}
    settings["disable_bias_linear"] = not given.get("add_bias_linear", True)
    settings["rotary_seq_len_interpolation_factor"] = given.get("rotary_seq_len_interpolation_factor") or 1.0
    if "norm_epsilon" not in settings and given.get("layernorm_epsilon") is not None:  # the name before 2023
        settings["norm_epsilon"] = given["layernorm_epsilon"]
    if given.get("use_rotary_position_embeddings"):
        settings["position_embedding_type"] = "rope"
    for name, value in settings.items():
        settings[name] = _as_field(name, value, where)
    missing = [name for name in _REQUIRED if settings.get(name, 0) < 1]
    if missing:
        raise CheckpointError(f"{where}: its args say nothing of {', '.join(missing)}, or a number below 1")
    model = ModelConfig(**settings)
    for rule in rules_in(model_checks):
        for finding in rule(Config(model=model), 1):
            raise CheckpointError(f"{where}: its args describe no model: {finding.message}")
    return model


def _as_field(name: str, value: Any, where: str) -> Any:
    """The value, in the type that the setting has."""
    default = getattr(ModelConfig, name)
    wanted = int if default is None else type(default)
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not wanted:
        raise CheckpointError(f"{where}: its args say {name} = {value!r}, which is no {wanted.__name__}")
    return value


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
    kind = given.get("tokenizer_type")
    if kind not in get_args(TokenizerType):
        return None
    settings: dict[str, Any] = {}
    for name in TOKENIZER_SETTINGS:
        value, default = given.get(name), getattr(DataConfig, name)
        if isinstance(value, list):
            value = tuple(value)
        if type(value) is (type(default) if default is not None else int if name == "vocab_size" else str):
            settings[name] = value
    if kind not in ("NullTokenizer", "TikTokenizer"):
        settings.pop("vocab_size", None)
    return DataConfig(tokenizer_type=kind, **settings)


def vocabulary_of(args: Namespace) -> int | None:
    """The size of the vocabulary without padding, if the arguments alone give it: NullTokenizer's ids and its end of document."""
    size = vars(args).get("vocab_size")
    return size + 1 if vars(args).get("tokenizer_type") == "NullTokenizer" and isinstance(size, int) else None
