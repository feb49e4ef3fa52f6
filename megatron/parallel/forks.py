"""CUDA in forked processes.

A process that has called CUDA's runtime, if only by `torch.cuda.is_available()`, leaves its forks without CUDA: every call in them
fails ("Cannot re-initialize CUDA in forked subprocess"). So whoever forks does it before, or the fork does not use CUDA.
"""

from __future__ import annotations

import os

from megatron.parallel.torch_private import is_in_bad_fork


def cuda_is_lost() -> bool:
    """Return whether this process is a fork of one that had called CUDA's runtime. Without CUDA it is False."""
    return is_in_bad_fork()


def hide_devices() -> None:
    """Let this process see no CUDA device. It has no effect if the process has called CUDA's runtime."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
