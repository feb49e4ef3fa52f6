"""RMSNorm of all query heads as one vector, and of all key heads as another, as in OLMo 2.

Tensor ranks hold some of the heads, so mean squares are sums over the ranks, and so is what backward subtracts. Both norms share
one message each way: two numbers a token.

Shapes: `s` sequence, `b` microbatch, `g` this rank's key-value heads, `r` query heads of each, `d` head size.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist

from megatron.model.norms import Norm
from megatron.parallel.collectives import all_reduce
from megatron.parallel.context import Group
from megatron.parallel.handles import OUTSIDE_CUDA_GRAPHS
from megatron.parallel.torch_private import resolve_process_group


def norm_all_heads(q: torch.Tensor, k: torch.Tensor, q_norm: Norm, k_norm: Norm, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise queries [s, b, g, r, d] and keys [s, b, g, d] over all heads of all ranks of a group; in at least float32."""
    wide = torch.promote_types(q.dtype, torch.float32) if q_norm.zero_centred else q.dtype
    weights = _weights(q, q_norm, wide), _weights(k, k_norm, wide)
    sizes = q_norm.shape[0], k_norm.shape[0]
    if torch.compiler.is_compiling():
        return _traced(q, k, *weights, sizes, q_norm.epsilon, group)
    normed: tuple[torch.Tensor, torch.Tensor] = _NormAllHeads.apply(q, k, *weights, sizes, q_norm.epsilon, group)
    return normed


def _weights(x: torch.Tensor, norm: Norm, wide: torch.dtype) -> torch.Tensor:
    """The factors of a rank's heads [..., d]; ones where norms have no weights."""
    weight, _ = norm.factors(wide)
    return x.new_ones(x.shape[2:], dtype=wide) if weight is None else weight.view(x.shape[2:])


class _NormAllHeads(torch.autograd.Function):
    """y = x w / rms(x). Keeps its inputs and one number a row of each."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        sizes: tuple[int, int],
        epsilon: float,
        group: Group,
    ) -> tuple[torch.Tensor, ...]:
        squares = torch.stack([_per_token(_wide(x).square()) for x in (q, k)])  # [2, s, b]
        factors = [(square / size + epsilon).rsqrt_() for square, size in zip(all_reduce(squares, group), sizes, strict=True)]
        ctx.save_for_backward(q, k, q_weight, k_weight, *factors)
        ctx.sizes, ctx.group = sizes, group
        pairs = zip((q, k), (q_weight, k_weight), factors, strict=True)
        return tuple(_like(factor, x).mul(x).mul_(weight).to(x.dtype) for x, weight, factor in pairs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        q, k, q_weight, k_weight, *factors = ctx.saved_tensors
        each = list(zip((q, k), (q_weight, k_weight), factors, grads, strict=True))
        dots = torch.stack([_per_token(_wide(grad).mul(weight).mul_(x)) for x, weight, _, grad in each])
        dots = all_reduce(dots, ctx.group)
        grad_inputs, grad_weights = [], []
        for (x, weight, factor, grad), dot, size in zip(each, dots, ctx.sizes, strict=True):
            wide = _wide(grad)
            shares = _like(dot * factor.pow(3) / size, x) * x
            grad_inputs.append((_like(factor, x) * wide).mul_(weight).sub_(shares).to(x.dtype))
            grad_weights.append((wide * x).mul_(_like(factor, x)).sum((0, 1)).to(weight.dtype))
        return *grad_inputs, *grad_weights, None, None, None


def _traced(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    sizes: tuple[int, int],
    epsilon: float,
    group: Group,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in operations that a compiler fuses and differentiates."""
    squares = torch.stack([_per_token(_wide(x).square()) for x in (q, k)])
    if group.size > 1:
        assert group.process_group is not None
        squares = _sum_both_ways(squares, group.process_group.group_name)
    normed = [
        (_wide(x) * _like((square / size + epsilon).rsqrt(), x) * weight).to(x.dtype)
        for x, weight, square, size in zip((q, k), (q_weight, k_weight), squares.unbind(), sizes, strict=True)
    ]
    return normed[0], normed[1]


@torch.library.custom_op("megatron::sum_both_ways", mutates_args=(), tags=OUTSIDE_CUDA_GRAPHS)
def _sum_both_ways(x: torch.Tensor, group: str) -> torch.Tensor:
    """Sum over a group, forward and backward: each rank uses the sum for a part of what follows."""
    total, name = x.clone(), cast("Any", group)  # a str, with a type of torch's own
    dist.all_reduce(total, group=resolve_process_group(name))
    return total


@_sum_both_ways.register_fake
def _(x: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(x)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.group = inputs[1]


def _differentiate(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return _sum_both_ways(grad, ctx.group), None


_sum_both_ways.register_autograd(_differentiate, setup_context=_remember)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _per_token(x: torch.Tensor) -> torch.Tensor:
    """The sum over heads and channels: [s, b, ...] to [s, b]."""
    return x.flatten(2).sum(-1)


def _like(x: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """[s, b] to [s, b, 1, ...] with as many dimensions as heads."""
    return x.reshape(*x.shape, *(1,) * (heads.dim() - 2))
