"""SCAFFOLD: replaced by the three ways."""

from __future__ import annotations

from typing import Any

import torch

from megatron.attention.documents import Documents
from megatron.config.parallel import ContextWay
from megatron.parallel.collectives import all_gather, reduce_scatter
from megatron.parallel.context import Group
from megatron.spec.layers import ScoreSpec


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:  # type: ignore[override]
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return reduce_scatter(grad, ctx.group), None


def context_attention(
    way: ContextWay,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: Documents,
    group: Group,
    *,
    scores: ScoreSpec,
    sinks: torch.Tensor | None,
    dropout: float,
    seed: int | None,
) -> torch.Tensor:
    cut = documents.cut
    assert cut is not None
    if q.dim() == 4:
        q = q.unflatten(2, (k.shape[2], -1))
    k, v = _Gather.apply(k, group), _Gather.apply(v, group)
    order = torch.from_numpy(cut.order)
    places = torch.from_numpy(cut.places(group.index))
    products = torch.einsum("qbgrd,kbgd->bgrqk", q, k) * (q.shape[-1] ** -0.5 if scores.scale is None else scores.scale)
    if scores.softcap is not None:
        products = (products / scores.softcap).tanh() * scores.softcap
    hidden = order[None] > places[:, None]
    if scores.window is not None:
        hidden |= order[None] < places[:, None] - scores.window
    starts = documents.starts[places]  # [q, b]
    hidden = hidden[None] | (order[None, None] < starts.t()[..., None])
    products = products.masked_fill(hidden[:, None, None], -torch.inf)
    if scores.softmax != "vanilla":
        sink = products.new_zeros(products.shape[1] * products.shape[2]) if sinks is None else sinks.to(products.dtype)
        sink = sink.view(1, *products.shape[1:3], 1, 1).expand(*products.shape[:-1], 1)
        shares = torch.cat([products, sink], -1).softmax(-1)[..., :-1]
    else:
        shares = products.softmax(-1)
    return torch.einsum("bgrqk,kbge->qbgre", shares, v).flatten(2)
