"""Linear operation of column- and row-parallel layers (Shoeybi et al. 2019, section 3).

Shapes: `s` sequence, `b` microbatch, `tp` tensor ranks. Under sequence parallelism a column-parallel layer takes [s/tp, b, in] and
a row-parallel layer returns [s/tp, b, out].

The operation comprises the matrix product, the communication before and after it, and the weight gradient. An input mode and an
output mode select the communication of the input x, the output y and their gradients dx and dy:

========== =============================== ====================================================
input      forward                         backward
========== =============================== ====================================================
plain      x                               dx
copy       x                               all-reduce(dx), while the weight gradient is computed
gather     all-gather(x) [s/tp] to [s]     reduce-scatter(dx), while the weight gradient is computed
========== =============================== ====================================================

========== =============================== ====================================================
output     forward                         backward
========== =============================== ====================================================
plain      y                               dy
sum        all-reduce(y)                   dy
scatter    reduce-scatter(y) [s] to [s/tp] all-gather(dy)
share      y                               all-reduce(dy)
gather     all-gather(y) [s/tp] to [s]     reduce-scatter(dy)
========== =============================== ====================================================

A column-parallel layer has input mode copy, or gather under sequence parallelism. A row-parallel layer has output mode sum, or
scatter under sequence parallelism. A layer whose full weight every rank holds has input mode plain. Its output mode is share, or
gather under sequence parallelism, if each rank uses the result for its local heads.

Only the local shard of a gathered input is kept for backward. Backward gathers the input again while the input gradient is computed
(Korthikanti et al. 2022, section 4.2.2). With a deferred weight gradient, no computation hides the communication of dx. The tensors
for the weight gradient are then gathered again when the weight gradient runs, while the previous deferred weight gradient is
computed.

No other computation hides all-gather(x), reduce-scatter(y), all-gather(dy) and, with a deferred weight gradient,
reduce-scatter(dx). An `Overlap` splits the operation's matrix product into blocks of rows, so that the product itself hides this
communication.

Selective recompute (Korthikanti et al. 2022, section 5) determines which tensor the operation saves. For a `RecomputableInput` the
operation saves the source, which the autograd graph holds anyway, and recomputes the input for the weight gradient. The same
kernels on the same values give the same bits. A deferred weight gradient never keeps more memory than without recompute: if the
source is larger than the input (the two halves of a gated MLP), the input is recomputed before the weight gradient is deferred.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import nn

from megatron.memory import recompute
from megatron.parallel.accumulate import (
    MakeInput,
    accumulate_product,
    accumulate_product_sum,
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
from megatron.precision.gemms import DEFAULT_GEMMS, LinearGemms

if TYPE_CHECKING:
    from megatron.parallel.overlap import Overlap

InputMode = Literal["plain", "copy", "gather"]
OutputMode = Literal["plain", "sum", "scatter", "share", "gather"]


@dataclass(frozen=True)
class RecomputableInput:
    """Input of a linear layer that is recomputed for backward instead of being kept in memory."""

    value: torch.Tensor
    """The input itself, connected to the autograd graph."""
    source: torch.Tensor
    """Tensor from which the input is computed, detached from autograd. The operation that computes the input keeps it anyway, so it
    takes no additional memory."""
    recompute: MakeInput
    """Function that computes the input from the source. Parameters that the function reads must stay allocated until the weight
    gradient is computed."""

    @classmethod
    def of(cls, recompute: MakeInput, source: torch.Tensor) -> RecomputableInput:
        """Compute the input from its source, and store the function that recomputes it."""
        return cls(recompute(source), source.detach(), recompute)


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """Settings of a linear layer: communication before and after the matrix product, its overlap with the product, and the
    implementation of the product."""

    group: Group
    input_mode: InputMode = "plain"
    output_mode: OutputMode = "plain"
    can_defer_weight_grad: bool = True
    """Whether a schedule that splits backward may compute the weight gradient later than the input gradient."""
    overlap: Overlap | None = None
    """How the product overlaps with the all-gather of its input (input mode "gather") or the reduce-scatter of its output
    (output mode "scatter"); None to run them one after the other."""
    gemms: LinearGemms = DEFAULT_GEMMS
    """Implementation of the matrix products that do not overlap with a collective."""


def _forward(config: LinearConfig, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute the matrix product with the communication before and after it."""
    matrix, bias = weight.flatten(0, -2), None if bias is None else bias.flatten()
    if config.overlap is not None and config.input_mode == "gather":
        return config.overlap.all_gather_matmul(x, matrix.t(), bias, config.group, returns_input=False)[1]
    if config.overlap is not None and config.output_mode == "scatter":
        return config.overlap.matmul_reduce_scatter(x, matrix.t(), config.group)
    full_x = all_gather(x, config.group) if config.input_mode == "gather" else x
    y = config.gemms.compute_output(full_x, matrix, bias)
    if config.output_mode == "sum":
        return all_reduce(y, config.group)
    if config.output_mode == "scatter":
        return reduce_scatter(y, config.group)
    return all_gather(y, config.group) if config.output_mode == "gather" else y


