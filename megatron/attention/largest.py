"""The largest score of each head over a step, for --qk-clip and --log-max-attention-logit.

A score is the product of a query and a key with its scale, before any cap (S_max of Kimi K2, arXiv 2507.20534, section 2.1). Only
pairs count of which the query sees the key: not beyond the window or the document. No kernel of torch's gives its scores away, so
they are computed once more, block by block, without a gradient; a maximum stays on the device, and no [s, s] tensor is made.

Shapes: `s` sequence, `b` microbatch, `n` this rank's query heads, `g` its key-value heads, `r = n / g`, `d` head size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from megatron.attention.blocks import Call, Reach, largest_scores
from megatron.attention.documents import Documents
from megatron.config.model import ModelConfig
from megatron.memory.recompute import is_remade
from megatron.parallel.collectives import all_gather
from megatron.parallel.context import Group
from megatron.parallel.cut import Cut
from megatron.spec.layers import ScoreSpec


class LargestScores:
    """What the attention of this rank's layers has found in the microbatches of a step so far.

    Args:
        layers, heads: of the whole model, with the layers of multi-token prediction; query heads.
        dtype: at least float32.
    """

    def __init__(self, layers: int, heads: int, dtype: torch.dtype, device: torch.device) -> None:
        self.found = torch.full((layers, heads), -torch.inf, dtype=dtype, device=device)
        """[layers, query heads], rows as `score_row` says; minus infinity for what other ranks compute."""
        self._watches = False

    @classmethod
    def of(cls, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> LargestScores:
        """For a model whose activations have a dtype."""
        return cls(
            model.num_layers + model.mtp_num_layers, model.num_attention_heads, torch.promote_types(dtype, torch.float32), device
        )

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Begin anew, and take the scores of what runs inside; outside, as in evaluations, none are taken."""
        self.found.fill_(-torch.inf)
        self._watches = True
        try:
            yield
        finally:
            self._watches = False

    @torch.no_grad()
    def take(
        self,
        layer: int,
        first_head: int,
        q: torch.Tensor,
        k: torch.Tensor,
        scores: ScoreSpec,
        documents: Documents | None,
        context_ranks: Group,
        beyond: int = 0,
    ) -> None:
        """Take the scores of a microbatch. What runs again in backward is not taken again.

        Args:
            layer: the row.
            first_head: the number of this rank's first query head.
            q: [s, b, g, r, d] or [s, b, n, d].
            k: [s, b, g, d].
            documents: a token sees only its own; None for its whole sample.
            context_ranks: those that share the sequence, of which each has some of the tokens.
            beyond: so many tokens at the end of the sequence are none of the sample; their queries do not count.
        """
        if not self._watches or is_remade():
            return
        if q.dim() == 4:
            q = q.unflatten(2, (k.shape[2], -1))
        runs: tuple[tuple[int, int], ...] = ((0, len(q)),)
        if context_ranks.size > 1:
            assert documents is not None and documents.cut is not None, "several context ranks share these tokens"
            k, runs = _in_order(all_gather(k.contiguous(), context_ranks), documents.cut), documents.cut.runs(context_ranks.index)
        uncapped, window, at = replace(scores, softcap=None), scores.reach(len(k)), 0
        here = self.found[layer, first_head : first_head + q.shape[2] * q.shape[3]]
        for first, end in runs:
            some, at = q[at : at + min(end, len(k) - beyond) - first], at + end - first
            if not len(some):
                continue
            found = largest_scores(some, k, Call(uncapped, Reach(window, documents, first)))
            torch.maximum(here, found.to(here.dtype), out=here)


@dataclass(frozen=True)
class LayerScores:
    """Where the attention of one layer gives its scores."""

    largest: LargestScores
    row: int
    beyond: int = 0
    """See `LargestScores.take`."""


def _in_order(gathered: torch.Tensor, cut: Cut) -> torch.Tensor:
    """Put the tokens of all context ranks, one rank's after the other's, into the order of the sequence."""
    parts, at = [], 0
    for rank in range(cut.ranks):
        for first, end in cut.runs(rank):
            parts.append((first, gathered[at : at + end - first]))
            at += end - first
    return torch.cat([part for _, part in sorted(parts, key=lambda one: one[0])])
