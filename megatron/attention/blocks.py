"""Causal attention computed block by block, for what torch's kernels do not take: windows, capped scores, sinks. No [s, s] tensor
is made: a block of queries meets only the keys in its reach, and backward computes its probabilities again.

Shapes: `s` sequence, `b` microbatch, `g` key-value heads, `r` query heads of each, `d` size of a query, `e` of a value. Within a
block: `q` queries, `k` keys, `B = b * g`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from megatron.attention.documents import Documents
from megatron.parallel.products import writes_wide_products
from megatron.parallel.random import seed_device
from megatron.spec.layers import ScoreSpec

_MOST_QUERIES = 128
"""Queries of a block. More would compute more scores outside of a window, fewer would take more launches."""
_MOST_SCORES = 1 << 25
"""Scores of a block, which has fewer queries where their reach is long."""


class Reach(NamedTuple):
    """What a query at a place of the sequence may attend to."""

    window: int | None
    """Tokens before its own; None for all."""
    documents: Documents | None
    """Whose bounds it does not cross."""
    first: int = 0
    """Place of the first query among the keys, which lie at 0, 1, ..."""
    origin: int = 0
    """Place of the first key in its sample."""

    def blocks(self, queries: int, keys: int, scores_of_a_key: int) -> Iterator[tuple[slice, slice]]:
        """Queries, and the keys in their reach, of each block that has any.

        Args:
            scores_of_a_key: those that one query token has with one key token, over all samples and heads.
        """
        longest = keys if self.window is None else min(keys, self.window + _MOST_QUERIES)
        size = max(1, min(_MOST_QUERIES, _MOST_SCORES // (scores_of_a_key * longest)))
        for start in range(0, queries, size):
            some = slice(start, min(start + size, queries))
            lowest = 0 if self.window is None else max(0, self.first + start - self.window)
            if self.documents is not None:
                lowest = max(lowest, self.documents.lowest_start(self.origin + self.first + start) - self.origin)
            if lowest < (highest := min(keys, self.first + some.stop)):
                yield some, slice(lowest, highest)

    def hidden(self, queries: slice, keys: slice, device: torch.device) -> torch.Tensor:
        """Which keys of a block a query does not see: [b or 1, q, k]."""
        at = torch.arange(self.first + queries.start, self.first + queries.stop, device=device)[:, None]
        keys_at = torch.arange(keys.start, keys.stop, device=device)
        hidden = keys_at > at
        if self.window is not None:
            hidden |= keys_at < at - self.window
        if self.documents is None:
            return hidden[None]
        place = self.origin + self.first
        starts = self.documents.starts[place + queries.start : place + queries.stop]  # [q, b]
        return hidden | (keys_at + self.origin < starts.t()[..., None])

    def sees_all(self, queries: slice, keys: slice) -> bool:
        """Whether each query of a block sees each key for sure: what documents hide is not looked at."""
        far = self.first + queries.stop - 1 - keys.start
        return (
            self.documents is None and keys.stop <= self.first + queries.start + 1 and (self.window is None or far <= self.window)
        )


class Call(NamedTuple):
    """What is computed, beside queries, keys and values."""

    scores: ScoreSpec
    reach: Reach
    dropout: float = 0.0
    seed: int = 0
    """Seed of the first block's dropout mask."""
    partial: bool = False
    """Whether queries see keys that are not in the call, so that some may see none that are."""


def block_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, call: Call) -> torch.Tensor:
    """softmax(score(q k^T)) v, with all but the products in at least float32.

    Args:
        q: [s, b, g, r, d].
        k, v: [keys, b, g, d] and [keys, b, g, e].
        sinks: what stands beside the scores in each head's softmax, [g * r]; None for nothing.

    Returns:
        [s, b, g * r * e].
    """
    out: torch.Tensor = _BlockAttention.apply(q, k, v, sinks, call)
    return out.flatten(2)


