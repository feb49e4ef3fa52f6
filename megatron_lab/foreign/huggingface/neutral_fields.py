"""Fields of published config.json files that the class of transformers does not read, with the values at which they change nothing.

Such fields come from the maker's own code, from older versions of transformers, or from an architecture with more options. A value
is accepted if it changes nothing in any model, or if it states what other fields already say. Any other value is refused: the model
may then be meant to compute something else than transformers computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.config.model import ModelConfig
from megatron.spec.activations import get_activation
from megatron.spec.layers import AttentionSpec, build_layer_specs
from megatron.spec.mlps import MLPSpec
from megatron_lab.foreign.huggingface.fields import FULL_ATTENTION, SLIDING_ATTENTION, Fields

_PROGRAMS = "auto_map"
"""Field with the programs of a folder, by the class of transformers for which each stands."""
_MAX_VALUE_LENGTH = 24
"""Longest value that the note repeats, in characters."""


@dataclass(frozen=True)
class NeutralFields:
    """Fields of config.json that change nothing at some values. They are judged only if the architecture does not read them."""

    names: tuple[str, ...]
    accepts: Callable[[Any, ModelConfig, Mapping[str, Any]], bool]
    """Function that returns whether a field changes nothing, from its value, the described model, and all fields of the file."""
    reason: str
    """End of the error message for all other values: why they are refused."""
    needs_model: bool = True
    """Whether `accepts` uses the described model, which must then be valid."""
    is_noted: bool = True
    """Whether the note about accepted fields names these. False for fields that transformers itself writes for every model."""


def judge_unread_fields(fields: Fields, model: ModelConfig, architecture: str, own: tuple[NeutralFields, ...] = ()) -> None:
    """Judge the fields that no converter has read by their values. Accepted values are listed in one note, the others are recorded
    as errors. Fields that are not known are left to `Fields.finish`.

    `auto_map` names the folder's own program for the model. The program is never run, which a note says.

    Args:
        fields: fields of config.json, after all converters of the architecture have read theirs.
        model: model that the fields describe.
        architecture: name of the class of transformers.
        own: fields of the architecture, which precede `NEUTRAL_FIELDS`.
    """
    known = {name: entry for entry in (*NEUTRAL_FIELDS, *own) for name in entry.names}
    is_valid = not fields.errors
    accepted = []
    for name, value in fields.get_unread().items():
        if (entry := known.get(name)) is None:
            continue
        if entry.needs_model and not is_valid:
            fields.get_raw(name)  # other fields must be corrected first
        elif entry.accepts(value, model, fields.values):
            fields.get_raw(name)
            accepted += [_format_field(name, value)] if entry.is_noted else []
        else:
            fields.refuse(name, entry.reason)
    if isinstance(programs := fields.get_unread().get(_PROGRAMS), dict):
        fields.get_raw(_PROGRAMS)
        fields.notes.append(f"the folder's own program ({_PROGRAMS}) is not run: the model is {architecture} of transformers")
    elif programs is not None:
        fields.refuse(_PROGRAMS, "must be a mapping from classes of transformers to programs")
    if accepted:
        fields.notes.append(
            f"{len(accepted)} field{'s' * (len(accepted) > 1)} of config.json not used, since no logit changes at "
            f"{'these values' if len(accepted) > 1 else 'this value'}: {', '.join(accepted)}"
        )


def _format_field(name: str, value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"{name} {text}" if len(text) <= _MAX_VALUE_LENGTH else name


def accept_values(*values: Any) -> Callable[[Any, ModelConfig, Mapping[str, Any]], bool]:
    """Return a function for `NeutralFields.accepts` that accepts the given values."""
    return lambda value, model, config: any(_is_equal(value, candidate) for candidate in values)


def accept_stated(state: Callable[[ModelConfig], Any]) -> Callable[[Any, ModelConfig, Mapping[str, Any]], bool]:
    """Return a function for `NeutralFields.accepts` that accepts a field which repeats a property of the model.

    Args:
        state: function that returns the property.
    """
    return lambda value, model, config: _is_equal(value, state(model))


def accept_activation(*synonyms: str) -> Callable[[Any, ModelConfig, Mapping[str, Any]], bool]:
    """Return a function for `NeutralFields.accepts` that accepts the names of the model's activation function.

    Args:
        synonyms: further names that are accepted.
    """

    def accepts(value: Any, model: ModelConfig, config: Mapping[str, Any]) -> bool:
        activation = get_activation(model)
        return value in (activation.name, *activation.hf_names, *synonyms)

    return accepts


def list_windows(model: ModelConfig) -> list[int | None]:
    """Return the attention window of each layer: the number of earlier tokens to which a token attends; None without a window."""
    return [layer.attention.scores.window for layer in build_layer_specs(model)]


def _is_equal(value: Any, expected: Any) -> bool:
    """Return whether two values of JSON are equal. A boolean equals no number."""
    return isinstance(value, bool) is isinstance(expected, bool) and value == expected


def _is_number(value: Any, below: float = float("inf")) -> bool:
    """Return whether a value is a number of at least 0 and below a limit."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < below


