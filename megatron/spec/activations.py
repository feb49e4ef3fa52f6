"""The activation functions of the MLP: every fact about them, but for the function itself (`megatron.model.mlp`).

This file imports no dataclass of settings, because the default width of the MLP, a setting, follows from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

# ---- Choices that modules of the user's own add to settings (`--imports`, docs/python.md).
#
# What a choice stands for is known to who registers it: an update rule (`megatron/optimizer/rules.py`), an activation
# (`megatron/model/mlp.py`). Here are only the names, which the command line needs before torch is there.

_added: dict[str, dict[str, frozenset[str]]] = {}
"""For a setting, by the name of its field: the choices that were added, with the further settings that each reads."""


def add_choice(field: str, name: str, built_in: Iterable[str], reads: Iterable[str] = ()) -> None:
    """Add a choice to a setting. The same one again replaces it, as when a cell of a notebook runs twice.

    Args:
        built_in: the choices that are there already.
        reads: fields of the optimizer's settings that act with this choice.

    Raises:
        ValueError: the name is taken, or cannot stand in a command line.
    """
    flag = f"--{field.replace('_', '-')}"
    if name in built_in:
        raise ValueError(f"{flag} {name} is there already: register it under another name")
    if not re.fullmatch(r"[A-Za-z][\w-]*", name):
        raise ValueError(f"{name!r} is no name for {flag}: it must begin with a letter, and hold letters, digits, _ and -")
    _added.setdefault(field, {})[name] = frozenset(reads)


def added(field: str) -> tuple[str, ...]:
    """The choices that were added to a setting."""
    return tuple(_added.get(field, ()))


def read_with(field: str, name: str) -> frozenset[str]:
    """The further settings that an added choice reads; none for any other choice."""
    return _added.get(field, {}).get(name, frozenset())


ActivationName = Literal["gelu", "gelu_exact", "relu", "squared_relu", "swiglu", "geglu", "geglu_exact", "quick_geglu"]
"""Those built in."""


@dataclass(frozen=True)
class Activation:
    """The function between the two products of an MLP."""

    name: str
    flag: str | None
    """The field of ModelConfig that asks for it, which is also Megatron-LM's argument where that has it; None for the default."""
    gated: bool
    """Whether the first product gives two halves, gate and value, of which the activation makes one."""
    hugging_face: tuple[str, ...]
    """Its names (or its gate's) in transformers: the first is written, the others are read as well. None where a user
    has registered the activation."""


ACTIVATIONS = (
    Activation("gelu", None, gated=False, hugging_face=("gelu_new", "gelu_pytorch_tanh")),
    Activation("gelu_exact", "gelu_exact", gated=False, hugging_face=("gelu", "gelu_python")),
    Activation("relu", "relu", gated=False, hugging_face=("relu",)),
    Activation("squared_relu", "squared_relu", gated=False, hugging_face=("relu2",)),
    Activation("swiglu", "swiglu", gated=True, hugging_face=("silu", "swish")),
    Activation("geglu", "geglu", gated=True, hugging_face=("gelu_pytorch_tanh", "gelu_new")),
    Activation("geglu_exact", "geglu_exact", gated=True, hugging_face=("gelu", "gelu_python")),
    Activation("quick_geglu", "quick_geglu", gated=True, hugging_face=("quick_gelu",)),
)
"""All activations; the first is the default."""

OWN = "activation"
"""The field of ModelConfig that names a registered activation."""
_registered: dict[str, Activation] = {}

FLAGS = tuple(activation.flag for activation in ACTIVATIONS if activation.flag is not None)
GATED_FLAGS = tuple(activation.flag for activation in ACTIVATIONS if activation.flag is not None and activation.gated)
SETTINGS = (*FLAGS, OWN)
"""All fields of ModelConfig that decide on the activation."""


def register(name: str, *, gated: bool) -> Activation:
    """Add an activation of the user's own, as a fact; see `megatron.model.mlp.register_activation`.

    Raises:
        ValueError: the name is taken, or cannot stand in a command line.
    """
    add_choice(OWN, name, [one.name for one in ACTIVATIONS])
    _registered[name] = Activation(name, OWN, gated=gated, hugging_face=())
    return _registered[name]


def activation_of(model: object) -> Activation:
    """The activation that the settings of a ModelConfig ask for. (A rule refuses more than one.)

    Raises:
        ValueError: one that is not registered in this process, as a record of settings may name it.
    """
    own = getattr(model, OWN)
    if own is not None:
        if own not in _registered:
            raise ValueError(f"--activation {own} is registered by no module here: name the one that does by --imports")
        return _registered[own]
    return next((one for one in ACTIVATIONS if one.flag is not None and getattr(model, one.flag)), ACTIVATIONS[0])


def spelled(flag: str) -> str:
    """A flag as it stands on the command line."""
    return f"--{flag.replace('_', '-')}"


def by_hugging_face_name(*, gated: bool) -> dict[str, Activation]:
    """Activations of gated or of plain MLPs, by each of their names in transformers."""
    return {name: one for one in ACTIVATIONS if one.gated is gated for name in one.hugging_face}
