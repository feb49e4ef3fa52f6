"""Causal attention computed in blocks of queries, for cases that torch's kernels do not support: windows, capped scores and
attention sinks.

No [s, s] tensor is allocated. A block of queries is multiplied only by the keys that the mask lets it see, and backward recomputes
the probabilities.

Shapes: `s` sequence, `b` microbatch, `g` key-value heads, `r` query heads per key-value head, `d` size of a query head, `e` size of
a value head. Within a block: `q` queries, `k` keys, `B = b * g`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from megatron.attention.documents import Documents
from megatron.parallel.matmul import has_float32_output
from megatron.parallel.random import seed_device
from megatron.spec.layers import ScoreSpec

_MAX_QUERIES_PER_BLOCK = 128
"""Largest number of queries in a block. With more, more scores outside of a window would be computed; with fewer, there would
be more kernel launches."""
_MAX_SCORES_PER_BLOCK = 1 << 25
"""Largest number of scores in a block. A block has fewer queries if they see many keys."""


class CausalMask(NamedTuple):
    """Causal mask: which keys a query may attend to, optionally limited to a window and to the document of the query."""

    window: int | None
    """Number of earlier tokens that a token may attend to; None for all."""
    documents: Documents | None
    """Documents that attention does not cross; None if a token may attend to its complete sample."""
    query_offset: int = 0
    """Position of the first query minus the position of the first key."""
    key_offset: int = 0
    """Position of the first key in its sample."""

    def iterate_blocks(self, num_queries: int, num_keys: int, scores_per_pair: int) -> Iterator[tuple[slice, slice]]:
        """Divide the score matrix (queries times keys) into blocks of consecutive queries. Yield for each block its slice of
        queries and the slice of keys that these queries may attend to.

        Blocks without visible keys are left out.

        Args:
            scores_per_pair: number of scores of one query token and one key token, over all samples and heads.
        """
        max_keys = num_keys if self.window is None else min(num_keys, self.window + _MAX_QUERIES_PER_BLOCK)
        block_size = max(1, min(_MAX_QUERIES_PER_BLOCK, _MAX_SCORES_PER_BLOCK // (scores_per_pair * max_keys)))
        for start in range(0, num_queries, block_size):
            block = slice(start, min(start + block_size, num_queries))
            first_key = 0 if self.window is None else max(0, self.query_offset + start - self.window)
            if self.documents is not None:
                first_key = max(
                    first_key, self.documents.get_min_document_start(self.key_offset + self.query_offset + start) - self.key_offset
                )
            if first_key < (end_key := min(num_keys, self.query_offset + block.stop)):
                yield block, slice(first_key, end_key)

    def compute_mask(self, queries: slice, keys: slice, device: torch.device) -> torch.Tensor:
        """Compute the mask of a block: True where a query must not attend to a key.

        Returns:
            [samples, queries, keys], or [1, queries, keys] if all samples have the same mask.
        """
        query_positions = torch.arange(self.query_offset + queries.start, self.query_offset + queries.stop, device=device)[:, None]
        key_positions = torch.arange(keys.start, keys.stop, device=device)
        is_masked = key_positions > query_positions
        if self.window is not None:
            is_masked |= key_positions < query_positions - self.window
        if self.documents is None:
            return is_masked[None]
        offset = self.key_offset + self.query_offset
        starts = self.documents.document_starts[offset + queries.start : offset + queries.stop]  # [q, b]
        return is_masked | (key_positions + self.key_offset < starts.t()[..., None])

    def is_unmasked(self, queries: slice, keys: slice) -> bool:
        """Return whether the mask hides no key of a block from any query. If samples have documents, the result is always False,
        because the document boundaries are not examined."""
        max_distance = self.query_offset + queries.stop - 1 - keys.start
        return (
            self.documents is None
            and keys.stop <= self.query_offset + queries.start + 1
            and (self.window is None or max_distance <= self.window)
        )


class BlockAttentionOptions(NamedTuple):
    """Settings of a blockwise attention call: everything except its tensors."""

    score_spec: ScoreSpec
    mask: CausalMask
    dropout: float = 0.0
    dropout_seed: int = 0
    """Seed of the dropout mask of the first block of queries and keys. Block i has the seed `dropout_seed` + i."""
    has_partial_keys: bool = False
    """Whether the call has only some of the keys, so that a query may see none of them."""


def block_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, options: BlockAttentionOptions
) -> torch.Tensor:
    """Compute softmax(score(q k^T)) v block by block. Everything except the matrix products is computed in at least float32.

    Args:
        q: queries, [s, b, g, r, d]: sequence, microbatch, key-value heads, query heads per key-value head, channels.
        k, v: keys [keys, b, g, d] and values [keys, b, g, e].
        sinks: attention sinks, one more logit in each head's softmax, [g * r]; None for no learnable sinks.

    Returns:
        [s, b, g * r * e].
    """
    out: torch.Tensor = _BlockAttention.apply(q, k, v, sinks, options)
    return out.flatten(2)


def single_token_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_visible: torch.Tensor | None,
    score_spec: ScoreSpec,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute `block_attention` for one new token of each sample, which attends to the tokens in a key-value cache. There is no
    backward.

    Args:
        q: queries, [b, g, r, d]: microbatch, key-value heads, query heads per key-value head, channels.
        k, v: cached keys [b, g, keys, d] and values [b, g, keys, e]: the tokens of the window.
        is_visible: [b, 1, 1, keys], False for cache slots without a token; None if all slots have one.

    Returns:
        [b, g, r, e].
    """
    masked_scores = _scale_and_cap(_matmul(q.flatten(0, 1), k.flatten(0, 1).mT), score_spec, q.shape[-1]).view(*q.shape[:3], -1)
    if is_visible is not None:
        masked_scores.masked_fill_(~is_visible, -torch.inf)
    probs, _ = _softmax_in_place(masked_scores[:, :, None], score_spec, sinks)
    return _matmul(probs.flatten(0, 2), v.flatten(0, 1)).view(*q.shape[:3], -1)


