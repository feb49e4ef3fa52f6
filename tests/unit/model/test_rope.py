"""Rotary positions against complex numbers in float64, and stretched frequencies against transformers and the reference."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from megatron.config.model import ModelConfig
from megatron.model import rope
from megatron.model.rope import build_rotary_table, compute_frequencies, rotate
from megatron.spec.rotary import RotarySpec, build_rotary_spec
from megatron_lab.verification.reference.rotary import compute_rotary_frequencies as reference_frequencies
from megatron_lab.verification.reference_run import build_rotary_scaling
from tests.support.lone_rank import CPU

SEQ, BATCH, HEADS = 7, 2, 3


def rotary(size: int = 8, **changes: object) -> RotarySpec:
    settings = dict(hidden_size=size * HEADS, num_attention_heads=HEADS, position_embedding_type="rope") | changes
    found = build_rotary_spec(ModelConfig(**settings))  # type: ignore[arg-type]
    assert found is not None
    return found


def heads(size: int, key: int = 0) -> torch.Tensor:
    return torch.randn(SEQ, BATCH, HEADS, size, dtype=torch.float64, generator=torch.Generator().manual_seed(key))


POSITIONS = torch.stack([torch.arange(SEQ), torch.arange(SEQ) + 1000], 1)
"""[s, b]: they need not begin at 0, nor be the same in each sequence."""


@pytest.mark.parametrize(("size", "percent"), [(8, 1.0), (8, 0.5), (12, 0.5), (2, 1.0)])
def test_rotation_is_a_complex_product(size: int, percent: float) -> None:
    """Channel i and channel i + r/2 are the parts of one number; the rest of the head is left alone."""
    model, x = rotary(size, rotary_percent=percent, rotary_base=500.0), heads(size)
    rotated = model.rotary_dim
    assert rotated == size * percent
    number = torch.complex(x[..., : rotated // 2], x[..., rotated // 2 : rotated])
    angles = POSITIONS.unsqueeze(-1) * torch.tensor([500.0 ** (-2 * i / rotated) for i in range(rotated // 2)], dtype=torch.float64)
    turned = number * torch.polar(torch.ones_like(angles), angles).unsqueeze(2)
    expected = torch.cat([turned.real, turned.imag, x[..., rotated:]], -1)
    torch.testing.assert_close(rotate(x, build_rotary_table(POSITIONS, model, x.dtype)), expected, rtol=1e-13, atol=1e-13)


def test_interpolated_positions_are_divided() -> None:
    """Position 12 of a stretched model is where position 4 was."""
    stretched = build_rotary_table(POSITIONS * 3, rotary(rotary_seq_len_interpolation_factor=3.0), torch.float64)
    for found, plain in zip(stretched, build_rotary_table(POSITIONS, rotary(), torch.float64), strict=True):
        torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)


def test_the_first_position_is_not_rotated() -> None:
    x = heads(8)
    assert torch.equal(rotate(x, build_rotary_table(torch.zeros(SEQ, BATCH, dtype=torch.int64), rotary(), x.dtype)), x)


@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 10**6))
def test_scores_depend_on_the_distance_only(i: int, j: int, shift: int) -> None:
    q, k = heads(8, key=1)[:1, :1], heads(8, key=2)[:1, :1]

    def score(a: int, b: int) -> float:
        tables = [build_rotary_table(torch.tensor([[position]]), rotary(), torch.float64) for position in (a, b)]
        return (rotate(q, tables[0]) * rotate(k, tables[1])).sum().item()

    assert score(i, j) == pytest.approx(score(i + shift, j + shift), rel=1e-8, abs=1e-8)


@pytest.mark.parametrize("percent", [1.0, 0.5])
def test_backward_is_the_adjoint(percent: float) -> None:
    x, y = heads(8, key=1).requires_grad_(), heads(8, key=2)
    table = build_rotary_table(POSITIONS, rotary(rotary_percent=percent), torch.float64)
    out = rotate(x, table)
    out.backward(y)
    assert x.grad is not None
    assert (out * y).sum().item() == pytest.approx((x * x.grad).sum().item(), rel=1e-12)
    torch.testing.assert_close(out.norm(dim=-1), x.norm(dim=-1), rtol=1e-13, atol=0.0)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("percent", "copies"), [(1.0, 0), (0.5, 1)])
def test_the_traced_rotation_has_the_same_bits_and_joins_no_empty_part(percent: float, copies: int, interleaved: bool) -> None:
    """In backward each part that is joined is padded to the whole and added: another pass over queries and keys."""
    model = rotary(rotary_percent=percent)
    table = build_rotary_table(POSITIONS, model, torch.float64)
    grads = []
    for function in (rotate, rope._rotate_in_traceable_ops):
        x = heads(8).requires_grad_()
        out = function(x, table, interleaved)
        out.backward(heads(8, key=1))
        assert x.grad is not None
        grads.append((out, x.grad))
    assert all(torch.equal(traced, eager) for eager, traced in zip(*grads, strict=True))
    graph = make_fx(partial(rope._rotate_in_traceable_ops, interleaved=interleaved))(heads(8), table)
    cats = [node for node in graph.graph.nodes if node.target is torch.ops.aten.cat.default]
    joins = [[part.meta["val"].shape[-1] for part in node.args[0]] for node in cats]
    assert all(size > 0 for sizes in joins for size in sizes)
    assert len(cats) == copies + (not interleaved), "the two halves, and what is not turned"


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float16, 2.0**-11), (torch.bfloat16, 2.0**-8)])
def test_16_bit_heads_are_rotated_in_float32(dtype: torch.dtype, rounding: float) -> None:
    """At position 100,000 a 16-bit angle would be off by many turns; only the result is rounded."""
    x = heads(64).to(dtype)
    positions = POSITIONS + 100_000
    table = build_rotary_table(positions, rotary(64), dtype)
    assert table[0].dtype == table[1].dtype == torch.float32
    exact = rotate(x.double(), build_rotary_table(positions, rotary(64), torch.float64))
    found = rotate(x, table)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=rounding, atol=1e-6)


def test_stretched_frequencies_follow_llama_3_1() -> None:
    """Written as in the model's published code: wavelength by wavelength."""
    base, size, factor = 500_000.0, 128, 8.0
    expected = []
    for i in range(0, size, 2):
        frequency = 1.0 / base ** (i / size)
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4.0:
            expected.append(frequency)
        elif wavelength > 8192 / 1.0:
            expected.append(frequency / factor)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            expected.append((1 - smooth) * frequency / factor + smooth * frequency)
    model = rotary(size, rotary_base=base, use_rope_scaling=True, rope_scaling_factor=factor)
    found = compute_frequencies(model, CPU)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-13, atol=0.0)
    plain = compute_frequencies(rotary(size, rotary_base=base), CPU)
    kept, stretched = found == plain, torch.isclose(found, plain / factor, rtol=1e-13)
    assert kept.any() and stretched.any() and (~kept & ~stretched).any(), "all three ranges occur"


