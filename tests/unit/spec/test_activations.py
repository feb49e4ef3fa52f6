"""The table of activations fits the settings, the functions and the names elsewhere."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import torch

from megatron.config.model import ModelConfig
from megatron.model.mlp import FUNCTIONS
from megatron.spec.activations import ACTIVATIONS, FLAGS, ActivationName, activation_of, by_hugging_face_name
from megatron.spec.layers import MLPSpec


def test_every_activation_has_a_name_a_flag_and_a_function() -> None:
    names = [activation.name for activation in ACTIVATIONS]
    assert sorted(names) == sorted(get_args(ActivationName)) == sorted(FUNCTIONS)
    assert [activation.flag for activation in ACTIVATIONS].index(None) == 0 and len(set(FLAGS)) == len(ACTIVATIONS) - 1
    assert {field.name for field in dataclasses.fields(ModelConfig)} >= set(FLAGS)
    for activation in ACTIVATIONS:
        flags: dict[str, Any] = {} if activation.flag is None else {activation.flag: True}
        assert activation_of(dataclasses.replace(ModelConfig(), **flags)) is activation, activation.name
        x = torch.randn(3, 2, 5, dtype=torch.float64)
        width = (3, 5) if activation.gated else (3, 2, 5)
        assert FUNCTIONS[activation.name](MLPSpec(5, activation, bias=False))(x).shape == width, activation.name


def test_a_name_elsewhere_means_one_activation() -> None:
    for gated in (True, False):
        names = [name for one in ACTIVATIONS if one.gated is gated for name in one.hugging_face]
        assert len(names) == len(set(names)) == len(by_hugging_face_name(gated=gated)) > 0
