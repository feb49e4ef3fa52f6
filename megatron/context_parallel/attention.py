"""Attention of tokens that context ranks share, in three ways.

Each rank has the queries, keys and values of its own tokens (`parallel/cut.py`):

==========  =================================================  ==========================================================
way         forward                                            backward
==========  =================================================  ==========================================================
all_gather  keys and values of all ranks are gathered, while   they are gathered again; their gradients are reduce-scattered
            the own ones are computed with
p2p         they go round the ring of ranks, a step ahead of   they go round again, and their gradients behind them
            the products (Liu et al. 2023, Ring Attention)
a2a         each rank receives all tokens of some heads        the same exchanges the other way
            (Jacobs et al. 2023, DeepSpeed-Ulysses)
==========  =================================================  ==========================================================

The first two compute attention in parts: queries of a run of neighbouring tokens against keys of another. Parts are merged by the
logarithms of their sums, and with the logarithm of the whole sum each part's gradient is exact (Dao et al. 2022, FlashAttention,
appendix B). Only what a rank has of queries, keys, values and the result is kept for backward.

Shapes: `t` tokens of this rank, `b` microbatch, `g` key-value heads, `r` query heads of each, `n = g * r`, `d` size of a query or
key head, `e` of a value head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch

from megatron.attention.core import core_attention
from megatron.attention.documents import Documents, reorder
from megatron.attention.parts import KeyGrads, RunPair, attend_part, differentiate_part, visible
from megatron.config.parallel import ContextWay
from megatron.parallel.collectives import Pending, all_to_all, start_all_gather, start_pass_on, start_reduce_scatter
from megatron.parallel.context import Group
from megatron.spec.layers import ScoreSpec

# ---- How keys and values of all context ranks come to each of them, and their gradients back. Transfers run beside products.
#
# Shapes: `t` tokens of a rank, `b` microbatch, `g` key-value heads, `d` size of a key head, `e` of a value head.

Held = tuple[int, torch.Tensor, torch.Tensor]
"""A rank, and its keys and values, [t, b, g, d] and [t, b, g, e]."""
Differentiate = Callable[[int, torch.Tensor, torch.Tensor, KeyGrads], None]
"""Adds what this rank's queries give to the gradients of a rank's keys and values."""


class Travel(Protocol):
    """Brings keys and values to this rank, its own first."""

    def forward(self, k: torch.Tensor, v: torch.Tensor) -> Iterator[Held]:
        """Yield those of each rank."""

    def backward(
        self, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype, differentiate: Differentiate
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum the gradients of this rank's keys and values over all ranks, in a dtype."""


class Gathering:
    """One all-gather, while the own part is computed; backward one more, and a reduce-scatter."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def forward(self, k: torch.Tensor, v: torch.Tensor) -> Iterator[Held]:
        """See `Travel`."""
        pending = start_all_gather(_packed(k, v), self._group)
        yield self._group.index, k, v
        yield from self._others(pending, k, v)

    def backward(
        self, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype, differentiate: Differentiate
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Travel`."""
        whole = torch.zeros((self._group.size, *_packed_shape(k, v)), dtype=dtype, device=k.device)
        for holder, keys, values in self.forward(k, v):
            differentiate(holder, keys, values, KeyGrads.within(whole[holder], k.shape[-1]))
        del keys, values  # they are parts of what was gathered
        return _unpacked(start_reduce_scatter(whole.flatten(0, 1), self._group).wait(), k, v)

    def _others(self, pending: Pending, k: torch.Tensor, v: torch.Tensor) -> Iterator[Held]:
        whole = pending.wait().unflatten(0, (self._group.size, -1))
        for holder in range(self._group.size):
            if holder != self._group.index:
                yield holder, *_unpacked(whole[holder], k, v)


