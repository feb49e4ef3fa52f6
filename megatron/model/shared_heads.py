"""Key-value heads that several tensor ranks share, where there are fewer of them than ranks.

The projection to queries, keys and values is divided evenly over the tensor ranks, as always: m ranks that share a key-value head
hold the rows of its group between them, so no weight is held twice, and checkpoints do not know of it. What they compute they give
to each other, and each goes on with its own query heads and the shared key and value. Backward sums what they found for these two.

Shapes: `s` sequence, `b` microbatch, `r` query heads of a group, `d` head size, `n` tensor ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron.parallel.collectives import all_gather, reduce_scatter
from megatron.parallel.context import Group


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
