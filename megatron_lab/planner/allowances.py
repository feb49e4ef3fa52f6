"""What CUDA takes of a device beside what the job allocates, which no arithmetic gives: estimates, each with its source.

All else in a plan is exact to the byte. So these stand apart, as one part of a rank's memory with a name of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.parallel.context import MESSAGE_CHANNELS
from megatron_lab.planner.state_report import amount

_MIB = 2**20


@dataclass(frozen=True)
class Allowance:
    """Memory of a device for one purpose."""

    name: str
    bytes: int
    source: str
    """Where the number comes from."""
    communicators: int = 0
    """Number of communicators of NCCL that it is for."""

    def __str__(self) -> str:
        """Return name and size, as "NCCL buffers of 5 communicators 1.21 GB"."""
        users = f" of {self.communicators} communicator{'s' * (self.communicators > 1)}" if self.communicators else ""
        return f"{self.name}{users} {amount(self.bytes)}"


CONTEXT = Allowance(
    "CUDA context",
    512 * _MIB,
    "measured: 400 MB (github.com/pytorch/pytorch/issues/109888), 426 MiB with torch 2.10 and CUDA 13.0 before any kernel "
    "(github.com/unslothai/unsloth-zoo/pull/1053); with kernels loaded as they are first used",
)
"""The driver's state of a process, and the code of the kernels."""
WORKSPACES = Allowance(
    "cuBLAS workspaces",
    2 * 32 * _MIB,
    "torch, aten/src/ATen/cuda/CublasHandlePool.cpp: 32 MiB on Hopper (before it 8.1) for each handle and stream; a handle for the "
    "thread of forwards and one for autograd's",
)
ROUNDING = Allowance(
    "allocator's rounding",
    22 * _MIB,
    "torch, c10/cuda/CUDACachingAllocator.cpp: an expandable segment grows by 20 MiB, that of blocks up to 1 MiB by 2 MiB",
)
"""What is mapped and not used at the end of the allocator's two segments. Gaps between blocks are not in it."""
_NCCL = (
    "NCCL, src/init.cc: a connection keeps 0.5 (LL) + 4.7 (LL128) + 4 MiB (NCCL_BUFFSIZE) a channel; with pages of 2 MiB and two "
    "blocks of flags that is 14 MiB, the 3.28 GB of 7 peers and 32 channels of github.com/NVIDIA/nccl/issues/1685. Channels: 16 of "
    f"a ring (issues/892), and the {MESSAGE_CHANNELS} that are allowed for messages to a peer"
)
_PER_CHANNEL = 14 * _MIB
_RING_CHANNELS, _PEER_CHANNELS = 16, 32


def allowances(rings: Mapping[str, int], num_peers: int) -> tuple[Allowance, ...]:
    """What CUDA takes on one rank.

    Args:
        rings: the groups of its collectives on the device, with their sizes, each under one name. Each is a communicator.
        num_peers: stages that it exchanges messages with. Each direction has a communicator of its own, which is one half of a
            connection.
    """
    num_rings = sum(size > 1 for size in rings.values())
    channels = _RING_CHANNELS * num_rings + MESSAGE_CHANNELS * num_peers
    nccl = [Allowance("NCCL buffers", channels * _PER_CHANNEL, _NCCL, num_rings + 2 * num_peers)] if channels else []
    return (CONTEXT, WORKSPACES, *nccl, ROUNDING)


def of_symmetric_memory(part_bytes: int) -> Allowance:
    """What products take that overlap by symmetric memory.

    Args:
        part_bytes: of the hidden states that a tensor rank holds between layers.
    """
    source = (
        "torch, torch/distributed/_symmetric_memory/__init__.py: two parts of a product that is scattered, beside the allocator"
    )
    return Allowance("symmetric memory", 2 * part_bytes, source)


def of_tensor_ring() -> Allowance:
    """What products take that overlap by a ring: messages to one neighbour, and from the other."""
    return Allowance(
        "NCCL buffers of a tensor ring", _PEER_CHANNELS * _PER_CHANNEL, f"{_NCCL}; 32 to a peer inside a node (issues/1685)"
    )
