"""Process groups: created once, then passed to the layers. A layer takes the group that it needs: ``context.group("tp")``.

The rank is an argument and not a property of the process. With the "fake" backend (``connect_fake``), the same code therefore
builds any rank of any world size on the meta device. In a group of size one, collectives do nothing, so callers need no special
case.
"""

from __future__ import annotations

import atexit
import datetime
import functools
import gc
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.config.imports import import_object
from megatron.config.launcher import describe_missing_rank, read_process_info
from megatron.config.parallel import ParallelConfig
from megatron.parallel.topology import AXES, DATA_AXES, EXPERT_AXES, GRADIENT_AXES, Topology

# ---- Backends of the process groups, and options of the communicators for pipeline messages and tensor parallelism.
#
# On CUDA, tensors use NCCL. Python objects, barriers and votes on an error use gloo: it does not wait for the GPU, and it still
# works after the GPU or NCCL has failed. Torch selects the backend by the device of the tensor. For objects and barriers it selects
# gloo in a group with both backends.

MESSAGE_CHANNELS = 2
"""NCCL channels for the messages between two pipeline stages. Each channel has buffers, and a thread block that occupies a
multiprocessor of the GPU as long as a posted receive waits for its message. By default NCCL uses two channels for a peer on another
node, and up to 32 for a peer on the same node. NCCL bounds the number by `maxCTAs` (ncclTopoComputeP2pChannels in
src/graph/paths.cc). The environment variable NCCL_MAX_CTAS has priority over this value."""

_NCCL_AND_GLOO = "cpu:gloo,cuda:nccl"
_PIPELINE_GROUPS = ("pp_up", "pp_down")
_TENSOR_GROUP = ("tp",)
_NCCL_ONLY_GROUPS = ("fsdp_shard", "fsdp_replica")
"""Groups that communicate only GPU tensors, never Python objects or barriers."""


class CommunicatorOptions(NamedTuple):
    """Options for creating a process group. The defaults are those of torch."""

    backend: str | None = None
    """Backend string of torch; None for the backends of the default process group."""
    high_priority: bool = False
    """Run this group's communication on a high-priority stream. Meant for short messages for which the next matrix product waits,
    on this rank or on the next stage."""
    max_channels: int | None = None
    """Upper bound on the number of NCCL channels; None for NCCL's default."""


def get_world_backend(backend: str) -> str:
    """Return torch's backend string for the default process group, for example "gloo". With NCCL, the string also names gloo, for
    tensors and objects in host memory."""
    return _NCCL_AND_GLOO if backend == "nccl" else backend


def get_communicator_options(name: Sequence[str], world_backends: str | None) -> CommunicatorOptions:
    """Return the options for creating a process group. Without NCCL, the defaults are returned.

    Args:
        name: axes of the group, such as ("tp",). A group for a special purpose has a name, possibly followed by axes, such as
            ("fsdp_shard", "edp").
        world_backends: backend string of the default process group.
    """
    if world_backends != _NCCL_AND_GLOO:
        return CommunicatorOptions()
    if (*name,) == _TENSOR_GROUP:
        return CommunicatorOptions(high_priority=True)
    if not {*name} & {*_PIPELINE_GROUPS, *_NCCL_ONLY_GROUPS}:
        return CommunicatorOptions()
    if {*name} & {*_PIPELINE_GROUPS}:
        return CommunicatorOptions("nccl", high_priority=True, max_channels=MESSAGE_CHANNELS)
    return CommunicatorOptions("nccl")


def check_error_handling(environment: Mapping[str, str]) -> None:
    """Reject settings of torch that make a rank hang, or continue with undefined data, after an NCCL error.

    By default torch watches for NCCL errors and ends the process (TearDown, 1, or SkipCleanUp, 3, which is the default). With
    NoHandling (0), all other ranks wait forever for a lost rank. With CleanUpOnly (2), the GPU continues with whatever the receive
    buffer contains.

    Raises:
        ValueError: an environment variable selects NoHandling or CleanUpOnly.
    """
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"):
        if (value := environment.get(name)) in ("0", "2"):
            consequence = (
                "after a rank is lost, all other ranks wait forever"
                if value == "0"
                else "after an NCCL error, ranks compute with undefined data"
            )
            raise ValueError(
                f"{name}={value} in the environment: {consequence}. Unset this variable; torch then ends every rank in which NCCL "
                "reports an error."
            )


