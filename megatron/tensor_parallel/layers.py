"""Layers of tensor parallelism: column- and row-parallel linear layers (Shoeybi et al. 2019, section 3), LoRA adapters, the word
embedding, and norms.

Shapes: `s` sequence, `b` microbatch, `h` hidden size, `v` padded vocabulary, `tp` tensor ranks. Under sequence parallelism a
column-parallel layer takes [s/tp, b, in] and a row-parallel layer returns [s/tp, b, out].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron.parallel.accumulate import accumulate_rows, get_grad_dtype, route_grad
from megatron.parallel.collectives import all_reduce_forward, reduce_scatter_forward
from megatron.parallel.params import Scope
from megatron.precision.gemms import DEFAULT_GEMMS, build_gemms
from megatron.spec.layers import NormSpec
from megatron.tensor_parallel.linear import (
    LAYERS,
    InputMode,
    LinearConfig,
    OutputMode,
    RecomputableInput,
    apply_linear_config,
    linear_by_handle,
)

# ---- Modules that use vectors (norm weights, biases) in ordinary torch operations, and the gradients of these vectors.
#
# In eager mode `route_grad` wraps each vector where it is used, so that its gradient goes to the parameter's sink. A compiled graph
# takes the wrapped vectors as inputs, and autograd passes their gradients back through `route_grad` outside of the graph. So the
# compiler sees no side effect.

Vectors = tuple[torch.Tensor | None, ...]


class VectorParamModule(nn.Module):
    """Base class of modules with vector parameters (norm weights, biases), which forward uses in ordinary torch operations."""

    _graph_inputs: Vectors | None = None
    """The module's vectors as inputs of a compiled graph, while the graph runs; None otherwise."""

    def get_vector_params(self) -> tuple[nn.Parameter | None, ...]:
        """Return the vector parameters. Callers must not store them, because sharding replaces the parameters."""
        raise NotImplementedError

    def get_vectors_for_forward(self) -> Vectors:
        """Return the vectors with which forward computes. Backward adds their gradients to the gradient sinks of the parameters."""
        if torch.compiler.is_compiling():
            assert self._graph_inputs is not None, "a compiled graph gets its vectors as inputs"
            return self._graph_inputs
        return tuple(None if vector is None else route_grad(vector) for vector in self.get_vector_params())


def find_vector_modules(module: nn.Module) -> list[VectorParamModule]:
    """Return the submodules of `module`, itself included, that have vector parameters (norm weights, biases)."""
    return [
        submodule
        for submodule in module.modules()
        if isinstance(submodule, VectorParamModule) and any(v is not None for v in submodule.get_vector_params())
    ]


@contextmanager
def vectors_as_graph_inputs(modules: Sequence[VectorParamModule]) -> Iterator[None]:
    """Within the context, pass the vectors (norm weights, biases) of these modules to a compiled graph as inputs. The context wraps
    one call of the graph.

    Their gradients then leave the graph, and are added to the gradient sinks of the parameters outside of it. So torch.compile sees
    no side effect.
    """
    try:
        for module in modules:
            module._graph_inputs = module.get_vectors_for_forward()
        yield
    finally:
        for module in modules:
            module._graph_inputs = None


# ---- Linear layers.


