"""CUDA in forked processes.

A process that has called CUDA's runtime, if only by `torch.cuda.is_available()`, leaves its forks without CUDA: every call in them
fails ("Cannot re-initialize CUDA in forked subprocess"). So whoever forks does it before, or the fork does not use CUDA.
"""

from __future__ import annotations

import os

import torch

from megatron.parallel.torch_private import is_in_bad_fork


def has_lost_devices() -> bool:
    """Return whether this machine has CUDA devices that this process cannot use, as a fork of one that had called CUDA's runtime.

    Counting the devices asks the driver's library (NVML), which survives a fork.
    """
    return is_in_bad_fork() and torch.cuda.device_count() > 0


def hide_devices() -> None:
    """Let this process see no CUDA device. It has no effect if the process has called CUDA's runtime."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