def build_nccl_options(communicator: CommunicatorOptions) -> Any:
    """Return torch's NCCL options for a process group, or None if all options are defaults.

    Defaults need no object, and only builds of torch with NCCL have its class.
    """
    if not communicator.high_priority and communicator.max_channels is None:
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=communicator.high_priority)
    if communicator.max_channels is not None and hasattr(options, "config"):  # NCCL is new enough to have a config
        options.config.max_ctas = communicator.max_channels
    return options


# Axes of the groups to create, all at the start and in this order, because every rank must call new_group for every group.
_GROUP_AXES = (("tp",), ("cp",), DATA_AXES, ("pp",), GRADIENT_AXES, ("tp", *GRADIENT_AXES), ("tp", "cp"), AXES)
_EXPERT_GROUP_AXES = (("etp", "ep"), ("edp",))


@dataclass(frozen=True)
class Group:
    """Process group: its name, the ranks of its members and this process's rank in it."""

    name: str
    ranks: tuple[int, ...]
    """Global ranks of the members."""
    rank: int
    """Rank of this process within the group: its position in `ranks`."""
    process_group: dist.ProcessGroup | None = None
    """torch's process group; None for a group of size one."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


SELF_GROUP = Group("self", (0,), 0)


@dataclass
class ParallelContext:
    """Position of this rank in the rank grid (its coordinate on each parallelism axis), and its process groups."""

    topology: Topology
    rank: int
    device: torch.device
    backend: str | None = None
    """Backend string of the default process group; None if torch.distributed is not initialized."""
    _groups: dict[tuple[str, ...], Group] = field(default_factory=dict)

    @functools.cached_property
    def coordinates(self) -> dict[str, int]:
        """Coordinates of this rank on every axis, including the expert axes."""
        return self.topology.all_coordinates(self.rank)

    @functools.cached_property
    def axis_sizes(self) -> dict[str, int]:
        """Size of every axis, including the expert axes."""
        return {axis: self.topology.get_size(axis) for axis in (*AXES, *EXPERT_AXES)}

    def group(self, *axes: str) -> Group:
        """Return this rank's process group over the given axes. Without axes, return a group of size one.

        Raises:
            KeyError: no group was created for these axes.
        """
        if not axes:
            return Group("alone", (self.rank,), 0)
        return self._groups[tuple(axis for axis in (*AXES, *EXPERT_AXES) if axis in axes)]

    @property
    def world(self) -> Group:
        """Group of all ranks."""
        return self.group(*AXES)

    @property
    def data_group(self) -> Group:
        """Process group of the data-parallel ranks, which read different samples of the global batch."""
        return self.group(*DATA_AXES)

    @property
    def gradient_group(self) -> Group:
        """Process group over which gradients are summed and optimizer state is sharded: the data-parallel and context-parallel
        ranks."""
        return self.group(*GRADIENT_AXES)

    @property
    def expert_group(self) -> Group:
        """Process group of the ranks that together hold each expert exactly once, and send each other the experts' tokens."""
        return self.group("etp", "ep")

    @property
    def sequence_group(self) -> Group:
        """Process group of the ranks that work on the same sequences: the context-parallel and tensor-parallel ranks. With sequence
        parallelism, the tensor-parallel ranks split the tokens too."""
        return self.group("tp", "cp")

    @property
    def context_group(self) -> Group:
        """Process group of the context-parallel ranks, which work on the same sequences, each on some of the tokens."""
        return self.group("cp")

    @property
    def context_rings(self) -> tuple[Group, Group]:
        """Two further process groups of the context-parallel ranks, for ring attention.

        The first is for keys and values, the second for their gradients. Each has its own communicator, so the two rings never wait
        for each other.
        """
        return self._groups[("cp_ring",)], self._groups[("cp_ring_grad",)]

    def get_pipeline_channel(self, source: int, destination: int) -> Group:
        """Return the process group for messages from one pipeline stage to another.

        Messages to later and to earlier stages have separate groups, which carry only tensors. NCCL runs the sends and receives of
        a pair of ranks in the order in which they were issued. With a single communicator, a message in one direction could
        therefore wait for a message in the other direction.
        """
        return self._groups[("pp_up",) if source < destination else ("pp_down",)]

    @property
    def pipeline_ends(self) -> Group:
        """Process group of the first and the last pipeline stage, which share a tied embedding. On all other stages, a group of
        only this rank."""
        return self._groups[("ends",)]

    def get_fsdp_shard_group(self, axes: tuple[str, ...] = GRADIENT_AXES) -> Group:
        """Return the process group over which `fully_shard` shards a parameter.

        By default this is the gradient group. With --fsdp-shard-size (hybrid FSDP), it contains only some neighboring ranks of that
        group.

        Args:
            axes: axes over which gradients of the parameter are summed. By default those of the gradient group; for experts, their
                data axis.
        """
        return self._groups.get(_build_fsdp_group_key("fsdp_shard", axes)) or self.group(*axes)

    def get_fsdp_replica_group(self, axes: tuple[str, ...] = GRADIENT_AXES) -> Group:
        """Return the process group of the ranks that hold the same shard of a parameter in hybrid FSDP. With full sharding, it is a
        group of size one."""
        return self._groups.get(_build_fsdp_group_key("fsdp_replica", axes)) or Group("fsdp_replica", (self.rank,), 0)

    def at_stage(self, stage: int) -> ParallelContext:
        """Return the context of another pipeline stage: of the rank that has this rank's coordinates on all axes but the pipeline
        axis.

        The returned context is for planning and cannot communicate: only sizes and ranks of its groups are meaningful.
        """
        groups_at_stage = {**self._groups, ("pp",): replace(self.group("pp"), rank=stage)}
        return replace(
            self, rank=self.topology.find_rank(**{**self.topology.get_coordinates(self.rank), "pp": stage}), _groups=groups_at_stage
        )


