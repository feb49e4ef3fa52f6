"""MLP, optionally gated (Shazeer 2020), with its width split over the tensor group; and the activation functions.

Shapes: `s` sequence, `b` microbatch, `h` hidden size, `f` local width of the MLP. A gated activation takes [..., 2, f]: gate, then
up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron.parallel.params import Scope
from megatron.spec.activations import register_activation_spec
from megatron.spec.mlps import MLPSpec
from megatron.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.tensor_parallel.linear import RecomputableInput

_SATURATED = 40.0
"""Input above which a sigmoid is exactly 1, also in float64."""


class _SwiGLU(torch.autograd.Function):
    """Autograd function of silu(gate) * up. Saves only its input, gate and up [..., 2, f]; backward recomputes silu."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return F.silu(x[..., 0, :]).mul_(x[..., 1, :])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        # On a GPU, launches cost time. In float16, grad * x could overflow.
        return _swiglu_backward(x, grad, few_launches=x.is_cuda and x.dtype != torch.float16)


def _swiglu_backward(x: torch.Tensor, grad: torch.Tensor, *, few_launches: bool) -> torch.Tensor:
    """Compute the gradient of x [..., 2, f] from the gradient of silu(gate) * up [..., f].

    Args:
        few_launches: launch three kernels and use a temporary buffer of the size of x, instead of four kernels without a buffer.
    """
    gate, up = x[..., 0, :], x[..., 1, :]
    out = torch.empty_like(x)
    grad_gate, grad_up = out[..., 0, :], out[..., 1, :]
    if few_launches:
        # grad * silu(gate) = (grad * gate) * sigmoid(gate), and sigmoid is the derivative of softplus.
        grad_times_x = x * grad.unsqueeze(-2)
        torch.ops.aten.silu_backward.grad_input(grad_times_x[..., 1, :], gate, grad_input=grad_gate)
        torch.ops.aten.softplus_backward.grad_input(grad_times_x[..., 0, :], gate, 1.0, _SATURATED, grad_input=grad_up)
    else:
        torch.mul(grad, up, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad_up, gate, grad_input=grad_gate)
        torch.ops.aten.silu.out(gate, out=grad_up).mul_(grad)
    return out


class _GEGLU(torch.autograd.Function):
    """Autograd function of gelu(gate) * up, with either approximation of `torch.nn.functional.gelu`. Saves only its input, gate and
    up [..., 2, f]."""

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


_QUICK_GELU_SCALE = 1.702
"""Factor in the sigmoid of the quick GELU (Hendrycks and Gimpel 2016)."""


class _QuickGEGLU(torch.autograd.Function):
    """Autograd function of gate * sigmoid(1.702 * gate) * (up + offset), in at least float32. If `clamp` is not None, gate and up
    are clamped first. Saves only its input, gate and up [..., 2, f]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, offset: float, clamp: float | None) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        ctx.offset, ctx.clamp = offset, clamp
        gate, up = _clamp_gate_and_up(x, clamp)
        return (torch.sigmoid(gate * _QUICK_GELU_SCALE).mul_(gate)).mul_(up + offset).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        gate, up = _clamp_gate_and_up(x, ctx.clamp)
        sigmoid, out = torch.sigmoid(gate * _QUICK_GELU_SCALE), torch.empty_like(x)
        gate_slope = (1 - sigmoid).mul_(gate).mul_(_QUICK_GELU_SCALE).add_(1).mul_(sigmoid)
        out[..., 0, :] = gate_slope.mul_(up + ctx.offset).mul_(grad)
        out[..., 1, :] = sigmoid.mul_(gate).mul_(grad)
        if ctx.clamp is not None:
            out[..., 0, :].masked_fill_(x[..., 0, :] > ctx.clamp, 0.0)
            out[..., 1, :].masked_fill_(x[..., 1, :].abs() > ctx.clamp, 0.0)
        return out, None, None


def _clamp_gate_and_up(x: torch.Tensor, clamp: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Split x [..., 2, f] into gate and up, in at least float32. Clamp gate to at most `clamp`, up to [-clamp, clamp]."""
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).unbind(-2)
    return (gate, up) if clamp is None else (gate.clamp(max=clamp), up.clamp(-clamp, clamp))


class _ReLU(torch.autograd.Function):
    """Autograd function of max(x, 0) that saves its input instead of its output. The output can therefore be freed and recomputed,
    unlike with torch's ReLU."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return F.relu(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return torch.ops.aten.threshold_backward(grad, x, 0.0)


class _SquaredReLU(torch.autograd.Function):
    """Autograd function of relu(x)^2. Saves only its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return F.relu(x).square_()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return F.relu(x).mul_(2.0).mul_(grad)


