"""The linear operation under column- and row-parallel layers (Shoeybi et al. 2019, section 3).

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
share      y                              all-reduce(dy)
gather     all-gather(y) [s/n] to [s]     reduce-scatter(dy)
========== ============================== ====================================================

A column-parallel layer has input copy (or gather under sequence parallelism), a row-parallel layer output sum (or scatter). A layer
that every rank holds as a whole has input plain, and output share (or gather) where each rank uses the result for its own heads.
Only the local part of a gathered input is kept for backward; it is gathered again there, while the input gradient is computed
(Korthikanti et al. 2022, section 4.2.2). Where the weight gradient is deferred, nothing hides the communication of dx, and what was
gathered is gathered again when the weight gradient runs, while the one before it is computed.

All-gather(x), reduce-scatter(y), all-gather(dy) and, where the weight gradient is deferred, reduce-scatter(dx) have nothing beside
them. With an `Overlap` their own product hides them, in pieces.

Selective recompute (Korthikanti et al. 2022, section 5) is a matter of what the operation keeps. Where its input is `Remade`, it
keeps the source of that, which the graph holds anyway, and makes the input again for the weight gradient: by the same kernels from
the same numbers, so with the same bits. A deferred weight gradient never keeps more than it would without: if the source is larger
than the input (the two halves of a gated MLP), it makes the input before it is put off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import nn

from megatron.memory import recompute
from megatron.parallel.accumulate import (
    Make,
    accumulate_product,
    accumulate_products,
    accumulate_sum,
    is_deferring,
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
from megatron.parallel.handles import OUTSIDE_CUDA_GRAPHS, Handles
from megatron.precision.products import PLAIN, Products

if TYPE_CHECKING:
    from megatron.parallel.overlap import Overlap

InputMode = Literal["plain", "copy", "gather"]
OutputMode = Literal["plain", "sum", "scatter", "share", "gather"]


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


@dataclass(frozen=True, slots=True)
class Form:
    """Everything about a linear layer that is not a tensor."""

    group: Group
    input_mode: InputMode = "plain"
    output_mode: OutputMode = "plain"
    defers: bool = True
    """Whether the weight gradient may be deferred."""
    overlap: Overlap | None = None
    """How the product overlaps with the collective of mode gather or scatter; None: they take turns."""
    products: Products = PLAIN
    """What the products are computed by, where they do not overlap."""


def _forward(form: Form, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product with the communication on both sides."""
    matrix, bias = weight.flatten(0, -2), None if bias is None else bias.flatten()
    if form.overlap is not None and form.input_mode == "gather":
        return form.overlap.gathered(x, matrix.t(), bias, form.group, keeps=False)[1]
    if form.overlap is not None and form.output_mode == "scatter":
        return form.overlap.scattered(x, matrix.t(), form.group)
    whole = all_gather(x, form.group) if form.input_mode == "gather" else x
    y = form.products.output(whole, matrix, bias)
    if form.output_mode == "sum":
        return all_reduce(y, form.group)
    if form.output_mode == "scatter":
        return reduce_scatter(y, form.group)
    return all_gather(y, form.group) if form.output_mode == "gather" else y


def _backward(
    form: Form,
    weight: nn.Parameter,
    bias: nn.Parameter | None,
    grad_output: torch.Tensor,
    kept: torch.Tensor | None,
    make: Make | None = None,
    *,
    source_is_larger: bool = False,
    gives_input: bool = True,
) -> torch.Tensor | None:
    """Add the gradients of weight and bias where they go, now or deferred, and return that of the input.

    Args:
        kept: the input, or what `make` makes it of. Not needed where the weight is frozen; the bias is frozen with it.
        gives_input: whether the input has a gradient.
    """
    group, overlap, make, matrix = form.group, form.overlap, make or _as_it_is, weight.flatten(0, -2)
    frozen = not weight.requires_grad
    deferring = form.defers and is_deferring() and not frozen
    if deferring and source_is_larger:
        assert kept is not None
        kept, make = make(kept), _as_it_is
    if form.output_mode == "share":
        grad_output = all_reduce(grad_output.clone(), group)
    elif form.output_mode == "gather":
        grad_output = reduce_scatter(grad_output, group)
    gathers_dy, gathers_x = form.output_mode == "scatter", form.input_mode == "gather"
    # A deferred weight gradient keeps only the local part of a gathered input, and gathers it again.
    local, pending = grad_output, None
    if overlap is not None and gives_input and gathers_dy:
        whole_dy, grad_input = overlap.gathered(local, matrix, None, group, keeps=not frozen)
        assert frozen or whole_dy is not None, "as asked for"
        grad_output, pending = grad_output if whole_dy is None else whole_dy, Pending(grad_input)
    elif overlap is not None and gives_input and gathers_x and (deferring or frozen):
        pending = Pending(overlap.scattered(local, matrix, group))
    elif gathers_dy:
        grad_output = all_gather(local, group)
    whole_x = None
    if gathers_x and not deferring and not frozen:
        assert kept is not None
        whole_x = start_all_gather(make(kept), group)
    if gives_input and pending is None:
        grad_input = form.products.input_gradient(grad_output, matrix)
        if form.input_mode == "copy":
            pending = start_all_reduce(grad_input, group)
        elif gathers_x:
            pending = start_reduce_scatter(grad_input, group)
        else:
            pending = Pending(grad_input)
    if frozen:
        return None if pending is None else pending.wait()
    assert kept is not None
    if bias is not None:
        accumulate_sum(bias, grad_output.flatten(0, -2))
    if not deferring:
        x = make(kept) if whole_x is None else whole_x.wait()
        accumulate_products(weight, [(grad_output.flatten(0, -2), x.flatten(0, -2))], form.products.weight_gradient)
    elif gathers_dy or gathers_x:

        def start() -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
            dy = start_all_gather(local, group) if gathers_dy else Pending(local)
            x = start_all_gather(make(kept), group) if gathers_x else None
            return lambda: (dy.wait(), make(kept) if x is None else x.wait())

        accumulate_product(weight, local, kept, start, product=form.products.weight_gradient)
    else:
        accumulate_product(weight, grad_output, kept, make=make, product=form.products.weight_gradient)
    return None if pending is None else pending.wait()


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


