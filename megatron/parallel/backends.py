"""Which libraries a process group speaks, and what the communicators of pipeline messages and of tensor ranks are made of.

On CUDA tensors go over NCCL, and what the host says (gathered objects, barriers, votes on an error) over gloo: it waits for no
device, and it still works when a device or NCCL has failed. torch chooses by the device of what is sent, and for objects and
barriers takes gloo where a group has both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

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