_Activation = Callable[[torch.Tensor], torch.Tensor]
ACTIVATION_FUNCTIONS: dict[str, Callable[[MLPSpec], _Activation]] = {
    "gelu": lambda spec: partial(F.gelu, approximate="tanh"),  # as GPT-2
    "gelu_exact": lambda spec: F.gelu,
    "relu": lambda spec: _ReLU.apply,
    "squared_relu": lambda spec: _SquaredReLU.apply,
    "swiglu": lambda spec: _SwiGLU.apply,
    "geglu": lambda spec: lambda x: _GEGLU.apply(x, "tanh"),
    "geglu_exact": lambda spec: lambda x: _GEGLU.apply(x, "none"),
    "quick_geglu": lambda spec: lambda x: _QuickGEGLU.apply(x, spec.linear_offset, spec.clamp_value),
}
"""Activation functions by name. Functions without a gate map [..., f] to [..., f], gated functions [..., 2, f] to [..., f]."""


def _build_gated(gate_function: _Activation) -> _Activation:
    return lambda x: gate_function(x[..., 0, :]) * x[..., 1, :]


def _quick_geglu(x: torch.Tensor, offset: float, clamp: float | None) -> torch.Tensor:
    """Compute the activation of `_QuickGEGLU` in operations that torch.compile can fuse. A value at a clamp bound has the gradient
    1, as in `_QuickGEGLU`.

    Autograd's gradient of `Tensor.clamp` at a bound is 1 before torch 2.14 and 0 since, so the function uses masks instead.
    """
    gate, up = _clamp_gate_and_up(x, None)
    if clamp is not None:
        gate = gate.masked_fill(gate > clamp, clamp)
        up = up.masked_fill(up > clamp, clamp).masked_fill(up < -clamp, -clamp)
    return (gate * torch.sigmoid(gate * _QUICK_GELU_SCALE) * (up + offset)).to(x.dtype)


TRACEABLE_ACTIVATION_FUNCTIONS: dict[str, Callable[[MLPSpec], _Activation]] = {
    "gelu": ACTIVATION_FUNCTIONS["gelu"],
    "gelu_exact": ACTIVATION_FUNCTIONS["gelu_exact"],
    "relu": lambda spec: F.relu,
    "squared_relu": lambda spec: lambda x: F.relu(x).square(),
    "swiglu": lambda spec: _build_gated(F.silu),
    "geglu": lambda spec: _build_gated(partial(F.gelu, approximate="tanh")),
    "geglu_exact": lambda spec: _build_gated(F.gelu),
    "quick_geglu": lambda spec: partial(_quick_geglu, offset=spec.linear_offset, clamp=spec.clamp_value),
}
"""Activation functions for torch.compile, which fuses them and itself decides which tensors it saves."""


def register_activation(name: str, function: _Activation, *, gated: bool = False) -> None:
    """Add a custom activation function for `--activation NAME`.

    Args:
        function: maps [..., f] to [..., f], or if gated [..., 2, f] to [..., f] (gate first, then up), by operations with autograd
            support. Each output channel must depend only on the input channel of the same index, because every tensor rank has some
            of the channels.
        gated: whether the function takes a gate.

    Raises:
        ValueError: the name is in use, or is not valid on the command line.
    """
    register_activation_spec(name, gated=gated)
    ACTIVATION_FUNCTIONS[name] = TRACEABLE_ACTIVATION_FUNCTIONS[name] = lambda spec: function


class MLP(nn.Module):
    """MLP: column-parallel linear layer, activation, row-parallel linear layer.

    Args:
        recomputes_activation: recompute the activation's output in backward from its input, instead of storing it.
    """

    def __init__(self, scope: Scope, spec: MLPSpec, *, recomputes_activation: bool = False) -> None:
        super().__init__()
        self.activation, self.traceable_activation = (
            ACTIVATION_FUNCTIONS[spec.activation.name](spec),
            TRACEABLE_ACTIVATION_FUNCTIONS[spec.activation.name](spec),
        )
        self.recomputes_activation = recomputes_activation
        self.up = ColumnParallelLinear(scope.get_child("up"))
        self.down = RowParallelLinear(scope.get_child("down"))

    def forward(self, x: torch.Tensor | RecomputableInput) -> torch.Tensor:
        """Map hidden states [s, b, h] (or [s/tp, b, h] under sequence parallelism) to the same shape."""
        hidden = self.up(x)  # [s, b, f], gated [s, b, 2, f]
        if torch.compiler.is_compiling():
            return self.down(self.traceable_activation(hidden))
        return self.down(RecomputableInput.of(self.activation, hidden) if self.recomputes_activation else self.activation(hidden))