def _has_attention_bias(model: ModelConfig) -> bool:
    attention = build_layer_specs(model)[0].attention
    return isinstance(attention, AttentionSpec) and attention.qkv_bias


def _has_mlp_bias(model: ModelConfig) -> bool:
    return any(isinstance(layer.mlp, MLPSpec) and layer.mlp.bias for layer in build_layer_specs(model))


def _has_any_bias(model: ModelConfig) -> bool:
    return _has_attention_bias(model) or _has_mlp_bias(model)


def _has_windows(model: ModelConfig) -> bool:
    return any(window is not None for window in list_windows(model))


def _get_window_size(model: ModelConfig) -> int | None:
    """Return the number of tokens to which a token attends in layers with a window, including itself; None without a window."""
    return max((window + 1 for window in list_windows(model) if window is not None), default=None)


def _list_layer_types(model: ModelConfig) -> list[str]:
    return [FULL_ATTENTION if window is None else SLIDING_ATTENTION for window in list_windows(model)]


def _accepts_window_size(value: Any, model: ModelConfig, config: Mapping[str, Any]) -> bool:
    is_off = not _has_windows(model) and config.get("use_sliding_window") is False
    return is_off or _is_equal(value, _get_window_size(model))


def _accepts_window_interval(value: Any, model: ModelConfig, config: Mapping[str, Any]) -> bool:
    """Return whether every `value`-th layer has no window, or the file lists the type of each layer, which has precedence."""
    if type(value) is not int or value < 1:
        return False
    if config.get("layer_types") is not None:
        return True
    return [window is None for window in list_windows(model)] == [(layer + 1) % value == 0 for layer in range(model.num_layers)]


_NO_EFFECT = "transformers has no such option in this architecture, so the model may be meant to compute something else"
_DIFFERS = "differs from what the other fields of the file say"