def attention_of_a_token(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor | None,
    scores: ScoreSpec,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The same for one token after all others, without a backward.

    Args:
        q: [b, g, r, d].
        k, v: [b, g, keys, d] and [b, g, keys, e], those of its window.
        visible: [b, 1, 1, keys], False where a key is none; None where all are.

    Returns:
        [b, g, r, e].
    """
    found = _capped(_product(q.flatten(0, 1), k.flatten(0, 1).mT), scores, q.shape[-1]).view(*q.shape[:3], -1)
    if visible is not None:
        found.masked_fill_(~visible, -torch.inf)
    shares, _ = _softmax(found[:, :, None], scores, sinks)
    return _product(shares.flatten(0, 2), v.flatten(0, 1)).view(*q.shape[:3], -1)


def largest_scores(q: torch.Tensor, k: torch.Tensor, call: Call) -> torch.Tensor:
    """The largest score of each head over all samples and all pairs in reach: [g * r], in at least float32.

    Args:
        q: [s, b, g, r, d].
        k: [keys, b, g, d].
    """
    s, b, g, r, _ = q.shape
    found = q.new_full((g, r), -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    for queries, keys in call.reach.blocks(s, len(k), b * g * r):
        scores = _scores(q[queries], k[keys], call)
        _hide(scores, call, queries, keys)
        torch.maximum(found, scores.view(b, g, -1, r, scores.shape[-1]).amax((0, 2, 4)), out=found)
    return found.flatten()


class _BlockAttention(torch.autograd.Function):
    """Keeps its inputs, its result and a log of a sum a row."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, call: Call
    ) -> torch.Tensor:
        out = q.new_empty((*q.shape[:4], v.shape[-1]))
        log_sums = q.new_empty(q.shape[:4], dtype=torch.promote_types(q.dtype, torch.float32))
        attend_by_blocks(q, k, v, call, out, log_sums, sinks)
        ctx.save_for_backward(q, k, v, sinks, out, log_sums)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        q, k, v, sinks, out, log_sums = ctx.saved_tensors
        b, g, r = q.shape[1:4]
        grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
        # Sums over blocks, in the wide dtype.
        grad_k, grad_v = (torch.zeros((b * g, len(x), x.shape[-1]), dtype=log_sums.dtype, device=x.device) for x in (k, v))
        grad_sinks = None if sinks is None else torch.zeros((g, r), dtype=log_sums.dtype, device=q.device)
        grads = Grads(grad_q, grad_k, grad_v, grad_sinks)
        differentiate_by_blocks(grad, q, k, v, ctx.call, out, log_sums, grads, sinks)
        both = (total.view(b, g, len(x), -1).permute(2, 0, 1, 3).to(x.dtype) for total, x in ((grad_k, k), (grad_v, v)))
        return grad_q, *both, None if sinks is None or grad_sinks is None else grad_sinks.flatten().to(sinks.dtype), None


class Grads(NamedTuple):
    """Where gradients go."""

    q: torch.Tensor
    """[s, b, g, r, d]: is written, or added to."""
    k: torch.Tensor
    """[B, keys, d] in the dtype of the softmax: is added to."""
    v: torch.Tensor
    """[B, keys, e] in the dtype of the softmax: is added to."""
    sinks: torch.Tensor | None = None
    """[g, r] in the dtype of the softmax: is added to."""


def attend_by_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: Call,
    out: torch.Tensor,
    log_sums: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> None:
    """Write attention of queries [s, b, g, r, d] to keys and values [keys, b, g, d] and [keys, b, g, e].

    Args:
        out: is written, [s, b, g, r, e], where a query sees any of the keys.
        log_sums: is written likewise, [s, b, g, r]: the logarithm of the sum of exp of a query's scores. It is minus infinity for a
            query that sees no key but lies in a block with one that does; its `out` is zero.
        sinks: [g * r]; None where the softmax has none, or they are not in this part of it.
    """
    s, b, g, r, _ = q.shape
    for number, (queries, keys) in enumerate(call.reach.blocks(s, len(k), b * g * r)):
        scores = _scores(q[queries], k[keys], call)
        _hide(scores, call, queries, keys)
        shares, log_sum = _softmax(scores.view(b, g, -1, r, scores.shape[-1]), call.scores, sinks, partial=call.partial)
        if call.dropout:
            shares.mul_(_kept(shares, call, number))
        mixed = _product(shares.flatten(2, 3).flatten(0, 1), _heads(v[keys]))
        out[queries] = mixed.view(b, g, -1, r, v.shape[-1]).permute(2, 0, 1, 3, 4)
        log_sums[queries] = log_sum.permute(2, 0, 1, 3)


