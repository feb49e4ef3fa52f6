"""softmax(score(q k^T)) v of complete samples, by the fastest kernel that supports it.

Shapes: `s` sequence, `b` microbatch, `g` key-value heads, `r` query heads per key-value head, `n = g * r` query heads, `d` size of
a query or key head, `e` size of a value head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from megatron.attention.backends import BLOCKWISE_KERNEL_NAME
from megatron.parallel.matmul import is_slow_half
from megatron.parallel.random import seed_device
from megatron.spec.layers import DEFAULT_SCORES, ScoreSpec

if TYPE_CHECKING:
    from megatron.attention.documents import Documents


def core_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: Documents | None = None,
    dropout: float = 0.0,
    *,
    score_spec: ScoreSpec = DEFAULT_SCORES,
    sinks: torch.Tensor | None = None,
    seed: int | None = None,
) -> torch.Tensor:
    """Compute softmax(scale q k^T) v with a causal mask. `score_spec` may add a window, a softcap or attention sinks. The softmax
    is in at least float32.

    Args:
        q: queries, [s, b, g, r, d] (sequence, microbatch, key-value heads, query heads per key-value head, channels) or [s, b, n,
            d] with n = g * r.
        k, v: keys [s, b, g, d] and values [s, b, g, e]; each head serves r neighboring query heads.
        documents: documents that attention does not cross; None to attend to the whole sample.
        sinks: learnable attention sinks [n], if the softmax has them.
        seed: seed of the dropout mask; None to use the current state of the generator.

    Returns:
        [s, b, n * e].
    """
    if q.dim() == 4:
        q = q.unflatten(2, (k.shape[2], -1))
    dtype, shape = q.dtype, q.shape
    if is_slow_half(q):
        q, k, v = q.float(), k.float(), v.float()
    if not has_fused_kernel(score_spec, shape[0] if documents is None else documents.max_seqlen):
        return _compute_unfused_attention(q, k, v, documents, dropout, score_spec, sinks, seed).to(dtype)
    if dropout > 0.0 and seed is not None:
        seed_device(q.device, seed)
    if documents is not None:
        from megatron.attention.documents import document_attention

        return document_attention(q.flatten(2, 3), k, v, documents, dropout, score_spec.scale).to(dtype)
    q, k, v, is_grouped = view_as_sdpa_inputs(q, k, v)
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, scale=score_spec.scale, enable_gqa=is_grouped)
    return out.permute(2, 0, 1, 3).reshape(*shape[:2], -1).to(dtype)


def view_as_sdpa_inputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]:
    """View queries [s, b, g, r, d], keys and values [s, b, g, d] in the layout of `scaled_dot_product_attention`. Dimensions:
    sequence, microbatch, key-value heads, query heads per key-value head, channels.

    Returns:
        q, k and v as [samples, heads, s, d], and whether query heads share keys and values. If they do, each key-value head
        becomes a sample, because several heads in one sample could not be viewed in this layout without a copy.
    """
    is_grouped = q.shape[3] > 1
    if is_grouped:
        q, k, v = q.flatten(1, 2), k.flatten(1, 2).unsqueeze(2), v.flatten(1, 2).unsqueeze(2)  # [s, b * g, r or 1, d]
    else:
        q = q.squeeze(3)
    return q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3), is_grouped


def has_fused_kernel(score_spec: ScoreSpec, max_seqlen: int) -> bool:
    """Return whether torch has a fused attention kernel on every device for scores of this kind. It has one for a plain softmax
    without window, softcap or sinks.

    Args:
        max_seqlen: tokens of the longest sample or document. A window that is not shorter has no effect.
    """
    is_plain_softmax = score_spec.softcap is None and score_spec.softmax == "vanilla"
    return is_plain_softmax and (score_spec.window is None or score_spec.get_effective_window(max_seqlen) is None)


def name_kernel(score_spec: ScoreSpec, q: torch.Tensor, v: torch.Tensor, dropout: float) -> str:
    """Return the name, as in log lines, of the kernel for scores with a window, a softcap or sinks: flash attention or the
    blockwise computation. Plain scores (`has_fused_kernel`) do not need this function.

    Args:
        q, v: any tensors with the dtype, device and head size of queries and values.
    """
    from megatron.attention.documents import flash_supports

    window_only = score_spec.softcap is None and score_spec.softmax == "vanilla"
    return "flash attention" if window_only and flash_supports(q, v, dropout) else BLOCKWISE_KERNEL_NAME


def _compute_unfused_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: Documents | None,
    dropout: float,
    score_spec: ScoreSpec,
    sinks: torch.Tensor | None,
    seed: int | None,
) -> torch.Tensor:
    """Compute attention with a window, a softcap or sinks. `scaled_dot_product_attention` has no fused kernel for these.

    torch's flash attention for sequences of different lengths (`varlen_attn`) supports a window. It is used if there is no softcap
    and no sink, it supports the call (`name_kernel`), and there are at most `MAX_SEQUENCES_PER_CALL` samples or documents.
    Otherwise attention is computed block by block (`block_attention`).
    """
    from megatron.attention.documents import MAX_SEQUENCES_PER_CALL, flash_attention

    length, batch_size = q.shape[:2]
    window = score_spec.get_effective_window(length)
    if name_kernel(score_spec, q, v, dropout) == "flash attention":
        if documents is None:
            cu_seqlens, max_seqlen = torch.arange(0, (batch_size + 1) * length, length, dtype=torch.int32, device=q.device), length
        else:
            cu_seqlens, max_seqlen = documents.cu_seqlens_device, documents.max_seqlen
        if len(cu_seqlens) - 1 <= MAX_SEQUENCES_PER_CALL:
            return flash_attention(q.flatten(2, 3), k, v, cu_seqlens, max_seqlen, window=window, scale=score_spec.scale)
    assert dropout == 0.0 or seed is not None, "a dropout mask needs a seed, because backward draws it again"
    from megatron.attention.blocks import BlockAttentionOptions, CausalMask, block_attention  # imported late: few models need it

    return block_attention(q, k, v, sinks, BlockAttentionOptions(score_spec, CausalMask(window, documents), dropout, seed or 0))
