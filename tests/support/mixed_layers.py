"""Models whose layers differ, whatever flags there are: the one function that says what layers are, replaced everywhere."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from megatron.config.model import ModelConfig
from megatron.spec import layers as spec
from megatron.spec.layers import LayerSpec
from megatron.spec.mlps import MLPSpec


def mix_layers(monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    """Let every so-manieth layer have no rotary positions and an MLP of twice the width."""
    original = spec.build_layer_specs

    def mixed(model: ModelConfig) -> tuple[LayerSpec, ...]:
        return tuple(_other(layer) if number % every == every - 1 else layer for number, layer in enumerate(original(model)))

    users = [module for name, module in sys.modules.items() if name.startswith(("megatron.", "megatron_lab."))]
    for module in users:
        if getattr(module, "build_layer_specs", None) is original:
            monkeypatch.setattr(module, "build_layer_specs", mixed)


def _other(layer: LayerSpec) -> LayerSpec:
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(mlp, MLPSpec)
    return dataclasses.replace(
        layer, attention=dataclasses.replace(attention, rotary=None), mlp=dataclasses.replace(mlp, ffn_size=2 * mlp.ffn_size)
    )
