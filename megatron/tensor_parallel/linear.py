"""Column- and row-parallel linear layers (Shoeybi et al. 2019, section 3): thin over one operation.

Shapes: `s` sequence, `b` microbatch, `n` tensor ranks. Under sequence parallelism a column layer takes [s/n, b, in] and a row layer
gives [s/n, b, out].
"""

from __future__ import annotations

import torch
from torch import nn

from megatron.parallel.accumulate import through
from megatron.parallel.scope import Scope
from megatron.tensor_parallel.linear_function import InputMode, parallel_linear


class ColumnParallelLinear(nn.Module):
    """Output features are split: each rank computes [s, b, out/n].

    The weight is [out, in]; with `halves` > 1 it is [halves, out, in] and the output [s, b, halves, out/n]: the halves of a gated
    MLP, each split by itself, so that a tensor rank's part is one slice of one dimension.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, scope: Scope) -> None:
        super().__init__()
        self.group = scope.tp
        self.input_mode: InputMode = "gather" if scope.sequence_parallel else "copy"
        scope.parameter(self, "weight")
        scope.optional(self, "bias")
        self.halves = len(self.weight) if self.weight.dim() == 3 else 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[s, b, in] (or [s/n, b, in]) to [s, b, out/n] (or [s, b, halves, out/n])."""
        y = parallel_linear(x, self.weight, self.bias, self.group, input_mode=self.input_mode)
        return y.unflatten(-1, (self.halves, -1)) if self.halves > 1 else y


class RowParallelLinear(nn.Module):
    """Input features are split: each rank multiplies its part, and the products are summed over the ranks. The bias counts once."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, scope: Scope) -> None:
        super().__init__()
        self.group, self.scatter = scope.tp, scope.sequence_parallel
        scope.parameter(self, "weight")
        scope.optional(self, "bias")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[s, b, in/n] to [s, b, out] (or [s/n, b, out])."""
        if self.group.size == 1:
            return parallel_linear(x, self.weight, self.bias, self.group)
        y = parallel_linear(x, self.weight, None, self.group, output_mode="scatter" if self.scatter else "sum")
        return y if self.bias is None else y + through(self.bias)
