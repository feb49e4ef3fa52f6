"""Who is wrong, where ranks have computed the same microbatch and do not agree.

A copy of the model is held by a block of data ranks: one, or as many as share the experts. The microbatch of each block is computed
by itself, then again by the next block of the ring, and where these two differ once more by the one behind. If there are two
blocks, each computes it once more: who does not repeat itself is wrong. If there is one, it computes it twice, which shows no more
than faults that pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron.parallel.topology import Topology
from megatron_lab.audit.digests import Likeness
from megatron_lab.audit.replicas import ranks_in_words

Blocks = Sequence[Sequence[int]]
"""The ranks of each block, in the order of the ring. Those at the same place in their blocks hold the same part of the model."""


def data_ranks_of_block(topology: Topology) -> int:
    """How many data ranks hold a copy of the model: they compute the same where they are given the same microbatches."""
    grid, of_experts = topology.size("tp", "cp"), topology.size("etp", "ep")
    return math.lcm(grid, of_experts) // grid


def blocks_of(topology: Topology) -> Blocks:
    """The blocks of all ranks."""

    def place(rank: int) -> tuple[int, ...]:
        at = topology.coordinates(rank)
        return at["dp"], at["pp"], at["cp"], at["tp"]

    ranks = sorted(range(topology.world_size), key=place)
    size = data_ranks_of_block(topology) * topology.size("tp", "cp", "pp")
    return [ranks[first : first + size] for first in range(0, len(ranks), size)]


def further_turns(blocks: int) -> range:
    """The turns of the ring that are made where the first two, 0 and 1, differ."""
    return range(2, min(2 * blocks, 4) if blocks < 3 else 3)


def verdict(blocks: int, same: Callable[[int, int], bool]) -> tuple[int | None, str]:
    """Which of the first two turns gave a wrong result (None: there is no telling), and why; in words about the block that has
    made turn 0 ({this}), turn 1 ({that}) and turn 2 ({third}).

    Args:
        same: whether the results of two turns are equal; those of 0 and 1 are not.
    """
    if blocks == 2:
        steady = same(0, 2), same(1, 3)
        if steady == (True, True):
            return None, "both repeat themselves: one of them has a fault that stays, and there is no third to tell which"
        if steady == (False, False):
            return None, "neither repeats itself: there is no telling who is wrong"
        return (1, "{that} does not repeat itself: it is wrong") if steady[0] else (0, "{this} does not repeat itself: it is wrong")
    if blocks == 1:
        return 0, "it does not repeat itself: it is wrong"
    agrees = same(0, 2), same(1, 2)
    if agrees[0] == agrees[1]:
        return None, "{third} computes a third result: there is no telling who is wrong"
    return (1, "{third} agrees with {this}: {that} is wrong") if agrees[0] else (0, "{third} agrees with {that}: {this} is wrong")


@dataclass(frozen=True)
class Dispute:
    """Two blocks that have computed the same microbatch, and differ."""

    words: str
    wrong: tuple[int, ...]
    """The ranks of the block that is wrong which gave another result; none if there is no telling."""


@dataclass(frozen=True)
class Court:
    """Compares what blocks have computed.

    Args:
        data_ranks: how many each block has.
        nodes: the host of each rank.
        names: of the parameters of each rank; its digests have a row more, of the loss.
        digests: of each rank, [turns, rows, width]: in each turn those of the microbatch of the block so many places before.
    """

    blocks: Blocks
    data_ranks: int
    nodes: Sequence[str]
    names: Sequence[Sequence[str]]
    digests: Sequence[torch.Tensor]
    likeness: Likeness

    def disputes(self) -> list[Dispute]:
        """Where blocks differ, and who is wrong."""
        return [self._settled(owner) for owner in range(len(self.blocks)) if self._apart(owner, 0, 1)]

    def _apart(self, owner: int, one: int, other: int) -> dict[tuple[int, int], list[bool]]:
        """Pairs of ranks that gave different results in two turns of a block's microbatch, with the rows that differ."""
        count = len(self.blocks)
        pairs = zip(self.blocks[(owner + one) % count], self.blocks[(owner + other) % count], strict=True)
        rows = {(a, b): self.likeness.apart(self.digests[a][one], self.digests[b][other]).tolist() for a, b in pairs}
        return {pair: apart for pair, apart in rows.items() if any(apart)}

    def _settled(self, owner: int) -> Dispute:
        count, pairs = len(self.blocks), self._apart(owner, 0, 1)
        sides = [sorted({pair[side] for pair in pairs}) for side in (0, 1)]
        this, that, third = (f"data {self._data_ranks((owner + turn) % count)}" for turn in range(3))
        turn, why = verdict(count, lambda one, other: not self._apart(owner, one, other))
        gradients = dict.fromkeys(
            name for (rank, _), rows in pairs.items() for name, bad in zip(self.names[rank], rows[:-1], strict=True) if bad
        )
        whole = {name for ranks in self.blocks for rank in ranks for name in self.names[rank]}
        what = ["the loss"] * any(rows[-1] for rows in pairs.values())
        if gradients:
            what.append(f"{len(gradients)} of {len(whole)} gradients (backward comes to {[*gradients][-1]} first)")
        again = "itself" if count == 1 else f"{that} ({self._places(sides[1])})"
        words = (
            f"the first microbatch of {this} ({self._places(sides[0])}), computed again by {again}, has another result: "
            f"{' and '.join(what)}; {why.format(this=this, that=that, third=third)}"
        )
        return Dispute(words, () if turn is None else tuple(sides[turn]))

    def _data_ranks(self, block: int) -> str:
        return ranks_in_words(range(block * self.data_ranks, (block + 1) * self.data_ranks))

    def _places(self, ranks: Sequence[int]) -> str:
        nodes = list(dict.fromkeys(self.nodes[rank] for rank in ranks))
        return f"{ranks_in_words(ranks)} on {'node' if len(nodes) == 1 else 'nodes'} {', '.join(nodes)}"
