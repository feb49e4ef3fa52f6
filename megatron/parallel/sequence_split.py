"""Distribution of the tokens of a sequence over context ranks. Pure arithmetic: every rank computes the same split.

Attention is causal: a token attends to all earlier tokens, so late tokens cost more than early ones. The sequence is therefore
split into segments of equal length. In the zig-zag split each rank gets one segment from the front and its mirror image from the
back, so that all ranks have the same cost::

    position  0  1 | 2  3 | 4  5 | 6  7 | 8  9 |10 11 |12 13 |14 15        4 context ranks
    rank        0      1      2      3      3      2      1      0

Where attention does not cross document boundaries, a token only costs the earlier tokens of its document. If that makes the zig-zag
split unbalanced, the sequence is split into shorter segments. A greedy algorithm assigns them, the most expensive segment first,
each to the rank with the lowest total cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

_SEGMENTS_PER_RANK = (2, 4, 8)
"""Segments per rank to try, in this order. More segments balance better, but attention runs separate matrix products for each
segment."""
_ACCEPTABLE_IMBALANCE = 1.02
"""If a split has at most this imbalance, no split with more segments is tried."""
_COST_SCALE = 1 << 10
"""Integer that stands for a window share of 1. Costs are integers, so sums are the same on every rank, whatever their order."""


@dataclass(frozen=True)
class SequenceSplit:
    """Split of a sequence over the context-parallel ranks: the sequence is divided into segments of equal length, and each rank has
    the same number of segments.

    All samples of a microbatch are split in the same way.
    """

    segment_length: int
    """Tokens per segment."""
    segments: tuple[tuple[int, ...], ...]
    """Segment indices of each rank, ascending."""
    imbalance: float = 1.0
    """Attention cost (number of tokens attended to) of the most loaded rank, divided by the mean over the ranks."""

    @property
    def num_ranks(self) -> int:
        """Number of context-parallel ranks."""
        return len(self.segments)

    @property
    def tokens_per_rank(self) -> int:
        """Tokens of a sequence on each rank."""
        return self.segment_length * len(self.segments[0])

    @property
    def length(self) -> int:
        """Tokens of the complete sequence."""
        return self.tokens_per_rank * self.num_ranks

    def get_token_ranges(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return the token ranges [start, end) of a rank, ascending. Adjacent segments are merged into one range."""
        return self._token_ranges[rank]

    @cached_property
    def _token_ranges(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        ranges_by_rank = []
        for segments in self.segments:
            ranges: list[tuple[int, int]] = []
            for segment in segments:
                segment_start = segment * self.segment_length
                start = ranges.pop()[0] if ranges and ranges[-1][1] == segment_start else segment_start
                ranges.append((start, segment_start + self.segment_length))
            ranges_by_rank.append(tuple(ranges))
        return tuple(ranges_by_rank)

    def get_positions(self, rank: int) -> NDArray[np.int64]:
        """Return the positions, within the sequence, of the tokens of a rank: [s / num_ranks] for a sequence of s tokens."""
        return np.concatenate([np.arange(start, end) for start, end in self.get_token_ranges(rank)])

    @cached_property
    def order(self) -> NDArray[np.int64]:
        """Positions, within the sequence, of the tokens of all ranks, concatenated in the order of the ranks: [s] for a sequence of
        s tokens."""
        return np.concatenate([self.get_positions(rank) for rank in range(self.num_ranks)])

    def with_imbalance(self, token_costs: NDArray[np.int64]) -> SequenceSplit:
        """Return this split with the field `imbalance` computed from the attention cost of each token.

        Args:
            token_costs: result of `compute_token_costs`, [s] for a sequence of s tokens.
        """
        segment_costs = token_costs.reshape(-1, self.segment_length).sum(1)
        max_rank_cost = max(int(segment_costs[list(segments)].sum()) for segments in self.segments)
        return replace(self, imbalance=max_rank_cost * self.num_ranks / max(1, int(segment_costs.sum())))


def split_zigzag(length: int, num_ranks: int) -> SequenceSplit:
    """Return the zig-zag split. Each rank has two segments of equal length: one from the front of the sequence, and its mirror
    image from the back.

    Raises:
        ValueError: the length is not divisible by twice the number of ranks.
    """
    if length % (2 * num_ranks):
        raise ValueError(
            f"a sequence of {length} tokens cannot be split over {num_ranks} context ranks: each rank gets 2 equal segments, "
            f"so the length must be divisible by {2 * num_ranks}. Change --seq-length or --context-parallel-size"
        )
    return SequenceSplit(length // (2 * num_ranks), tuple((rank, 2 * num_ranks - 1 - rank) for rank in range(num_ranks)))


def split_balanced(token_costs: NDArray[np.int64], num_ranks: int) -> SequenceSplit:
    """Return the zig-zag split, or a split with more segments per rank if that balances the cost better.

    Args:
        token_costs: attention cost (number of tokens attended to) of each token of the sequence, [s].

    Raises:
        ValueError: the length is not divisible by twice the number of ranks.
    """
    best = split_zigzag(len(token_costs), num_ranks).with_imbalance(token_costs)
    for segments_per_rank in _SEGMENTS_PER_RANK:
        if best.imbalance <= _ACCEPTABLE_IMBALANCE or len(token_costs) % (segments_per_rank * num_ranks):
            break
        candidate = _assign_segments(token_costs, num_ranks, segments_per_rank).with_imbalance(token_costs)
        best = min(best, candidate, key=lambda split: split.imbalance)
    return best


def _assign_segments(token_costs: NDArray[np.int64], num_ranks: int, segments_per_rank: int) -> SequenceSplit:
    """Divide the sequence into segments and assign them greedily: the most expensive segment first, each to the rank with the
    lowest cost that still needs segments."""
    segment_costs = token_costs.reshape(num_ranks * segments_per_rank, -1).sum(1)
    rank_segments: list[list[int]] = [[] for _ in range(num_ranks)]
    rank_costs = [0] * num_ranks
    for segment in np.argsort(-segment_costs, kind="stable").tolist():
        rank = min(
            (rank for rank in range(num_ranks) if len(rank_segments[rank]) < segments_per_rank),
            key=lambda rank: (rank_costs[rank], rank),
        )
        rank_segments[rank].append(segment)
        rank_costs[rank] += int(segment_costs[segment])
    return SequenceSplit(
        len(token_costs) // (num_ranks * segments_per_rank), tuple(tuple(sorted(segments)) for segments in rank_segments)
    )


def compute_token_costs(
    length: int, window_shares: Mapping[int | None, float], document_bounds: NDArray[np.int32] | None = None
) -> NDArray[np.int64]:
    """Return the attention cost of each position, summed over the samples of a microbatch, [s].

    The cost is the number of tokens that the position attends to, summed over the window sizes. Each window size is weighted so
    that its part of the cost of a sample with a single document is its share. Costs are integers, in units of `1 / _COST_SCALE`.

    Args:
        length: s, tokens per sample.
        window_shares: share of each window size in the attention FLOPs of a sample with a single document. The window None stands
            for full causal attention.
        document_bounds: cumulative lengths of the documents of all concatenated samples, if attention does not cross documents;
            None if each sample is a single document.
    """
    if document_bounds is None:
        num_earlier_tokens = np.arange(length, dtype=np.int64)[None]
    else:
        num_earlier_tokens = (
            np.arange(document_bounds[-1], dtype=np.int64)
            - np.repeat(document_bounds[:-1].astype(np.int64), np.diff(document_bounds))
        ).reshape(-1, length)
    costs = np.zeros(length, dtype=np.int64)
    for window, share in window_shares.items():
        num_earlier_in_window = (
            np.arange(length, dtype=np.int64) if window is None else np.minimum(np.arange(length, dtype=np.int64), window)
        )
        weight = round(_COST_SCALE * share * length * length / (2 * int((num_earlier_in_window + 1).sum())))
        costs += weight * ((num_earlier_tokens if window is None else np.minimum(num_earlier_tokens, window)) + 1).sum(0)
    return costs
