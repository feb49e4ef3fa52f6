"""Flash attention of a range pair: the queries of one token range attend to the keys of another.

This module calls torch's operations that return the logsumexp of each query's scores and, in backward, take the logsumexp over all
keys. So the results of several pairs can be merged, and the gradient of each pair is exact.

The visible tokens of a pair form a list of sequences. If the two ranges are equal, the sequences are the documents of the range,
with a causal mask. Otherwise the keys are earlier than the queries. Then each sample has at most one sequence, the document that
lies in both ranges, without a mask.

Shapes: `q` queries of the pair, `k` keys of the pair, `b` microbatch, `g` key-value heads, `r` query heads per key-value head, `n =
g * r` query heads, `d` head size, `T` tokens of all sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from megatron.attention.documents import Documents, TokenRange, copy_to_device, flash_supports
from megatron.parallel.torch_private import flash_attention_backward, flash_attention_forward
from megatron.spec.layers import ScoreSpec

_UNLIMITED = -1
"""Window size that stands for all tokens."""


class PackedSide(NamedTuple):
    """Queries, or keys, of a flash-attention call: the tokens of all sequences that the call computes, concatenated."""

    rows: torch.Tensor | None
    """Index in the flattened [queries, microbatch] (or [keys, microbatch]) of each concatenated token. None for all tokens, sample
    after sample."""
    cu_seqlens: torch.Tensor
    """Offset of each sequence in the concatenation, and at the end the total number of tokens: int32."""
    max_seqlen: int

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate the tokens of all sequences: from [tokens, microbatch, ...] to [concatenated tokens, ...]."""
        return x.transpose(0, 1).flatten(0, 1) if self.rows is None else x.flatten(0, 1).index_select(0, self.rows)

    def unpack(self, x: torch.Tensor, like: torch.Tensor, fill_value: float = 0.0) -> torch.Tensor:
        """Undo `pack`: from [concatenated tokens, ...] to [tokens, microbatch, ...].

        Args:
            like: tensor whose first two sizes are those of the result.
            fill_value: value for tokens that belong to no sequence.
        """
        num_tokens, batch_size = like.shape[:2]
        if self.rows is None:
            return x.unflatten(0, (batch_size, num_tokens)).transpose(0, 1)
        out = x.new_full((num_tokens * batch_size, *x.shape[1:]), fill_value)
        return out.index_copy_(0, self.rows, x).unflatten(0, (num_tokens, batch_size))


class VisibleSequences(NamedTuple):
    """Queries and keys of a flash-attention call that computes attention between two token ranges. Each sequence of queries attends
    to the sequence of keys with the same index."""

    queries: PackedSide
    keys: PackedSide
    is_causal: bool

    @classmethod
    def of(cls, queries: TokenRange, keys: TokenRange, documents: Documents) -> VisibleSequences:
        """Find the sequences of queries and keys that attend to each other.

        Args:
            queries, keys: token ranges. They are equal, or the keys are earlier and at least one key is visible.
        """
        sample_starts = range(0, documents.batch_size * documents.sample_length, documents.sample_length)
        device = documents.cu_seqlens_device.device
        if queries == keys:
            inner_bounds = [documents.find_document_starts(start + queries[0], start + queries[1]) for start in sample_starts]
            num_tokens = queries[1] - queries[0]
            shared_side = _build_side(None, np.concatenate([np.diff([0, *ends, num_tokens]) for ends in inner_bounds]), device)
            return cls(shared_side, shared_side, is_causal=True)
        visible_pairs = [
            (sample, ranges)
            for sample, start in enumerate(sample_starts)
            if (ranges := _find_visible_ranges(queries, keys, documents, start)) is not None
        ]
        sees_all = len(visible_pairs) == documents.batch_size and all(ranges == (queries, keys) for _, ranges in visible_pairs)

        def select_side(index: int, token_range: TokenRange) -> PackedSide:
            sample_ranges = [(sample, ranges[index]) for sample, ranges in visible_pairs]
            rows = [
                (np.arange(*visible_range) - token_range[0]) * documents.batch_size + sample
                for sample, visible_range in sample_ranges
            ]
            return _build_side(
                None if sees_all else np.concatenate(rows), np.array([end - first for _, (first, end) in sample_ranges]), device
            )

        return cls(select_side(0, queries), select_side(1, keys), is_causal=False)


def _find_visible_ranges(
    queries: TokenRange, keys: TokenRange, documents: Documents, sample_start: int
) -> tuple[TokenRange, TokenRange] | None:
    """Find the document of a sample that lies in both token ranges, where the keys are earlier than the queries.

    Args:
        sample_start: offset of the sample in the concatenated samples.

    Returns:
        the queries and the keys that belong to this document; None if no document lies in both ranges.
    """
    document_start, document_end = documents.find_document(sample_start + queries[0])
    if document_start - sample_start >= keys[1]:
        return None
    return (queries[0], min(queries[1], document_end - sample_start)), (max(keys[0], document_start - sample_start), keys[1])


def _build_side(rows: np.ndarray | None, lengths: np.ndarray, device: torch.device) -> PackedSide:
    """Build the packed queries or keys.

    Args:
        rows: index of each token in the flattened [tokens, microbatch]; None for all tokens.
        lengths: length of each sequence.
    """
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return PackedSide(
        None if rows is None else copy_to_device(rows, device), copy_to_device(cu_seqlens, device), int(lengths.max())
    )