def _build_fsdp_group_key(name: str, axes: tuple[str, ...]) -> tuple[str, ...]:
    return (name,) if axes == GRADIENT_AXES else (name, *axes)


def make_context(
    topology: Topology,
    rank: int,
    device: torch.device,
    *,
    timeout_minutes: float = 10,
    fsdp_shard_size: int | None = None,
    local_groups_only: bool = False,
) -> ParallelContext:
    """Create every process group of the topology, and return the context of this rank. All ranks of the default process group must
    call this function together.

    Args:
        rank: global rank of this process.
        fsdp_shard_size: number of data-parallel ranks that share one copy of the model (see `get_fsdp_shard_group`); None for all.
        local_groups_only: create only the groups that contain this rank, because the other ranks do not exist as processes.

    Raises:
        ValueError: the number of data-parallel ranks is not divisible by `fsdp_shard_size`.
    """
    context = ParallelContext(topology, rank, device, dist.get_backend() if dist.is_initialized() else None)
    timeout = datetime.timedelta(minutes=timeout_minutes)
    process_groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    def create_groups(key: tuple[str, ...], rank_lists: list[tuple[int, ...]], uses_new_communicator: bool = False) -> None:
        name = "-".join(key)
        for ranks in rank_lists:
            if len(ranks) == 1:
                process_group = None
            elif ranks in process_groups and not uses_new_communicator:
                process_group = process_groups[ranks]
            elif len(ranks) == topology.world_size and not uses_new_communicator:
                process_group = dist.group.WORLD
            else:
                communicator = get_communicator_options(key, context.backend)
                process_group = dist.new_group(
                    list(ranks),
                    timeout=timeout,
                    backend=communicator.backend,
                    pg_options=build_nccl_options(communicator),
                    group_desc=name,
                )
            if not uses_new_communicator:
                process_groups[ranks] = process_group
            if rank in ranks:
                context._groups[key] = Group(name, ranks, ranks.index(rank), process_group)

    def list_groups(*axes: str) -> list[tuple[int, ...]]:
        return [topology.group(rank, *axes)] if local_groups_only else topology.get_groups(*axes)

    for axes in (*_GROUP_AXES, *_EXPERT_GROUP_AXES):
        create_groups(axes, list_groups(*axes))
    for key in ("cp_ring", "cp_ring_grad"):
        create_groups((key,), list_groups("cp"), uses_new_communicator=True)
    pipeline_groups = list_groups("pp")
    create_groups(("pp_up",), pipeline_groups, uses_new_communicator=True)
    create_groups(("pp_down",), pipeline_groups, uses_new_communicator=True)
    context._groups[("ends",)] = Group("ends", (rank,), 0)
    create_groups(("ends",), [(ranks[0], ranks[-1]) for ranks in pipeline_groups if len(ranks) > 1])
    if fsdp_shard_size is not None:
        for axes, shard_size in (
            (GRADIENT_AXES, fsdp_shard_size),
            (EXPERT_AXES[-1:], topology.get_expert_shard_size(fsdp_shard_size)),
        ):
            shard_groups, replica_groups = topology.shard_and_replica_groups(shard_size, rank if local_groups_only else None, axes)
            create_groups(_build_fsdp_group_key("fsdp_shard", axes), shard_groups)
            create_groups(_build_fsdp_group_key("fsdp_replica", axes), replica_groups)
    return context


