"""RMSNorm over all query heads as one vector and over all key heads as one vector, as in OLMo 2; and key-value heads shared by
tensor ranks.

Each tensor rank holds some of the heads. So the mean squares are sums over the ranks, and so is the term that backward subtracts.
The query norm and the key norm share one all-reduce in forward and one in backward, with two values per token.

Shapes: `s` sequence, `b` microbatch, `g` local key-value heads, `r` query heads per key-value head, `d` head size.
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


def normalize_all_heads(
    q: torch.Tensor, k: torch.Tensor, q_norm: Norm, k_norm: Norm, group: Group
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply RMSNorm to the queries and to the keys of each token, over all heads on all ranks of a group, in at least float32.

    Args:
        q: local queries [s, b, g, r, d], with r query heads for each of g key-value heads.
        k: local keys [s, b, g, d].
        group: ranks that together hold all heads.
    """
    compute_dtype = torch.promote_types(q.dtype, torch.float32) if q_norm.zero_centred else q.dtype
    weights = _get_local_weight(q, q_norm, compute_dtype), _get_local_weight(k, k_norm, compute_dtype)
    sizes = q_norm.shape[0], k_norm.shape[0]
    if torch.compiler.is_compiling():
        return _normalize_in_traceable_ops(q, k, *weights, sizes, q_norm.epsilon, group)
    normed: tuple[torch.Tensor, torch.Tensor] = _NormAllHeads.apply(q, k, *weights, sizes, q_norm.epsilon, group)
    return normed


def _get_local_weight(x: torch.Tensor, norm: Norm, dtype: torch.dtype) -> torch.Tensor:
    """Return the part of the norm's weight for the local heads, in the shape of x without its dimensions [s, b]. Return ones if the
    norm has no weight."""
    weight, _ = norm.scale_and_offset(dtype)
    return x.new_ones(x.shape[2:], dtype=dtype) if weight is None else weight.view(x.shape[2:])