SHORT, LONG = [1 + 0.05 * i for i in range(24)], [1 + 0.5 * i for i in range(24)]
STRETCHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": ({"factor": 3.0}, {"rotary_seq_len_interpolation_factor": 3.0}),
    "llama3": (
        {"factor": 5.0, "low_freq_factor": 0.5, "high_freq_factor": 2.0, "original_max_position_embeddings": 200},
        {
            "use_rope_scaling": True,
            "rope_scaling_factor": 5.0,
            "rope_low_freq_factor": 0.5,
            "rope_high_freq_factor": 2.0,
            "original_max_position_embeddings": 200,
        },
    ),
    "yarn": (
        {"factor": 8.0, "original_max_position_embeddings": 400},
        {"rope_type": "yarn", "rotary_scaling_factor": 8.0, "original_max_position_embeddings": 400},
    ),
    "yarn, every constant": (
        {
            "factor": 8.0,
            "original_max_position_embeddings": 400,
            "beta_fast": 20.0,
            "beta_slow": 2.0,
            "mscale": 0.7,
            "mscale_all_dim": 0.3,
            "truncate": False,
        },
        {
            "rope_type": "yarn",
            "rotary_scaling_factor": 8.0,
            "original_max_position_embeddings": 400,
            "beta_fast": 20.0,
            "beta_slow": 2.0,
            "mscale": 0.7,
            "mscale_all_dim": 0.3,
            "yarn_correction_range_round_to_int": False,
        },
    ),
    "dynamic": ({"factor": 2.0}, {"rope_type": "dynamic", "rotary_scaling_factor": 2.0, "original_max_position_embeddings": 500}),
    "longrope": (
        {"factor": 4.0, "original_max_position_embeddings": 300, "short_factor": SHORT, "long_factor": LONG},
        {
            "rope_type": "longrope",
            "rotary_scaling_factor": 4.0,
            "original_max_position_embeddings": 300,
            "rope_short_factors": tuple(SHORT),
            "rope_long_factors": tuple(LONG),
        },
    ),
}
"""Parameters of transformers' configurations, and ours."""


