"""Activation functions of the MLP: all properties except the functions themselves, which are in `megatron.model.mlp`.

This module imports no settings dataclass, because a setting (the default intermediate size of the MLP) depends on it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

# ---- Choices that a user's modules add to settings (`--imports`, docs/python.md).
#
# Only the names are stored here, because the command line is parsed before torch is imported. The implementation of a choice is
# stored by the module that registers it: update rules in `megatron/optimizer/rules.py`, activations in `megatron/model/mlp.py`.

_added_choices: dict[str, dict[str, frozenset[str]]] = {}
"""Added choices by settings field and name, each with the optimizer settings that take effect with the choice."""


def add_choice(field: str, name: str, built_in: Iterable[str], reads: Iterable[str] = ()) -> None:
    """Add a user-defined choice to a setting, such as a custom optimizer to --optimizer. Adding an existing name again replaces the
    choice, so that a notebook cell can run twice.

    Args:
        field: field name of the setting, such as "optimizer".
        built_in: choices that the setting has without registration.
        reads: names of the optimizer settings that take effect with this choice.

    Raises:
        ValueError: the name is built in, or cannot be used on the command line.
    """
    flag = f"--{field.replace('_', '-')}"
    if name in built_in:
        raise ValueError(f"{flag} {name} is a built-in choice: register yours under another name")
    if not re.fullmatch(r"[A-Za-z][\w-]*", name):
        raise ValueError(
            f"{name!r} is not a valid name for {flag}: it must start with a letter and contain only letters, digits, _ and -"
        )
    _added_choices.setdefault(field, {})[name] = frozenset(reads)


def get_added_choices(field: str) -> tuple[str, ...]:
    """Return the choices that users' modules have added to a setting."""
    return tuple(_added_choices.get(field, ()))


def get_choice_settings(field: str, name: str) -> frozenset[str]:
    """Return the names of the optimizer settings that take effect with a user-defined choice. The set is empty for built-in
    choices."""
    return _added_choices.get(field, {}).get(name, frozenset())


ActivationName = Literal["gelu", "gelu_exact", "relu", "squared_relu", "swiglu", "geglu", "geglu_exact", "quick_geglu"]
"""Names of the built-in activations."""


@dataclass(frozen=True)
class Activation:
    """Activation function between the two linear layers of an MLP."""

    name: str
    config_field: str | None
    """Field of ModelConfig that selects the activation. It is named as Megatron-LM's argument if there is one. None for the
    default activation."""
    is_gated: bool
    """Whether the first linear layer outputs two halves, gate and value, which the activation combines into one."""
    hf_names: tuple[str, ...]
    """Names of the activation in the transformers library; for a gated activation, of the function applied to the gate.

    Exports write the first name, imports accept all. Empty for activations registered by a user.
    """


_TANH_GELU_NAMES = ("gelu_fast", "gelu_accurate", "gelu_python_tanh")
"""Further names of GELU with tanh in transformers. The functions differ only in rounding."""
ACTIVATIONS = (
    Activation("gelu", None, is_gated=False, hf_names=("gelu_new", "gelu_pytorch_tanh", *_TANH_GELU_NAMES)),
    Activation("gelu_exact", "gelu_exact", is_gated=False, hf_names=("gelu", "gelu_python")),
    Activation("relu", "relu", is_gated=False, hf_names=("relu",)),
    Activation("squared_relu", "squared_relu", is_gated=False, hf_names=("relu2",)),
    Activation("swiglu", "swiglu", is_gated=True, hf_names=("silu", "swish")),
    Activation("geglu", "geglu", is_gated=True, hf_names=("gelu_pytorch_tanh", "gelu_new", *_TANH_GELU_NAMES)),
    Activation("geglu_exact", "geglu_exact", is_gated=True, hf_names=("gelu", "gelu_python")),
    Activation("quick_geglu", "quick_geglu", is_gated=True, hf_names=("quick_gelu",)),
)
"""All built-in activations. The first is the default."""

CUSTOM_FIELD = "activation"
"""Field of ModelConfig that names a registered activation."""
_custom_activations: dict[str, Activation] = {}

BUILT_IN_FIELDS = tuple(activation.config_field for activation in ACTIVATIONS if activation.config_field is not None)
GATED_FIELDS = tuple(
    activation.config_field for activation in ACTIVATIONS if activation.config_field is not None and activation.is_gated
)
ACTIVATION_FIELDS = (*BUILT_IN_FIELDS, CUSTOM_FIELD)
"""All fields of ModelConfig that select the activation."""


def register_activation_spec(name: str, *, gated: bool) -> Activation:
    """Register the name and properties of a custom activation, without its function.

    `megatron.model.mlp.register_activation` registers both.

    Raises:
        ValueError: the name is built in, or cannot be used on the command line.
    """
    add_choice(CUSTOM_FIELD, name, [activation.name for activation in ACTIVATIONS])
    _custom_activations[name] = Activation(name, CUSTOM_FIELD, is_gated=gated, hf_names=())
    return _custom_activations[name]


def get_activation(model: object) -> Activation:
    """Return the activation that a ModelConfig selects. (A check of the settings rejects models that select more than one.)

    Raises:
        ValueError: the activation is not registered in this process, for example if the settings come from a checkpoint.
    """
    custom_name = getattr(model, CUSTOM_FIELD)
    if custom_name is not None:
        if custom_name not in _custom_activations:
            raise ValueError(f"--activation {custom_name} is not registered: add the module that registers it to --imports")
        return _custom_activations[custom_name]
    return next(
        (
            activation
            for activation in ACTIVATIONS
            if activation.config_field is not None and getattr(model, activation.config_field)
        ),
        ACTIVATIONS[0],
    )


def format_flag(field: str) -> str:
    """Format the name of a settings field as a command-line flag, such as --lora-rank for lora_rank."""
    return f"--{field.replace('_', '-')}"


def build_hf_name_table(*, gated: bool) -> dict[str, Activation]:
    """Return the built-in activations of gated or of non-gated MLPs, by their names in the transformers library."""
    return {name: activation for activation in ACTIVATIONS if activation.is_gated is gated for name in activation.hf_names}
