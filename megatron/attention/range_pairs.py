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
    """Range of queries and range of keys, as positions in the sequence, and the settings of attention between them. The two ranges
    are equal or disjoint."""

    query_range: TokenRange
    key_range: TokenRange
    query_offset: int
    """Index of the first query among the local tokens of its context rank."""
    key_offset: int
    """Index of the first key among the local tokens of its context rank."""
    score_spec: ScoreSpec
    """Conversion of products q k^T to probabilities (scale, softcap, window). Attention sinks are not included, because they
    enter when all pairs are merged."""
    documents: Documents
    """Documents of all tokens of the microbatch, over all context ranks."""
    dropout: float
    dropout_seed: int

    @property
    def query_rows(self) -> slice:
        """Slice of the queries within the local tokens of their context rank."""
        return slice(self.query_offset, self.query_offset + self.query_range[1] - self.query_range[0])

    @property
    def key_rows(self) -> slice:
        """Slice of the keys within the local tokens of their context rank."""
        return slice(self.key_offset, self.key_offset + self.key_range[1] - self.key_range[0])

    def uses_flash(self, q: torch.Tensor, v: torch.Tensor) -> bool:
        """Return whether flash attention computes attention between the two ranges. Otherwise attention is computed block by block.

        Args:
            q, v: queries and values of the pair.
        """
        if len(self.documents.cu_seqlens) - 1 > MAX_SEQUENCES_PER_CALL:
            return False
        return flash_range_pairs.supports(self.query_range, self.key_range, q, v, self.score_spec, self.dropout)

    @property
    def blockwise_options(self) -> BlockAttentionOptions:
        """Options for computing the pair block by block (`block_attention_forward`)."""
        relative_start, key_start = self.query_range[0] - self.key_range[0], self.key_range[0]
        mask = CausalMask(self.score_spec.window, self.documents if self.documents.is_packed else None, relative_start, key_start)
        return BlockAttentionOptions(self.score_spec, mask, self.dropout, self.dropout_seed, has_partial_keys=True)


def name_pair_kernel(score_spec: ScoreSpec, q: torch.Tensor, v: torch.Tensor, dropout: float) -> str:
    """Return the name, as in log lines, of the kernel that computes attention between two token ranges in context parallelism.

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
    """Return whether any query of one token range may attend to any key of another, in any sample of the microbatch.

    Args:
        window: number of earlier tokens that a token may attend to; None for all.
    """
    min_visible_key = (
        documents.get_min_document_start(query_range[0])
        if window is None
        else max(documents.get_min_document_start(query_range[0]), query_range[0] - window)
    )
    return key_range[0] < query_range[1] and key_range[1] > min_visible_key


class KeyValueGrads(NamedTuple):
    """Gradients of the keys and values of one context rank, summed over pairs of token ranges. Both tensors are views of one
    communication buffer."""

    k: torch.Tensor
    """Gradient of the keys: [microbatch * key-value heads, tokens of the rank, channels]."""
    v: torch.Tensor
    """Gradient of the values: [microbatch * key-value heads, tokens of the rank, channels]."""

    @classmethod
    def from_buffer(cls, buffer: torch.Tensor, head_size: int) -> KeyValueGrads:
        """View a communication buffer as the gradients of keys and values.

        Args:
            buffer: [tokens of the rank, microbatch, key-value heads, channels of a key and of a value].
            head_size: channels of a key.
        """
        grads = buffer.flatten(1, 2).transpose(0, 1)
        return cls(grads[..., :head_size], grads[..., head_size:])

    def select_pair(self, pair: RangePair, grad_q: torch.Tensor) -> AttentionGrads:
        """Return views of the gradients that belong to the queries and keys of one pair of token ranges.

        Args:
            grad_q: gradients of all local queries.
        """
        return AttentionGrads(grad_q[pair.query_rows], self.k[:, pair.key_rows], self.v[:, pair.key_rows])


def attend_pair(pair: RangePair, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of the queries of one token range to the keys and values of another.

    Args:
        q: [q, b, g, r, d]: queries, microbatch, key-value heads, query heads per key-value head, channels.
        k, v: [k, b, g, d] and [k, b, g, e].

    Returns:
        the output [q, b, g, r, e], and the logsumexp of each query's scores, [q, b, g, r], minus infinity for a query that sees no
        key. The output has the dtype of `q` if flash attention computes it, otherwise at least float32.
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
    """Compute the gradients of attention between two token ranges, and add them to `grads`.

    Args:
        grad: gradient of the attention output, [q, b, g, r, e]: queries, microbatch, key-value heads, query heads per key-value
            head, channels.
        out: attention output over all keys that a query sees, also those of other ranges.
        logsumexp: logsumexp of the scores over all keys that a query sees, [q, b, g, r].
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
