"""Column- and row-parallel linear layers (Shoeybi et al. 2019, section 3): thin over one operation.

Shapes: `s` sequence, `b` microbatch, `n` tensor ranks. Under sequence parallelism a column layer takes [s/n, b, in] and a row layer
gives [s/n, b, out].

The operation owns its product, the communication on both sides, its weight gradient and where that goes. What it does forward and
backward:

========== ============================== ====================================================
input      forward                        backward
========== ============================== ====================================================
plain      x                              dx
copy       x                              all-reduce(dx), while the weight gradient is computed
gather     all-gather(x) [s/n] to [s]     reduce-scatter(dx), while the weight gradient is computed
========== ============================== ====================================================

========== ============================== ====================================================
output     forward                        backward
========== ============================== ====================================================
plain      y                              dy
sum        all-reduce(y)                  dy
scatter    reduce-scatter(y) [s] to [s/n] all-gather(dy)
========== ============================== ====================================================

A column-parallel layer has input copy (or gather under sequence parallelism), a row-parallel layer output sum (or scatter). Only
the local part of a gathered input is kept for backward; it is gathered again there, while the input gradient is computed
(Korthikanti et al. 2022, section 4.2.2). Where the weight gradient is deferred, nothing hides the communication of dx, and what was
gathered is gathered again when the weight gradient runs, while the one before it is computed.

Selective recompute (Korthikanti et al. 2022, section 5) is a matter of what the operation keeps. Where its input is `Remade`, it
keeps the source of that, which the graph holds anyway, and makes the input again for the weight gradient: by the same kernels from
the same numbers, so with the same bits. A deferred weight gradient never keeps more than it would without: if the source is larger
than the input (the two halves of a gated MLP), it makes the input before it is put off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from megatron.memory.recompute import about_to_save
from megatron.parallel.accumulate import (
    Make,
    accumulate,
    accumulate_product,
    accumulate_products,
    grad_dtype,
    is_deferring,
    through,
)
from megatron.parallel.collectives import (
    Pending,
    all_gather,
    all_reduce,
    reduce_scatter,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from megatron.parallel.context import Group
from megatron.parallel.products import input_product, linear
from megatron.parallel.scope import Scope

InputMode = Literal["plain", "copy", "gather"]
OutputMode = Literal["plain", "sum", "scatter"]


@dataclass(frozen=True)
class Remade:
    """An input that a linear layer does not keep: in backward it is made again."""

    value: torch.Tensor
    """The input itself, as autograd knows it."""
    source: torch.Tensor
    """What it is made of, cut off from autograd. Whoever made it keeps that anyway, so it takes no memory of its own."""
    make: Make
    """Makes the value of the source. Parameters that it reads must be there until the weight gradient has run."""

    @classmethod
    def of(cls, make: Make, source: torch.Tensor) -> Remade:
        """Make the value for the first time."""
        return cls(make(source), source.detach(), make)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: torch.Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        group: Group,
        input_mode: InputMode,
        output_mode: OutputMode,
        source: torch.Tensor | None,
        make: Make | None,
        defers: bool,
    ) -> torch.Tensor:
        kept = x if source is None else source
        about_to_save(kept)
        ctx.save_for_backward(kept)
        ctx.make, ctx.source_is_larger = make, kept.nbytes > x.nbytes
        # Parameters are leaves and outlive the graph, so they need no saving; their identity is what finds their sink.
        ctx.weight, ctx.bias, ctx.group, ctx.modes, ctx.defers = weight, bias, group, (input_mode, output_mode), defers
        whole = all_gather(x, group) if input_mode == "gather" else x
        y = linear(whole, weight.flatten(0, -2), None if bias is None else bias.flatten())
        if output_mode == "sum":
            return all_reduce(y, group)
        if output_mode == "scatter":
            return reduce_scatter(y, group)
        return y

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, *tuple[None, ...]]:  # type: ignore[override]
        (kept,) = ctx.saved_tensors
        make: Make = ctx.make or _as_it_is
        deferring = ctx.defers and is_deferring()
        if deferring and ctx.source_is_larger:
            kept, make = make(kept), _as_it_is
        weight, bias, group = ctx.weight, ctx.bias, ctx.group
        input_mode, output_mode = ctx.modes
        gathers_dy, gathers_x = output_mode == "scatter", input_mode == "gather"
        # A deferred weight gradient keeps only the local part of a gathered input, and gathers it again.
        local = grad_output
        if gathers_dy:
            grad_output = all_gather(grad_output, group)
        whole_x = start_all_gather(make(kept), group) if gathers_x and not deferring else None
        pending = None
        if ctx.needs_input_grad[0]:
            grad_input = input_product(grad_output, weight.flatten(0, -2))
            if input_mode == "copy":
                pending = start_all_reduce(grad_input, group)
            elif input_mode == "gather":
                pending = start_reduce_scatter(grad_input, group)
            else:
                pending = Pending(grad_input)
        if bias is not None:
            # In the precision of its destination: a 16-bit sum over all tokens would lose digits, or overflow.
            accumulate(bias, grad_output.flatten(0, -2).sum(0, dtype=grad_dtype(bias)).view_as(bias))
        if not deferring:
            x = make(kept) if whole_x is None else whole_x.wait()
            accumulate_products(weight, [(grad_output.flatten(0, -2), x.flatten(0, -2))])
        elif gathers_dy or gathers_x:

            def start() -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
                dy = start_all_gather(local, group) if gathers_dy else Pending(local)
                x = start_all_gather(make(kept), group) if gathers_x else None
                return lambda: (dy.wait(), make(kept) if x is None else x.wait())

            accumulate_product(weight, local, kept, start)
        else:
            accumulate_product(weight, grad_output, kept, make=make)
        return (None if pending is None else pending.wait()), *(None,) * 8


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


def parallel_linear(
    x: torch.Tensor | Remade,
    weight: nn.Parameter,
    bias: nn.Parameter | None,
    group: Group,
    *,
    input_mode: InputMode = "plain",
    output_mode: OutputMode = "plain",
    defers: bool = True,
) -> torch.Tensor:
    """x weight^T + bias with the communication of the two modes.

    Args:
        x: [s, b, in], or [s/n, b, in] with input mode gather. It is kept for backward, unless it is made again.
        weight: this rank's part, [out, in]; leading dimensions are flattened ([2, f, h] gives 2f outputs).
        bias: as the weight without its last dimension; added before the output's communication, so only for plain output.
        defers: whether the weight gradient may be deferred.

    Returns:
        [s, b, out], or [s/n, b, out] with output mode scatter.
    """
    assert bias is None or output_mode == "plain", "a bias added before a sum would count once a rank"
    value, source, make = (x.value, x.source, x.make) if isinstance(x, Remade) else (x, None, None)
    return _Linear.apply(value, weight, bias, group, input_mode, output_mode, source, make, defers)


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

    def forward(self, x: torch.Tensor | Remade) -> torch.Tensor:
        """Map x [s, b, in] (or [s/n, b, in]) to [s, b, out/n] (or [s, b, halves, out/n])."""
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

    def forward(self, x: torch.Tensor | Remade) -> torch.Tensor:
        """Map x [s, b, in/n] to [s, b, out] (or [s/n, b, out])."""
        if self.group.size == 1:
            return parallel_linear(x, self.weight, self.bias, self.group)
        y = parallel_linear(x, self.weight, None, self.group, output_mode="scatter" if self.scatter else "sum")
        return y if self.bias is None else y + through(self.bias)
