"""Checks that weights on several ranks are equal in every bit: on tensor ranks, data ranks, and both holders of a tied embedding.

One small reduction for each group compares digests. If one differs, ranks tell each other what they have, then all raise one error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.parallel.boxes import Box
from megatron.parallel.collectives import all_reduce, gather_objects
from megatron.parallel.context import Group, ParallelContext
from megatron.parallel.params import ParamEntry, ParamTable, Shard
from megatron.parallel.random import stable_seed
from megatron.parallel.topology import EXPERT_AXES, GRADIENT_AXES, Topology
from megatron.training.failure import AuditError
from megatron_lab.audit.digests import bit_digest

MOST_LINES = 8
"""The most findings that an error shows in full."""


def raise_audit(head: str, findings: Sequence[str], advice: str) -> None:
    """Raise an error with the findings, if there are any.

    Raises:
        AuditError: there are findings. Every rank must come here with the same ones.
    """
    if not findings:
        return
    more = [f"and {len(findings) - MOST_LINES} more"] if len(findings) > MOST_LINES else []
    raise AuditError("\n  ".join([head, *findings[:MOST_LINES], *more, advice]))


def ranks_in_words(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 1 and 2`."""
    shown = [str(rank) for rank in ranks[:MOST_LINES]]
    if len(ranks) > MOST_LINES:
        return f"ranks {', '.join(shown)} and {len(ranks) - MOST_LINES} more"
    return f"rank {shown[0]}" if len(shown) == 1 else f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


@dataclass(frozen=True)
class ReplicatedPart:
    """Boxes of a parameter that this rank holds, and that others may hold too."""

    name: str
    what: str
    """`weights`, or `main weights` where main parameters are separate."""
    boxes: tuple[Box, ...]
    tensor: Callable[[], torch.Tensor]

    @property
    def key(self) -> int:
        """The same for the same part of the model, on every rank."""
        return stable_seed(self.what, self.name, repr(self.boxes))

    def __str__(self) -> str:
        return self.name if self.what == "weights" else f"{self.name} ({self.what})"


def copies_held(params: ParamTable, shards: Sequence[Shard], context: ParallelContext) -> list[ReplicatedPart]:
    """What this rank holds that another may hold too: its parameters (if sharded, its part), and separate main parameters."""
    shared_out = {shard.record.name for shard in shards if shard.alone}
    copies = [_whole(entry, context) for entry in params if entry.record.name not in shared_out]
    for shard in shards:
        boxes = tuple(placed.box for placed in shard.boxes(context))
        if shard.record.name in shared_out:
            copies.append(ReplicatedPart(shard.record.name, "weights", boxes, lambda shard=shard: shard.weights))  # type: ignore[misc]
        if shard.main.data_ptr() != shard.weights.data_ptr():
            copies.append(ReplicatedPart(shard.record.name, "main weights", boxes, lambda shard=shard: shard.main))  # type: ignore[misc]
    return [copy for copy in copies if any(box.numel for box in copy.boxes)]


def _whole(entry: ParamEntry, context: ParallelContext) -> ReplicatedPart:
    held = entry.record.held_box(context.axis_sizes, context.coordinates)
    return ReplicatedPart(entry.record.name, "weights", (held,), lambda: entry.param)


