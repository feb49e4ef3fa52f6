"""softmax(score(q k^T)) v of whole samples, by the kernel that takes it.

Shapes: `s` sequence, `b` microbatch, `g` key-value heads, `r` query heads of each, `n = g * r`, `d` size of a query or key head,
`e` of a value head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from megatron.attention.backends import BLOCK_BY_BLOCK
from megatron.parallel.products import slow_half
from megatron.parallel.random import seed_device
from megatron.spec.layers import PLAIN, ScoreSpec

if TYPE_CHECKING:
    from megatron.attention.documents import Documents


def core_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: Documents | None = None,
    dropout: float = 0.0,
    *,
    scores: ScoreSpec = PLAIN,
    sinks: torch.Tensor | None = None,
    seed: int | None = None,
) -> torch.Tensor:
    """softmax(scale q k^T) v with a causal mask, or what `scores` says; the softmax is in at least float32.

    Args:
        q: [s, b, g, r, d] or [s, b, n, d].
        k, v: [s, b, g, d] and [s, b, g, e]; each serves r neighbouring query heads.
        documents: a token attends only to its own; None to its whole sample.
        sinks: [n], where the softmax has learnable ones.
        seed: of the dropout mask; None for what the generator says.

    Returns:
        [s, b, n * e].
    """
    if q.dim() == 4:
        q = q.unflatten(2, (k.shape[2], -1))
    dtype, shape = q.dtype, q.shape
    if slow_half(q):
        q, k, v = q.float(), k.float(), v.float()
    if not one_kernel(scores, shape[0] if documents is None else documents.longest):
        return _shaped_attention(q, k, v, documents, dropout, scores, sinks, seed).to(dtype)
    if dropout > 0.0 and seed is not None:
        seed_device(q.device, seed)
    if documents is not None:
        from megatron.attention.documents import attention_within_documents

        return attention_within_documents(q.flatten(2, 3), k, v, documents, dropout, scores.scale).to(dtype)
    q, k, v, grouped = as_samples(q, k, v)
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, scale=scores.scale, enable_gqa=grouped)
    return out.permute(2, 0, 1, 3).reshape(*shape[:2], -1).to(dtype)


def as_samples(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]:
    """View queries [s, b, g, r, d], keys and values [s, b, g, d] as torch's kernels take them.

    Returns:
        each as [samples, heads, s, d], and whether the query heads of a sample share keys and values. Then each group is a sample
        of its own: as one sample, its heads could not lie among keys and values without a copy.
    """
    grouped = q.shape[3] > 1
    if grouped:
        q, k, v = q.flatten(1, 2), k.flatten(1, 2).unsqueeze(2), v.flatten(1, 2).unsqueeze(2)  # [s, b * g, r or 1, d]
    else:
        q = q.squeeze(3)
    return q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3), grouped


def one_kernel(scores: ScoreSpec, longest: int) -> bool:
    """Whether torch has a kernel for scores of samples or documents of at most so many tokens, whatever the device."""
    plain = scores.softcap is None and scores.softmax == "vanilla"
    return plain and (scores.window is None or scores.reach(longest) is None)


def shaped_kernel(scores: ScoreSpec, q: torch.Tensor, v: torch.Tensor, dropout: float) -> str:
    """What computes attention where it is not one kernel for any device, in words.

    Args:
        q, v: any tensors of the dtype, device and size of a head.
    """
    from megatron.attention.documents import flash_takes

    window_only = scores.softcap is None and scores.softmax == "vanilla"
    return "flash attention" if window_only and flash_takes(q, v, dropout) else BLOCK_BY_BLOCK


def _shaped_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: Documents | None,
    dropout: float,
    scores: ScoreSpec,
    sinks: torch.Tensor | None,
    seed: int | None,
) -> torch.Tensor:
    """Attention with a window, a cap or sinks."""
    from megatron.attention.documents import MOST_AT_ONCE, flash_attention

    length, batch = q.shape[:2]
    window = scores.reach(length)
    if shaped_kernel(scores, q, v, dropout) == "flash attention":
        if documents is None:
            bounds, longest = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=q.device), length
        else:
            bounds, longest = documents.on_device, documents.longest
        if len(bounds) - 1 <= MOST_AT_ONCE:
            return flash_attention(q.flatten(2, 3), k, v, bounds, longest, window=window, scale=scores.scale)
    assert dropout == 0.0 or seed is not None, "masks are made again in backward"
    from megatron.attention.blocks import Call, Reach, block_attention  # few models have such scores

    return block_attention(q, k, v, sinks, Call(scores, Reach(window, documents), dropout, seed or 0))
