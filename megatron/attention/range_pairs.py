"""Attention of range pairs: the queries of one token range and the keys of another, for sequences split over context ranks.

Shapes: `q` queries of the pair, `k` keys of the pair, `b` microbatch, `g` key-value heads, `r` query heads per key-value head, `B =
b * g`, `d` size of a query or key head, `e` size of a value head, `t` tokens of a rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron.attention import flash_range_pairs
from megatron.attention.backends import BLOCKWISE_KERNEL_NAME
from megatron.attention.blocks import (
    AttentionGrads,
    BlockAttentionOptions,
    CausalMask,
    block_attention_backward,
    block_attention_forward,
)
from megatron.attention.documents import MAX_SEQUENCES_PER_CALL, Documents, TokenRange
from megatron.spec.layers import ScoreSpec


class RangePair(NamedTuple):
    """Pair of token ranges, one of queries and one of keys, and the settings of attention between them. The two ranges are equal or
    disjoint."""

    query_range: TokenRange
    key_range: TokenRange
    query_offset: int
    """Index of the first query among the tokens of the rank that holds it."""
    key_offset: int
    """Index of the first key among the tokens of the rank that holds it."""
    score_spec: ScoreSpec
    """Spec of the scores: how products become probabilities, without the sinks of the softmax."""
    documents: Documents
    """Documents of the complete microbatch."""
    dropout: float
    dropout_seed: int

    @property
    def query_rows(self) -> slice:
        """Slice of the queries within the tokens of their rank."""
        return slice(self.query_offset, self.query_offset + self.query_range[1] - self.query_range[0])

    @property
    def key_rows(self) -> slice:
        """Slice of the keys within the tokens of their rank."""
        return slice(self.key_offset, self.key_offset + self.key_range[1] - self.key_range[0])

    def uses_flash(self, q: torch.Tensor, v: torch.Tensor) -> bool:
        """Return whether flash attention computes the pair; otherwise it is computed blockwise."""
        if len(self.documents.cu_seqlens) - 1 > MAX_SEQUENCES_PER_CALL:
            return False
        return flash_range_pairs.supports(self.query_range, self.key_range, q, v, self.score_spec, self.dropout)

    @property
    def blockwise_options(self) -> BlockAttentionOptions:
        """Options for computing the pair with `block_attention_forward`."""
        relative_start, key_start = self.query_range[0] - self.key_range[0], self.key_range[0]
        mask = CausalMask(self.score_spec.window, self.documents if self.documents.is_packed else None, relative_start, key_start)
        return BlockAttentionOptions(self.score_spec, mask, self.dropout, self.dropout_seed, has_partial_keys=True)


def name_pair_kernel(score_spec: ScoreSpec, q: torch.Tensor, v: torch.Tensor, dropout: float) -> str:
    """Return the name of the kernel that computes range pairs.

    Args:
        q, v: any tensors with the dtype, device and head size of queries and values.
    """
    token_range = (0, 1)
    return (
        "flash attention"
        if flash_range_pairs.supports(token_range, token_range, q, v, score_spec, dropout)
        else BLOCKWISE_KERNEL_NAME
    )


def is_pair_visible(query_range: TokenRange, key_range: TokenRange, documents: Documents, window: int | None) -> bool:
    """Return whether any query of one range may attend to any key of the other range."""
    min_visible_key = (
        documents.min_document_start(query_range[0])
        if window is None
        else max(documents.min_document_start(query_range[0]), query_range[0] - window)
    )
    return key_range[0] < query_range[1] and key_range[1] > min_visible_key


class KeyValueGrads(NamedTuple):
    """Gradients of this rank's keys and values, summed over range pairs. Both tensors are views of one communication buffer, [t, b,
    g, d + e]."""

    k: torch.Tensor
    """Gradient of the keys of this rank, [B, t, d]."""
    v: torch.Tensor
    """Gradient of the values of this rank, [B, t, e]."""

    @classmethod
    def from_buffer(cls, buffer: torch.Tensor, head_size: int) -> KeyValueGrads:
        """View a communication buffer as two tensors: the gradients of the keys, with `head_size` channels, and the gradients of
        the values."""
        grads = buffer.flatten(1, 2).transpose(0, 1)
        return cls(grads[..., :head_size], grads[..., head_size:])

    def select_pair(self, pair: RangePair, grad_q: torch.Tensor) -> AttentionGrads:
        """Return views of the gradients of one range pair. `grad_q` has the gradients of all local queries."""
        return AttentionGrads(grad_q[pair.query_rows], self.k[:, pair.key_rows], self.v[:, pair.key_rows])


def attend_pair(pair: RangePair, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of queries [q, b, g, r, d] to keys [k, b, g, d] and values [k, b, g, e].

    Returns:
        the output [q, b, g, r, e], in at least float32 or in the dtype of flash attention, and the logsumexp of each query's
        scores, [q, b, g, r], minus infinity for a query that sees no key.
    """
    if pair.uses_flash(q, v):
        return flash_range_pairs.flash_pair_forward(pair.query_range, pair.key_range, pair.documents, pair.score_spec, q, k, v)
    softmax_dtype = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros((*q.shape[:4], v.shape[-1]), dtype=softmax_dtype)
    logsumexp = q.new_full(q.shape[:4], -torch.inf, dtype=softmax_dtype)
    block_attention_forward(q, k, v, pair.blockwise_options, out, logsumexp)
    return out, logsumexp


def attend_pair_backward(
    pair: RangePair,
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    grads: AttentionGrads,
) -> None:
    """Compute the gradients of one range pair, and add them to `grads`.

    Args:
        grad: gradient of the merged output, [q, b, g, r, e].
        out: merged output of all pairs.
        logsumexp: over all keys that a query sees.
        grads: gradients that are added to.
    """
    if not pair.uses_flash(q, v):
        block_attention_backward(grad, q, k, v, pair.blockwise_options, out, logsumexp, grads, accumulate_grad_q=True)
        return
    pair_args = (pair.query_range, pair.key_range, pair.documents, pair.score_spec)
    grad_q, grad_k, grad_v = flash_range_pairs.flash_pair_backward(*pair_args, grad, q, k, v, out, logsumexp)
    grads.q.add_(grad_q)
    for total, summand in ((grads.k, grad_k), (grads.v, grad_v)):
        total.unflatten(0, (q.shape[1], -1)).add_(summand.permute(1, 2, 0, 3))
