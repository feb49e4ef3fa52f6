"""Process groups, made once and passed on. A layer receives the group that it needs: ``context.group("tp")``.

The rank is an argument, not a fact of the process. So with the "fake" backend (``connect_fake``) the same code builds any rank of
any world on the meta device. A group of one needs no branch in the caller: every collective does nothing for it.
"""

from __future__ import annotations

import datetime
import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.config.imports import named
from megatron.config.launcher import launched, missing_rank
from megatron.config.parallel import ParallelConfig
from megatron.parallel.topology import AXES, DATA_AXES, EXPERT_AXES, GRADIENT_AXES, Topology

# ---- Which libraries a process group speaks, and what the communicators of pipeline messages and of tensor ranks are made of.
#
# On CUDA tensors go over NCCL, and what the host says (gathered objects, barriers, votes on an error) over gloo: it waits for no
# device, and it still works when a device or NCCL has failed. torch chooses by the device of what is sent, and for objects and
# barriers takes gloo where a group has both.

MESSAGE_CHANNELS = 2
"""NCCL's channels for the messages between two stages. A channel has buffers, and a thread block that keeps a multiprocessor of the
GPU busy as long as a posted receive waits for its message. Two is what NCCL takes to a peer on another node; inside a node it would
take up to 32. (NCCL bounds them by `maxCTAs`: src/graph/paths.cc, ncclTopoComputeP2pChannels. NCCL_MAX_CTAS goes before it.)"""

_NCCL_AND_GLOO = "cpu:gloo,cuda:nccl"
_MESSAGES = ("pp_up", "pp_down")
_TENSOR_RANKS = ("tp",)
_TENSORS_ONLY = ("fsdp_shard", "fsdp_replica")
"""Groups over which no rank says anything but tensors."""


class Communicator(NamedTuple):
    """What a group is made with."""

    backend: str | None = None
    """As torch spells it; None for that of the world."""
    high_priority: bool = False
    """Its stream goes before those that compute: what it sends is short, and products wait for it, here or on the next stage."""
    max_channels: int | None = None


def world_backend(backend: str) -> str:
    """The backends of the world, where tensors go over this one."""
    return _NCCL_AND_GLOO if backend == "nccl" else backend


def communicator(name: Sequence[str], world: str | None) -> Communicator:
    """What the group of this name is made with.

    Args:
        name: the axes of the group, or its name where it is none of the axes'.
        world: the backends of the world.
    """
    if world != _NCCL_AND_GLOO:
        return Communicator()
    if (*name,) == _TENSOR_RANKS:
        return Communicator(high_priority=True)
    if not {*name} & {*_MESSAGES, *_TENSORS_ONLY}:
        return Communicator()
    if {*name} & {*_MESSAGES}:
        return Communicator("nccl", high_priority=True, max_channels=MESSAGE_CHANNELS)
    return Communicator("nccl")


def check_error_handling(environment: Mapping[str, str]) -> None:
    """Refuse settings of torch with which a rank would wait for ever, or compute on with what was never received.

    torch watches NCCL's errors and ends the process (TearDown, 1, or SkipCleanUp, 3, its default). NoHandling (0) leaves all other
    ranks waiting. CleanUpOnly (2) lets the device go on with whatever is in the memory.

    Raises:
        ValueError: the environment asks for one of these two.
    """
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"):
        if (value := environment.get(name)) in ("0", "2"):
            what = "a lost rank leaves all others waiting" if value == "0" else "a failed message is computed on with"
            raise ValueError(f"{name}={value} in the environment: {what}. Unset it; torch then ends every rank that NCCL fails on.")


def options(made_of: Communicator) -> Any:
    """torch's options for it, which only a torch with NCCL has; None where there is nothing to say."""
    if not made_of.high_priority and made_of.max_channels is None:
        return None
    found = dist.ProcessGroupNCCL.Options(is_high_priority_stream=made_of.high_priority)
    if made_of.max_channels is not None and hasattr(found, "config"):  # torch is built with an NCCL that has it
        found.config.max_ctas = made_of.max_channels
    return found


# Groups that the framework asks for. Made eagerly and in this order, because every rank must take part in making every group.
_GROUP_AXES = (("tp",), ("cp",), DATA_AXES, ("pp",), GRADIENT_AXES, ("tp", *GRADIENT_AXES), ("tp", "cp"), AXES)
_EXPERT_GROUP_AXES = (("etp", "ep"), ("edp",))


