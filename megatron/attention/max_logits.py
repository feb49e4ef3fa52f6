"""Largest attention logit of each head over a step, for --qk-clip and --log-max-attention-logit.

A logit (score) is the scaled product of a query and a key, before any softcap (S_max of Kimi K2, arXiv 2507.20534, section 2.1).
Only visible pairs count: keys beyond the window or in another document do not. No attention kernel of torch returns its scores. So
they are computed a second time, in blocks and without a gradient. The maxima stay on the device, and no [s, s] tensor is allocated.

Shapes: `s` sequence, `b` microbatch, `n` local query heads, `g` local key-value heads, `r = n / g` query heads per key-value head,
`d` head size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from megatron.attention.blocks import BlockAttentionOptions, CausalMask, compute_max_logits
from megatron.attention.documents import Documents
from megatron.config.model import ModelConfig
from megatron.memory.recompute import is_recomputing
from megatron.parallel.collectives import all_gather
from megatron.parallel.context import Group
from megatron.parallel.sequence_split import SequenceSplit
from megatron.spec.layers import ScoreSpec


class MaxLogitTracker:
    """Tracker of the largest logits (scaled products of a query and a key) of this rank's attention layers over the microbatches of
    a step.

    Args:
        num_layers: layers of the full model, including those of multi-token prediction.
        num_heads: query heads of the full model.
        dtype: dtype of the maxima, at least float32.
    """

    def __init__(self, num_layers: int, num_heads: int, dtype: torch.dtype, device: torch.device) -> None:
        self.max_logits = torch.full((num_layers, num_heads), -torch.inf, dtype=dtype, device=device)
        """[layers, query heads]; `get_score_row` returns the row of a layer. Minus infinity for layers and heads of other ranks."""
        self._is_recording = False

    @classmethod
    def of(cls, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> MaxLogitTracker:
        """Build the tracker of a model. The maxima have the dtype of the activations, but at least float32.

        Args:
            dtype: dtype of the activations.
        """
        return cls(
            model.num_layers + model.mtp_num_layers, model.num_attention_heads, torch.promote_types(dtype, torch.float32), device
        )

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Reset the maxima, and let attention layers record their logits within the context. Outside the context, for example in
        evaluation, `record` does nothing."""
        self.max_logits.fill_(-torch.inf)
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False

    @torch.no_grad()
    def record(
        self,
        row: int,
        first_head: int,
        q: torch.Tensor,
        k: torch.Tensor,
        score_spec: ScoreSpec,
        documents: Documents | None,
        context_group: Group,
        num_ahead: int = 0,
    ) -> None:
        """Update the maxima with the logits of one layer and microbatch. Does nothing when backward recomputes the layer.

        Args:
            row: row of the layer in `max_logits`.
            first_head: index of the first local query head in the full model.
            q: queries [s, b, g, r, d] or [s, b, g * r, d]: sequence, microbatch, key-value heads, query heads per key-value head,
                channels.
            k: keys [s, b, g, d].
            documents: documents that attention does not cross; None for complete samples.
            context_group: ranks that share the sequence; each has some of the tokens.
            num_ahead: number of positions between a token and the last token that the layer reads at its position. The queries of
                positions at which it reads padding, or a token beyond the last label, do not count.
        """
        if not self._is_recording or is_recomputing():
            return
        if q.dim() == 4:
            q = q.unflatten(2, (k.shape[2], -1))
        token_ranges: tuple[tuple[int, int], ...] = ((0, len(q)),)
        if context_group.size > 1:
            assert documents is not None and documents.sequence_split is not None, (
                "context parallelism needs documents that say which rank holds which tokens"
            )
            k, token_ranges = (
                _to_sequence_order(all_gather(k.contiguous(), context_group), documents.sequence_split),
                documents.sequence_split.get_token_ranges(context_group.rank),
            )
        uncapped_spec, window, offset = replace(score_spec, softcap=None), score_spec.get_effective_window(len(k)), 0
        documents, num_counted = None if documents is None else documents.mask_padding(num_ahead), len(k) - max(num_ahead - 1, 0)
        layer_max = self.max_logits[row, first_head : first_head + q.shape[2] * q.shape[3]]
        for start, end in token_ranges:
            range_q, offset = q[offset : offset + min(end, num_counted) - start], offset + end - start
            if not len(range_q):
                continue
            range_max = compute_max_logits(range_q, k, BlockAttentionOptions(uncapped_spec, CausalMask(window, documents, start)))
            torch.maximum(layer_max, range_max.to(layer_max.dtype), out=layer_max)


@dataclass(frozen=True)
class LayerLogitTracker:
    """Handle by which one attention layer records its logits: the tracker of the model, and the layer's row in `max_logits`."""

    tracker: MaxLogitTracker
    row: int
    num_ahead: int = 0
    """Number of positions between a token and the last token that the layer reads at its position; 0 except in multi-token
    prediction."""


def _to_sequence_order(gathered: torch.Tensor, sequence_split: SequenceSplit) -> torch.Tensor:
    """Sort tokens by their position in the sequence. In `gathered` they are concatenated in the order of the context ranks."""
    ranges, offset = [], 0
    for rank in range(sequence_split.num_ranks):
        for start, end in sequence_split.get_token_ranges(rank):
            ranges.append((start, gathered[offset : offset + end - start]))
            offset += end - start
    return torch.cat([tokens for _, tokens in sorted(ranges, key=lambda entry: entry[0])])