def _backward(
    config: LinearConfig,
    weight: nn.Parameter,
    bias: nn.Parameter | None,
    grad_output: torch.Tensor,
    saved_input: torch.Tensor | None,
    recompute_input: MakeInput | None = None,
    *,
    source_is_larger: bool = False,
    needs_input_grad: bool = True,
) -> torch.Tensor | None:
    """Add the gradients of weight and bias to their gradient sinks, now or deferred, and return the gradient of the input.

    Args:
        saved_input: the input, or the source from which `recompute_input` computes it. Not needed if the weight is frozen; the bias
            is then frozen too.
        recompute_input: computes the input from `saved_input`; by default `saved_input` is the input.
        source_is_larger: whether `saved_input` takes more memory than the input.
        needs_input_grad: whether the input has a gradient. If not, return None.
    """
    group, overlap, recompute_input, matrix = config.group, config.overlap, recompute_input or _identity, weight.flatten(0, -2)
    is_frozen = not weight.requires_grad
    defers = config.can_defer_weight_grad and is_deferring() and not is_frozen
    if defers and source_is_larger:
        assert saved_input is not None
        saved_input, recompute_input = recompute_input(saved_input), _identity
    if config.output_mode == "share":
        grad_output = all_reduce(grad_output.clone(), group)
    elif config.output_mode == "gather":
        grad_output = reduce_scatter(grad_output, group)
    gathers_grad_output, gathers_x = config.output_mode == "scatter", config.input_mode == "gather"
    # A deferred weight gradient keeps only the local shards of gathered tensors, and gathers them again.
    local_grad_output, pending = grad_output, None
    if overlap is not None and needs_input_grad and gathers_grad_output:
        full_grad_output, grad_input = overlap.all_gather_matmul(
            local_grad_output, matrix, None, group, returns_input=not is_frozen
        )
        assert is_frozen or full_grad_output is not None, "returns_input=True returns the gathered input"
        grad_output, pending = grad_output if full_grad_output is None else full_grad_output, Pending(grad_input)
    elif overlap is not None and needs_input_grad and gathers_x and (defers or is_frozen):
        pending = Pending(overlap.matmul_reduce_scatter(local_grad_output, matrix, group))
    elif gathers_grad_output:
        grad_output = all_gather(local_grad_output, group)
    pending_x = None
    if gathers_x and not defers and not is_frozen:
        assert saved_input is not None
        pending_x = start_all_gather(recompute_input(saved_input), group)
    if needs_input_grad and pending is None:
        grad_input = config.gemms.compute_input_grad(grad_output, matrix)
        if config.input_mode == "copy":
            pending = start_all_reduce(grad_input, group)
        elif gathers_x:
            pending = start_reduce_scatter(grad_input, group)
        else:
            pending = Pending(grad_input)
    if is_frozen:
        return None if pending is None else pending.wait()
    assert saved_input is not None
    if bias is not None:
        accumulate_sum(bias, grad_output.flatten(0, -2))
    if not defers:
        x = recompute_input(saved_input) if pending_x is None else pending_x.wait()
        accumulate_product_sum(weight, [(grad_output.flatten(0, -2), x.flatten(0, -2))], config.gemms.compute_weight_grad)
    elif gathers_grad_output or gathers_x:

        def start_gathers() -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
            dy = start_all_gather(local_grad_output, group) if gathers_grad_output else Pending(local_grad_output)
            x = start_all_gather(recompute_input(saved_input), group) if gathers_x else None
            return lambda: (dy.wait(), recompute_input(saved_input) if x is None else x.wait())

        accumulate_product(weight, local_grad_output, saved_input, start_gathers, product=config.gemms.compute_weight_grad)
    else:
        accumulate_product(weight, grad_output, saved_input, make_input=recompute_input, product=config.gemms.compute_weight_grad)
    return None if pending is None else pending.wait()


def _identity(x: torch.Tensor) -> torch.Tensor:
    return x