class LinearLayer(VectorParamModule):
    """Base class of column-parallel, row-parallel and replicated linear layers.

    Holds the parameters, the settings of the linear operation, and a handle: an identifier by which the operations of a compiled
    graph find the layer.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    handle: torch.Tensor | None = None
    """Identifier of the layer in a compiled graph (see `create_handle`); None in eager mode."""

    def __init__(self, scope: Scope, config: LinearConfig) -> None:
        super().__init__()
        self.config = config
        scope.register_param(self, "weight")
        scope.register_optional_param(self, "bias")
        self.adapter = LoraAdapter(scope, config) if scope.has_weight("lora_a.weight") else None
        self.gather_size = config.group.size if "gather" in (config.input_mode, config.output_mode) else 1
        self.scatter_size = config.group.size if config.output_mode == "scatter" else 1

    def create_handle(self, device: torch.device) -> None:
        """Register the layer so that a compiled graph can find it. Must be called before the graph's first call.

        Args:
            device: device of the parameters when the graph runs. They may still be on the meta device.
        """
        self.handle = LAYERS.create(self, device)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy, with the handle replaced by its device. A handle identifies only one layer, so the copy
        creates a new handle."""
        return {**self.__dict__, "handle": None if self.handle is None else self.handle.device}

    def __setstate__(self, state: dict[str, Any]) -> None:
        device = state.pop("handle")
        super().__setstate__(state)
        if device is not None:
            self.create_handle(device)

    @property
    def fused_bias(self) -> nn.Parameter | None:
        """The bias if it is added within the matrix product; None if it is added after the reduction over ranks, or if there is no
        bias."""
        return self.bias if self.config.output_mode == "plain" else None

    def get_vector_params(self) -> tuple[nn.Parameter | None, ...]:
        """Return a tuple with the bias if it is added after the reduction over ranks, otherwise with None."""
        return (None if self.fused_bias is not None else self.bias,)

    def apply_linear(self, x: torch.Tensor | RecomputableInput) -> torch.Tensor:
        """Apply the matrix product with its communication, and add the output of the LoRA adapter if there is one."""
        if self.adapter is None:
            return self._matmul(x)
        adapter_output = self.adapter(x)  # first: in a recompute the layer's product then comes last, and is skipped
        return self._matmul(x) + adapter_output

    def _matmul(self, x: torch.Tensor | RecomputableInput) -> torch.Tensor:
        if torch.compiler.is_compiling():
            assert isinstance(x, torch.Tensor)
            assert self.handle is not None, "create_handle comes before a compiled graph"
            return linear_by_handle(x, self.weight, self.fused_bias, self.handle, self.gather_size, self.scatter_size)
        return apply_linear_config(self.config, x, self.weight, self.fused_bias)


class LoraAdapter(nn.Module):
    """LoRA adapter of a linear layer (Hu et al. 2021): the product scale * B A x is added to the layer's output.

    The adapter takes the layer's input x and returns a tensor of the layer's output shape. It applies the layer's communication to
    the low-rank activations between A and B: the input's communication for a column-parallel layer, the output's for a row-parallel
    layer. Every rank holds the full unsplit matrix: A for a column-parallel layer, B for a row-parallel layer.
    """

    def __init__(self, scope: Scope, config: LinearConfig) -> None:
        super().__init__()
        self.scale = scope.lora_scale
        local_config, parallel_config = LinearConfig(config.group), replace(config, overlap=None, gemms=DEFAULT_GEMMS)
        splits_inputs = bool(scope.get_weight("lora_a.weight").splits)
        self.a = LinearLayer(scope.get_child("lora_a"), parallel_config if splits_inputs else local_config)
        self.b = LinearLayer(scope.get_child("lora_b"), local_config if splits_inputs else parallel_config)

    def forward(self, x: torch.Tensor | RecomputableInput) -> torch.Tensor:
        """Map the layer's input to the term that is added to its output."""
        low_rank = self.a.apply_linear(x)  # [s, b, rank], or [s/tp, b, rank]
        return self.b.apply_linear(low_rank if self.scale == 1.0 else low_rank * self.scale)


class ColumnParallelLinear(LinearLayer):
    """Linear layer whose output features are split over tensor ranks: each rank computes [s, b, out/tp].

    The weight is [out, in]. The gated MLP stacks `num_projections` weights as [num_projections, out, in], and the output is [s, b,
    num_projections, out/tp]. Each projection is split separately, so that a rank's shard is a slice of a single dimension.
    """

    def __init__(self, scope: Scope) -> None:
        gemms = build_gemms(scope.fp8, scope.tp, "outputs", scope.context.context_group)
        input_mode: InputMode = "gather" if scope.sequence_parallel else "copy"
        super().__init__(scope, LinearConfig(scope.tp, input_mode, overlap=scope.overlap, gemms=gemms))
        self.num_projections = len(self.weight) if self.weight.dim() == 3 else 1

    def forward(self, x: torch.Tensor | RecomputableInput) -> torch.Tensor:
        """Map x [s, b, in] (or [s/tp, b, in]) to [s, b, out/tp] (or [s, b, num_projections, out/tp])."""
        y = self.apply_linear(x)
        return y.unflatten(-1, (self.num_projections, -1)) if self.num_projections > 1 else y


