"""The table of activations fits the settings, the functions and the names elsewhere."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import torch

from megatron.config.model import ModelConfig
from megatron.model.mlp import ACTIVATION_FUNCTIONS
from megatron.spec.activations import ACTIVATIONS, BUILT_IN_FIELDS, ActivationName, build_hf_name_table, get_activation
from megatron.spec.layers import MLPSpec


def test_every_activation_has_a_name_a_flag_and_a_function() -> None:
    names = [activation.name for activation in ACTIVATIONS]
    assert sorted(names) == sorted(get_args(ActivationName)) == sorted(ACTIVATION_FUNCTIONS)
    assert [activation.config_field for activation in ACTIVATIONS].index(None) == 0 and len(set(BUILT_IN_FIELDS)) == len(
        ACTIVATIONS
    ) - 1
    assert {field.name for field in dataclasses.fields(ModelConfig)} >= set(BUILT_IN_FIELDS)
    for activation in ACTIVATIONS:
        flags: dict[str, Any] = {} if activation.config_field is None else {activation.config_field: True}
        assert get_activation(dataclasses.replace(ModelConfig(), **flags)) is activation, activation.name
        x = torch.randn(3, 2, 5, dtype=torch.float64)
        width = (3, 5) if activation.is_gated else (3, 2, 5)
        assert ACTIVATION_FUNCTIONS[activation.name](MLPSpec(5, activation, bias=False))(x).shape == width, activation.name


def test_a_name_elsewhere_means_one_activation() -> None:
    for gated in (True, False):
        names = [name for one in ACTIVATIONS if one.is_gated is gated for name in one.hf_names]
        assert len(names) == len(set(names)) == len(build_hf_name_table(gated=gated)) > 0