class _Linear(torch.autograd.Function):
    """Autograd function of the linear operation in eager mode: the matrix product and its communication."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: torch.Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        config: LinearConfig,
        source: torch.Tensor | None,
        recompute_input: MakeInput | None,
    ) -> torch.Tensor:
        saved_input = x if source is None else source
        if weight.requires_grad:
            if recompute.recomputing_region is not None:
                recompute.recomputing_region.offer(saved_input)
            ctx.save_for_backward(saved_input)
        ctx.recompute_input, ctx.source_is_larger = recompute_input, saved_input.nbytes > x.nbytes
        # Parameters are leaves and outlive the graph, so they are not saved. Their gradient sink is found by identity.
        ctx.config, ctx.weight, ctx.bias = config, weight, bias
        return _forward(config, x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, *tuple[None, ...]]:  # type: ignore[override]
        saved = ctx.saved_tensors
        grad_input = _backward(
            ctx.config,
            ctx.weight,
            ctx.bias,
            grad_output,
            saved[0] if saved else None,
            ctx.recompute_input,
            source_is_larger=ctx.source_is_larger,
            needs_input_grad=ctx.needs_input_grad[0],
        )
        return grad_input, *(None,) * 5


# ---- The linear operation as custom operators, which torch.compile does not trace into. A layer is passed by its handle
# (`megatron/parallel/handles.py`), so that equal layers share one compiled graph. Sizes that determine the output shape are
# arguments, because the compiler does not know the value of the handle.


class CompiledLayer(Protocol):
    """Interface of a linear layer in a graph of torch.compile; `LinearLayer` implements it.

    The graph contains only the layer's handle: a tensor that identifies the layer. The operations of the graph find the layer by
    its handle. They look up its parameters at each use, because sharding replaces them.
    """

    config: LinearConfig
    weight: nn.Parameter

    @property
    def fused_bias(self) -> nn.Parameter | None:
        """The bias if it is added within the matrix product; None otherwise."""


LAYERS: Handles[CompiledLayer] = Handles("layer")


@torch.library.custom_op("megatron::linear", mutates_args=(), tags=OUTSIDE_CUDA_GRAPHS)
def linear_by_handle(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, handle: torch.Tensor, gather_size: int, scatter_size: int
) -> torch.Tensor:
    """Compute the forward of the linear layer that `handle` identifies, as an operation of a compiled graph.

    Args:
        gather_size: number of ranks over which the sequence is gathered, before or after the product; 1 for no gather.
        scatter_size: number of ranks over which the output is scattered; 1 for no scatter.
    """
    return _forward(LAYERS.find(handle).config, x, weight, bias)


@linear_by_handle.register_fake
def _(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, handle: torch.Tensor, gather_size: int, scatter_size: int
) -> torch.Tensor:
    outputs = weight.numel() // weight.shape[-1]
    return x.new_empty((x.shape[0] * gather_size // scatter_size, *x.shape[1:-1], outputs))


@torch.library.custom_op("megatron::linear_backward", mutates_args=(), tags=OUTSIDE_CUDA_GRAPHS)
def _linear_backward(grad_output: torch.Tensor, saved_input: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the layer's input, and add the gradients of weight and bias to their gradient sinks.

    The sinks are a side effect that the compiler does not see. The compiler cannot drop the call, because each layer's input
    gradient is needed within a block.
    """
    layer = LAYERS.find(handle)
    grad_input = _backward(layer.config, layer.weight, layer.fused_bias, grad_output, saved_input)
    assert grad_input is not None
    return grad_input


@_linear_backward.register_fake
def _(grad_output: torch.Tensor, saved_input: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
    return saved_input.new_empty(saved_input.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[3])


def _differentiate(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, *tuple[None, ...]]:
    return _linear_backward(grad_output, *ctx.saved_tensors), *(None,) * 5


linear_by_handle.register_autograd(_differentiate, setup_context=_save_for_backward)


def parallel_linear(
    x: torch.Tensor | RecomputableInput,
    weight: nn.Parameter,
    bias: nn.Parameter | None,
    group: Group,
    *,
    input_mode: InputMode = "plain",
    output_mode: OutputMode = "plain",
    can_defer_weight_grad: bool = True,
    overlap: Overlap | None = None,
) -> torch.Tensor:
    """Compute x weight^T + bias, with the communication that `input_mode` and `output_mode` select.

    Args:
        x: [s, b, in], or [s/tp, b, in] with input mode gather. Kept for backward, unless it is a `RecomputableInput`.
        weight: this rank's shard [out, in]. Leading dimensions are flattened ([2, f, h] gives 2 * f outputs).
        bias: shape of the weight without its last dimension. Added before the output's communication, so allowed only with output
            mode plain.
        can_defer_weight_grad: whether the weight gradient may be deferred.
        overlap: how the product overlaps with a collective; see `LinearConfig`.

    Returns:
        [s, b, out], or [s/tp, b, out] with output mode scatter.
    """
    return apply_linear_config(LinearConfig(group, input_mode, output_mode, can_defer_weight_grad, overlap), x, weight, bias)


def apply_linear_config(
    config: LinearConfig, x: torch.Tensor | RecomputableInput, weight: nn.Parameter, bias: nn.Parameter | None
) -> torch.Tensor:
    """Compute x weight^T + bias, with the communication and the implementation of the product that `config` selects."""
    assert bias is None or config.output_mode == "plain", "a bias added before a sum would count once a rank"
    value, source, recompute_input = (x.value, x.source, x.recompute) if isinstance(x, RecomputableInput) else (x, None, None)
    if not torch.is_grad_enabled():  # text generation is faster without the overhead of an autograd function
        return _forward(config, value, weight, bias)
    return _Linear.apply(value, weight, bias, config, source, recompute_input)
