"""The MLP, plain or gated (Shazeer 2020), with its width split over the tensor group; and the activation functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron.parallel.scope import Scope
from megatron.spec.activations import ActivationName
from megatron.spec.layers import MLPSpec
from megatron.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.tensor_parallel.linear import Remade

_SATURATED = 40.0
"""Beyond it, a sigmoid is 1 in float64 too."""


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up, [..., 2, f] to [..., f]. Keeps only its input; backward computes silu again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return F.silu(x[..., 0, :]).mul_(x[..., 1, :])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        # On a GPU each launch counts. In float16 the shorter way might overflow.
        return _swiglu_gradient(x, grad, few_launches=x.is_cuda and x.dtype != torch.float16)


def _swiglu_gradient(x: torch.Tensor, grad: torch.Tensor, *, few_launches: bool) -> torch.Tensor:
    """Gradient of x [..., 2, f] from that of silu(gate) * up [..., f]. Four launches and nothing beside the result; or three."""
    gate, up = x[..., 0, :], x[..., 1, :]
    out = torch.empty_like(x)
    grad_gate, grad_up = out[..., 0, :], out[..., 1, :]
    if few_launches:
        # grad * silu(gate) = (grad * gate) * sigmoid(gate), and sigmoid is the derivative of softplus.
        products = x * grad.unsqueeze(-2)
        torch.ops.aten.silu_backward.grad_input(products[..., 1, :], gate, grad_input=grad_gate)
        torch.ops.aten.softplus_backward.grad_input(products[..., 0, :], gate, 1.0, _SATURATED, grad_input=grad_up)
    else:
        torch.mul(grad, up, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad_up, gate, grad_input=grad_gate)
        torch.ops.aten.silu.out(gate, out=grad_up).mul_(grad)
    return out


class _SquaredReLU(torch.autograd.Function):
    """relu(x)^2. Keeps only its input, as GELU does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return F.relu(x).square_()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return F.relu(x).mul_(2.0).mul_(grad)


_FUNCTIONS: dict[ActivationName, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": partial(F.gelu, approximate="tanh"),  # as GPT-2
    "swiglu": _SwiGLU.apply,
    "squared_relu": _SquaredReLU.apply,
}
"""Plain ones map [..., f] to [..., f], gated ones [..., 2, f] to [..., f]."""


def _swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.unbind(-2)
    return F.silu(gate) * up


_TRACED: dict[ActivationName, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": _FUNCTIONS["gelu"],
    "swiglu": _swiglu,
    "squared_relu": lambda x: F.relu(x).square(),
}
"""The same for a compiler, which fuses them and chooses itself what it keeps."""


class MLP(nn.Module):
    """Column-parallel up, activation, row-parallel down.

    Args:
        remakes_activation: the activation's result is not kept for backward but computed again, from what it keeps itself.
    """

    def __init__(self, scope: Scope, spec: MLPSpec, *, remakes_activation: bool = False) -> None:
        super().__init__()
        self.activation, self.traced = _FUNCTIONS[spec.activation.name], _TRACED[spec.activation.name]
        self.remakes_activation = remakes_activation
        self.up = ColumnParallelLinear(scope.child("up"))
        self.down = RowParallelLinear(scope.child("down"))

    def forward(self, x: torch.Tensor | Remade) -> torch.Tensor:
        """Map hidden states [s, b, h] to the same shape."""
        wide = self.up(x)  # [s, b, f], gated [s, b, 2, f]
        if torch.compiler.is_compiling():
            return self.down(self.traced(wide))
        return self.down(Remade.of(self.activation, wide) if self.remakes_activation else self.activation(wide))