class RowParallelLinear(LinearLayer):
    """Linear layer whose input features are split over tensor ranks. The outputs of the ranks are summed, and the bias is added
    after the sum."""

    def __init__(self, scope: Scope) -> None:
        reduction_mode: OutputMode = "scatter" if scope.sequence_parallel else "sum"
        output_mode: OutputMode = "plain" if scope.tp.size == 1 else reduction_mode
        gemms = build_gemms(scope.fp8, scope.tp, "inputs", scope.context.context_group)
        super().__init__(scope, LinearConfig(scope.tp, output_mode=output_mode, overlap=scope.overlap, gemms=gemms))

    def forward(self, x: torch.Tensor | RecomputableInput) -> torch.Tensor:
        """Map x [s, b, in/tp] to [s, b, out] (or [s/tp, b, out])."""
        y = self.apply_linear(x)
        if self.bias is None or self.fused_bias is not None:
            return y
        (bias,) = self.get_vectors_for_forward()
        assert bias is not None
        return y + bias


class ReplicatedLinear(LinearLayer):
    """Linear layer whose full weight every rank holds. Each rank applies it to its local tokens: the full sequence or, under
    sequence parallelism, its shard of the sequence.

    Args:
        for_heads: whether the output is shared by all attention heads, and each rank uses it for its local heads. The output's
            gradient is then summed over the ranks, and under sequence parallelism the output is gathered to the full sequence.
    """

    def __init__(self, scope: Scope, *, for_heads: bool = False) -> None:
        sequence_parallel = scope.sequence_parallel
        output_mode: OutputMode = ("gather" if sequence_parallel else "share") if for_heads and scope.tp.size > 1 else "plain"
        gemms = build_gemms(scope.fp8, scope.tp, "tokens" if sequence_parallel else "nothing", scope.context.context_group)
        super().__init__(scope, LinearConfig(scope.tp, output_mode=output_mode, gemms=gemms))

    def forward(self, x: torch.Tensor | RecomputableInput) -> torch.Tensor:
        """Map x [s, b, in] (or [s/tp, b, in]) to [s, b, out] (or, unless `for_heads`, [s/tp, b, out])."""
        return self.apply_linear(x)


# ---- Word embedding with the vocabulary split over the tensor group.


class _Lookup(torch.autograd.Function):
    """Autograd function that looks up rows of a table. Backward adds the gradients of the rows to the table's gradient sink, and
    returns no gradient for the table to autograd."""

    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(ids)
        ctx.weight = weight
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:  # type: ignore[override]
        (ids,) = ctx.saved_tensors
        # Repeated ids are summed in the precision of the main gradient: 16-bit rounding would lose a frequent token's gradient.
        upcast_grad = grad.to(get_grad_dtype(ctx.weight))
        accumulate_rows(ctx.weight, ids.flatten(), upcast_grad.flatten(0, -2))
        return None, None