def supports(
    queries: TokenRange, keys: TokenRange, q: torch.Tensor, v: torch.Tensor, score_spec: ScoreSpec, dropout: float
) -> bool:
    """Return whether flash attention supports the queries of one token range and the keys of another.

    It must support the tensors and the dropout (`flash_supports`), and there must be no softcap. With a window, the two ranges must
    be equal, or every key must lie within the window of every query.
    """
    crosses_window = score_spec.window is not None and queries != keys and queries[1] - 1 - keys[0] > score_spec.window
    return flash_supports(q, v, dropout) and score_spec.softcap is None and not crosses_window


def flash_pair_forward(
    queries: TokenRange,
    keys: TokenRange,
    documents: Documents,
    score_spec: ScoreSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute flash attention of the queries of one token range to the keys and values of another.

    Args:
        queries, keys: the token ranges.
        q: [q, b, g, r, d]: queries, microbatch, key-value heads, query heads per key-value head, channels.
        k, v: [k, b, g, d].

    Returns:
        the output [q, b, g, r, d], and the logsumexp of the scores [q, b, g, r], minus infinity for a query that sees no key.
    """
    sequences = documents.get_cached_for_pair(queries, keys, VisibleSequences.of)
    packed = (sequences.queries.pack(q.flatten(2, 3)), sequences.keys.pack(k), sequences.keys.pack(v))
    out, packed_logsumexp = varlen_forward(*packed, sequences, _get_window_size(score_spec, sequences), score_spec.scale)
    head_shape = q.shape[2:4]
    logsumexp = sequences.queries.unpack(packed_logsumexp.t(), q, -torch.inf)
    return sequences.queries.unpack(out, q).unflatten(2, head_shape), logsumexp.unflatten(2, head_shape)


def flash_pair_backward(
    queries: TokenRange,
    keys: TokenRange,
    documents: Documents,
    score_spec: ScoreSpec,
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of the queries of one token range and of the keys and values of another.

    Args:
        queries, keys: the token ranges.
        grad, out: gradient of the attention output, and the output, over all keys that a query sees, also those of other ranges:
            [q, b, g, r, d].
        q: [q, b, g, r, d]: queries, microbatch, key-value heads, query heads per key-value head, channels.
        k, v: [k, b, g, d].
        logsumexp: logsumexp of the scores over all keys that a query sees, [q, b, g, r].

    Returns:
        the gradients of q, k and v.
    """
    sequences = documents.get_cached_for_pair(queries, keys, VisibleSequences.of)
    packed_grad, packed_q, packed_out = (sequences.queries.pack(x.flatten(2, 3)) for x in (grad, q, out))
    packed_logsumexp = sequences.queries.pack(logsumexp.flatten(2, 3)).t().contiguous()
    packed_inputs = (packed_grad, packed_q, sequences.keys.pack(k), sequences.keys.pack(v), packed_out, packed_logsumexp)
    grad_q, grad_k, grad_v = varlen_backward(*packed_inputs, sequences, _get_window_size(score_spec, sequences), score_spec.scale)
    return (
        sequences.queries.unpack(grad_q, q).unflatten(2, q.shape[2:4]),
        sequences.keys.unpack(grad_k, k),
        sequences.keys.unpack(grad_v, v),
    )


def _get_window_size(score_spec: ScoreSpec, sequences: VisibleSequences) -> tuple[int, int]:
    """Return to how many tokens on the left and on the right a token attends, as flash attention expects it: -1 for no limit."""
    if not sequences.is_causal:
        return _UNLIMITED, _UNLIMITED
    return _UNLIMITED if score_spec.get_effective_window(sequences.queries.max_seqlen) is None else score_spec.window or 0, 0


def varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sequences: VisibleSequences,
    window_size: tuple[int, int],
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call torch's flash attention on packed queries, keys and values, [tokens, heads, channels].

    Returns:
        the output [tokens, heads, channels], and the logsumexp of the scores in float32, [heads, tokens].
    """
    varlen_args = (sequences.queries.cu_seqlens, sequences.keys.cu_seqlens, sequences.queries.max_seqlen, sequences.keys.max_seqlen)
    out, logsumexp, *_ = flash_attention_forward(
        *(q, k, v, *varlen_args, 0.0, sequences.is_causal),
        return_debug_mask=False,
        scale=scale,
        window_size_left=window_size[0],
        window_size_right=window_size[1],
    )
    return out, logsumexp


def varlen_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    sequences: VisibleSequences,
    window_size: tuple[int, int],
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Call the backward of torch's flash attention. Returns the gradients of queries, keys and values, in the shapes of q, k and
    v."""
    varlen_args = (sequences.queries.cu_seqlens, sequences.keys.cu_seqlens, sequences.queries.max_seqlen, sequences.keys.max_seqlen)
    # Without dropout, the state of the random generator is not used.
    rng_state, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = flash_attention_backward(
        *(grad, q, k, v, out, logsumexp, *varlen_args, 0.0, sequences.is_causal, rng_state, unused),
        scale=scale,
        window_size_left=window_size[0],
        window_size_right=window_size[1],
    )
    return grads
