"""Who holds which tokens under context parallelism."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from megatron.parallel.sequence_split import SequenceSplit, compute_token_costs, split_balanced, split_zigzag


def plain_costs(length: int, bounds: list[int], window: int | None) -> list[int]:
    """Tokens attended to from each place, counted one by one."""
    found = [0] * length
    for first, end in itertools.pairwise(bounds):
        for token in range(first, end):
            found[token % length] += sum(window is None or token - key <= window for key in range(first, token + 1))
    return found


def check(cut: SequenceSplit, length: int, ranks: int) -> None:
    """Every token has one holder, all holders have as many, and runs and places say the same."""
    assert (cut.length, cut.num_ranks, cut.tokens_per_rank) == (length, ranks, length // ranks)
    assert sorted(cut.order.tolist()) == list(range(length))
    for rank in range(ranks):
        places = cut.get_positions(rank)
        assert places.tolist() == sorted(places.tolist()) and len(places) == cut.tokens_per_rank
        assert places.tolist() == cut.order[rank * cut.tokens_per_rank : (rank + 1) * cut.tokens_per_rank].tolist()
        ends = [end for _, end in cut.get_token_ranges(rank)]
        assert all(first > end for (first, _), end in zip(cut.get_token_ranges(rank)[1:], ends, strict=False)), (
            "runs that touch are one"
        )


def test_mirrored_pieces_share_causal_work_evenly() -> None:
    for ranks in (1, 2, 3, 4, 8):
        length = 12 * 2 * ranks
        cut = split_zigzag(length, ranks)
        check(cut, length, ranks)
        costs = compute_token_costs(length, {None: 1.0})
        assert split_balanced(costs, ranks) == cut.with_imbalance(costs) and cut.with_imbalance(costs).imbalance == 1.0
    assert split_zigzag(16, 4).get_token_ranges(3) == ((6, 10),) and split_zigzag(16, 4).get_token_ranges(0) == ((0, 2), (14, 16))
    with pytest.raises(ValueError, match="20 tokens cannot be split over 4 context ranks.* divisible by 8"):
        split_zigzag(20, 4)


def test_costs_are_the_tokens_attended_to() -> None:
    random = np.random.default_rng(0)
    for length, batch, window in ((16, 1, None), (16, 3, None), (24, 2, 5), (24, 2, 23)):
        inner = random.choice(np.arange(1, length * batch), size=5, replace=False)
        bounds = np.unique(np.concatenate([inner, np.arange(0, batch * length + 1, length)])).astype(np.int32)
        costs = compute_token_costs(length, {window: 1.0}, bounds)
        plain = np.array(plain_costs(length, bounds.tolist(), window))
        assert np.array_equal(costs * int(plain[0]), plain * int(costs[0])), "the same but for one factor"
    halves = compute_token_costs(16, {None: 0.5, 3: 0.5})
    assert abs(halves.sum() / compute_token_costs(16, {None: 1.0}).sum() - 1) < 0.01, (
        "each kind of layer counts by its share of the work"
    )


def test_documents_are_dealt_by_what_they_cost() -> None:
    """One long document and many short ones: the zig-zag gives most work to few ranks."""
    length, ranks = 1024, 4
    for bounds in ([0, 300, *range(320, 1025, 16)], [*range(0, 725, 16), 720, 1024], [*range(0, 1025, 8)], [0, 512, 1024]):
        costs = compute_token_costs(length, {None: 1.0}, np.unique(np.array(bounds, dtype=np.int32)))
        cut = split_balanced(costs, ranks)
        check(cut, length, ranks)
        zigzag = split_zigzag(length, ranks).with_imbalance(costs).imbalance
        assert cut.imbalance <= min(zigzag, 1.25), (bounds[:3], zigzag)
        assert cut.imbalance == max(costs[cut.get_positions(rank)].sum() for rank in range(ranks)) * ranks / costs.sum()
    odd = compute_token_costs(24, {None: 1.0}, np.array([0, 20, 24], dtype=np.int32))
    assert split_balanced(odd, 4).segment_length == 3, "no finer cut divides it"
