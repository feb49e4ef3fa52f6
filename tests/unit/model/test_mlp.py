"""The activation functions of the MLP: what they compute, and what they keep."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from megatron.model.mlp import ACTIVATION_FUNCTIONS, TRACEABLE_ACTIVATION_FUNCTIONS, _swiglu_backward
from megatron.spec.activations import ACTIVATIONS, Activation
from megatron.spec.mlps import MLPSpec

PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "swiglu": lambda x: F.silu(x[..., 0, :]) * x[..., 1, :],
    "squared_relu": lambda x: F.relu(x).square(),
    "relu": F.relu,
    "gelu_exact": F.gelu,
    "geglu": lambda x: F.gelu(x[..., 0, :], approximate="tanh") * x[..., 1, :],
    "geglu_exact": lambda x: F.gelu(x[..., 0, :]) * x[..., 1, :],
    "quick_geglu": lambda x: quick(bounded(x[..., 0, :], -torch.inf)) * (bounded(x[..., 1, :], -0.5) + 1.0),
}


def quick(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def bounded(x: torch.Tensor, least: float) -> torch.Tensor:
    """Clamp to at most 0.5. The gradient at a bound is 1; that of `Tensor.clamp` there depends on the version of torch."""
    return torch.where((x >= least) & (x <= 0.5), x, x.detach().clamp(least, 0.5))


def function_of(activation: Activation) -> Callable[[torch.Tensor], torch.Tensor]:
    return ACTIVATION_FUNCTIONS[activation.name](MLPSpec(8, activation, bias=False, linear_offset=1.0, clamp_value=0.5))


def test_each_equals_its_formula_and_keeps_its_input_alone() -> None:
    """So a linear layer after it may keep the same in place of its result."""
    for activation in ACTIVATIONS:
        shape = (5, 3, 2, 8) if activation.is_gated else (5, 3, 8)
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            torch.manual_seed(0)
            x = torch.randn(shape, dtype=dtype, requires_grad=True)
            kept: list[int] = []

            def keep(tensor: torch.Tensor, kept: list[int] = kept) -> torch.Tensor:
                kept.append(tensor.data_ptr())
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                y = function_of(activation)(x)
            assert set(kept) == {x.data_ptr()}, activation.name
            exact = x.detach().double().requires_grad_()
            expected = PLAIN[activation.name](exact)
            grad = torch.randn_like(y)
            y.backward(grad)
            expected.backward(grad.double())
            assert x.grad is not None and exact.grad is not None
            rounding = 8 * torch.finfo(dtype).eps
            torch.testing.assert_close(y.double(), expected, rtol=rounding, atol=rounding)
            torch.testing.assert_close(x.grad.double(), exact.grad, rtol=rounding, atol=rounding)


def test_the_same_for_a_compiler() -> None:
    for activation in ACTIVATIONS:
        x = torch.randn((5, 2, 8) if activation.is_gated else (5, 8), dtype=torch.float64)
        spec = MLPSpec(8, activation, bias=False, linear_offset=1.0, clamp_value=0.5)
        torch.testing.assert_close(
            TRACEABLE_ACTIVATION_FUNCTIONS[activation.name](spec)(x),
            ACTIVATION_FUNCTIONS[activation.name](spec)(x),
            rtol=1e-13,
            atol=1e-13,
        )


def test_at_a_bound_the_gradient_is_the_same_eager_and_compiled() -> None:
    """It is that of a value within the bounds, in every version of torch."""
    spec = MLPSpec(8, next(one for one in ACTIVATIONS if one.name == "quick_geglu"), bias=False, linear_offset=1.0, clamp_value=0.5)
    values = torch.tensor([-0.6, -0.5, 0.1, 0.5, 0.6], dtype=torch.float64)
    pairs = torch.cartesian_prod(values, values).t().contiguous()  # of a gate and an up projection: [2, 25]
    grads = []
    for function in (
        ACTIVATION_FUNCTIONS[spec.activation.name](spec),
        TRACEABLE_ACTIVATION_FUNCTIONS[spec.activation.name](spec),
        PLAIN[spec.activation.name],
    ):
        x = pairs.clone().requires_grad_()
        function(x).sum().backward()
        assert x.grad is not None
        grads.append(x.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(grads[2], grads[0], rtol=1e-13, atol=1e-13)
    assert torch.equal(grads[0] != 0, torch.stack([pairs[0] <= 0.5, pairs[1].abs() <= 0.5]))


@pytest.mark.parametrize("few_launches", [False, True])
def test_both_ways_to_the_gradient_of_a_gate(few_launches: bool) -> None:
    """Also where a sigmoid is 0 or 1, and where an exponential would overflow."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        torch.manual_seed(1)
        x, grad = torch.randn(200, 2, 8, dtype=dtype), torch.randn(200, 8, dtype=dtype)
        x[:, 0] *= torch.logspace(-2, 3, 200)[:, None]
        exact = x.double().detach().requires_grad_()
        PLAIN["swiglu"](exact).backward(grad.double())
        rounding = 8 * torch.finfo(dtype).eps
        with torch.no_grad():
            found = _swiglu_backward(x, grad, few_launches=few_launches)
        torch.testing.assert_close(found.double(), exact.grad, rtol=rounding, atol=rounding)
