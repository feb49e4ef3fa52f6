"""RMSNorm of all query heads as one vector, and of all key heads as another, as in OLMo 2.

Tensor ranks hold some of the heads, so mean squares are sums over the ranks, and so is what backward subtracts. Both norms share
one message each way: two numbers a token.

Shapes: `s` sequence, `b` microbatch, `g` this rank's key-value heads, `r` query heads of each, `d` head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist

from megatron.parallel.collectives import all_gather, all_reduce, reduce_scatter
from megatron.parallel.context import Group
from megatron.parallel.handles import OUTSIDE_CUDA_GRAPHS
from megatron.parallel.torch_private import resolve_process_group
from megatron.tensor_parallel.layers import Norm


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


# ---- Key-value heads that several tensor ranks share, where there are fewer of them than ranks.
#
# The projection to queries, keys and values is divided evenly over the tensor ranks, as always: m ranks that share a key-value head
# hold the rows of its group between them, so no weight is held twice, and checkpoints do not know of it. What they compute they
# give to each other, and each goes on with its own query heads and the shared key and value. Backward sums what they found for
# these two.
#
# Shapes: `s` sequence, `b` microbatch, `r` query heads of a group, `d` head size, `n` tensor ranks.


@dataclass(frozen=True)
class Sharing:
    """The part of a tensor rank."""

    group: Group
    """The tensor group."""
    ranks: int
    """Neighbouring ranks that share a key-value head (m)."""
    queries: int
    """Query heads of the key-value head, on all of them (r)."""
    head_size: int

    @classmethod
    def of(cls, group: Group, heads: int, kv_heads: int, head_size: int) -> Sharing | None:
        """The sharing of a layer; None where each rank has key-value heads of its own."""
        return cls(group, group.size // kv_heads, heads // kv_heads, head_size) if kv_heads < group.size else None

    @property
    def members(self) -> slice:
        """The ranks that share this rank's key-value head."""
        first = self.group.index // self.ranks * self.ranks
        return slice(first, first + self.ranks)

    @property
    def own_queries(self) -> slice:
        """This rank's of the r query heads."""
        count = self.queries // self.ranks
        first = self.group.index % self.ranks * count
        return slice(first, first + count)


def exchanged(qkv: torch.Tensor, sharing: Sharing) -> torch.Tensor:
    """Give the ranks that share a key-value head what each needs of it.

    Args:
        qkv: this rank's rows of the projection, [s, b, (r + 2) d / m].

    Returns:
        its query heads, then the key and the value, [s, b, (r / m + 2) d].
    """
    return _Exchange.apply(qkv, sharing)


class _Exchange(torch.autograd.Function):
    """Forward: gather, keep own queries, key and value. Backward: the adjoint, a sum over ranks of what each has for a row."""

    @staticmethod
    def forward(ctx: Any, qkv: torch.Tensor, sharing: Sharing) -> torch.Tensor:  # type: ignore[override]
        ctx.sharing = sharing
        rows = all_gather(qkv.contiguous().unsqueeze(0), sharing.group)[sharing.members]  # [m, s, b, (r + 2) d / m]
        group = rows.permute(1, 2, 0, 3).reshape(*qkv.shape[:2], sharing.queries + 2, sharing.head_size)
        return torch.cat([group[:, :, sharing.own_queries], group[:, :, -2:]], 2).flatten(2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        sharing, heads = ctx.sharing, grad.unflatten(-1, (-1, ctx.sharing.head_size))
        group = grad.new_zeros(*grad.shape[:2], sharing.queries + 2, sharing.head_size)
        group[:, :, sharing.own_queries], group[:, :, -2:] = heads[:, :, :-2], heads[:, :, -2:]
        rows = group.flatten(2).unflatten(-1, (sharing.ranks, -1)).permute(2, 0, 1, 3)
        whole = grad.new_zeros(sharing.group.size, *rows.shape[1:])
        whole[sharing.members] = rows
        return reduce_scatter(whole, sharing.group).squeeze(0), None