NEUTRAL_FIELDS = (
    # biases
    NeutralFields(
        ("attention_bias", "qkv_bias", "use_qkv_bias", "attention_qkv_bias", "add_qkv_bias"),
        accept_stated(_has_attention_bias),
        "the biases of attention differ from those that transformers has in this architecture",
    ),
    NeutralFields(
        ("mlp_bias",),
        accept_stated(_has_mlp_bias),
        "the biases of the MLP differ from those that transformers has in this architecture",
    ),
    NeutralFields(
        ("use_bias", "bias"),
        accept_stated(_has_any_bias),
        "the biases differ from those that transformers has in this architecture",
    ),
    NeutralFields(
        ("lm_head_bias", "head_bias"), accept_values(False), "an output layer with biases is not supported", needs_model=False
    ),
    # attention
    NeutralFields(("sliding_window", "sliding_window_size"), _accepts_window_size, _DIFFERS),
    NeutralFields(("use_sliding_window",), accept_stated(_has_windows), _DIFFERS),
    NeutralFields(("layer_types",), accept_stated(_list_layer_types), _DIFFERS),
    NeutralFields(("sliding_window_pattern", "_sliding_window_pattern"), _accepts_window_interval, _DIFFERS),
    NeutralFields(
        ("max_window_layers",),
        lambda value, model, config: type(value) is int and value >= 0,
        "must be a number of layers",
        needs_model=False,
    ),
    NeutralFields(("full_attn_mod", "interpolate_factor"), accept_values(1), _NO_EFFECT, needs_model=False),
    NeutralFields(("is_causal", "causal"), accept_values(True), "attention is causal here", needs_model=False, is_noted=False),
    NeutralFields(
        ("is_decoder",),
        accept_values(False, True),
        "must be true or false: the model is a decoder in any case",
        needs_model=False,
        is_noted=False,
    ),
    NeutralFields(
        ("is_encoder_decoder", "add_cross_attention", "tie_encoder_decoder"),
        accept_values(False),
        "only models without an encoder are supported",
        needs_model=False,
        is_noted=False,
    ),
    NeutralFields(("use_bidirectional_attention",), accept_values(False), "attention is causal here", needs_model=False),
    NeutralFields(
        ("pruned_heads",), accept_values({}), "models with pruned heads are not supported", needs_model=False, is_noted=False
    ),
    NeutralFields(("alibi", "use_alibi", "use_moe"), accept_values(False), _NO_EFFECT, needs_model=False),
    NeutralFields(("use_mrope",), accept_values(False), _NO_EFFECT, needs_model=False, is_noted=False),
    NeutralFields(("scale_attn_weights",), accept_values(True), _NO_EFFECT, needs_model=False),
    NeutralFields(("scale_attn_by_inverse_layer_idx",), accept_values(False), _NO_EFFECT, needs_model=False),
    NeutralFields(
        ("qk_layernorm", "use_qk_norm", "use_qk_layernorm", "qk_norm"), accept_stated(lambda model: model.qk_layernorm), _DIFFERS
    ),
    NeutralFields(("head_dim", "kv_channels"), accept_stated(lambda model: model.head_size), _DIFFERS),
    NeutralFields(("num_key_value_heads",), accept_stated(lambda model: model.num_key_value_heads), _DIFFERS),
    # rotary positions
    NeutralFields(
        ("rope_interleaved", "rope_interleave"), accept_stated(lambda model: model.rotary_interleaved), _DIFFERS, is_noted=False
    ),
    NeutralFields(("rope_theta", "rotary_emb_base", "rotary_base"), accept_stated(lambda model: model.rotary_base), _DIFFERS),
    NeutralFields(
        ("partial_rotary_factor", "rotary_pct", "rope_pct", "rotary_percent"),
        accept_stated(lambda model: model.rotary_percent),
        _DIFFERS,
    ),
    # MLP and residual branches
    NeutralFields(("hidden_act", "hidden_activation", "activation_function"), accept_activation(), _DIFFERS),
    NeutralFields(
        ("use_parallel_residual", "parallel_residual", "parallel_attn"),
        accept_stated(lambda model: model.parallel_residual),
        _DIFFERS,
    ),
    NeutralFields(
        ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps", "norm_epsilon"),
        accept_stated(lambda model: model.norm_epsilon),
        _DIFFERS,
    ),
    NeutralFields(("embedding_multiplier",), accept_stated(lambda model: model.embedding_multiplier), _DIFFERS),
    NeutralFields(("residual_multiplier",), accept_stated(lambda model: model.residual_multiplier), _DIFFERS),
    NeutralFields(("logits_scaling", "logit_scale"), accept_values(1), _NO_EFFECT, needs_model=False),
    # experts and multi-token prediction of models without them
    NeutralFields(("mlp_only_layers",), accept_values([]), _NO_EFFECT, needs_model=False),
    NeutralFields(("num_nextn_predict_layers", "num_mtp_layers"), accept_values(0), _NO_EFFECT, needs_model=False),
    # dropout: in training only, and transformers does not read these names
    NeutralFields(
        (
            *("attention_dropout", "hidden_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob", "attn_pdrop"),
            *("embd_pdrop", "resid_pdrop", "resid_dropout", "residual_dropout", "embedding_dropout", "embd_dropout"),
            *("attn_dropout", "ffn_dropout", "dropout"),
        ),
        lambda value, model, config: _is_number(value, 1.0),
        "must be a probability",
        needs_model=False,
    ),
)
"""Fields of all architectures. An entry applies to an architecture only if that architecture does not read the field."""
