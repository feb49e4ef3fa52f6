"""The activation functions of the MLP: every fact about them, but for the function itself (`megatron.model.mlp`).

This file imports no settings, because the default width of the MLP, a setting, follows from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ActivationName = Literal["gelu", "swiglu", "squared_relu"]


@dataclass(frozen=True)
class Activation:
    """The function between the two products of an MLP."""

    name: ActivationName
    flag: str | None
    """The field of ModelConfig that asks for it, which is also Megatron-LM's argument; None for the one that needs no flag."""
    gated: bool
    """Whether the first product gives two halves, gate and value, of which the activation makes one."""
    hugging_face: tuple[str, ...]
    """Its names (or its gate's) in transformers: the first is written, the others are read as well."""


ACTIVATIONS = (
    Activation("gelu", None, gated=False, hugging_face=("gelu_new", "gelu_pytorch_tanh")),
    Activation("swiglu", "swiglu", gated=True, hugging_face=("silu", "swish")),
    Activation("squared_relu", "squared_relu", gated=False, hugging_face=("relu2",)),
)
"""All activations; the first is the default."""

FLAGS = tuple(activation.flag for activation in ACTIVATIONS if activation.flag is not None)
GATED_FLAGS = tuple(activation.flag for activation in ACTIVATIONS if activation.flag is not None and activation.gated)


def activation_of(model: object) -> Activation:
    """The activation that the flags of a ModelConfig ask for. (A rule refuses more than one.)"""
    return next((one for one in ACTIVATIONS if one.flag is not None and getattr(model, one.flag)), ACTIVATIONS[0])


def spelled(flag: str) -> str:
    """A flag as it stands on the command line."""
    return f"--{flag.replace('_', '-')}"


def by_hugging_face_name(*, gated: bool) -> dict[str, Activation]:
    """Activations of gated or of plain MLPs, by each of their names in transformers."""
    return {name: one for one in ACTIVATIONS if one.gated is gated for name in one.hugging_face}
