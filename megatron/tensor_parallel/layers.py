"""Layers with parameters: column- and row-parallel linear layers (Shoeybi et al. 2019, section 3), LoRA adapters, the word
embedding, and norms.

Shapes: `s` sequence, `b` microbatch, `n` tensor ranks. Under sequence parallelism a column layer takes [s/n, b, in] and a row layer
gives [s/n, b, out].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron.parallel.accumulate import accumulate_rows, grad_dtype, through
from megatron.parallel.collectives import reduce_scatter_forward, sum_forward
from megatron.parallel.params import Scope
from megatron.precision.products import PLAIN, products_of
from megatron.spec.layers import NormSpec
from megatron.tensor_parallel.linear import LAYERS, Form, InputMode, OutputMode, Remade, linear_by_handle, linear_of

# ---- Modules that use vectors (weights of norms, biases) in ordinary torch operations: how these enter, and where their
# gradients go.
#
# Outside of compiled code a vector enters where it is used (`through`). A compiled graph gets them as inputs instead: they enter in
# front of it, and what it gives back for them goes on from there. So no compiler has to know of a side effect.

Vectors = tuple[torch.Tensor | None, ...]


class VectorUser(nn.Module):
    """A module that uses vectors in ordinary operations."""

    _entered: Vectors | None = None
    """While a compiled graph runs, the vectors that have entered in front of it."""

    def vectors(self) -> tuple[nn.Parameter | None, ...]:
        """Return the parameters, looked up anew, since sharding puts other tensors in their place."""
        raise NotImplementedError

    def entering(self) -> Vectors:
        """Return the vectors as the module's forward uses them."""
        if torch.compiler.is_compiling():
            assert self._entered is not None, "a compiled graph gets its vectors as inputs"
            return self._entered
        return tuple(None if vector is None else through(vector) for vector in self.vectors())


def vector_users(module: nn.Module) -> list[VectorUser]:
    """Return the modules within a module that use vectors."""
    return [one for one in module.modules() if isinstance(one, VectorUser) and any(v is not None for v in one.vectors())]


@contextmanager
def entered(users: Sequence[VectorUser]) -> Iterator[None]:
    """Around one call of a compiled graph: its vectors are inputs."""
    try:
        for user in users:
            user._entered = user.entering()
        yield
    finally:
        for user in users:
            user._entered = None


# ---- Linear layers.


class LinearLayer(VectorUser):
    """What column- and row-parallel layers share: parameters, a form, and a handle by which a compiled block's operations find
    them."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    handle: torch.Tensor | None = None
    """Name of the layer in a compiled graph (`create_handle`); None in eager mode."""

    def __init__(self, scope: Scope, form: Form) -> None:
        super().__init__()
        self.form = form
        scope.parameter(self, "weight")
        scope.optional(self, "bias")
        self.adapter = Adapter(scope, form) if scope.has("lora_a.weight") else None
        self.gather = form.group.size if "gather" in (form.input_mode, form.output_mode) else 1
        self.scatter = form.group.size if form.output_mode == "scatter" else 1

    def create_handle(self, device: torch.device) -> None:
        """Let a compiled graph find this layer. Needed before the graph's first call.

        Args:
            device: that of the parameters when the graph runs; they may still be on the meta device.
        """
        self.handle = LAYERS.create(self, device)

    def __getstate__(self) -> dict[str, Any]:
        """A handle names this layer alone. A copy, from memory or from a file, creates its own on the same device."""
        return {**self.__dict__, "handle": None if self.handle is None else self.handle.device}

    def __setstate__(self, state: dict[str, Any]) -> None:
        device = state.pop("handle")
        super().__setstate__(state)
        if device is not None:
            self.create_handle(device)

    @property
    def used_bias(self) -> nn.Parameter | None:
        """The bias, where it is a part of the product."""
        return self.bias if self.form.output_mode == "plain" else None

    def vectors(self) -> tuple[nn.Parameter | None, ...]:
        """Return the bias if it is added to the sum of the ranks, and None otherwise; see `VectorUser`."""
        return (None if self.used_bias is not None else self.bias,)

    def product(self, x: torch.Tensor | Remade) -> torch.Tensor:
        """The linear operation of this layer, with its adapter."""
        if self.adapter is None:
            return self._product(x)
        beside = self.adapter(x)  # first: where the layer runs again, the product that nobody keeps is then the last
        return self._product(x) + beside

    def _product(self, x: torch.Tensor | Remade) -> torch.Tensor:
        if torch.compiler.is_compiling():
            assert isinstance(x, torch.Tensor)
            assert self.handle is not None, "create_handle comes before a compiled graph"
            return linear_by_handle(x, self.weight, self.used_bias, self.handle, self.gather, self.scatter)
        return linear_of(self.form, x, self.weight, self.used_bias)


class Adapter(nn.Module):
    """What LoRA adds to a linear layer (Hu et al. 2021): scale x B A x, for the same input and in the form of the layer's output.

    Between A and B lies the layer's communication, of the rank's channels: that of the input of a column-parallel layer, of the
    output of a row-parallel one. The matrix that no rank splits, A of the one and B of the other, is whole on all of them.
    """

    def __init__(self, scope: Scope, form: Form) -> None:
        super().__init__()
        self.scale = scope.lora_scale
        plain, same = Form(form.group), replace(form, overlap=None, products=PLAIN)
        splits_inputs = bool(scope.weight("lora_a.weight").splits)
        self.a = LinearLayer(scope.child("lora_a"), same if splits_inputs else plain)
        self.b = LinearLayer(scope.child("lora_b"), plain if splits_inputs else same)

    def forward(self, x: torch.Tensor | Remade) -> torch.Tensor:
        """Map the layer's input to what is added to its output."""
        low = self.a.product(x)  # [s, b, rank], or [s/n, b, rank]
        return self.b.product(low if self.scale == 1.0 else low * self.scale)


