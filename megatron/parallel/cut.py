"""Who holds which tokens of a sequence that context ranks share. Pure: every rank computes the same cut from the same lengths.

A token attends to those before it, so late tokens cost more than early ones. Each rank holds one piece from the front and its
mirror image from the back (zig-zag), whose costs add up to the same on all ranks::

    places    0  1 | 2  3 | 4  5 | 6  7 | 8  9 |10 11 |12 13 |14 15        4 context ranks
    rank        0      1      2      3      3      2      1      0

Where documents bound attention, a token costs what its own document has before it. Then the sequence is cut finer, and pieces go
one by one, the dearest first, to the rank that has least.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

_PIECES_OF_A_RANK = (2, 4, 8)
"""Pieces that may be tried. More of them balance better, but each has its own products."""
_GOOD_ENOUGH = 1.02
"""The imbalance with which no finer cut is tried."""
_WEIGHT = 1 << 10
"""One whole of a window's share. Costs are integers, so that every rank finds the same sums in any order."""


@dataclass(frozen=True)
class Cut:
    """Equal pieces of a sequence, as many for each rank. All samples of a microbatch are cut alike."""

    piece: int
    """Tokens of a piece."""
    pieces: tuple[tuple[int, ...], ...]
    """Numbers of the pieces of each rank, ascending."""
    imbalance: float = 1.0
    """What the busiest rank does, as a multiple of the mean."""

    @property
    def ranks(self) -> int:
        """Number of context ranks."""
        return len(self.pieces)

    @property
    def tokens(self) -> int:
        """Tokens that each rank holds."""
        return self.piece * len(self.pieces[0])

    @property
    def length(self) -> int:
        """Tokens of the whole sequence."""
        return self.tokens * self.ranks

    def runs(self, rank: int) -> tuple[tuple[int, int], ...]:
        """The stretches of neighbouring tokens that a rank holds, as (first, end), in their order."""
        return self._runs[rank]

    @cached_property
    def _runs(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        found = []
        for pieces in self.pieces:
            runs: list[tuple[int, int]] = []
            for number in pieces:
                first = number * self.piece
                start = runs.pop()[0] if runs and runs[-1][1] == first else first
                runs.append((start, first + self.piece))
            found.append(tuple(runs))
        return tuple(found)

    def places(self, rank: int) -> NDArray[np.int64]:
        """Place in the sequence of each token that a rank holds, [s / ranks]."""
        return np.concatenate([np.arange(first, end) for first, end in self.runs(rank)])

    @cached_property
    def order(self) -> NDArray[np.int64]:
        """Places of the tokens of all ranks, one rank after the other, [s]."""
        return np.concatenate([self.places(rank) for rank in range(self.ranks)])

    def weighed(self, costs: NDArray[np.int64]) -> Cut:
        """The same with the imbalance that these costs of each token give, [s]."""
        each = costs.reshape(-1, self.piece).sum(1)
        most = max(int(each[list(pieces)].sum()) for pieces in self.pieces)
        return replace(self, imbalance=most * self.ranks / max(1, int(each.sum())))


def mirrored(length: int, ranks: int) -> Cut:
    """The zig-zag cut: two pieces a rank, the same number of tokens from the front and from the back.

    Raises:
        ValueError: the length does not divide into two pieces a rank.
    """
    if length % (2 * ranks):
        raise ValueError(f"a sequence of {length} tokens does not divide into 2 equal pieces for each of {ranks} context ranks")
    return Cut(length // (2 * ranks), tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks)))


def balanced(costs: NDArray[np.int64], ranks: int) -> Cut:
    """A cut by which all ranks have about as much to do: the zig-zag, or a finer one where that is better.

    Args:
        costs: of each token, [s].

    Raises:
        ValueError: the length does not divide into two pieces a rank.
    """
    best = mirrored(len(costs), ranks).weighed(costs)
    for count in _PIECES_OF_A_RANK:
        if best.imbalance <= _GOOD_ENOUGH or len(costs) % (count * ranks):
            break
        dealt = _dealt(costs, ranks, count).weighed(costs)
        best = min(best, dealt, key=lambda cut: cut.imbalance)
    return best


def _dealt(costs: NDArray[np.int64], ranks: int, count: int) -> Cut:
    """Give the dearest piece that is left to the rank that has least and has room."""
    each = costs.reshape(ranks * count, -1).sum(1)
    held: list[list[int]] = [[] for _ in range(ranks)]
    done = [0] * ranks
    for number in np.argsort(-each, kind="stable").tolist():
        rank = min((rank for rank in range(ranks) if len(held[rank]) < count), key=lambda rank: (done[rank], rank))
        held[rank].append(number)
        done[rank] += int(each[number])
    return Cut(len(costs) // (ranks * count), tuple(tuple(sorted(numbers)) for numbers in held))


def token_costs(length: int, shares: Mapping[int | None, float], bounds: NDArray[np.int32] | None = None) -> NDArray[np.int64]:
    """What attention costs for each place, over the samples of a microbatch: in tokens attended to, [s].

    Args:
        length: s.
        shares: part of each window (None: all tokens before) in the attention of a sample of one document.
        bounds: of the documents that attention does not cross, with the samples laid end to end; None where each sample is one.
    """
    if bounds is None:
        before = np.arange(length, dtype=np.int64)[None]
    else:
        before = (np.arange(bounds[-1], dtype=np.int64) - np.repeat(bounds[:-1].astype(np.int64), np.diff(bounds))).reshape(
            -1, length
        )
    total = np.zeros(length, dtype=np.int64)
    for window, share in shares.items():
        whole = np.arange(length, dtype=np.int64) if window is None else np.minimum(np.arange(length, dtype=np.int64), window)
        weight = round(_WEIGHT * share * length * length / (2 * int((whole + 1).sum())))
        total += weight * ((before if window is None else np.minimum(before, window)) + 1).sum(0)
    return total