def lookup_rows(ids: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
    """Return the rows of an embedding table [v, h] with the given ids [...]: [..., h]."""
    return _Lookup.apply(ids, weight)


class VocabParallelEmbedding(nn.Module):
    """Word embedding whose rows are split over tensor ranks (Shoeybi et al. 2019, section 3).

    Each rank looks up the tokens in its range of rows, and the results are summed over the ranks. Rows beyond the vocabulary are
    padding. No valid token selects them, so they have no gradient, and checkpoints do not contain them.
    """

    weight: nn.Parameter

    def __init__(self, scope: Scope) -> None:
        super().__init__()
        self.group, self.sequence_parallel = scope.tp, scope.sequence_parallel
        name = scope.get_weight("weight").name
        if name in scope.table:
            self.weight = scope.table.share(name, self, "weight", scope.chunk)
        else:
            scope.register_param(self, "weight")
        self.num_rows = len(self.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map token ids [s, b] to [s, b, h] (or [s/tp, b, h] under sequence parallelism)."""
        if self.group.size == 1:
            return lookup_rows(tokens, self.weight)
        # Tokens of other ranks look up an arbitrary local row, whose gradient is masked to zero. The remainder spreads them over
        # the rows; with a single row, backward would add their gradients one after the other.
        local, rank = tokens.remainder(self.num_rows), tokens.div(self.num_rows, rounding_mode="floor")
        rows = lookup_rows(local, self.weight).masked_fill((rank != self.group.rank).unsqueeze(-1), 0.0)
        return reduce_scatter_forward(rows, self.group) if self.sequence_parallel else all_reduce_forward(rows, self.group)


# ---- LayerNorm and RMSNorm. Statistics are computed in at least float32 whatever the dtype.


class Norm(VectorParamModule):
    """LayerNorm or RMSNorm over the last dimension. The output has the model's dtype even if the residual stream is float32.

    Args:
        size: number of channels that are normalised together, over all ranks.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, scope: Scope, spec: NormSpec, size: int) -> None:
        super().__init__()
        self.norm_type, self.epsilon, self.zero_centred = spec.normalization, spec.epsilon, spec.zero_centered
        self.shape, self.dtype = (size,), scope.dtype
        scope.register_optional_param(self, "weight")
        scope.register_optional_param(self, "bias")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., channels] to the same shape, in the parameters' dtype."""
        return self._normalise(self._upcast(x))

    def build_recomputable(self, x: torch.Tensor) -> RecomputableInput:
        """Return the normalised input of a linear layer in a form that the layer recomputes in backward instead of keeping.

        For the recomputation, the layer normalises the tensor that this norm saved. The norm's parameters are allocated at that
        time, even if they are fully sharded, because backward is within the block. Schedules that defer weight gradients cannot be
        used with fully sharded parameters (`check_no_split_backward_with_full_sharding`).
        """
        return RecomputableInput.of(self._normalise, self._upcast(x))

    def _upcast(self, x: torch.Tensor) -> torch.Tensor:
        """Convert the input to at least float32 where torch's norm would lose precision: on CPUs, and for norms with zero-centered
        weights. Torch's norm saves the converted input for backward."""
        # On CPU torch's LayerNorm sums the gradients of weight and bias over all tokens in the dtype of x. In bfloat16, at 4,096
        # tokens, the sums were wrong by a third. Torch's RMSNorm converts x to float32 in any case.
        # A zero-centred norm computes 1 + weight, which has too few digits in 16 bits.
        return x.to(torch.promote_types(x.dtype, torch.float32)) if x.device.type == "cpu" or self.zero_centred else x

    def get_vector_params(self) -> tuple[nn.Parameter | None, ...]:
        """Return the weight and the bias; None for a weight or bias that the norm does not have."""
        return self.weight, self.bias

    def scale_and_offset(self, dtype: torch.dtype) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the scale and the offset of the normalised channels in `dtype`; None for a scale or offset that the norm does not
        have."""
        if all(vector is None for vector in self.get_vector_params()):
            return None, None
        weight, bias = (None if vector is None else vector.to(dtype) for vector in self.get_vectors_for_forward())
        return weight + 1.0 if weight is not None and self.zero_centred else weight, bias

    def _normalise(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.scale_and_offset(x.dtype)  # with a float32 residual stream, 16-bit parameters are converted to float32
        if self.norm_type == "RMSNorm":
            return F.rms_norm(x, self.shape, weight, self.epsilon).to(self.dtype)
        return F.layer_norm(x, self.shape, weight, bias, self.epsilon).to(self.dtype)