class Ring:
    """Each rank passes on what it has computed with, and receives the next meanwhile. Gradients follow on a ring of their own."""

    def __init__(self, group: Group, of_gradients: Group) -> None:
        self._group, self._of_gradients = group, of_gradients

    def forward(self, k: torch.Tensor, v: torch.Tensor) -> Iterator[Held]:
        """See `Travel`."""
        held, keys, values = _packed(k, v), k, v
        for step in range(self._group.size):
            pending = start_pass_on(held, self._group) if step < self._group.size - 1 else None
            yield (self._group.index - step) % self._group.size, keys, values
            if pending is not None:
                held = pending.wait()
                keys, values = _unpacked(held, k, v)

    def backward(
        self, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype, differentiate: Differentiate
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Travel`. What is passed on last is the own sum, from the rank before."""
        pending: Pending | None = None
        for holder, keys, values in self.forward(k, v):
            summed = torch.zeros(_packed_shape(k, v), dtype=dtype, device=k.device)
            differentiate(holder, keys, values, KeyGrads.within(summed, k.shape[-1]))
            if pending is not None:
                summed += pending.wait()
            pending = start_pass_on(summed, self._of_gradients)
        assert pending is not None
        return _unpacked(pending.wait(), k, v)


def _packed(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Keys and values in one message: [t, b, g, d + e]."""
    return torch.cat([k, v], -1)


def _packed_shape(k: torch.Tensor, v: torch.Tensor) -> tuple[int, ...]:
    return (*k.shape[:-1], k.shape[-1] + v.shape[-1])


def _unpacked(both: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = both.split([k.shape[-1], v.shape[-1]], -1)
    return keys, values


_SEEDS_OF_A_PART = 1 << 24
"""Each block of a part has a dropout mask of its own."""


class Sharers(NamedTuple):
    """The context ranks, and how they share keys and values."""

    way: ContextWay
    group: Group
    rings: tuple[Group, Group]
    """The same ranks with communicators for what goes round: keys and values, and gradients."""


class _Call(NamedTuple):
    """What is computed, beside tensors."""

    sharers: Sharers
    documents: Documents
    scores: ScoreSpec
    dropout: float
    seed: int

    def travel(self) -> Travel:
        """How keys and values come to this rank."""
        if self.sharers.way == "p2p":
            return Ring(*self.sharers.rings)
        return Gathering(self.sharers.group)

    def parts(self, holder: int) -> Iterator[RunPair]:
        """The products of this rank's queries with the keys of a rank."""
        cut, own = self.documents.cut, self.sharers.group.index
        assert cut is not None
        rows = 0
        for number, queries in enumerate(cut.runs(own)):
            columns = 0
            for other, keys in enumerate(cut.runs(holder)):
                if visible(queries, keys, self.documents, self.scores.window):
                    place = (holder * len(cut.pieces[own]) + number) * len(cut.pieces[holder]) + other
                    # What sinks add to the sum enters once, when all parts are merged.
                    scores = dataclasses.replace(self.scores, softmax="vanilla")
                    seed = self.seed + place * _SEEDS_OF_A_PART
                    yield RunPair(queries, keys, rows, columns, scores, self.documents, self.dropout, seed)
                columns += keys[1] - keys[0]
            rows += queries[1] - queries[0]


def context_attention(
    sharers: Sharers,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: Documents,
    scores: ScoreSpec,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    core: Callable[..., torch.Tensor] = core_attention,
) -> torch.Tensor:
    """softmax(score(q k^T)) v of this rank's tokens, over those of all context ranks.

    Args:
        q: [t, b, g, r, d] or [t, b, n, d].
        k, v: [t, b, g, d] and [t, b, g, e].
        documents: of the whole microbatch, with the cut.
        sinks: [n], where the softmax has learnable ones.
        seed: of this rank's dropout masks.
        core: `core_attention`, or what does the same, for whole samples of some heads.

    Returns:
        [t, b, n * e].
    """
    if q.dim() == 4:
        q = q.unflatten(2, (k.shape[2], -1))
    if sharers.way == "a2a":
        return _by_heads(sharers.group, q, k, v, documents, scores, sinks, dropout, seed, core)
    out: torch.Tensor = _InParts.apply(q, k, v, sinks, _Call(sharers, documents, scores, dropout, seed or 0))
    return out.flatten(2)


class _InParts(torch.autograd.Function):
    """Keeps its inputs, its result and a logarithm of a sum a row, all of this rank's tokens."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, call: _Call
    ) -> torch.Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros((*q.shape[:4], v.shape[-1]), dtype=wide)
        log_sums = q.new_full(q.shape[:4], -torch.inf, dtype=wide)
        for holder, keys, values in call.travel().forward(k, v):
            for part in call.parts(holder):
                rows = part.rows
                found, log_sum = attend_part(part, q[rows], keys[part.columns], values[part.columns])
                _merge(out[rows], log_sums[rows], found, log_sum)
        if call.scores.softmax != "vanilla":
            sink = log_sums.new_zeros(()) if sinks is None else sinks.to(wide).view(q.shape[2:4])
            whole = torch.logaddexp(log_sums, sink.expand_as(log_sums))
            out.mul_((log_sums - whole).exp_()[..., None])
            log_sums = whole
        narrow = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, narrow, log_sums)
        ctx.call = call
        return narrow

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        q, k, v, sinks, out, log_sums = ctx.saved_tensors
        call: _Call = ctx.call
        grad = grad.contiguous()
        grad_q = torch.zeros(q.shape, dtype=log_sums.dtype, device=q.device)

        def grads_of(holder: int, keys: torch.Tensor, values: torch.Tensor, grads: KeyGrads) -> None:
            for part in call.parts(holder):
                rows, columns = part.rows, part.columns
                differentiate_part(
                    part,
                    *(grad[rows], q[rows], keys[columns], values[columns], out[rows], log_sums[rows]),
                    grads.of(part, grad_q),
                )

        grad_k, grad_v = call.travel().backward(k, v, log_sums.dtype, grads_of)
        grad_sinks = None
        if sinks is not None:
            delta = (grad.to(log_sums.dtype) * out).sum(-1)
            shares = (sinks.to(log_sums.dtype).view(q.shape[2:4]) - log_sums).exp_()
            grad_sinks = -(shares * delta).sum((0, 1)).flatten().to(sinks.dtype)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), grad_sinks, None


def _merge(out: torch.Tensor, log_sums: torch.Tensor, found: torch.Tensor, log_sum: torch.Tensor) -> None:
    """Merge a part into what there is of the same queries: the mean of both, weighed by their sums.

    Args:
        out, found: [q, b, g, r, e]; the first is changed.
        log_sums, log_sum: [q, b, g, r]; the first is changed.
    """
    whole = torch.logaddexp(log_sums, log_sum)
    # Where nothing was seen yet, in either: log 0 - log 0 is no number.
    seen = whole.isfinite()
    old, new = (torch.where(seen, (each - whole).exp_(), 0.0)[..., None] for each in (log_sums, log_sum))
    out.mul_(old).addcmul_(found, new)
    log_sums.copy_(whole)


class _TokensForHeads(torch.autograd.Function):
    """All-to-all along dimension 0: part i goes to rank i. Its backward is itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:  # type: ignore[override]
        ctx.group = group
        return all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return all_to_all(grad, ctx.group), None


def _by_heads(
    group: Group,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: Documents,
    scores: ScoreSpec,
    sinks: torch.Tensor | None,
    dropout: float,
    seed: int | None,
    core: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Exchange tokens for heads, compute attention of whole samples, and exchange back."""
    ranks, cut = group.size, documents.cut
    assert cut is not None
    t, _, g, r, d = q.shape
    sizes = [r * d, d, v.shape[-1]]
    joined = torch.cat([q.flatten(3), k, v], -1).unflatten(2, (ranks, g // ranks))  # [t, b, ranks, g / ranks, ...]
    received: torch.Tensor = _TokensForHeads.apply(joined.permute(2, 0, 1, 3, 4), group)
    order, places = documents.order_of_holders
    whole = reorder(received.flatten(0, 1), places, order)  # [s, b, g / ranks, ...], in the order of the sequence
    q, k, v = whole.split(sizes, -1)
    if sinks is not None:
        sinks = sinks.unflatten(0, (ranks, -1))[group.index]
    inside = documents if documents.bounded else None
    out = core(q.unflatten(3, (r, d)), k, v, inside, dropout, scores=scores, sinks=sinks, seed=seed)
    by_holder = reorder(out, order, places).unflatten(0, (ranks, t))
    back: torch.Tensor = _TokensForHeads.apply(by_holder, group)  # [ranks, t, b, n / ranks * e]
    return back.permute(1, 2, 0, 3).flatten(2)