@dataclass(frozen=True)
class Group:
    """Ranks that communicate, as one of them sees them."""

    name: str
    ranks: tuple[int, ...]
    index: int
    """This rank's position in `ranks`."""
    process_group: dist.ProcessGroup | None = None
    """torch's group; None for a group of one."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


SELF_GROUP = Group("self", (0,), 0)


@dataclass
class ParallelContext:
    """The place of this rank in the grid, and its groups."""

    topology: Topology
    rank: int
    device: torch.device
    backend: str | None = None
    """torch's word for the libraries that the world speaks."""
    _groups: dict[tuple[str, ...], Group] = field(default_factory=dict)

    @functools.cached_property
    def coordinates(self) -> dict[str, int]:
        """Place of this rank on every axis, the experts' axes too."""
        return self.topology.places(self.rank)

    @functools.cached_property
    def axis_sizes(self) -> dict[str, int]:
        """Size of every axis."""
        return {axis: self.topology.size(axis) for axis in (*AXES, *EXPERT_AXES)}

    def group(self, *axes: str) -> Group:
        """The group over these axes that this rank belongs to; over none, this rank alone.

        Raises:
            KeyError: no group is made for this set of axes.
        """
        if not axes:
            return Group("alone", (self.rank,), 0)
        return self._groups[tuple(axis for axis in (*AXES, *EXPERT_AXES) if axis in axes)]

    @property
    def world(self) -> Group:
        """The group of all ranks."""
        return self.group(*AXES)

    @property
    def data_group(self) -> Group:
        """Ranks that read different samples. The global batch is divided among these."""
        return self.group(*DATA_AXES)

    @property
    def gradient_group(self) -> Group:
        """Ranks whose gradients are summed and over which state is sharded: the data ranks with the context ranks of each."""
        return self.group(*GRADIENT_AXES)

    @property
    def expert_group(self) -> Group:
        """Ranks that together hold each expert once, and give each other tokens."""
        return self.group("etp", "ep")

    @property
    def sequence_group(self) -> Group:
        """Ranks that share each sequence, under sequence parallelism the tensor ranks too."""
        return self.group("tp", "cp")

    @property
    def context_group(self) -> Group:
        """Ranks that share each sequence."""
        return self.group("cp")

    @property
    def context_rings(self) -> tuple[Group, Group]:
        """The context ranks again, for keys and values that go round, and for the gradients of these behind them: each with a
        communicator of its own, so that neither waits for the other."""
        return self._groups[("cp_ring",)], self._groups[("cp_ring_grad",)]

    def pipeline_channel(self, source: int, destination: int) -> Group:
        """The group for messages from one pipeline rank (position on the pp axis) to another.

        Messages towards higher and towards lower ranks have a group each, of tensors only. NCCL runs the sends and receives of a
        pair in the order in which they were issued, so two directions on one communicator could wait for each other.
        """
        return self._groups[("pp_up",) if source < destination else ("pp_down",)]

    @property
    def pipeline_ends(self) -> Group:
        """First and last pipeline rank, which share a tied embedding; a group of one on the ranks between."""
        return self._groups[("ends",)]

    def fsdp_shard(self, axes: tuple[str, ...] = GRADIENT_AXES) -> Group:
        """Ranks that hold a slice each of what `fully_shard` shards: the gradient group, or a part of --fsdp-shard-size.

        Args:
            axes: over which gradients of the parameters are summed: those of the data ranks, or of experts.
        """
        return self._groups.get(_part("fsdp_shard", axes)) or self.group(*axes)

    def fsdp_replica(self, axes: tuple[str, ...] = GRADIENT_AXES) -> Group:
        """Ranks that hold the same slice, one in each part; a group of one unless there are several parts."""
        return self._groups.get(_part("fsdp_replica", axes)) or Group("fsdp_replica", (self.rank,), 0)

    def at_stage(self, stage: int) -> ParallelContext:
        """The context of the rank at this stage that has the same places otherwise. For arithmetic only: its groups have only sizes
        and places."""
        groups = {**self._groups, ("pp",): replace(self.group("pp"), index=stage)}
        return replace(self, rank=self.topology.rank(**{**self.topology.coordinates(self.rank), "pp": stage}), _groups=groups)


def _part(name: str, axes: tuple[str, ...]) -> tuple[str, ...]:
    """The key of a group that is a part of a larger one, or lies across such parts."""
    return (name,) if axes == GRADIENT_AXES else (name, *axes)