class _Linear(torch.autograd.Function):
    """The operation in eager mode."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: torch.Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        form: Form,
        source: torch.Tensor | None,
        make: Make | None,
    ) -> torch.Tensor:
        kept = x if source is None else source
        if weight.requires_grad:
            if recompute.remaking is not None:
                recompute.remaking.offer(kept)
            ctx.save_for_backward(kept)
        ctx.make, ctx.source_is_larger = make, kept.nbytes > x.nbytes
        # Parameters are leaves and outlive the graph, so they need no saving; their identity is what finds their sink.
        ctx.form, ctx.weight, ctx.bias = form, weight, bias
        return _forward(form, x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, *tuple[None, ...]]:  # type: ignore[override]
        saved = ctx.saved_tensors
        grad_input = _backward(
            ctx.form,
            ctx.weight,
            ctx.bias,
            grad_output,
            saved[0] if saved else None,
            ctx.make,
            source_is_larger=ctx.source_is_larger,
            gives_input=ctx.needs_input_grad[0],
        )
        return grad_input, *(None,) * 5


# The same as operations that a compiler takes as they are. A layer enters by its handle (`megatron/parallel/handles.py`), so equal
# layers share one compilation. Shapes are arguments, since a compiler knows no tensor's value.


class Handled(Protocol):
    """A layer that a handle names. Its parameters are looked up at each use: others take their place when they are sharded."""

    form: Form
    weight: nn.Parameter

    @property
    def used_bias(self) -> nn.Parameter | None:
        """The bias, where it is a part of the product."""


LAYERS: Handles[Handled] = Handles("layer")


@torch.library.custom_op("megatron::linear", mutates_args=(), tags=OUTSIDE_CUDA_GRAPHS)
def linear_by_handle(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, handle: torch.Tensor, gather: int, scatter: int
) -> torch.Tensor:
    """The forward of the layer that the handle names.

    Args:
        gather, scatter: number of ranks over which the sequence is joined before or after the product, or cut after it.
    """
    return _forward(LAYERS.find(handle).form, x, weight, bias)


@linear_by_handle.register_fake
def _(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, handle: torch.Tensor, gather: int, scatter: int
) -> torch.Tensor:
    outputs = weight.numel() // weight.shape[-1]
    return x.new_empty((x.shape[0] * gather // scatter, *x.shape[1:-1], outputs))


@torch.library.custom_op("megatron::linear_backward", mutates_args=(), tags=OUTSIDE_CUDA_GRAPHS)
def _linear_backward(grad_output: torch.Tensor, kept: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
    """The gradient of the input. The gradients of weight and bias go where they belong: a side effect that no compiler sees, and
    that none drops, since in a block the gradient of each layer's input is needed."""
    layer = LAYERS.find(handle)
    grad_input = _backward(layer.form, layer.weight, layer.used_bias, grad_output, kept)
    assert grad_input is not None
    return grad_input


@_linear_backward.register_fake
def _(grad_output: torch.Tensor, kept: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
    return kept.new_empty(kept.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[3])


def _differentiate(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, *tuple[None, ...]]:
    return _linear_backward(grad_output, *ctx.saved_tensors), *(None,) * 5


linear_by_handle.register_autograd(_differentiate, setup_context=_save)


def parallel_linear(
    x: torch.Tensor | Remade,
    weight: nn.Parameter,
    bias: nn.Parameter | None,
    group: Group,
    *,
    input_mode: InputMode = "plain",
    output_mode: OutputMode = "plain",
    defers: bool = True,
    overlap: Overlap | None = None,
) -> torch.Tensor:
    """x weight^T + bias with the communication of the two modes.

    Args:
        x: [s, b, in], or [s/n, b, in] with input mode gather. It is kept for backward, unless it is made again.
        weight: this rank's part, [out, in]; leading dimensions are flattened ([2, f, h] gives 2f outputs).
        bias: as the weight without its last dimension; added before the output's communication, so only for plain output.
        defers: whether the weight gradient may be deferred.
        overlap: see `Form`.

    Returns:
        [s, b, out], or [s/n, b, out] with output mode scatter.
    """
    return linear_of(Form(group, input_mode, output_mode, defers, overlap), x, weight, bias)


def linear_of(form: Form, x: torch.Tensor | Remade, weight: nn.Parameter, bias: nn.Parameter | None) -> torch.Tensor:
    """The operation of a layer of this form."""
    assert bias is None or form.output_mode == "plain", "a bias added before a sum would count once a rank"
    value, source, make = (x.value, x.source, x.make) if isinstance(x, Remade) else (x, None, None)
    return _Linear.apply(value, weight, bias, form, source, make)