class ColumnParallelLinear(LinearLayer):
    """Output features are split: each rank computes [s, b, out/n].

    The weight is [out, in]; with `halves` > 1 it is [halves, out, in] and the output [s, b, halves, out/n]: the halves of a gated
    MLP, each split by itself, so that a tensor rank's part is one slice of one dimension.
    """

    def __init__(self, scope: Scope) -> None:
        products = products_of(scope.fp8, scope.tp, "outputs", scope.context.context_group)
        input_mode: InputMode = "gather" if scope.sequence_parallel else "copy"
        super().__init__(scope, Form(scope.tp, input_mode, overlap=scope.overlap, products=products))
        self.halves = len(self.weight) if self.weight.dim() == 3 else 1

    def forward(self, x: torch.Tensor | Remade) -> torch.Tensor:
        """Map x [s, b, in] (or [s/n, b, in]) to [s, b, out/n] (or [s, b, halves, out/n])."""
        y = self.product(x)
        return y.unflatten(-1, (self.halves, -1)) if self.halves > 1 else y


class RowParallelLinear(LinearLayer):
    """Input features are split: each rank multiplies its part, and the products are summed over the ranks. The bias counts once."""

    def __init__(self, scope: Scope) -> None:
        over_ranks: OutputMode = "scatter" if scope.sequence_parallel else "sum"
        output_mode: OutputMode = "plain" if scope.tp.size == 1 else over_ranks
        products = products_of(scope.fp8, scope.tp, "inputs", scope.context.context_group)
        super().__init__(scope, Form(scope.tp, output_mode=output_mode, overlap=scope.overlap, products=products))

    def forward(self, x: torch.Tensor | Remade) -> torch.Tensor:
        """Map x [s, b, in/n] to [s, b, out] (or [s/n, b, out])."""
        y = self.product(x)
        if self.bias is None or self.used_bias is not None:
            return y
        (bias,) = self.entering()
        assert bias is not None
        return y + bias


class ReplicatedLinear(LinearLayer):
    """Every rank holds the whole weight and applies it to what it has: the whole sequence, or its part of it.

    Args:
        for_heads: what comes out is the same for all heads, and each rank uses it for its own. So its gradient is summed over the
            ranks, and under sequence parallelism the whole sequence comes out.
    """

    def __init__(self, scope: Scope, *, for_heads: bool = False) -> None:
        split = scope.sequence_parallel
        output_mode: OutputMode = ("gather" if split else "share") if for_heads and scope.tp.size > 1 else "plain"
        products = products_of(scope.fp8, scope.tp, "tokens" if split else "nothing", scope.context.context_group)
        super().__init__(scope, Form(scope.tp, output_mode=output_mode, products=products))

    def forward(self, x: torch.Tensor | Remade) -> torch.Tensor:
        """Map x [s, b, in] (or [s/n, b, in]) to [s, b, out] (or, if not for heads, [s/n, b, out])."""
        return self.product(x)


# ---- Word embedding with the vocabulary split over the tensor group (Shoeybi et al. 2019, section 3).


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


# ---- LayerNorm and RMSNorm. Statistics are computed in at least float32 whatever the dtype.


class Norm(VectorUser):
    """Normalises the last dimension. Its result has the model's dtype even when the residual stream is float32.

    Args:
        size: channels that are normalised together, on all ranks.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, scope: Scope, spec: NormSpec, size: int) -> None:
        super().__init__()
        self.kind, self.epsilon, self.zero_centred = spec.kind, spec.epsilon, spec.zero_centred
        self.shape, self.dtype = (size,), scope.dtype
        scope.optional(self, "weight")
        scope.optional(self, "bias")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., channels] to the same shape, in the parameters' dtype."""
        return self._normalise(self._kept(x))

    def remade(self, x: torch.Tensor) -> Remade:
        """Normalise for a linear layer that keeps nothing of its input: its backward normalises again what the norm keeps.

        Sharded parameters are there for that: it happens while backward is in the layer, since schedules that put weight gradients
        off are refused for them (`late_gradients_find_their_block`).
        """
        return Remade.of(self._normalise, self._kept(x))

    def _kept(self, x: torch.Tensor) -> torch.Tensor:
        """The input in the form in which torch's norm keeps it for backward."""
        # On CPU torch's LayerNorm sums the gradients of weight and bias over all tokens in the dtype of x: in bfloat16, at 4,096
        # tokens, they came out a third off. Its RMSNorm widens x in any case.
        # And 1 + weight has too few digits in 16 bits.
        return x.to(torch.promote_types(x.dtype, torch.float32)) if x.device.type == "cpu" or self.zero_centred else x

    def vectors(self) -> tuple[nn.Parameter | None, ...]:
        """Return weight and bias; see `VectorUser`."""
        return self.weight, self.bias

    def factors(self, dtype: torch.dtype) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the factors of the normalised channels and their offsets, in a dtype; None for a norm without them."""
        if all(vector is None for vector in self.vectors()):
            return None, None
        weight, bias = (None if vector is None else vector.to(dtype) for vector in self.entering())
        return weight + 1.0 if weight is not None and self.zero_centred else weight, bias

    def _normalise(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.factors(x.dtype)  # over a float32 residual stream 16-bit parameters are widened
        if self.kind == "RMSNorm":
            return F.rms_norm(x, self.shape, weight, self.epsilon).to(self.dtype)
        return F.layer_norm(x, self.shape, weight, bias, self.epsilon).to(self.dtype)
