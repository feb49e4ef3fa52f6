"""Load a checkpoint into any layout: the same call on every rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from megatron.checkpoint.errors import raise_for_user
from megatron.checkpoint.global_tensor import GlobalTensor
from megatron.checkpoint.loading.content import Compared, compare_content
from megatron.checkpoint.loading.find import Place
from megatron.checkpoint.loading.plan import TENSORS, BoxLoadPlanner
from megatron.checkpoint.loading.reader import BoxReader
from megatron.checkpoint.single import quiet_without_group
from megatron.checkpoint.storage.opening import open_storage
from megatron.checkpoint.together import group_of

_MOST_THREADS = 4


@dataclass(frozen=True)
class Loaded:
    """What a load has done."""

    digest: str | None
    """Digest of all content of the checkpoint, the same at every layout; None in older ones."""
    compared: Compared
    """What the comparison of the tensors in memory with it has shown."""


def load_tensors(
    path: Place,
    tensors: list[GlobalTensor],
    *,
    allow_unused: Callable[[str], bool] = lambda name: False,
    process_group: dist.ProcessGroup | None = None,
) -> Loaded:
    """Fill tensors in place from the checkpoint in folder `path`, whatever layout it was saved at.

    Call it on every rank of the group. Each rank reads only the stored boxes that overlap its own, and checks them. Floating-point
    dtypes are converted into each other; other dtypes must be equal. What lies in memory is compared with what was saved.

    Args:
        path: folder of the checkpoint, or its URL.
        tensors: what this rank holds; every element of their boxes is filled. Padding is left as it is.
        allow_unused: whether the stored tensor of this name may be left unread; the first rank's is asked.
        process_group: the ranks that load; by default all, or this process alone where torch.distributed is not initialised.

    Raises:
        CheckpointError: something asked for is not stored, something stored is not used by any rank, or shapes differ: all
            cases in one message, on every rank; nothing was changed. Or the format is newer than this program.
        DamagedCheckpointError: files are missing, truncated or altered, or what was loaded is not what was saved; on every rank.
            The tensors may be filled in part.
    """
    no_dist = process_group is None and not dist.is_initialized()
    threads, doing = reading_threads(), f"cannot load {path}"
    reader = BoxReader(open_storage(path), threads)
    try:
        with quiet_without_group(no_dist):
            dcp.load(
                {TENSORS: tensors},
                storage_reader=reader,
                planner=BoxLoadPlanner(allow_unused),
                process_group=process_group,
                no_dist=no_dist,
            )
    except CheckpointException as failed:
        raise_for_user(failed, doing)
    compared = compare_content(tensors, reader.straight, reader.manifest, threads, group_of(process_group), doing)
    return Loaded(reader.manifest.content_digest, compared)


def reading_threads() -> int:
    """Threads with which a rank reads: its share of the cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(_MOST_THREADS, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
