"""A part of attention: queries of a run of neighbouring tokens against keys of another, where a sequence is shared out.

Shapes: `q` queries of the run, `k` its keys, `b` microbatch, `g` key-value heads, `r` query heads of each, `B = b * g`, `d` size of
a query or key head, `e` of a value head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron.attention import flash_parts
from megatron.attention.backends import BLOCK_BY_BLOCK
from megatron.attention.blocks import Call, Grads, Reach, attend_by_blocks, differentiate_by_blocks
from megatron.attention.documents import MOST_AT_ONCE, Documents, Run
from megatron.spec.layers import ScoreSpec


class RunPair(NamedTuple):
    """Queries and keys. The two runs are the same, or have no token in common."""

    queries: Run
    keys: Run
    first_row: int
    """Row of the first query among those of its rank."""
    first_column: int
    """Row of the first key among those of its rank."""
    scores: ScoreSpec
    """How products become probabilities, but for what the softmax has beside the scores."""
    documents: Documents
    """Those of the whole microbatch."""
    dropout: float
    seed: int

    @property
    def rows(self) -> slice:
        """The queries among those of their rank."""
        return slice(self.first_row, self.first_row + self.queries[1] - self.queries[0])

    @property
    def columns(self) -> slice:
        """The keys among those of their rank."""
        return slice(self.first_column, self.first_column + self.keys[1] - self.keys[0])

    def by_flash(self, q: torch.Tensor, v: torch.Tensor) -> bool:
        """Whether flash attention computes it."""
        if len(self.documents.bounds) - 1 > MOST_AT_ONCE:
            return False
        return flash_parts.takes(self.queries, self.keys, q, v, self.scores, self.dropout)

    @property
    def call(self) -> Call:
        """What is computed block by block."""
        first, origin = self.queries[0] - self.keys[0], self.keys[0]
        reach = Reach(self.scores.window, self.documents if self.documents.bounded else None, first, origin)
        return Call(self.scores, reach, self.dropout, self.seed, partial=True)


def kernel_in_words(scores: ScoreSpec, q: torch.Tensor, v: torch.Tensor, dropout: float) -> str:
    """What computes the parts.

    Args:
        q, v: any tensors of the dtype, device and size of a head.
    """
    run = (0, 1)
    return "flash attention" if flash_parts.takes(run, run, q, v, scores, dropout) else BLOCK_BY_BLOCK


def visible(queries: Run, keys: Run, documents: Documents, window: int | None) -> bool:
    """Whether any query sees any key."""
    lowest = documents.lowest_start(queries[0]) if window is None else max(documents.lowest_start(queries[0]), queries[0] - window)
    return keys[0] < queries[1] and keys[1] > lowest


class KeyGrads(NamedTuple):
    """Sums of the gradients of a rank's keys and values over parts: views of one message, [t, b, g, d + e]."""

    k: torch.Tensor
    """[B, t, d]"""
    v: torch.Tensor
    """[B, t, e]"""

    @classmethod
    def within(cls, message: torch.Tensor, size: int) -> KeyGrads:
        """Those that a message holds; a key head has `size` channels."""
        both = message.flatten(1, 2).transpose(0, 1)
        return cls(both[..., :size], both[..., size:])

    def of(self, part: RunPair, grad_q: torch.Tensor) -> Grads:
        """Where the gradients of a part go; those of all queries of this rank are given."""
        return Grads(grad_q[part.rows], self.k[:, part.columns], self.v[:, part.columns])


def attend_part(part: RunPair, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of [q, b, g, r, d] to [k, b, g, d] and [k, b, g, e].

    Returns:
        the result [q, b, g, r, e], in at least float32 or as flash attention gives it, and the logarithm of each row's sum,
        [q, b, g, r]: minus infinity where a query sees no key.
    """
    if part.by_flash(q, v):
        return flash_parts.attend(part.queries, part.keys, part.documents, part.scores, q, k, v)
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros((*q.shape[:4], v.shape[-1]), dtype=wide)
    log_sums = q.new_full(q.shape[:4], -torch.inf, dtype=wide)
    attend_by_blocks(q, k, v, part.call, out, log_sums)
    return out, log_sums


def differentiate_part(
    part: RunPair,
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    log_sums: torch.Tensor,
    grads: Grads,
) -> None:
    """Add a part's gradients.

    Args:
        grad: of the merged result, [q, b, g, r, e].
        out: the merged result.
        log_sums: of all keys that a query sees.
    """
    if not part.by_flash(q, v):
        differentiate_by_blocks(grad, q, k, v, part.call, out, log_sums, grads, adds=True)
        return
    runs = (part.queries, part.keys, part.documents, part.scores)
    of_q, of_k, of_v = flash_parts.differentiate(*runs, grad, q, k, v, out, log_sums)
    grads.q.add_(of_q)
    for total, of_keys in ((grads.k, of_k), (grads.v, of_v)):
        total.unflatten(0, (q.shape[1], -1)).add_(of_keys.permute(1, 2, 0, 3))
