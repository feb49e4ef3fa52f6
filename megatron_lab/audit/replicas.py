"""Checks that copies of weights on several ranks are equal in all bits: on tensor ranks, on data ranks, and on the first and last
pipeline stage for a tied embedding.

Each process group compares digests (64-bit hashes) of its copies with one small all-reduce. If a digest differs, the ranks exchange
their digests, and all ranks raise an error that names the differing ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.parallel.collectives import all_reduce, gather_objects
from megatron.parallel.context import Group, ParallelContext
from megatron.parallel.params import ParamEntry, ParamTable, Shard
from megatron.parallel.random import compute_stable_seed
from megatron.parallel.tensor_slice import TensorSlice
from megatron.parallel.topology import EXPERT_AXES, GRADIENT_AXES, Topology
from megatron.training.failure import AuditError
from megatron_lab.audit.digests import compute_bit_digest

MAX_LINES = 8
"""Maximum number of problems that an error shows in full."""


def raise_audit(summary: str, problems: Sequence[str], advice: str) -> None:
    """Raise an error that lists the problems of a check. Do nothing if there are no problems. Every rank must call this function
    with the same arguments.

    Args:
        summary: first line of the message.
        problems: one line for each problem.
        advice: last line of the message, which says what the user can do.

    Raises:
        AuditError: there are problems.
    """
    if not problems:
        return
    remainder = [f"and {len(problems) - MAX_LINES} more"] if len(problems) > MAX_LINES else []
    raise AuditError("\n  ".join([summary, *problems[:MAX_LINES], *remainder, advice]))


def format_rank_list(ranks: Sequence[int]) -> str:
    """Format ranks as text: `rank 3`, or `ranks 0, 1 and 2`."""
    names = [str(rank) for rank in ranks[:MAX_LINES]]
    if len(ranks) > MAX_LINES:
        return f"ranks {', '.join(names)} and {len(ranks) - MAX_LINES} more"
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names[:-1])} and {names[-1]}"


@dataclass(frozen=True)
class ReplicatedTensor:
    """Tensor of this rank (a parameter or a main parameter, or some slices of it) of which other ranks may have copies."""

    name: str
    weight_type: str
    """`weights` for a parameter, or `main weights` for a main parameter that is a separate tensor."""
    slices: tuple[TensorSlice, ...]
    get_tensor: Callable[[], torch.Tensor]

    @property
    def key(self) -> int:
        """Hash by which ranks recognize copies: it is equal on all ranks that hold equal slices of the same parameter."""
        return compute_stable_seed(self.weight_type, self.name, repr(self.slices))

    def __str__(self) -> str:
        return self.name if self.weight_type == "weights" else f"{self.name} ({self.weight_type})"


def find_replicated_tensors(params: ParamTable, shards: Sequence[Shard], context: ParallelContext) -> list[ReplicatedTensor]:
    """Return the tensors of this rank of which other ranks may have copies: its parameters, its shards of fully sharded parameters,
    and its main parameters if these are separate tensors."""
    fully_sharded_names = {shard.record.name for shard in shards if shard.is_fully_sharded}
    tensors = [_build_local_param(entry, context) for entry in params if entry.record.name not in fully_sharded_names]
    for shard in shards:
        slices = tuple(buffer_slice.slice for buffer_slice in shard.get_slices(context))
        if shard.record.name in fully_sharded_names:
            tensors.append(ReplicatedTensor(shard.record.name, "weights", slices, lambda shard=shard: shard.weights))  # type: ignore[misc]
        if shard.main_param.data_ptr() != shard.weights.data_ptr():
            tensors.append(ReplicatedTensor(shard.record.name, "main weights", slices, lambda shard=shard: shard.main_param))  # type: ignore[misc]
    return [tensor for tensor in tensors if any(tensor_slice.numel for tensor_slice in tensor.slices)]


def _build_local_param(entry: ParamEntry, context: ParallelContext) -> ReplicatedTensor:
    local_slice = entry.record.get_local_slice(context.axis_sizes, context.coordinates)
    return ReplicatedTensor(entry.record.name, "weights", (local_slice,), lambda: entry.param)


class Replicas:
    """Compares the copies of weights that several ranks hold. All ranks must create it together and call `compare` together.

    Args:
        tensors: tensors of this rank of which other ranks may have copies.
    """

    def __init__(self, tensors: Sequence[ReplicatedTensor], context: ParallelContext) -> None:
        self._context, self._tensors = context, list(tensors)
        axis_names = _format_gradient_axes(context.topology)
        groups = {
            "tensor ranks": context.group("tp"),
            f"{axis_names} ranks": context.gradient_group,
            f"the {axis_names} ranks with the same shard": context.get_fsdp_replica_group(),
            "the ranks with the same experts": context.group("edp"),
            "the ranks with the same shard of the same experts": context.get_fsdp_replica_group(EXPERT_AXES[-1:]),
            "the first and the last stage": context.pipeline_ends,
        }
        if context.group("edp").ranks == context.gradient_group.ranks:
            del groups["the ranks with the same experts"]
        self._common_tensors = {
            group_name: (group, self._find_common_copies(group)) for group_name, group in groups.items() if group.size > 1
        }
        self._needed_indices = sorted({index for _, indices in self._common_tensors.values() for index in indices})

    def describe(self) -> str:
        """Format, for the log, how many tensors are compared over each group of ranks."""
        counts = [f"{len(indices)} over {group_name}" for group_name, (_, indices) in self._common_tensors.items() if indices]
        return ", ".join(counts) or "no weight is on several ranks"

    def compare(self, iteration: int, last_checked: int | None) -> None:
        """Compare all copies of weights bit by bit.

        Args:
            iteration: number of completed iterations, for the error message.
            last_checked: iteration of the previous comparison; None for the first comparison.

        Raises:
            AuditError: on every rank, if any two copies differ in any bit.
        """
        device = self._context.device
        digests = torch.zeros(len(self._tensors), dtype=torch.int64, device=device)
        for index in self._needed_indices:
            digests[index] = compute_bit_digest(self._tensors[index].get_tensor()).to(device)
        differs = torch.zeros_like(digests)
        for group, indices in self._common_tensors.values():
            if indices:
                local_digests = digests[indices]
                max_digests = all_reduce(local_digests.clone(), group, dist.ReduceOp.MAX)
                differs[indices] |= (local_digests != max_digests).to(
                    torch.int64
                )  # nonzero on at least one rank if the copies differ
        anywhere = all_reduce(differs.sum(), self._context.world, dist.ReduceOp.MAX)
        if anywhere.item():
            self._explain(digests.tolist(), differs.tolist(), iteration, last_checked)

    def _find_common_copies(self, group: Group) -> list[int]:
        """Find the tensors of which every rank of the group has a copy. Return their indices in an order that is equal on all
        ranks."""
        index_by_key = {tensor.key: index for index, tensor in enumerate(self._tensors)}
        common = set.intersection(*map(set, gather_objects(list(index_by_key), group)))
        return [index_by_key[key] for key in sorted(common)]

    def _explain(self, digests: list[int], differs: list[int], iteration: int, last_checked: int | None) -> None:
        world = self._context.world
        local_tensors = list(zip(self._tensors, digests, differs, strict=True))
        differing_keys = set().union(
            *gather_objects({tensor.key for tensor, _, is_different in local_tensors if is_different}, world)
        )
        rank_tensors = gather_objects(
            [(tensor.key, str(tensor), digest) for tensor, digest, _ in local_tensors if tensor.key in differing_keys], world
        )
        digests_by_rank: dict[tuple[int, str], dict[int, int]] = {}
        for rank, tensors in enumerate(rank_tensors):
            for key, label, digest in tensors:
                digests_by_rank.setdefault((key, label), {})[rank] = digest
        lines = [
            f"{label}: {_describe_minority(by_rank, self._context.topology)}" for (_, label), by_rank in digests_by_rank.items()
        ]
        last_check_text = "" if last_checked is None else f" (at iteration {last_checked} they were equal)"
        raise_audit(
            f"iteration {iteration}: copies of weights that must be equal differ between ranks{last_check_text}, "
            "so training stops without saving.",
            sorted(lines),
            "Possible causes: a fault of memory or of a link, or a gradient that is not summed over these ranks. Restart from the\n"
            "  last checkpoint. If the same rank differs again, replace its machine.",
        )


def _describe_minority(by_rank: dict[int, int], topology: Topology) -> str:
    """Describe which ranks hold other values of a weight than the majority of ranks, and in which process groups.

    Args:
        by_rank: digest (hash of the bits) of each rank's copy. All digests should be equal.
    """
    counts = Counter(by_rank.values()).most_common()
    if len(counts) > 1 and counts[0][1] == counts[1][1]:
        value_groups = [[rank for rank, digest in by_rank.items() if digest == value] for value, _ in counts]
        minority = [rank for ranks in value_groups[1:] for rank in ranks]
        summary = (
            f"{' and '.join(map(format_rank_list, value_groups))} have different values, and it cannot be decided which are wrong"
        )
    else:
        minority = [rank for rank, digest in by_rank.items() if digest != counts[0][0]]
        majority = [rank for rank in by_rank if rank not in minority]
        summary = f"the values of {format_rank_list(minority)} differ from those of {format_rank_list(majority)}"
    groups: list[str] = []
    for rank in minority:
        for group_name, ranks in _get_groups(rank, topology).items():
            text = f"{group_name} [{', '.join(map(str, ranks))}]"
            members = [peer for peer in ranks if peer in by_rank]
            if text not in groups and len({by_rank[peer] for peer in members}) > 1:
                groups.append(text)
    return f"{summary} ({', '.join(groups[:4])}{', ...' if len(groups) > 4 else ''})"


def _get_groups(rank: int, topology: Topology) -> dict[str, tuple[int, ...]]:
    pipeline = topology.group(rank, "pp")
    ends = {"first and last stage": (pipeline[0], pipeline[-1])} if rank in (pipeline[0], pipeline[-1]) else {}
    return {
        "tensor group": topology.group(rank, "tp"),
        f"{_format_gradient_axes(topology)} group": topology.group(rank, *GRADIENT_AXES),
        **ends,
    }


def _format_gradient_axes(topology: Topology) -> str:
    """Return the names of the axes over which gradients are summed, as text: "data", or "context and data"."""
    return "context and data" if topology.cp > 1 else "data"
