"""CUDA in forked processes.

After a process has called CUDA's runtime, even only by `torch.cuda.is_available()`, its forks cannot use CUDA: every call in them
fails ("Cannot re-initialize CUDA in forked subprocess"). Therefore fork before the first call, or do not use CUDA in the fork.
"""

from __future__ import annotations

import os

import torch

from megatron.parallel.torch_private import is_in_bad_fork


def has_lost_devices() -> bool:
    """Return whether this process is a fork that cannot use the machine's CUDA devices, because its parent used CUDA before the
    fork.

    The number of devices comes from the driver's library (NVML), which also works in a fork.
    """
    return is_in_bad_fork() and torch.cuda.device_count() > 0


def hide_devices() -> None:
    """Hide all CUDA devices from this process. This has no effect if the process has already called CUDA's runtime."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