def connect(config: ParallelConfig) -> ParallelContext:
    """Join the job that a launcher such as torchrun describes in environment variables. Without a launcher, the world has a single
    rank.

    Raises:
        ValueError: CUDA is requested but not available, there are more local ranks than GPUs, the backend does not support the
            device, the environment disables NCCL's error handling, --init-method is set but the rank is unknown, or the rendezvous
            fails.
    """
    if not dist.is_initialized() and (problem := describe_missing_rank(config.init_method)):
        raise ValueError(problem)
    job = read_process_info()
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
        # No device_id: with it, NCCL would create each communicator immediately, by splitting the communicator of the world.
        # Without it, the ranks of a group create the communicator at its first use, and each pair of adjacent pipeline stages has a
        # separate communicator for each direction.
        store = import_object("megatron.parallel.rendezvous:rendezvous")(job, timeout.total_seconds(), config.init_method)
        dist.init_process_group(get_world_backend(backend), timeout=timeout, store=store, rank=job.rank, world_size=job.world_size)
        # Deletes the process groups that `disconnect` has destroyed (contexts are part of reference cycles). This ends the threads
        # of gloo. Such a thread may still hold tensors of the last collective. If it released them while the interpreter is
        # finalized, the process would abort: "terminate called without an active exception" (pytorch issue 190489).
        atexit.register(gc.collect)
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
    """Build the context of any rank of a world of any size in this process, with the "fake" backend of torch.

    The process groups are real objects, but collectives return at once, and the contents of received tensors are undefined. Only
    the groups of this rank are created, so a world of a million ranks takes half a second.

    Args:
        fsdp_shard_size: number of data-parallel ranks that share one copy of the model; None for all.
        device: meta device or a real device.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if topology.world_size > 1:
        dist.init_process_group("fake", rank=rank, world_size=topology.world_size, store=FakeStore())
    return make_context(topology, rank, device, fsdp_shard_size=fsdp_shard_size, local_groups_only=True)


def choose_device(requested: str, local_rank: int) -> torch.device:
    """Return the device for the process with a local rank (its index on the node). A CUDA device also becomes the current device.

    Args:
        requested: "cpu", "cuda", or "auto" for CUDA if it is available.

    Raises:
        ValueError: CUDA is not available, or there are more local ranks than GPUs.
    """
    if requested == "cpu" or (requested == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(
            "--device cuda, but torch sees no CUDA device. Use --device cpu, or check the driver and CUDA_VISIBLE_DEVICES."
        )
    if torch.cuda.device_count() == 1 and os.environ.get("CUDA_VISIBLE_DEVICES"):
        local_rank = 0  # the launcher makes one GPU visible per process (NCCL does not support two ranks on one GPU)
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {local_rank} has no GPU, because torch sees only {torch.cuda.device_count()} GPUs on this node. "
            f"Start at most that many processes per node (--nproc-per-node {torch.cuda.device_count()}), or use --device cpu."
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def disconnect() -> None:
    """Destroy the default process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