class _NormAllHeads(torch.autograd.Function):
    """Autograd function of y = w * x / rms(x), for queries and for keys. Saves q and k and, for each token, 1 / rms(q) and 1 /
    rms(k)."""

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
        sq_sums = torch.stack([_sum_per_token(_upcast(x).square()) for x in (q, k)])  # [2, s, b]
        inverse_rms = [(sq_sum / size + epsilon).rsqrt_() for sq_sum, size in zip(all_reduce(sq_sums, group), sizes, strict=True)]
        ctx.save_for_backward(q, k, q_weight, k_weight, *inverse_rms)
        ctx.sizes, ctx.group = sizes, group
        pairs = zip((q, k), (q_weight, k_weight), inverse_rms, strict=True)
        return tuple(_view_like_heads(factor, x).mul(x).mul_(weight).to(x.dtype) for x, weight, factor in pairs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        q, k, q_weight, k_weight, *factors = ctx.saved_tensors
        inputs = list(zip((q, k), (q_weight, k_weight), factors, grads, strict=True))
        dots = torch.stack([_sum_per_token(_upcast(grad).mul(weight).mul_(x)) for x, weight, _, grad in inputs])
        dots = all_reduce(dots, ctx.group)
        grad_inputs, grad_weights = [], []
        for (x, weight, factor, grad), dot, size in zip(inputs, dots, ctx.sizes, strict=True):
            upcast_grad = _upcast(grad)
            projection = _view_like_heads(dot * factor.pow(3) / size, x) * x
            grad_inputs.append((_view_like_heads(factor, x) * upcast_grad).mul_(weight).sub_(projection).to(x.dtype))
            grad_weights.append((upcast_grad * x).mul_(_view_like_heads(factor, x)).sum((0, 1)).to(weight.dtype))
        return *grad_inputs, *grad_weights, None, None, None


def _normalize_in_traceable_ops(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    sizes: tuple[int, int],
    epsilon: float,
    group: Group,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalize queries and keys as `_NormAllHeads` does, but in operations that torch.compile can fuse and differentiate.

    Args:
        sizes: number of channels over which queries and keys are normalized, over all ranks.
    """
    sq_sums = torch.stack([_sum_per_token(_upcast(x).square()) for x in (q, k)])
    if group.size > 1:
        assert group.process_group is not None
        sq_sums = _all_reduce_both_passes(sq_sums, group.process_group.group_name)
    normed = [
        (_upcast(x) * _view_like_heads((sq_sum / size + epsilon).rsqrt(), x) * weight).to(x.dtype)
        for x, weight, sq_sum, size in zip((q, k), (q_weight, k_weight), sq_sums.unbind(), sizes, strict=True)
    ]
    return normed[0], normed[1]


@torch.library.custom_op("megatron::sum_both_ways", mutates_args=(), tags=OUTSIDE_CUDA_GRAPHS)
def _all_reduce_both_passes(x: torch.Tensor, group: str) -> torch.Tensor:
    """Sum x over a group in forward, and sum its gradients over the group in backward.

    The gradients are partial sums, because every rank uses the sum only for its own heads.

    Args:
        group: name of the process group.
    """
    total, name = x.clone(), cast("Any", group)  # a str; torch declares another type
    dist.all_reduce(total, group=resolve_process_group(name))
    return total


@_all_reduce_both_passes.register_fake
def _(x: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(x)


def _save_group(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.group = inputs[1]


def _all_reduce_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return _all_reduce_both_passes(grad, ctx.group), None


_all_reduce_both_passes.register_autograd(_all_reduce_backward, setup_context=_save_group)


def _upcast(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _sum_per_token(x: torch.Tensor) -> torch.Tensor:
    """Sum each token's values over heads and channels: [s, b, ...] to [s, b]."""
    return x.flatten(2).sum(-1)


def _view_like_heads(x: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """View a value per token, [s, b], as [s, b, 1, ...] to broadcast it over the dimensions of `heads`."""
    return x.reshape(*x.shape, *(1,) * (heads.dim() - 2))


# ---- Key-value heads shared by several tensor ranks, for models with fewer key-value heads than tensor ranks.
#
# The fused QKV projection is divided evenly over the tensor ranks, as always. The m ranks that share a key-value head together hold
# the rows of its group: its r query heads, the key and the value. So no weight is stored twice, and checkpoints are not affected.
# The ranks gather the outputs of their rows. Then each rank computes attention for its own query heads with the shared key and
# value. Backward sums the gradients of key and value over the ranks.
#
# Shapes: `s` sequence, `b` microbatch, `r` query heads of a key-value head, `d` head size, `m` ranks that share a key-value head.


@dataclass(frozen=True)
class KVHeadSharing:
    """Assignment of key-value heads to tensor ranks, seen from one rank, if the model has fewer key-value heads than tensor
    ranks."""

    group: Group
    """Tensor-parallel group, over which the heads are split."""
    ranks_per_kv_head: int
    """Number of neighboring ranks that share a key-value head (`m` in shapes)."""
    heads_per_group: int
    """Number of query heads that share a key-value head, over all m ranks (`r` in shapes)."""
    head_size: int

    @classmethod
    def of(cls, group: Group, num_heads: int, num_kv_heads: int, head_size: int) -> KVHeadSharing | None:
        """Build the description of how this rank shares key-value heads in a model. Return None if every rank has separate
        key-value heads."""
        return cls(group, group.size // num_kv_heads, num_heads // num_kv_heads, head_size) if num_kv_heads < group.size else None

    @property
    def sharing_ranks(self) -> slice:
        """Indices in the tensor group of the ranks that share the key-value head of this rank."""
        start = self.group.rank // self.ranks_per_kv_head * self.ranks_per_kv_head
        return slice(start, start + self.ranks_per_kv_head)

    @property
    def local_query_heads(self) -> slice:
        """Indices of this rank's query heads among the r query heads that share its key-value head."""
        num_local_heads = self.heads_per_group // self.ranks_per_kv_head
        start = self.group.rank % self.ranks_per_kv_head * num_local_heads
        return slice(start, start + num_local_heads)


def exchange_kv_groups(qkv: torch.Tensor, sharing: KVHeadSharing) -> torch.Tensor:
    """Gather a key-value head and its r query heads from the m ranks that share the key-value head, and select the heads that this
    rank needs.

    Each of the m ranks has computed 1/m of these heads' channels. After the exchange a rank has r/m full query heads, and the full
    key and value.

    Args:
        qkv: local output of the fused query-key-value projection, [s, b, (r + 2) * d / m], with head size d.

    Returns:
        the local query heads, then the key and the value, [s, b, (r / m + 2) * d].
    """
    return _ExchangeKVGroups.apply(qkv, sharing)


class _ExchangeKVGroups(torch.autograd.Function):
    """Autograd function of `exchange_kv_groups`. Backward sums the gradients of each channel over the ranks (reduce-scatter)."""

    @staticmethod
    def forward(ctx: Any, qkv: torch.Tensor, sharing: KVHeadSharing) -> torch.Tensor:  # type: ignore[override]
        ctx.sharing = sharing
        rows = all_gather(qkv.contiguous().unsqueeze(0), sharing.group)[sharing.sharing_ranks]  # [m, s, b, (r + 2) d / m]
        kv_group = rows.permute(1, 2, 0, 3).reshape(*qkv.shape[:2], sharing.heads_per_group + 2, sharing.head_size)
        return torch.cat([kv_group[:, :, sharing.local_query_heads], kv_group[:, :, -2:]], 2).flatten(2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        sharing, heads = ctx.sharing, grad.unflatten(-1, (-1, ctx.sharing.head_size))
        kv_group = grad.new_zeros(*grad.shape[:2], sharing.heads_per_group + 2, sharing.head_size)
        kv_group[:, :, sharing.local_query_heads], kv_group[:, :, -2:] = heads[:, :, :-2], heads[:, :, -2:]
        rows = kv_group.flatten(2).unflatten(-1, (sharing.ranks_per_kv_head, -1)).permute(2, 0, 1, 3)
        all_rows = grad.new_zeros(sharing.group.size, *rows.shape[1:])
        all_rows[sharing.sharing_ranks] = rows
        return reduce_scatter(all_rows, sharing.group).squeeze(0), None
