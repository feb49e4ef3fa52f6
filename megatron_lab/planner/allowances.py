"""Estimates of the device memory that CUDA and its libraries use in addition to the job's tensors, each with its source.

This memory cannot be computed. All other memory in a plan is exact to the byte, so the estimates form a separate entry of a rank's
memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.parallel.context import MESSAGE_CHANNELS
from megatron_lab.planner.units import format_bytes

_MIB = 2**20


@dataclass(frozen=True)
class Allowance:
    """Estimated device memory that CUDA or one of its libraries uses for one purpose."""

    name: str
    bytes: int
    source: str
    """Basis of the estimate: the measurement or the source file from which it follows."""
    communicators: int = 0
    """Number of NCCL communicators that share this memory; 0 if the memory does not belong to NCCL."""

    def __str__(self) -> str:
        """Return the purpose and the size, such as "NCCL buffers of 5 communicators 1.21 GB"."""
        users = f" of {self.communicators} communicator{'s' * (self.communicators > 1)}" if self.communicators else ""
        return f"{self.name}{users} {format_bytes(self.bytes)}"


CONTEXT = Allowance(
    "CUDA context",
    512 * _MIB,
    "measured: 400 MB (github.com/pytorch/pytorch/issues/109888), 426 MiB with torch 2.10 and CUDA 13.0 before any kernel "
    "(github.com/unslothai/unsloth-zoo/pull/1053); with kernels loaded as they are first used",
)
"""Driver state of a process, and the code of its kernels."""
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
"""Memory that is mapped but unused at the end of the allocator's two segments. Gaps between blocks are not included."""
_NCCL = (
    "NCCL, src/init.cc: a connection keeps 0.5 (LL) + 4.7 (LL128) + 4 MiB (NCCL_BUFFSIZE) a channel; with pages of 2 MiB and two "
    "blocks of flags that is 14 MiB, the 3.28 GB of 7 peers and 32 channels of github.com/NVIDIA/nccl/issues/1685. Channels: 16 of "
    f"a ring (issues/892), and the {MESSAGE_CHANNELS} that are allowed for messages to a peer"
)
_PER_CHANNEL = 14 * _MIB
_RING_CHANNELS, _PEER_CHANNELS = 16, 32


def estimate_allowances(rings: Mapping[str, int], num_peers: int) -> tuple[Allowance, ...]:
    """Return the estimates of CUDA's own memory on one rank, one for each purpose (CUDA context, cuBLAS, NCCL, allocator).

    Args:
        rings: number of ranks of each process group over which the rank runs collectives, by the group's name. Groups that share a
            communicator appear once.
        num_peers: number of pipeline stages with which the rank exchanges messages. Sends and receives use separate communicators,
            which together take the memory of one connection.
    """
    num_rings = sum(size > 1 for size in rings.values())
    channels = _RING_CHANNELS * num_rings + MESSAGE_CHANNELS * num_peers
    nccl = [Allowance("NCCL buffers", channels * _PER_CHANNEL, _NCCL, num_rings + 2 * num_peers)] if channels else []
    return (CONTEXT, WORKSPACES, *nccl, ROUNDING)


def estimate_symmetric_memory(shard_bytes: int) -> Allowance:
    """Estimate the symmetric memory (buffers that all GPUs of a node can access) for matrix products that overlap with
    tensor-parallel communication.

    Args:
        shard_bytes: bytes of the hidden states of a microbatch that one tensor rank holds between layers.
    """
    source = (
        "torch, torch/distributed/_symmetric_memory/__init__.py: two parts of a product that is scattered, beside the allocator"
    )
    return Allowance("symmetric memory", 2 * shard_bytes, source)


def estimate_tensor_ring() -> Allowance:
    """Estimate the NCCL buffers for matrix products that overlap with tensor-parallel communication, if it consists of messages in
    a ring. Each tensor rank sends to one neighbor and receives from the other."""
    return Allowance(
        "NCCL buffers of a tensor ring", _PEER_CHANNELS * _PER_CHANNEL, f"{_NCCL}; 32 to a peer inside a node (issues/1685)"
    )