def _cut(settings: dict[str, Any], pairs: int) -> dict[str, Any]:
    """With lists of factors for as many pairs."""
    return {key: value[:pairs] if isinstance(value, list | tuple) else value for key, value in settings.items()}


@pytest.mark.parametrize("percent", [1.0, 0.5])
@pytest.mark.parametrize("name", STRETCHES)
def test_stretched_frequencies_are_those_of_transformers_and_of_the_reference(name: str, percent: float) -> None:
    """At lengths within and beyond the original context; theirs in float32. Half of the frequencies or all are stretched."""
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    transformers = pytest.importorskip("transformers")
    theirs, settings = STRETCHES[name]
    kind, size = name.split(",")[0], 48
    theirs, settings = (_cut(each, int(24 * percent)) for each in (theirs, settings))
    spec = rotary(size, rotary_base=500.0, rotary_percent=percent, **settings)
    parameters = {"rope_type": kind, "rope_theta": 500.0, "partial_rotary_factor": percent, **theirs}
    config = transformers.LlamaConfig(
        hidden_size=size * HEADS, num_attention_heads=HEADS, max_position_embeddings=500, rope_parameters=parameters
    )
    stretch = build_rotary_scaling(ModelConfig(position_embedding_type="rope", **settings))
    plain = compute_frequencies(replace(spec, scaling=None), CPU)
    differ = []
    for length in (100, 500, 2000):
        expected, magnitude = rope_utils.ROPE_INIT_FUNCTIONS[kind](config, CPU, seq_len=length)
        found = compute_frequencies(spec, CPU, length)
        torch.testing.assert_close(found.float(), expected, rtol=2e-6, atol=0.0)
        assert spec.attention_factor == pytest.approx(magnitude, rel=1e-12)
        assert stretch is not None and stretch.attention_factor == pytest.approx(magnitude, rel=1e-12)
        by_reference = reference_frequencies(500.0, spec.rotary_dim, stretch, length)
        torch.testing.assert_close(found, torch.tensor(by_reference, dtype=torch.float64), rtol=1e-13, atol=0.0)
        differ.append(not torch.equal(found, plain))
    assert differ == ([False, False, True] if kind == "dynamic" else [True] * 3)
    table = build_rotary_table(POSITIONS, spec, torch.float64, 2000)
    torch.testing.assert_close(
        table[..., 0, 0, :].square() + table[..., 0, 1, :].square(), torch.full_like(table[..., 0, 0, :], spec.attention_factor**2)
    )


def test_interleaved_pairs_are_halves_in_another_order() -> None:
    """Forward and backward, part of the head rotated."""
    halves, neighbours = rotary(12, rotary_percent=2 / 3), rotary(12, rotary_percent=2 / 3, rotary_interleaved=True)
    assert (neighbours.rotary_dim, neighbours.is_interleaved) == (8, True)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7, 8, 9, 10, 11])  # firsts, seconds, the rest
    x, grad = heads(12).requires_grad_(), heads(12, key=1)
    there = x.detach()[..., order].requires_grad_()
    table = build_rotary_table(POSITIONS, halves, torch.float64)
    here = rotate(x, table, neighbours.is_interleaved)
    expected = rotate(there, table)
    assert torch.equal(here[..., order], expected) and not torch.equal(here, rotate(x, table))
    here.backward(grad)
    expected.backward(grad[..., order])
    assert x.grad is not None and there.grad is not None and torch.equal(x.grad[..., order], there.grad)
