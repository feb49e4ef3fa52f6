"""Experts that take only so many choices of a sequence (docs/moe.md, "Capacity").

Shapes: `s` tokens of a sequence on this rank, `S` of a whole sequence, `b` microbatch, `k` experts of a token, `E` experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megatron.parallel.collectives import all_gather
from megatron.parallel.context import Group
from megatron.spec.mlps import RouterSpec


def taken(
    weights: torch.Tensor,
    chosen: torch.Tensor,
    spec: RouterSpec,
    sequence_ranks: Group,
    order: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Which choices of this rank's tokens their experts take, bool [s, b, k].

    Of each sequence an expert takes those with the largest weights, in steps of 1/4096, of equal ones the earlier; or the earliest.
    So that the answer is the same at every layout, the ranks that share a sequence tell each other all of it: b S k choices and
    weights.

    Args:
        weights: [s, b, k].
        chosen: int64 [s, b, k].
        sequence_ranks: those that share each sequence.
        order: place in the sequence of the tokens of all these ranks, one after the other, and where each place is then: [S] each.
            By default they are in order.
    """
    here = slice(sequence_ranks.index * len(chosen), (sequence_ranks.index + 1) * len(chosen))
    weights, chosen = all_gather(weights.detach(), sequence_ranks), all_gather(chosen, sequence_ranks)
    if order is not None:
        weights, chosen = weights[order[1]], chosen[order[1]]
    most = spec.taken(len(chosen))
    assert most is not None
    by_token = (weights.transpose(0, 1).flatten(1), chosen.transpose(0, 1).flatten(1))  # [b, S k]
    found = _first(*by_token, most, spec).unflatten(1, (-1, spec.chosen)).transpose(0, 1)
    return (found if order is None else found[order[0]])[here]


_STEPS = 1 << 12
"""Weights are compared in so many steps. Equal tokens at the begin of a sequence have equal weights but for rounding, which
differs between layouts: so the earlier one goes first."""


def _first(weights: torch.Tensor, chosen: torch.Tensor, most: int, spec: RouterSpec) -> torch.Tensor:
    """The same of whole sequences whose choices lie in the order of the tokens, [b, S k]."""
    if spec.drops_last:
        order = torch.arange(chosen.shape[1], device=chosen.device).expand_as(chosen)
    else:
        order = (weights * _STEPS).round().sort(dim=1, descending=True, stable=True).indices
    experts, of_experts = chosen.gather(1, order).sort(dim=1, stable=True)
    counts = torch.zeros(len(chosen), spec.experts, dtype=torch.int64, device=chosen.device)
    counts.scatter_add_(1, experts, torch.ones_like(experts))
    begins = counts.cumsum(1) - counts
    number = torch.arange(chosen.shape[1], device=chosen.device) - begins.gather(1, experts)
    return torch.empty_like(number, dtype=torch.bool).scatter_(1, order.gather(1, of_experts), number < most)


def padded(
    apply: Callable[[torch.Tensor, Sequence[int]], torch.Tensor], most: int, rows: torch.Tensor, counts: Sequence[int]
) -> torch.Tensor:
    """What `apply` gives for rows [n, h], of which each expert has so many, where it gets `most` for each, zeros behind them."""
    begins = [most * expert for expert in range(len(counts))]
    place = torch.cat([torch.arange(a, a + count, device=rows.device) for a, count in zip(begins, counts, strict=True)])
    filled = rows.new_zeros(most * len(counts), rows.shape[1]).index_copy(0, place, rows)
    return apply(filled, [most] * len(counts)).index_select(0, place)