def make_context(
    topology: Topology,
    rank: int,
    device: torch.device,
    *,
    timeout_minutes: float = 10,
    fsdp_shard_size: int | None = None,
    alone: bool = False,
) -> ParallelContext:
    """Make every group of the topology. All ranks of the default process group call this together; a world of one needs none.

    Args:
        fsdp_shard_size: data ranks that share one copy of the model (see `fsdp_shard`); by default all.
        alone: make only the groups of this rank, since no other ranks take part.

    Raises:
        ValueError: the data ranks do not divide into such parts.
    """
    context = ParallelContext(topology, rank, device, dist.get_backend() if dist.is_initialized() else None)
    timeout = datetime.timedelta(minutes=timeout_minutes)
    made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    def enter(key: tuple[str, ...], members: list[tuple[int, ...]], own_communicator: bool = False) -> None:
        name = "-".join(key)
        for ranks in members:
            if len(ranks) == 1:
                process_group = None
            elif ranks in made and not own_communicator:
                process_group = made[ranks]
            elif len(ranks) == topology.world_size and not own_communicator:
                process_group = dist.group.WORLD
            else:
                made_of = communicator(key, context.backend)
                process_group = dist.new_group(
                    list(ranks), timeout=timeout, backend=made_of.backend, pg_options=options(made_of), group_desc=name
                )
            if not own_communicator:
                made[ranks] = process_group
            if rank in ranks:
                context._groups[key] = Group(name, ranks, ranks.index(rank), process_group)

    def groups(*axes: str) -> list[tuple[int, ...]]:
        return [topology.group(rank, *axes)] if alone else topology.groups(*axes)

    for axes in (*_GROUP_AXES, *_EXPERT_GROUP_AXES):
        enter(axes, groups(*axes))
    for key in ("cp_ring", "cp_ring_grad"):
        enter((key,), groups("cp"), own_communicator=True)
    pipelines = groups("pp")
    enter(("pp_up",), pipelines, own_communicator=True)
    enter(("pp_down",), pipelines, own_communicator=True)
    context._groups[("ends",)] = Group("ends", (rank,), 0)
    enter(("ends",), [(ranks[0], ranks[-1]) for ranks in pipelines if len(ranks) > 1])
    if fsdp_shard_size is not None:
        for axes, size in ((GRADIENT_AXES, fsdp_shard_size), (EXPERT_AXES[-1:], topology.expert_shard_size(fsdp_shard_size))):
            parts, across = topology.hybrid_groups(size, rank if alone else None, axes)
            enter(_part("fsdp_shard", axes), parts)
            enter(_part("fsdp_replica", axes), across)
    return context


def connect(config: ParallelConfig) -> ParallelContext:
    """Join the job that a launcher such as torchrun describes in the environment, or be a world of one.

    Raises:
        ValueError: CUDA is asked for and missing, there are more local ranks than devices, the backend does not fit the device,
            NCCL is asked not to end a rank on which it fails, --init-method names a place and nothing says which rank this is, or
            the ranks do not find each other.
    """
    if not dist.is_initialized() and (unknown := missing_rank(config.init_method)):
        raise ValueError(unknown)
    job = launched()
    device = choose_device(config.device, job.local_rank)
    backend = config.distributed_backend or ("nccl" if device.type == "cuda" else "gloo")
    if backend == "nccl" and device.type != "cuda":
        raise ValueError(
            f"--distributed-backend nccl needs CUDA, but the device is {device.type}. Use gloo, or leave the flag out."
        )
    if backend == "nccl":
        check_error_handling(os.environ)
    if job.world_size > 1 and not dist.is_initialized():
        timeout = datetime.timedelta(minutes=config.distributed_timeout_minutes)
        # No device_id: with it, NCCL would make every group at once, by a split of the whole world each. Without, a communicator is
        # made at its first use by its own ranks, and each pair of pipeline neighbours has one of its own in each direction.
        store = named("megatron.parallel.meeting:meet")(job, timeout.total_seconds(), config.init_method)
        dist.init_process_group(world_backend(backend), timeout=timeout, store=store, rank=job.rank, world_size=job.world_size)
    topology = Topology.of(config, job.world_size)
    return make_context(
        topology,
        job.rank,
        device,
        timeout_minutes=config.distributed_timeout_minutes,
        fsdp_shard_size=config.fsdp_shard_size,
    )


def connect_fake(
    topology: Topology,
    rank: int,
    fsdp_shard_size: int | None = None,
    device: torch.device = torch.device("meta"),  # noqa: B008 (a constant)
) -> ParallelContext:
    """Take the place of any rank of any world, on the meta device or on a real one: its groups are real objects, collectives return
    at once, and what would be received is whatever the memory holds.

    No other rank's groups are made, so that a world of a million takes half a second.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if topology.world_size > 1:
        dist.init_process_group("fake", rank=rank, world_size=topology.world_size, store=FakeStore())
    return make_context(topology, rank, device, fsdp_shard_size=fsdp_shard_size, alone=True)


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """The device of a local rank; makes it the current one on CUDA.

    Raises:
        ValueError: there is no such device.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(
            "--device cuda, but torch sees no CUDA device. Use --device cpu, or check the driver and CUDA_VISIBLE_DEVICES."
        )
    if torch.cuda.device_count() == 1 and os.environ.get("CUDA_VISIBLE_DEVICES"):
        local_rank = 0  # the launcher shows each process a GPU of its own (NCCL refuses two ranks on one)
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {local_rank} has no GPU of its own: this node shows {torch.cuda.device_count()}. "
            f"Start at most that many processes a node (--nproc-per-node {torch.cuda.device_count()}), or use --device cpu."
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def disconnect() -> None:
    """Leave the job, if one was joined."""
    if dist.is_initialized():
        dist.destroy_process_group()
