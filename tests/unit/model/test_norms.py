"""Failing with LayerNorm on CPU: torch's kernel sums the weight's and bias's gradients over all rows in 16 bits."""

from __future__ import annotations

import pytest
import torch

from megatron.config.model import Normalization
from megatron.parallel.params import ParamTable, Scope, materialize
from megatron.spec.layers import NormSpec
from megatron.spec.weights import build_norm as norm_weights
from megatron.tensor_parallel.layers import Norm
from tests.support.lone_rank import CPU, lone_rank
from tests.support.sinks import sink_over

ROWS, SIZE = 4096, 64


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()


def run(kind: Normalization, dtype: torch.dtype, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    table = ParamTable()
    spec = NormSpec(kind, 1e-5, has_bias=kind == "LayerNorm")
    weights = {weight.name: weight for weight in norm_weights("norm", spec, SIZE)}
    norm = Norm(Scope(lone_rank(), table, weights, dtype).get_child("norm"), spec, SIZE)
    materialize(norm, table, CPU)
    for entry in table:
        with torch.no_grad():
            entry.param.copy_(torch.linspace(0.5, 1.5, SIZE, dtype=torch.float64))
        entry.param.grad_sink = sink_over(torch.zeros(SIZE, dtype=torch.promote_types(dtype, torch.float32)))  # type: ignore[attr-defined]
    leaf = x.to(dtype).clone().requires_grad_()
    y = norm(leaf)
    y.backward(dy.to(dtype))
    assert leaf.grad is not None
    return {"y": y.detach(), "dx": leaf.grad} | {e.record.name: e.param.grad_sink.main_grad for e in table}  # type: ignore[attr-defined]


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-5), (torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-10)])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("scale", [1.0, 3000.0, 1e-2])
def test_norms_are_within_rounding_of_float64(kind: Normalization, dtype: torch.dtype, rounding: float, scale: float) -> None:
    """Statistics of numbers whose squares overflow float16, and gradients of weights summed over thousands of rows."""
    generator = torch.Generator().manual_seed(1)
    x = (torch.randn(ROWS, 1, SIZE, dtype=torch.float64, generator=generator) * scale).to(dtype).double()
    dy = (torch.randn(ROWS, 1, SIZE, dtype=torch.float64, generator=generator) + x / (2 * scale)).to(dtype).double()
    found, exact = run(kind, dtype, x, dy), run(kind, torch.float64, x, dy)
    errors = {name: error(found[name], exact[name]) for name in exact}
    assert max(errors.values()) < rounding, errors
