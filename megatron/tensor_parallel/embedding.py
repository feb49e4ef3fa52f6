"""Word embedding with the vocabulary split over the tensor group (Shoeybi et al. 2019, section 3)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron.parallel.accumulate import accumulate_rows, grad_dtype
from megatron.parallel.collectives import reduce_scatter_forward, sum_forward
from megatron.parallel.scope import Scope


class _Lookup(torch.autograd.Function):
    """Looks up rows of the table. Backward adds into the gradient sink; autograd computes no gradient for the table itself."""

    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(ids)
        ctx.weight = weight
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:  # type: ignore[override]
        (ids,) = ctx.saved_tensors
        # Repeated ids must be summed in the precision of the main gradient, or a frequent token's gradient is lost to rounding.
        wide = grad.to(grad_dtype(ctx.weight))
        accumulate_rows(ctx.weight, ids.flatten(), wide.flatten(0, -2))
        return None, None


def lookup(ids: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
    """Rows of a table [v, h] for integer ids [...]: [..., h]."""
    return _Lookup.apply(ids, weight)


class VocabParallelEmbedding(nn.Module):
    """Each rank holds a range of rows and looks up the tokens in it; the ranks' results are summed.

    Rows beyond the vocabulary are padding: no valid token reaches them, so they have no gradient, and they are in no checkpoint.
    """

    weight: nn.Parameter

    def __init__(self, scope: Scope) -> None:
        super().__init__()
        self.group, self.scatter = scope.tp, scope.sequence_parallel
        name = scope.weight("weight").name
        if name in scope.table:
            self.weight = scope.table.share(name, self, "weight", scope.chunk)
        else:
            scope.parameter(self, "weight")
        self.rows = len(self.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Look up token ids [s, b]: [s, b, h] (or [s/n, b, h] under sequence parallelism)."""
        if self.group.size == 1:
            return lookup(tokens, self.weight)
        # Tokens of other ranks look up some row of ours, whose gradient from them is zero: not all of them the same row, in which
        # they would be summed one after the other.
        local, rank = tokens.remainder(self.rows), tokens.div(self.rows, rounding_mode="floor")
        rows = lookup(local, self.weight).masked_fill((rank != self.group.index).unsqueeze(-1), 0.0)
        return reduce_scatter_forward(rows, self.group) if self.scatter else sum_forward(rows, self.group)