class Replicas:
    """The copies in each group of ranks, and their comparison. All ranks make it together, and compare together.

    Args:
        copies: those of this rank.
    """

    def __init__(self, copies: Sequence[ReplicatedPart], context: ParallelContext) -> None:
        self._context, self._copies = context, list(copies)
        sharers = _sharers(context.topology)
        groups = {
            "tensor ranks": context.group("tp"),
            f"{sharers} ranks": context.gradient_group,
            f"the {sharers} ranks that hold the same part": context.fsdp_replica(),
            "the ranks with the same experts": context.group("edp"),
            "the ranks with the same part of the same experts": context.fsdp_replica(EXPERT_AXES[-1:]),
            "the first and the last stage": context.pipeline_ends,
        }
        if context.group("edp").ranks == context.gradient_group.ranks:
            del groups["the ranks with the same experts"]
        self._common = {what: (group, self._held_by_all(group)) for what, group in groups.items() if group.size > 1}
        self._needed = sorted({index for _, indices in self._common.values() for index in indices})

    def describe(self) -> str:
        """How many copies are compared, for the log."""
        words = [f"{len(indices)} over {what}" for what, (_, indices) in self._common.items() if indices]
        return ", ".join(words) or "none is held twice"

    def compare(self, iteration: int, checked_before: int | None) -> None:
        """Compare all copies.

        Args:
            iteration: steps done, for the error.
            checked_before: the iteration of the last comparison, if there was one.

        Raises:
            AuditError: on every rank, if any two copies differ in any bit.
        """
        device = self._context.device
        digests = torch.zeros(len(self._copies), dtype=torch.int64, device=device)
        for index in self._needed:
            digests[index] = bit_digest(self._copies[index].tensor()).to(device)
        differs = torch.zeros_like(digests)
        for group, indices in self._common.values():
            if indices:
                mine = digests[indices]
                largest = all_reduce(mine.clone(), group, dist.ReduceOp.MAX)
                differs[indices] |= (mine != largest).to(torch.int64)  # on at least one rank, if they are not all the same
        anywhere = all_reduce(differs.sum(), self._context.world, dist.ReduceOp.MAX)
        if anywhere.item():
            self._explain(digests.tolist(), differs.tolist(), iteration, checked_before)

    def _held_by_all(self, group: Group) -> list[int]:
        """Indices of the copies that every rank of the group holds, in an order that is the same on all."""
        mine = {copy.key: index for index, copy in enumerate(self._copies)}
        common = set.intersection(*map(set, gather_objects(list(mine), group)))
        return [mine[key] for key in sorted(common)]

    def _explain(self, digests: list[int], differs: list[int], iteration: int, checked_before: int | None) -> None:
        world = self._context.world
        mine = list(zip(self._copies, digests, differs, strict=True))
        suspects = set().union(*gather_objects({copy.key for copy, _, bad in mine if bad}, world))
        seen = gather_objects([(copy.key, str(copy), digest) for copy, digest, _ in mine if copy.key in suspects], world)
        found: dict[tuple[int, str], dict[int, int]] = {}
        for rank, copies in enumerate(seen):
            for key, words, digest in copies:
                found.setdefault((key, words), {})[rank] = digest
        lines = [f"{words}: {_odd_ones(by_rank, self._context.topology)}" for (_, words), by_rank in found.items()]
        since = "" if checked_before is None else f" (at iteration {checked_before} they did not)"
        raise_audit(
            f"iteration {iteration}: ranks that must hold the same weights differ{since}, so training stops and saves nothing.",
            sorted(lines),
            "A fault of memory or of a link does that, or a gradient that is not summed over these ranks. Start again from the\n"
            "  last checkpoint; if the same rank differs again, take its machine out.",
        )


def _odd_ones(by_rank: dict[int, int], topology: Topology) -> str:
    """Which ranks differ from the majority, and in which groups.

    Args:
        by_rank: digest by rank, for the ranks that must have the same.
    """
    counts = Counter(by_rank.values()).most_common()
    if len(counts) > 1 and counts[0][1] == counts[1][1]:
        parts = [[rank for rank, digest in by_rank.items() if digest == value] for value, _ in counts]
        odd = [rank for ranks in parts[1:] for rank in ranks]
        words = f"{' and '.join(map(ranks_in_words, parts))} have different values, and there is no telling which are wrong"
    else:
        odd = [rank for rank, digest in by_rank.items() if digest != counts[0][0]]
        usual = [rank for rank in by_rank if rank not in odd]
        words = f"{ranks_in_words(odd)} {'has' if len(odd) == 1 else 'have'} other values than {ranks_in_words(usual)}"
    groups: list[str] = []
    for rank in odd:
        for what, ranks in _groups_of(rank, topology).items():
            text = f"{what} [{', '.join(map(str, ranks))}]"
            here = [other for other in ranks if other in by_rank]
            if text not in groups and len({by_rank[other] for other in here}) > 1:
                groups.append(text)
    return f"{words} ({', '.join(groups[:4])}{', ...' if len(groups) > 4 else ''})"


def _groups_of(rank: int, topology: Topology) -> dict[str, tuple[int, ...]]:
    pipeline = topology.group(rank, "pp")
    ends = {"first and last stage": (pipeline[0], pipeline[-1])} if rank in (pipeline[0], pipeline[-1]) else {}
    return {"tensor group": topology.group(rank, "tp"), f"{_sharers(topology)} group": topology.group(rank, *GRADIENT_AXES), **ends}


def _sharers(topology: Topology) -> str:
    """The axes over which gradients are summed, in words."""
    return "context and data" if topology.cp > 1 else "data"
