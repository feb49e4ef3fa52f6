"""Decision which rank is wrong if ranks have computed different gradients for the same microbatch.

A *model replica* is a set of ranks that together hold one copy of the model: one data rank, or several if experts are distributed
over data ranks. The replicas form a ring. *Shift* s means that each replica computes the first microbatch of the replica s
positions before it. Shift 0 is the replica's own microbatch. With shift 1 the next replica computes the same microbatch again. If
the results of shift 0 and shift 1 differ:

- With three or more replicas, the third replica computes the microbatch, as shift 2.
- With two replicas, both compute the microbatch once more, as shifts 2 and 3. A replica that does not reproduce its own result is
  wrong.
- A single replica computes the microbatch twice. This detects only transient faults.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron.parallel.topology import Topology
from megatron_lab.audit.digests import DigestComparer
from megatron_lab.audit.replicas import format_rank_list

ModelReplicas = Sequence[Sequence[int]]
"""Ranks of each replica, in the order of the ring. Ranks at equal positions of their replicas hold equal parameters."""


def count_data_ranks_per_replica(topology: Topology) -> int:
    """Return the number of data ranks that together hold one copy of the model. The number is above 1 if experts are distributed
    over data ranks."""
    dense_size, expert_size = topology.get_size("tp", "cp"), topology.get_size("etp", "ep")
    return math.lcm(dense_size, expert_size) // dense_size


def build_model_replicas(topology: Topology) -> ModelReplicas:
    """Return the ranks of each model replica: each list of ranks together holds one copy of the model."""

    def get_sort_key(rank: int) -> tuple[int, ...]:
        coordinates = topology.get_coordinates(rank)
        return coordinates["dp"], coordinates["pp"], coordinates["cp"], coordinates["tp"]

    ranks = sorted(range(topology.world_size), key=get_sort_key)
    size = count_data_ranks_per_replica(topology) * topology.get_size("tp", "cp", "pp")
    return [ranks[first : first + size] for first in range(0, len(ranks), size)]


def get_extra_shifts(num_replicas: int) -> range:
    """Return the additional computations that decide which replica is wrong, if two replicas have computed different results for
    the same microbatch.

    In shift s, each replica computes the first microbatch of the replica s positions before it. The results of shift 0 and shift 1
    differ.

    Returns:
        numbers of the additional shifts, from 2 on; empty if there is a single replica.
    """
    return range(2, min(2 * num_replicas, 4) if num_replicas < 3 else 3)


def find_wrong_shift(num_replicas: int, is_equal: Callable[[int, int], bool]) -> tuple[int | None, str]:
    """Decide which of two replicas computed the wrong result for a microbatch: its own replica (shift 0) or the next replica (shift
    1). Their results differ.

    Args:
        num_replicas: number of model replicas.
        is_equal: function that returns whether the results of two shifts for the microbatch are equal. In shift s, the replica s
            positions after the microbatch's own replica computes the microbatch.

    Returns:
        the shift with the wrong result (0 or 1), or None if it cannot be decided. Also the reason: a template with placeholders for
        the replicas of shift 0 ({first}), shift 1 ({second}) and shift 2 ({third}).
    """
    if num_replicas == 2:
        repeats = is_equal(0, 2), is_equal(1, 3)
        if repeats == (True, True):
            return (
                None,
                "both reproduce their results: one has a permanent fault, but without a third replica it cannot be decided which",
            )
        if repeats == (False, False):
            return None, "neither reproduces its result: it cannot be decided which is wrong"
        return (
            (1, "{second} does not reproduce its result: it is wrong")
            if repeats[0]
            else (0, "{first} does not reproduce its result: it is wrong")
        )
    if num_replicas == 1:
        return 0, "it does not reproduce its result: it is wrong"
    agrees = is_equal(0, 2), is_equal(1, 2)
    if agrees[0] == agrees[1]:
        return None, "{third} computes a third result: it cannot be decided which is wrong"
    return (
        (1, "{third} agrees with {first}: {second} is wrong")
        if agrees[0]
        else (0, "{third} agrees with {second}: {first} is wrong")
    )


@dataclass(frozen=True)
class Dispute:
    """Disagreement of two replicas (copies of the model) that computed different gradients or losses for the same microbatch."""

    message: str
    wrong_ranks: tuple[int, ...]
    """Ranks of the wrong replica whose results differ; empty if it cannot be decided which replica is wrong."""


@dataclass(frozen=True)
class DisputeResolver:
    """Compares the digests of gradients that replicas computed for the same microbatches, and decides which ranks are wrong.

    In shift s, each replica computes the first microbatch of the replica s positions before it in the ring.

    Args:
        replicas: ranks of each model replica, in the order of the ring.
        data_ranks_per_replica: number of data ranks that together hold one copy of the model.
        nodes: host of each rank.
        names: for each rank, the names of its parameters, one for each row of its digests. The last row, for the loss, has no name.
        digests: for each rank, its digests [shifts, rows, width]. The width is 1 for hashes of the bits, and 5 for comparison up to
            rounding.
        comparer: comparison of digests, exactly or up to rounding.
    """

    replicas: ModelReplicas
    data_ranks_per_replica: int
    nodes: Sequence[str]
    names: Sequence[Sequence[str]]
    digests: Sequence[torch.Tensor]
    comparer: DigestComparer

    def find_disputes(self) -> list[Dispute]:
        """Return a `Dispute` for each replica (copy of the model) whose first microbatch gave other results when the next replica
        in the ring computed it again. A dispute names the wrong ranks, if it can be decided which they are."""
        return [self._resolve(owner) for owner in range(len(self.replicas)) if self._find_differing_pairs(owner, 0, 1)]

    def _find_differing_pairs(self, owner: int, shift_a: int, shift_b: int) -> dict[tuple[int, int], list[bool]]:
        """Compare the results of two replicas for the first microbatch of replica `owner`: the replicas that are `shift_a` and
        `shift_b` positions after it.

        Returns:
            for each pair of corresponding ranks of the two replicas whose results differ: which rows of their digests differ.
        """
        num_replicas = len(self.replicas)
        pairs = zip(self.replicas[(owner + shift_a) % num_replicas], self.replicas[(owner + shift_b) % num_replicas], strict=True)
        rows = {
            (a, b): self.comparer.find_differences(self.digests[a][shift_a], self.digests[b][shift_b]).tolist() for a, b in pairs
        }
        return {pair: differs for pair, differs in rows.items() if any(differs)}

    def _resolve(self, owner: int) -> Dispute:
        num_replicas, pairs = len(self.replicas), self._find_differing_pairs(owner, 0, 1)
        differing_ranks = [sorted({pair[i] for pair in pairs}) for i in (0, 1)]
        first, second, third = (f"data {self._format_data_ranks((owner + shift) % num_replicas)}" for shift in range(3))
        shift, reason = find_wrong_shift(
            num_replicas, lambda shift_a, shift_b: not self._find_differing_pairs(owner, shift_a, shift_b)
        )
        gradients = dict.fromkeys(
            name for (rank, _), rows in pairs.items() for name, differs in zip(self.names[rank], rows[:-1], strict=True) if differs
        )
        all_names = {name for ranks in self.replicas for rank in ranks for name in self.names[rank]}
        differing = ["the loss"] * any(rows[-1] for rows in pairs.values())
        if gradients:
            differing.append(f"{len(gradients)} of {len(all_names)} gradients (first in backward: {[*gradients][-1]})")
        recomputed_by = "itself" if num_replicas == 1 else f"{second} ({self._format_ranks_and_nodes(differing_ranks[1])})"
        message = (
            f"the first microbatch of {first} ({self._format_ranks_and_nodes(differing_ranks[0])}), "
            f"computed again by {recomputed_by}, has a different result: "
            f"{' and '.join(differing)}; {reason.format(first=first, second=second, third=third)}"
        )
        return Dispute(message, () if shift is None else tuple(differing_ranks[shift]))

    def _format_data_ranks(self, replica: int) -> str:
        return format_rank_list(range(replica * self.data_ranks_per_replica, (replica + 1) * self.data_ranks_per_replica))

    def _format_ranks_and_nodes(self, ranks: Sequence[int]) -> str:
        nodes = list(dict.fromkeys(self.nodes[rank] for rank in ranks))
        return f"{format_rank_list(ranks)} on {'node' if len(nodes) == 1 else 'nodes'} {', '.join(nodes)}"
