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


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up, [..., 2, f] to [..., f]. Keeps only its input; backward computes silu again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return F.silu(x[..., 0, :]).mul_(x[..., 1, :])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        gate, up = x[..., 0, :], x[..., 1, :]
        out = torch.empty_like(x)
        out[..., 0, :] = torch.ops.aten.silu_backward(grad * up, gate)
        torch.mul(grad, F.silu(gate), out=out[..., 1, :])
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


class MLP(nn.Module):
    """Column-parallel up, activation, row-parallel down.

    Args:
        remakes_activation: the activation's result is not kept for backward but computed again, from what it keeps itself.
    """

    def __init__(self, scope: Scope, spec: MLPSpec, *, remakes_activation: bool = False) -> None:
        super().__init__()
        self.activation, self.remakes_activation = _FUNCTIONS[spec.activation.name], remakes_activation
        self.up = ColumnParallelLinear(scope.child("up"))
        self.down = RowParallelLinear(scope.child("down"))

    def forward(self, x: torch.Tensor | Remade) -> torch.Tensor:
        """Map hidden states [s, b, h] to the same shape."""
        wide = self.up(x)  # [s, b, f], gated [s, b, 2, f]
        return self.down(Remade.of(self.activation, wide) if self.remakes_activation else self.activation(wide))
