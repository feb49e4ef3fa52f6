"""Output layer and cross entropy as one operation over chunks of tokens, so that the full logits of a microbatch never exist.

Forward saves the hidden states and a few values per token. Backward recomputes the logits [c, v/tp] of each chunk of `c` tokens and
overwrites them with their gradient. From this gradient it computes the gradient of the hidden states and adds the chunk's
contribution to the weight gradient. The weight's gradient sink is opened once for all chunks. Forward and backward together compute
four matrix products of the output layer's size; the unchunked loss computes three.

Communication: that of a column-parallel layer (`linear.py`) and that of the unchunked loss (`cross_entropy.py`). The loss needs one
reduction of one value per token and one of two values per token, however many chunks there are.

Shapes: `s` sequence, `b` microbatch, `h` hidden size, `v` padded vocabulary, `tp` tensor ranks, `c` tokens per chunk.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from megatron.parallel.accumulate import accumulate_product_sum
from megatron.parallel.collectives import Pending, all_gather, start_all_reduce, start_reduce_scatter
from megatron.parallel.matmul import matmul_into
from megatron.tensor_parallel.cross_entropy import (
    LogitGradTerms,
    LogitStatistics,
    VocabShard,
    combine_over_vocab,
    compute_total_loss_grad,
    sum_losses,
    write_logit_grads,
)

# ---- Loops whose iterations do the same work on tensors of the same shapes. A run executes every iteration. The planner, whose
# tensors have no values, executes three of them and counts the second as many times as a run would execute it.

T = TypeVar("T")

RepeatContext = Callable[[int], contextlib.AbstractContextManager[None]]
"""Function that returns a context manager. A dry run counts the operations within that context as many times as the argument
says."""

_repeats: RepeatContext | None = None


@contextlib.contextmanager
def sample_iterations(repeats: RepeatContext) -> Iterator[None]:
    """Within the context, make `iterate_chunks` yield only the first, the second and the last chunk, so that a dry run of the loss
    is short.

    Args:
        repeats: called with the number of equal chunks for which the second chunk stands. Returns a context manager, within which
            the second chunk is processed.
    """
    global _repeats
    previous, _repeats = _repeats, repeats
    try:
        yield
    finally:
        _repeats = previous


def iterate_chunks(chunks: Sequence[T]) -> Iterator[T]:
    """Yield the chunks of a microbatch's tokens. Within `sample_iterations`, yield only the first, the second and the last chunk.

    All chunks between the first and the last must have the same size. The loop over the chunks must free in each iteration all
    memory that it allocates.
    """
    if _repeats is None or len(chunks) <= 3:
        yield from chunks
        return
    yield chunks[0]
    with _repeats(len(chunks) - 2):
        yield chunks[1]
    yield chunks[-1]


def _build_chunk_slices(num_tokens: int, chunk_size: int) -> list[slice]:
    return [slice(start, min(start + chunk_size, num_tokens)) for start in range(0, num_tokens, chunk_size)]


class _ChunkedLoss(torch.autograd.Function):
    """Autograd function of `chunked_loss`. Saves the hidden states and a few values per token; backward recomputes the logits of
    each chunk."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: torch.Tensor,
        weight: nn.Parameter,
        labels: torch.Tensor,
        mask: torch.Tensor,
        shard: VocabShard,
        sequence_parallel: bool,
        chunk_size: int,
    ) -> torch.Tensor:
        hidden = (all_gather(x, shard.group) if sequence_parallel else x).flatten(0, -2)
        statistics = LogitStatistics(labels.reshape(-1), shard, x.dtype)
        logits = hidden.new_empty(min(chunk_size, len(hidden)), len(weight))
        for chunk in iterate_chunks(_build_chunk_slices(len(hidden), chunk_size)):
            statistics.consume_logits(matmul_into(logits[: chunk.stop - chunk.start], hidden[chunk], weight.t()), chunk)
        log_sum, target_logit = statistics.log_sum_and_target()
        log_z, target_logit = combine_over_vocab(log_sum, target_logit, shard.group)
        mask = mask.reshape(-1).to(statistics.dtype)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(x, *statistics.compute_grad_terms(log_sum, log_z, mask))
        # Parameters are leaves and outlive the graph, so they are not saved. Their gradient sink is found by identity.
        ctx.weight, ctx.shard, ctx.sequence_parallel, ctx.chunk_size = weight, shard, sequence_parallel, chunk_size
        return sum_losses(log_z, target_logit, mask, shard.z_coeff)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None, None]:  # type: ignore[override]
        x, *saved = ctx.saved_tensors
        weight, shard, group = ctx.weight, ctx.shard, ctx.shard.group
        full_x = all_gather(x, group) if ctx.sequence_parallel else x
        hidden, grad_input = full_x.flatten(0, -2), torch.empty_like(full_x)
        grad_hidden = grad_input.view(hidden.shape)
        grad_terms = LogitGradTerms(*saved).scale(compute_total_loss_grad(grad))
        pending_reductions: list[Pending] = []

        def iter_weight_grad_factors() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            logits = hidden.new_empty(min(ctx.chunk_size, len(hidden)), len(weight))
            for chunk in iterate_chunks(_build_chunk_slices(len(hidden), ctx.chunk_size)):
                chunk_logits = matmul_into(logits[: chunk.stop - chunk.start], hidden[chunk], weight.t())
                write_logit_grads(chunk_logits, shard, grad_terms.select(chunk))
                matmul_into(grad_hidden[chunk], chunk_logits, weight)
                if chunk.stop == len(hidden):  # overlaps with the last chunk's weight gradient
                    pending_reductions.append(
                        (start_reduce_scatter if ctx.sequence_parallel else start_all_reduce)(grad_input, group)
                    )
                yield chunk_logits, hidden[chunk]

        accumulate_product_sum(weight, iter_weight_grad_factors())
        return pending_reductions[0].wait(), None, None, None, None, None, None


def chunked_loss(
    x: torch.Tensor,
    weight: nn.Parameter,
    labels: torch.Tensor,
    mask: torch.Tensor,
    shard: VocabShard,
    *,
    sequence_parallel: bool,
    chunk_size: int,
) -> torch.Tensor:
    """Compute the output layer and the loss chunk by chunk: the sum over tokens of mask x loss, for the logits x weight^T.

    Args:
        x: hidden states [s, b, h], or [s/tp, b, h] with `sequence_parallel`.
        weight: this rank's shard of the output layer, [v/tp, h].
        labels: token ids [s, b] in the full vocabulary.
        mask: weight of each token's loss [s, b].
        shard: this rank's columns of the logits, and the options of the loss.
        sequence_parallel: whether tensor ranks split the sequence of `x`, so that it must be gathered.
        chunk_size: tokens per chunk; the last chunk may have fewer.

    Returns:
        the sum of the cross entropy, a scalar; with a z-loss [2], the sums of the cross entropy and of the z-loss. In float32 or
        wider and equal on every rank of the tensor group.
    """
    return _ChunkedLoss.apply(x, weight, labels, mask, shard, sequence_parallel, chunk_size)
