"""Llama, Mistral, Qwen2 and Qwen3: rotary positions, RMSNorm, gated MLP, grouped queries; and how they differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from megatron.checkpoint.huggingface.fields import Fields
from megatron.checkpoint.huggingface.layout import Family, grouped, stacked, whole
from megatron.checkpoint.huggingface.rotary_fields import in_every_layer, in_some_layers, never, read_rope, write_rope
from megatron.config.model import ModelConfig
from megatron.spec.activations import GATED_FLAGS, activation_of, by_hugging_face_name, spelled

Biases = Literal["none", "qkv", "all"]
_BIASES_SAID = {"none": "no linear layer has a bias", "qkv": "only query, key and value have biases", "all": "all have biases"}
_ACTIVATIONS = by_hugging_face_name(gated=True)
_GATES = " or ".join(dict.fromkeys(activation.hugging_face[0] for activation in _ACTIVATIONS.values()))


@dataclass(frozen=True)
class Style:
    """How an architecture differs from the others."""

    biases: dict[Biases, dict[str, Any]]
    """The biases that it can have, with the fields for them."""
    window: Callable[[Fields, int], int | None]
    """Gives the attention window from config.json and the number of layers; None if there is none."""
    no_window: dict[str, Any]
    """The fields for no window."""
    kv_heads: int | None = None
    """Default of key-value heads (None: as many as query heads)."""
    head_size: int | None = None
    """Default of channels of a head (None: hidden / heads)."""
    max_positions: int = 32768
    """Default of max_position_embeddings."""
    qk_norm: bool = False
    heads_divide_hidden: bool = False
    """Whether transformers refuses a hidden size that does not divide by the heads, even with heads of another size."""


def biases_of(model: ModelConfig) -> Biases:
    """Which linear layers have biases."""
    return "all" if not model.disable_bias_linear else "qkv" if model.add_qkv_bias else "none"


def _read(style: Style, fields: Fields) -> ModelConfig:
    hidden, heads, layers = (fields.size(name) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    kv_heads = _or_null(fields, "num_key_value_heads", absent=style.kv_heads or heads, null=heads)
    if heads % kv_heads:
        fields.refuse("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads = {heads}")
    size = _or_null(fields, "head_dim", absent=style.head_size or 0, null=0)
    if not size and hidden % heads:
        fields.refuse("hidden_size", f"does not divide by num_attention_heads = {heads}, and there is no head_dim")
    size = size or hidden // heads
    if size % 2:
        fields.refuse("hidden_size", f"heads of {size} channels cannot be rotated in pairs")
    activation = _ACTIVATIONS[fields.expect("hidden_act", tuple(_ACTIVATIONS), "silu", f"the gated MLP has {_GATES} here")]
    assert activation.flag is not None
    biases = _read_biases(style, fields)
    positions = fields.size("max_position_embeddings", style.max_positions)
    window = style.window(fields, layers)
    if window is not None and window < positions:
        fields.notes.append(
            f"attention is within a window of {window} tokens there, which is not known here: the same up to that length, so "
            f"sequences are limited to {window} tokens"
        )
    return ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=fields.size("intermediate_size"),
        num_attention_heads=heads,
        kv_channels=size,
        group_query_attention=kv_heads != heads,
        num_query_groups=kv_heads if kv_heads != heads else 1,
        seq_length=min(positions, window or positions),
        max_position_embeddings=positions,
        position_embedding_type="rope",
        **read_rope(fields, positions),
        normalization="RMSNorm",
        norm_epsilon=fields.number("rms_norm_eps", 1e-6),
        **{activation.flag: True},
        untie_embeddings_and_output_weights=not fields.switch("tie_word_embeddings", False),
        disable_bias_linear=biases != "all",
        add_qkv_bias=biases == "qkv",
        qk_layernorm=style.qk_norm,
        attention_dropout=fields.number("attention_dropout", 0.0),
        hidden_dropout=0.0,
        init_method_std=fields.number("initializer_range", 0.02),
    )


def _or_null(fields: Fields, name: str, *, absent: int, null: int) -> int:
    """A size for which absence and null mean different things."""
    value = fields.raw(name, "absent")
    return absent if value == "absent" else null if value is None else fields.size(name)


def _read_biases(style: Style, fields: Fields) -> Biases:
    """The biases whose fields are those of the file; the first if the file has no such fields."""
    kinds = list(style.biases)
    given = {name: fields.raw(name, default) for name, default in style.biases[kinds[0]].items()}
    for kind in kinds:
        if style.biases[kind] == given:
            return kind
    for name in given:
        fields.refuse(name, f"only {' or '.join(map(str, style.biases.values()))} can be read")
    return kinds[0]


def _misfits(style: Style, model: ModelConfig) -> list[str]:
    biases = biases_of(model)
    wrong = {
        f"positions are {model.position_embedding_type}, not rope": model.position_embedding_type != "rope",
        f"only {model.rotary_percent:.0%} of a head is rotated": model.rotary_percent != 1.0,
        f"the norm is {model.normalization}, not RMSNorm": model.normalization != "RMSNorm",
        f"the MLP is not gated ({' or '.join(map(spelled, GATED_FLAGS))})": not activation_of(model).gated,
        _BIASES_SAID[biases]: biases not in style.biases,
        "queries and keys are normalised (--qk-layernorm)": model.qk_layernorm and not style.qk_norm,
        "queries and keys are not normalised (--qk-layernorm)": style.qk_norm and not model.qk_layernorm,
        f"the hidden size {model.hidden_size} does not divide by {model.num_attention_heads} heads": (
            style.heads_divide_hidden and model.hidden_size % model.num_attention_heads != 0
        ),
    }
    return [text for text, is_so in wrong.items() if is_so]


def _write(style: Style, model: ModelConfig) -> dict[str, Any]:
    return {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_dim": model.head_size,
        "hidden_act": activation_of(model).hugging_face[0],
        "max_position_embeddings": model.num_positions,
        **write_rope(model),
        "rms_norm_eps": model.norm_epsilon,
        "attention_dropout": model.attention_dropout,
        "initializer_range": model.init_method_std,
        "tie_word_embeddings": model.tied,
        **style.no_window,
        **style.biases[biases_of(model)],
    }


def llama_style(model_type: str, architecture: str, style: Style) -> Family:
    """Make the family of an architecture."""
    return Family(
        model_type=model_type,
        architecture=architecture,
        prefix="model.",
        layer="layers.{}",
        outside={
            "embedding.word.weight": whole("embed_tokens.weight"),
            "final_norm.weight": whole("norm.weight"),
            "output.weight": whole("lm_head.weight"),
        },
        inside={
            "attention_norm.weight": whole("input_layernorm.weight"),
            "attention.qkv.weight": grouped("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
            "attention.qkv.bias": grouped("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
            "attention.q_norm.weight": whole("self_attn.q_norm.weight"),
            "attention.k_norm.weight": whole("self_attn.k_norm.weight"),
            "attention.output.weight": whole("self_attn.o_proj.weight"),
            "attention.output.bias": whole("self_attn.o_proj.bias"),
            "mlp_norm.weight": whole("post_attention_layernorm.weight"),
            "mlp.up.weight": stacked("mlp.gate_proj.weight", "mlp.up_proj.weight"),
            "mlp.up.bias": stacked("mlp.gate_proj.bias", "mlp.up_proj.bias"),
            "mlp.down.weight": whole("mlp.down_proj.weight"),
            "mlp.down.bias": whole("mlp.down_proj.bias"),
        },
        buffers=r"(?:layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",  # frequencies
        without_effect=(),
        read=partial(_read, style),
        misfits=partial(_misfits, style),
        write=partial(_write, style),
    )


LLAMA = llama_style(
    "llama",
    "LlamaForCausalLM",
    Style(
        biases={
            "none": {"attention_bias": False, "mlp_bias": False},
            "all": {"attention_bias": True, "mlp_bias": True},
        },
        window=never,
        no_window={},
        max_positions=2048,
        heads_divide_hidden=True,
    ),
)


QWEN2 = llama_style(
    "qwen2",
    "Qwen2ForCausalLM",
    Style(
        biases={"qkv": {}},
        window=in_some_layers,
        no_window={"use_sliding_window": False, "sliding_window": None},
        kv_heads=32,
    ),
)


QWEN3 = llama_style(
    "qwen3",
    "Qwen3ForCausalLM",
    Style(
        biases={"none": {"attention_bias": False}},
        window=in_some_layers,
        no_window={"use_sliding_window": False, "sliding_window": None},
        kv_heads=32,
        head_size=128,
        qk_norm=True,
    ),
)


MISTRAL = llama_style(
    "mistral",
    "MistralForCausalLM",
    Style(biases={"none": {}}, window=in_every_layer, no_window={"sliding_window": None}, kv_heads=8, max_positions=4096 * 32),
)