def differentiate_by_blocks(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: Call,
    out: torch.Tensor,
    log_sums: torch.Tensor,
    grads: Grads,
    sinks: torch.Tensor | None = None,
    *,
    adds: bool = False,
) -> None:
    """The backward of `attend_by_blocks`.

    Args:
        grad: of the result, [s, b, g, r, e].
        out, log_sums: of all keys that a query sees, also those that are in no part of this call.
        adds: whether gradients of queries are added to what is there.
    """
    s, b, g, r, d = q.shape
    for number, (queries, keys) in enumerate(call.reach.blocks(s, len(k), b * g * r)):
        raw = _scores(q[queries], k[keys], call)
        slopes = None if call.scores.softcap is None else 1 - (raw / call.scores.softcap).square_()
        _hide(raw, call, queries, keys)
        log_sum = log_sums[queries].permute(1, 2, 0, 3)  # [b, g, q, r]
        shares = raw.view(b, g, -1, r, raw.shape[-1]).sub_(log_sum[..., None]).exp_().view(raw.shape)
        some_grad, some_out = grad[queries], out[queries]
        delta = (some_grad.to(log_sums.dtype) * some_out).sum(-1).permute(1, 2, 0, 3)  # [b, g, q, r]
        if grads.sinks is not None:
            grads.sinks.sub_(((_sinks_of(sinks, log_sum) - log_sum).exp_() * delta).sum((0, 2)))
        rows = _rows(some_grad)
        grad_shares = _product(rows, _heads(v[keys]).mT)
        kept = _kept(shares, call, number) if call.dropout else None
        if kept is not None:
            grad_shares.mul_(kept)
        grads.v[:, keys] += _product((shares if kept is None else shares * kept).mT, rows)
        grad_scores = shares.mul_(grad_shares.sub_(delta.flatten(2).flatten(0, 1)[..., None]))
        if slopes is not None:
            grad_scores.mul_(slopes)
        grad_scores.mul_(_scale(call.scores, d))
        some = _product(grad_scores, _heads(k[keys])).view(b, g, -1, r, d).permute(2, 0, 1, 3, 4)
        if adds:
            grads.q[queries] += some
        else:
            grads.q[queries] = some
        grads.k[:, keys] += _product(grad_scores.mT, _rows(q[queries]))


def _scale(scores: ScoreSpec, size: int) -> float:
    return size**-0.5 if scores.scale is None else scores.scale


def _scores(q: torch.Tensor, k: torch.Tensor, call: Call) -> torch.Tensor:
    """Scaled and capped: [q, b, g, r, d] and [k, b, g, d] to [B, q * r, k]."""
    return _capped(_product(_rows(q), _heads(k).mT), call.scores, q.shape[-1])


def _capped(products: torch.Tensor, scores: ScoreSpec, size: int) -> torch.Tensor:
    """Scale and cap products of queries and keys of a size, in place."""
    products.mul_(_scale(scores, size))
    return products if scores.softcap is None else products.div_(scores.softcap).tanh_().mul_(scores.softcap)


def _softmax(
    scores: torch.Tensor, spec: ScoreSpec, sinks: torch.Tensor | None, *, partial: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn scores [b, g, q, r, k] into probabilities in place; and the logarithm of each row's denominator, [b, g, q, r].

    Args:
        partial: there may be rows of minus infinity alone. They become zeros, with the logarithm of zero.
    """
    highest = scores.amax(-1)
    if partial:
        highest.clamp_(min=torch.finfo(highest.dtype).min)
    sink = None if spec.softmax == "vanilla" else _sinks_of(sinks, highest)
    if sink is not None:
        highest = torch.maximum(highest, sink)
    total = scores.sub_(highest[..., None]).exp_().sum(-1)
    if sink is not None:
        total += (sink - highest).exp_()
    scores.div_((total.clamp(min=1.0) if partial else total)[..., None])  # any other row has exp(0) in its sum
    return scores, total.log_().add_(highest)


def _hide(scores: torch.Tensor, call: Call, queries: slice, keys: slice) -> None:
    """Set scores [B, q * r, k] of keys out of reach to minus infinity."""
    if call.reach.sees_all(queries, keys):
        return
    hidden = call.reach.hidden(queries, keys, scores.device)  # [b or 1, q, k]
    number, keys_here = hidden.shape[1:]
    samples = len(hidden)
    scores.view(samples, -1, number, scores.shape[1] // number, keys_here).masked_fill_(hidden[:, None, :, None], -torch.inf)


def _sinks_of(sinks: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """For [b, g, q, r]: each head's sink, or zero where the weight is a constant."""
    if sinks is None:
        return like.new_zeros(())
    return sinks.to(like.dtype).view(1, like.shape[1], 1, like.shape[3])


def _kept(shares: torch.Tensor, call: Call, number: int) -> torch.Tensor:
    """The dropout mask of a block, scaled: 0 or 1 / (1 - p)."""
    seed_device(shares.device, call.seed + number)
    return torch.empty_like(shares).bernoulli_(1 - call.dropout).div_(1 - call.dropout)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[q, b, g, r, d] to [B, q * r, d]."""
    return x.permute(1, 2, 0, 3, 4).flatten(2, 3).flatten(0, 1)


def _heads(x: torch.Tensor) -> torch.Tensor:
    """[k, b, g, d] to [B, k, d]."""
    return x.permute(1, 2, 0, 3).flatten(0, 1)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Products of matrices in at least float32. Where the factors have 16 bits, a tensor core multiplies them as they are and adds
    in float32; a CPU gets them widened."""
    narrow = {a.dtype, b.dtype} & {torch.float16, torch.bfloat16}
    if not narrow:
        return torch.bmm(a, b)
    (dtype,) = narrow
    if not (a.is_cuda and writes_wide_products(a.device, dtype)):
        return torch.bmm(a.float(), b.float())
    return torch.bmm(a.to(dtype), b.to(dtype), out_dtype=torch.float32)
