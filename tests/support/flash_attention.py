"""Stand-ins for torch's flash attention of sequences laid end to end, which runs on CUDA only.

They have the arguments and results of `flash_forward` and `flash_backward` in `megatron/attention/flash_range_pairs.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron.attention.flash_range_pairs import VisibleSequences


def seen_by(seen: VisibleSequences, window: tuple[int, int], scale: float, q: torch.Tensor, k: torch.Tensor) -> Iterator[Any]:
    """For each sequence of a call of flash attention: its rows and keys, and scores [n, q, k], as torch's kernel sees them."""
    assert q.dim() == 3 and q.shape[1] % k.shape[1] == 0 and window[1] == (0 if seen.is_causal else -1)
    for side, x in ((seen.queries, q), (seen.keys, k)):
        lengths = side.cu_seqlens.diff()
        assert side.cu_seqlens.dtype == torch.int32 and int(side.cu_seqlens[-1]) == len(x) and int(lengths.min()) > 0
        assert side.max_seqlen == int(lengths.max())
    for number in range(len(seen.queries.cu_seqlens) - 1):
        rows, keys = (slice(*side.cu_seqlens[number : number + 2].tolist()) for side in (seen.queries, seen.keys))
        wide = k[keys].repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = torch.einsum("qnd,knd->nqk", q[rows], wide) * scale
        if seen.is_causal:
            back = torch.arange(scores.shape[1])[:, None] - torch.arange(scores.shape[2])
            scores = scores.masked_fill((back < 0) | (back > (len(q) if window[0] == -1 else window[0])), -torch.inf)
        yield rows, keys, wide, scores


def plain_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: VisibleSequences, window: tuple[int, int], scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What torch's flash attention computes on CUDA: in at least float32, with a result in the dtype of the queries."""
    out, dtype = torch.empty_like(q), q.dtype
    q, k, v = map(widened, (q, k, v))
    sums = q.new_empty((q.shape[1], len(q)))
    for rows, keys, _, scores in seen_by(seen, window, scale or q.shape[-1] ** -0.5, q, k):
        wide = v[keys].repeat_interleave(q.shape[1] // v.shape[1], 1)
        out[rows], sums[:, rows] = torch.einsum("nqk,knd->qnd", scores.softmax(-1), wide).to(dtype), scores.logsumexp(-1)
    return out, sums


def plain_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    seen: VisibleSequences,
    window: tuple[int, int],
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Its backward, which takes sums and result as they are given."""
    scale, heads, dtype = scale or q.shape[-1] ** -0.5, q.shape[1] // k.shape[1], q.dtype
    assert sums.is_contiguous()
    grad, q, k, v, out = map(widened, (grad, q, k, v, out))
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, keys, wide_k, scores in seen_by(seen, window, scale, q, k):
        shares = (scores - sums[:, rows, None]).exp()
        wide_v = v[keys].repeat_interleave(heads, 1)
        delta = (grad[rows] * out[rows]).sum(-1).t()[..., None]
        slopes = shares * (torch.einsum("qnd,knd->nqk", grad[rows], wide_v) - delta) * scale
        grad_q[rows] = torch.einsum("nqk,knd->qnd", slopes, wide_k)
        grad_k[keys] += torch.einsum("nqk,qnd->knd", slopes, q[rows]).unflatten(1, (-1, heads)).sum(2)
        grad_v[keys] += torch.einsum("nqk,qnd->knd", shares, grad[rows]).unflatten(1, (-1, heads)).sum(2)
    return grad_q.to(dtype), grad_k.to(dtype), grad_v.to(dtype)


def widened(x: torch.Tensor) -> torch.Tensor:
    """In at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
