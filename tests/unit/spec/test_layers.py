"""Layers of mixed kinds: grouped by what they are, run once in a plan where they are alike, each with its own costs."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.checkpoint.errors import CheckpointError
from megatron.config.model import ModelConfig
from megatron.spec import counts
from megatron.spec.layers import LayerSpec, build_layer_specs, group_equal
from megatron.spec.mlps import MLPSpec
from megatron.spec.weights import iter_weights
from megatron_lab.foreign.huggingface.families import select_family
from megatron_lab.planner.chunk_trace import choose_representatives
from tests.support.mixed_layers import mix_layers

MODEL = ModelConfig(
    num_layers=7, hidden_size=16, num_attention_heads=4, seq_length=8, position_embedding_type="rope", normalization="RMSNorm"
)


def kinds(text: str) -> list[LayerSpec]:
    """A layer for each letter."""
    (layer,) = group_equal(build_layer_specs(MODEL))
    assert isinstance(layer.mlp, MLPSpec)
    return [dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, ffn_size=ord(letter))) for letter in text]


def test_equal_layers_are_one_kind() -> None:
    assert list(group_equal(build_layer_specs(MODEL)).values()) == [[0, 1, 2, 3, 4, 5, 6]]
    assert list(group_equal("abacab").values()) == [[0, 2, 4], [1, 5], [3]]


def test_a_plan_runs_three_of_those_that_are_alike() -> None:
    cases = {
        "": "",
        "a": "0",
        "aa": "01",
        "aaa": "012",
        "aaaaaa": "015",
        "ab": "01",
        "abab": "0123",
        "aaaaab": "0145",
        "abbbbbb": "01236",
    }
    for text, run in cases.items():
        assert sorted(set(choose_representatives(kinds(text)))) == [int(place) for place in run], text
    for text in ("aaab" * 6, "aaaaab" * 21, "ab" * 9, "aaaaabbbbb", "aaa" + 58 * "b"):
        stand_ins = choose_representatives(kinds(text))
        places = sorted(set(stand_ins))
        assert len(places) < len(text) and {places[0], places[-1]} == {0, len(text) - 1}, text
        short = "".join(text[place] for place in places)
        for place, other in enumerate(stand_ins):
            where = places.index(other)
            assert short[max(where - 1, 0) : where + 2] == text[max(place - 1, 0) : place + 2] or 0 in (place, other), (text, place)


def test_each_layer_has_its_own_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = counts.count_layer_flops(MODEL), counts.count_parameters(MODEL, 11)
    mix_layers(monkeypatch, 3)
    added = 2 * MODEL.hidden_size * MODEL.ffn_size  # weights of a plain MLP, once more
    more = [2 * added if layer in (2, 5) else 0 for layer in range(7)]
    assert [mixed - before for mixed, before in zip(counts.count_layer_flops(MODEL), plain[0], strict=True)] == more
    assert counts.count_parameters(MODEL, 11) - plain[1] == 2 * (added + MODEL.ffn_size)  # and the bias
    shapes = {weight.name: weight.shape for weight in iter_weights(MODEL, 11)}
    assert [shapes[f"layers.{layer}.mlp.up.weight"][0] // 64 for layer in range(7)] == [1, 1, 2, 1, 1, 2, 1]


def test_models_of_mixed_layers_are_not_exported_as_equal_ones() -> None:
    """An architecture fits only where it can say which layers differ."""
    model = dataclasses.replace(
        MODEL, swiglu=True, ffn_hidden_size=32, disable_bias_linear=True, untie_embeddings_and_output_weights=True
    )
    assert select_family(model).model_type == "llama"
    assert select_family(dataclasses.replace(model, window_size="3,0")).model_type == "mistral"
    mixed = dataclasses.replace(model, no_rope_freq="3")
    assert select_family(mixed).model_type == "smollm3"
    with pytest.raises(CheckpointError, match="llama: --no-rope-freq is 3, there by default"):
        select_family(mixed, "llama")
    with pytest.raises(CheckpointError, match="mistral: --window-size is 3,0, there by default"):
        select_family(dataclasses.replace(model, window_size="3,0", window_attn_skip_freq="2"), "mistral")
