"""The MLP, plain or gated (Shazeer 2020), with its width split over the tensor group; and the activation functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron.parallel.params import Scope
from megatron.spec.activations import register
from megatron.spec.mlps import MLPSpec
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


class _GEGLU(torch.autograd.Function):
    """gelu(gate) * up, [..., 2, f] to [..., f], by one of torch's two ways. Keeps only its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, approximate: str) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        ctx.approximate = approximate
        return F.gelu(x[..., 0, :], approximate=approximate).mul_(x[..., 1, :])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        (gate, up), out, aten = x.unbind(-2), torch.empty_like(x), torch.ops.aten
        grad_gate, grad_up = out[..., 0, :], out[..., 1, :]
        torch.mul(grad, up, out=grad_up)
        aten.gelu_backward.grad_input(grad_up, gate, approximate=ctx.approximate, grad_input=grad_gate)
        aten.gelu.out(gate, approximate=ctx.approximate, out=grad_up).mul_(grad)
        return out, None


_QUICK = 1.702
"""Factor in the sigmoid of the quick GELU (Hendrycks and Gimpel 2016)."""


class _QuickGEGLU(torch.autograd.Function):
    """gate * sigmoid(1.702 gate) * (up + offset) of the clamped input, [..., 2, f] to [..., f], computed in at least float32. Keeps
    only its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, offset: float, clamp: float | None) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        ctx.offset, ctx.clamp = offset, clamp
        gate, up = _clamped(x, clamp)
        return (torch.sigmoid(gate * _QUICK).mul_(gate)).mul_(up + offset).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        gate, up = _clamped(x, ctx.clamp)
        share, out = torch.sigmoid(gate * _QUICK), torch.empty_like(x)
        slope = (1 - share).mul_(gate).mul_(_QUICK).add_(1).mul_(share)
        out[..., 0, :] = slope.mul_(up + ctx.offset).mul_(grad)
        out[..., 1, :] = share.mul_(gate).mul_(grad)
        if ctx.clamp is not None:
            out[..., 0, :].masked_fill_(x[..., 0, :] > ctx.clamp, 0.0)
            out[..., 1, :].masked_fill_(x[..., 1, :].abs() > ctx.clamp, 0.0)
        return out, None, None


def _clamped(x: torch.Tensor, clamp: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up in at least float32."""
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).unbind(-2)
    return (gate, up) if clamp is None else (gate.clamp(max=clamp), up.clamp(-clamp, clamp))


class _ReLU(torch.autograd.Function):
    """max(x, 0). Keeps its input and not, as torch's does, its result, which may be made again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return F.relu(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return torch.ops.aten.threshold_backward(grad, x, 0.0)


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


_Function = Callable[[torch.Tensor], torch.Tensor]
FUNCTIONS: dict[str, Callable[[MLPSpec], _Function]] = {
    "gelu": lambda spec: partial(F.gelu, approximate="tanh"),  # as GPT-2
    "gelu_exact": lambda spec: F.gelu,
    "relu": lambda spec: _ReLU.apply,
    "squared_relu": lambda spec: _SquaredReLU.apply,
    "swiglu": lambda spec: _SwiGLU.apply,
    "geglu": lambda spec: lambda x: _GEGLU.apply(x, "tanh"),
    "geglu_exact": lambda spec: lambda x: _GEGLU.apply(x, "none"),
    "quick_geglu": lambda spec: lambda x: _QuickGEGLU.apply(x, spec.offset, spec.clamp),
}
"""The function of an MLP. Plain ones map [..., f] to [..., f], gated ones [..., 2, f] to [..., f]."""


def _gated(gate_function: _Function) -> _Function:
    return lambda x: gate_function(x[..., 0, :]) * x[..., 1, :]


def _quick_geglu(x: torch.Tensor, offset: float, clamp: float | None) -> torch.Tensor:
    """Compute what `_QuickGEGLU` computes, with the same gradient: 1 through a value at a bound. Autograd's gradient of
    `Tensor.clamp` at a bound is 1 before torch 2.14 and 0 since, so masks take its place."""
    gate, up = _clamped(x, None)
    if clamp is not None:
        gate = gate.masked_fill(gate > clamp, clamp)
        up = up.masked_fill(up > clamp, clamp).masked_fill(up < -clamp, -clamp)
    return (gate * torch.sigmoid(gate * _QUICK) * (up + offset)).to(x.dtype)


_TRACED: dict[str, Callable[[MLPSpec], _Function]] = {
    "gelu": FUNCTIONS["gelu"],
    "gelu_exact": FUNCTIONS["gelu_exact"],
    "relu": lambda spec: F.relu,
    "squared_relu": lambda spec: lambda x: F.relu(x).square(),
    "swiglu": lambda spec: _gated(F.silu),
    "geglu": lambda spec: _gated(partial(F.gelu, approximate="tanh")),
    "geglu_exact": lambda spec: _gated(F.gelu),
    "quick_geglu": lambda spec: partial(_quick_geglu, offset=spec.offset, clamp=spec.clamp),
}
"""The same for a compiler, which fuses them and chooses itself what it keeps."""


def register_activation(name: str, function: _Function, *, gated: bool = False) -> None:
    """Add an activation of the user's own, for `--activation NAME`.

    Args:
        function: maps [..., f] to [..., f], or gated [..., 2, f] to [..., f] (gate first, then value), by operations that autograd
            knows. Each channel must depend on itself alone: tensor ranks hold a part of them each.
        gated: whether it takes two halves.

    Raises:
        ValueError: the name is taken, or cannot stand in a command line.
    """
    register(name, gated=gated)
    FUNCTIONS[name] = _TRACED[name] = lambda spec: function


class MLP(nn.Module):
    """Column-parallel up, activation, row-parallel down.

    Args:
        remakes_activation: the activation's result is not kept for backward but computed again, from what it keeps itself.
    """

    def __init__(self, scope: Scope, spec: MLPSpec, *, remakes_activation: bool = False) -> None:
        super().__init__()
        self.activation, self.traced = FUNCTIONS[spec.activation.name](spec), _TRACED[spec.activation.name](spec)
        self.remakes_activation = remakes_activation
        self.up = ColumnParallelLinear(scope.child("up"))
        self.down = RowParallelLinear(scope.child("down"))

    def forward(self, x: torch.Tensor | Remade) -> torch.Tensor:
        """Map hidden states [s, b, h] to the same shape."""
        wide = self.up(x)  # [s, b, f], gated [s, b, 2, f]
        if torch.compiler.is_compiling():
            return self.down(self.traced(wide))
        return self.down(Remade.of(self.activation, wide) if self.remakes_activation else self.activation(wide))