def compute_max_logits(q: torch.Tensor, k: torch.Tensor, options: BlockAttentionOptions) -> torch.Tensor:
    """Compute the largest score of each head, over all samples and all pairs of a query and a key that it may attend to.

    Args:
        q: queries, [s, b, g, r, d]: sequence, microbatch, key-value heads, query heads per key-value head, channels.
        k: keys, [keys, b, g, d].

    Returns:
        [g * r], in at least float32.
    """
    s, b, g, r, _ = q.shape
    max_logits = q.new_full((g, r), -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    for queries, keys in options.mask.iterate_blocks(s, len(k), b * g * r):
        scores = _compute_scores(q[queries], k[keys], options)
        _apply_mask(scores, options, queries, keys)
        torch.maximum(max_logits, scores.view(b, g, -1, r, scores.shape[-1]).amax((0, 2, 4)), out=max_logits)
    return max_logits.flatten()


class _BlockAttention(torch.autograd.Function):
    """Autograd function of `block_attention`. Saves its inputs, its output and the logsumexp of the scores of each query."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, options: BlockAttentionOptions
    ) -> torch.Tensor:
        out = q.new_empty((*q.shape[:4], v.shape[-1]))
        logsumexp = q.new_empty(q.shape[:4], dtype=torch.promote_types(q.dtype, torch.float32))
        block_attention_forward(q, k, v, options, out, logsumexp, sinks)
        ctx.save_for_backward(q, k, v, sinks, out, logsumexp)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        q, k, v, sinks, out, logsumexp = ctx.saved_tensors
        b, g, r = q.shape[1:4]
        grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
        # Gradients of keys and values are summed over blocks in the dtype of the softmax.
        grad_k, grad_v = (torch.zeros((b * g, len(x), x.shape[-1]), dtype=logsumexp.dtype, device=x.device) for x in (k, v))
        grad_sinks = None if sinks is None else torch.zeros((g, r), dtype=logsumexp.dtype, device=q.device)
        grads = AttentionGrads(grad_q, grad_k, grad_v, grad_sinks)
        block_attention_backward(grad, q, k, v, ctx.options, out, logsumexp, grads, sinks)
        grads_kv = (total.view(b, g, len(x), -1).permute(2, 0, 1, 3).to(x.dtype) for total, x in ((grad_k, k), (grad_v, v)))
        return grad_q, *grads_kv, None if sinks is None or grad_sinks is None else grad_sinks.flatten().to(sinks.dtype), None


class AttentionGrads(NamedTuple):
    """Buffers that receive the gradients of one attention call."""

    q: torch.Tensor
    """Gradient of the queries: [sequence, microbatch, key-value heads, query heads per key-value head, channels].
    `block_attention_backward` overwrites this buffer or, with `accumulate_grad_q`, adds to it."""
    k: torch.Tensor
    """Gradient of the keys, [B, keys, channels], with B = microbatch * key-value heads. In the dtype of the softmax (at least
    float32). The backward adds to it."""
    v: torch.Tensor
    """Gradient of the values, [B, keys, channels], with B = microbatch * key-value heads. In the dtype of the softmax (at least
    float32). The backward adds to it."""
    sinks: torch.Tensor | None = None
    """Gradient of the attention sinks, [key-value heads, query heads per key-value head], in the dtype of the softmax (at least
    float32). The backward adds to it. None if the sinks are not learnable, or not part of the call."""


def block_attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: BlockAttentionOptions,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> None:
    """Compute attention block by block, and write the output and the logsumexp of the scores into given tensors.

    Blocks of queries without visible keys are not written. In other blocks, a query that sees no key gets the output zero and the
    logsumexp minus infinity.

    Args:
        q: queries, [s, b, g, r, d]: sequence, microbatch, key-value heads, query heads per key-value head, channels.
        k, v: keys [keys, b, g, d] and values [keys, b, g, e].
        out: output [s, b, g, r, e].
        logsumexp: logarithm of the sum of exp(score) of each query, [s, b, g, r].
        sinks: [g * r]; None if the softmax has no learnable sinks, or if another call includes them.
    """
    s, b, g, r, _ = q.shape
    for block_index, (queries, keys) in enumerate(options.mask.iterate_blocks(s, len(k), b * g * r)):
        scores = _compute_scores(q[queries], k[keys], options)
        _apply_mask(scores, options, queries, keys)
        probs, block_logsumexp = _softmax_in_place(
            scores.view(b, g, -1, r, scores.shape[-1]), options.score_spec, sinks, has_partial_keys=options.has_partial_keys
        )
        if options.dropout:
            probs.mul_(_dropout_mask(probs, options, block_index))
        block_out = _matmul(probs.flatten(2, 3).flatten(0, 1), _flatten_heads(v[keys]))
        out[queries] = block_out.view(b, g, -1, r, v.shape[-1]).permute(2, 0, 1, 3, 4)
        logsumexp[queries] = block_logsumexp.permute(2, 0, 1, 3)


def block_attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: BlockAttentionOptions,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    grads: AttentionGrads,
    sinks: torch.Tensor | None = None,
    *,
    accumulate_grad_q: bool = False,
) -> None:
    """Compute the gradients of `block_attention_forward`.

    Args:
        grad: gradient of the output, [s, b, g, r, e]: sequence, microbatch, key-value heads, query heads per key-value head,
            channels of a value.
        out, logsumexp: output [s, b, g, r, e] and logsumexp [s, b, g, r] over all keys that a query sees, including keys outside of
            this call.
        grads: buffers that receive the gradients.
        accumulate_grad_q: add to the gradients of the queries instead of overwriting them.
    """
    s, b, g, r, d = q.shape
    for block_index, (queries, keys) in enumerate(options.mask.iterate_blocks(s, len(k), b * g * r)):
        scores = _compute_scores(q[queries], k[keys], options)
        softcap_grad = None if options.score_spec.softcap is None else 1 - (scores / options.score_spec.softcap).square_()
        _apply_mask(scores, options, queries, keys)
        block_logsumexp = logsumexp[queries].permute(1, 2, 0, 3)  # [b, g, q, r]
        probs = scores.view(b, g, -1, r, scores.shape[-1]).sub_(block_logsumexp[..., None]).exp_().view(scores.shape)
        block_grad, block_out = grad[queries], out[queries]
        delta = (block_grad.to(logsumexp.dtype) * block_out).sum(-1).permute(1, 2, 0, 3)  # [b, g, q, r]
        if grads.sinks is not None:
            grads.sinks.sub_(((_broadcast_sinks(sinks, block_logsumexp) - block_logsumexp).exp_() * delta).sum((0, 2)))
        grad_rows = _flatten_queries(block_grad)
        grad_probs = _matmul(grad_rows, _flatten_heads(v[keys]).mT)
        dropout_mask = _dropout_mask(probs, options, block_index) if options.dropout else None
        if dropout_mask is not None:
            grad_probs.mul_(dropout_mask)
        grads.v[:, keys] += _matmul((probs if dropout_mask is None else probs * dropout_mask).mT, grad_rows)
        grad_scores = probs.mul_(grad_probs.sub_(delta.flatten(2).flatten(0, 1)[..., None]))
        if softcap_grad is not None:
            grad_scores.mul_(softcap_grad)
        grad_scores.mul_(_softmax_scale(options.score_spec, d))
        block_grad_q = _matmul(grad_scores, _flatten_heads(k[keys])).view(b, g, -1, r, d).permute(2, 0, 1, 3, 4)
        if accumulate_grad_q:
            grads.q[queries] += block_grad_q
        else:
            grads.q[queries] = block_grad_q
        grads.k[:, keys] += _matmul(grad_scores.mT, _flatten_queries(q[queries]))


def _softmax_scale(score_spec: ScoreSpec, head_size: int) -> float:
    return head_size**-0.5 if score_spec.scale is None else score_spec.scale


def _compute_scores(q: torch.Tensor, k: torch.Tensor, options: BlockAttentionOptions) -> torch.Tensor:
    """Multiply queries [q, b, g, r, d] by keys [k, b, g, d], then scale the products and apply the softcap, if there is one.

    Returns:
        the scores, [b * g, q * r, k].
    """
    return _scale_and_cap(_matmul(_flatten_queries(q), _flatten_heads(k).mT), options.score_spec, q.shape[-1])


def _scale_and_cap(logits: torch.Tensor, score_spec: ScoreSpec, head_size: int) -> torch.Tensor:
    """Multiply the products q k^T by the softmax scale and apply the softcap, if there is one. In place."""
    logits.mul_(_softmax_scale(score_spec, head_size))
    return logits if score_spec.softcap is None else logits.div_(score_spec.softcap).tanh_().mul_(score_spec.softcap)


def _softmax_in_place(
    scores: torch.Tensor, score_spec: ScoreSpec, sinks: torch.Tensor | None, *, has_partial_keys: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn scores [b, g, q, r, k] into probabilities in place (softmax over the keys k), and compute their logsumexp.

    Args:
        sinks: learnable attention sinks, or None.
        has_partial_keys: whether all scores of a query may be minus infinity. The probabilities of this query become zero, and its
            logsumexp minus infinity.

    Returns:
        the probabilities, and the logsumexp [b, g, q, r].
    """
    row_max = scores.amax(-1)
    if has_partial_keys:
        row_max.clamp_(min=torch.finfo(row_max.dtype).min)
    sink_scores = None if score_spec.softmax == "vanilla" else _broadcast_sinks(sinks, row_max)
    if sink_scores is not None:
        row_max = torch.maximum(row_max, sink_scores)
    denominator = scores.sub_(row_max[..., None]).exp_().sum(-1)
    if sink_scores is not None:
        denominator += (sink_scores - row_max).exp_()
    scores.div_(
        (denominator.clamp(min=1.0) if has_partial_keys else denominator)[..., None]
    )  # the sum of a row with visible keys is at least exp(0)
    return scores, denominator.log_().add_(row_max)


def _apply_mask(scores: torch.Tensor, options: BlockAttentionOptions, queries: slice, keys: slice) -> None:
    """Set the scores of masked keys to minus infinity. The scores have the shape [b * g, q * r, k]."""
    if options.mask.is_unmasked(queries, keys):
        return
    is_masked = options.mask.compute_mask(queries, keys, scores.device)  # [b or 1, q, k]
    num_queries, num_keys = is_masked.shape[1:]
    num_samples = len(is_masked)
    scores.view(num_samples, -1, num_queries, scores.shape[1] // num_queries, num_keys).masked_fill_(
        is_masked[:, None, :, None], -torch.inf
    )


def _broadcast_sinks(sinks: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Return the attention sink of each head, broadcastable to `like` ([b, g, q, r]). The sinks are zero if they are not
    learnable."""
    if sinks is None:
        return like.new_zeros(())
    return sinks.to(like.dtype).view(1, like.shape[1], 1, like.shape[3])


def _dropout_mask(probs: torch.Tensor, options: BlockAttentionOptions, block_index: int) -> torch.Tensor:
    """Draw the dropout mask of a block of probabilities: 0 for a dropped probability, 1 / (1 - dropout) for any other."""
    seed_device(probs.device, options.dropout_seed + block_index)
    return torch.empty_like(probs).bernoulli_(1 - options.dropout).div_(1 - options.dropout)


def _flatten_queries(x: torch.Tensor) -> torch.Tensor:
    """Reshape queries or gradients [q, b, g, r, d] to [B, q * r, d], with B = b * g (samples times key-value heads)."""
    return x.permute(1, 2, 0, 3, 4).flatten(2, 3).flatten(0, 1)


def _flatten_heads(x: torch.Tensor) -> torch.Tensor:
    """Reshape keys or values [k, b, g, d] to [B, k, d], with B = b * g (samples times key-value heads)."""
    return x.permute(1, 2, 0, 3).flatten(0, 1)


def _matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply batches of matrices. The sums and the returned products are in at least float32.

    16-bit matrices are multiplied by tensor cores, which sum in float32. Where the device does not support this, such as on a CPU,
    the matrices are first converted to float32.
    """
    half_dtypes = {a.dtype, b.dtype} & {torch.float16, torch.bfloat16}
    if not half_dtypes:
        return torch.bmm(a, b)
    (dtype,) = half_dtypes
    if not (a.is_cuda and has_float32_output(a.device, dtype)):
        return torch.bmm(a.float(), b.float())
    return torch.bmm(a.to(dtype), b.to(dtype), out_dtype=torch.float32)
