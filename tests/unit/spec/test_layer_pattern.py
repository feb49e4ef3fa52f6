"""Which layers have a window and which do without rotary positions, as texts say it; what is wrong with a text."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from megatron.attention.documents import Documents
from megatron.config.model import ModelConfig
from megatron.spec.counts import compute_window_shares, count_attended_pairs, count_attention_flops
from megatron.spec.layer_pattern import find_pattern_problem, format_pattern, is_marked, parse_pattern, parse_window
from megatron.spec.layers import build_layer_specs

MODEL = ModelConfig(num_layers=6, hidden_size=16, num_attention_heads=4, seq_length=8, position_embedding_type="rope")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[1,0,1]", "101"),
        (" [ 1 , 0 ] * 2 ", "1010"),
        ("([1]*2+[0])*2", "110110"),
        ("[0]+([1]*2+[0])*2+[1]", "01101101"),
        ("([1]*2)*2*2", "11111111"),
        ("(([0]+[1]))", "01"),
        ("[1]*0+[0]", "0"),
        ("[]+[1]", "1"),
    ],
)
def test_lists_are_those_of_python(text: str, expected: str) -> None:
    found = parse_pattern(text)
    assert found == tuple(letter == "1" for letter in expected) == tuple(map(bool, eval(text.strip())))
    assert find_pattern_problem(text, len(expected)) is None and parse_pattern(format_pattern(found)) == found  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0", "N is 0. Set N to 1 or more"),
        ("x", "neither a number nor a list"),
        ("", "neither a number nor a list"),
        ("-1", "neither a number nor a list"),
        ("[1,2]", "has '2' at an invalid position"),
        ("[1 0]", "has '0' at an invalid position"),
        ("[1,0", "neither a number nor a list"),
        ("([1]", "is not closed"),
        ("[1]*", "has a * without a number after it"),
        ("[1]*x", "has a * without a number after it"),
        ("[1]+", "neither a number nor a list"),
        ("[1][0]", "has an unexpected '['"),
        ("[1]*99999999999999999999", "more than 100,000 layers"),
        ("[1]*5", "The list in the layer pattern has 5 entries, but the model has 6 layers"),
    ],
)
def test_what_is_wrong_with_a_text_is_said(text: str, problem: str) -> None:
    assert problem in (find_pattern_problem(text, 6) or "")


def test_a_number_marks_the_last_of_every_so_many() -> None:
    assert [is_marked(parse_pattern("3"), layer) for layer in range(7)] == [False, False, True, False, False, True, False]
    assert not is_marked(None, 2)


def test_windows_are_written_with_what_comes_after() -> None:
    assert [parse_window(text) for text in ("127,0", "(127,0)", "( 0 , 0 )")] == [127, 127, 0]
    assert [parse_window(text) for text in (None, "127", "127,1", "-1,0", "127,0)x", "1" * 99 + ",0")] == [None] * 6


@pytest.mark.parametrize(
    ("freq", "windowed"), [(None, "111111"), ("3", "110110"), ("1", "000000"), ("[1,0]*3", "101010"), ("7", "111111")]
)
def test_a_number_skips_and_a_list_names_layers_with_a_window(freq: str | None, windowed: str) -> None:
    """As Megatron-LM's is_layer_window_attention has it."""
    model = dataclasses.replace(MODEL, window_size="3,0", window_attn_skip_freq=freq, rotary_base_local=50.0, use_rope_scaling=True)
    for spec, letter in zip(build_layer_specs(model), windowed, strict=True):
        assert spec.attention.scores.window == (3 if letter == "1" else None)
        rotary = spec.attention.rotary
        assert rotary is not None and rotary.base == (50.0 if letter == "1" else 10000.0)
        assert (rotary.scaling is None) == (letter == "1"), "the local base is for the length of the window"


def test_layers_without_rotary_positions() -> None:
    for freq, rotated in (("3", "110110"), ("[1]+[0]*5", "011111")):
        model = dataclasses.replace(MODEL, no_rope_freq=freq)
        assert [spec.attention.rotary is not None for spec in build_layer_specs(model)] == [letter == "1" for letter in rotated]


def test_windows_do_less_work() -> None:
    """As many pairs as there are, a token with itself counted half, as for the whole square."""
    for length in (1, 2, 5, 8):
        for window in (None, 0, 1, 3, 20):
            pairs = sum(1 - (j == i) / 2 for i in range(length) for j in range(i + 1) if window is None or i - j <= window)
            assert count_attended_pairs(length, window) / 2 == pairs, (length, window)
        assert count_attended_pairs(length, None) == length**2
    model = dataclasses.replace(MODEL, window_size="3,0", window_attn_skip_freq="3")
    flops = count_attention_flops(model)
    assert flops[2] == 2 * 16 * 8 and flops[0] * 8 * 8 == flops[2] * count_attended_pairs(8, 3)
    assert compute_window_shares(model) == {3: 4 * flops[0] / sum(flops), None: 2 * flops[2] / sum(flops)}
    assert compute_window_shares(MODEL) == {None: 1.0}


def test_documents_in_windows_do_less_work() -> None:
    """Of two samples, one is documents of 5 and 3 tokens; windows of 3 tokens before the own in four of six layers."""
    model = dataclasses.replace(MODEL, window_size="3,0", window_attn_skip_freq="3")
    bounds = np.array([0, 5, 8, 16], dtype=np.int32)
    documents = Documents(bounds, torch.from_numpy(bounds), 2)
    found = documents.count_equivalent_samples(compute_window_shares(model))
    full, windowed = (
        (8**2 + 5**2 + 3**2) / 8**2,
        (count_attended_pairs(8, 3) + count_attended_pairs(5, 3) + count_attended_pairs(3, 3)) / count_attended_pairs(8, 3),
    )
    shares = 2 * 8**2, 4 * count_attended_pairs(8, 3)
    assert found == pytest.approx((shares[0] * full + shares[1] * windowed) / sum(shares), rel=1e-12)
    assert documents.count_equivalent_samples({None: 1.0}) == full
