"""Save a checkpoint: the same call on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from megatron.checkpoint.errors import raise_for_user
from megatron.checkpoint.global_tensor import GlobalTensor
from megatron.checkpoint.saving.plan import TENSORS, BoxSavePlanner
from megatron.checkpoint.saving.writer import BoxWriter
from megatron.checkpoint.single import quiet_without_group


def save_checkpoint(
    folder: Path,
    iteration: int,
    tensors: list[GlobalTensor],
    config: dict[str, Any],
    state: dict[str, Any],
    *,
    process_group: dist.ProcessGroup | None = None,
    max_file_bytes: int | None = None,
) -> Path:
    """Write `<folder>/iter_<iteration>/`, in the format that `manifest.py` describes, and point the latest file to it.

    Call it on every rank of the group. All ranks return when the checkpoint is complete, or all raise, and then nothing half
    written stands under its name. A checkpoint of the same iteration is replaced.

    Args:
        folder: the save folder (`--save`), on a file system that all ranks share; made if it does not exist.
        iteration: number of the checkpoint.
        tensors: what this rank holds. Together the ranks' boxes must make up whole tensors; equal boxes are written once.
            At most one box at a time is copied (and none that is in host memory already).
        config: goes into `config.json`; the first rank's is written.
        state: goes into `state.json`; the first rank's is written.
        process_group: the ranks that save; by default all, or this process alone where torch.distributed is not initialised.
        max_file_bytes: begin another data file where one would become larger (a box is never cut).

    Returns:
        the folder of the checkpoint.

    Raises:
        CheckpointError: a rank could not write, config or state do not fit into JSON, or the boxes are not whole tensors.
    """
    writer = BoxWriter(folder, iteration, config, state, max_file_bytes)
    no_dist = process_group is None and not dist.is_initialized()
    try:
        with quiet_without_group(no_dist):
            dcp.save(
                {TENSORS: tensors},
                storage_writer=writer,
                planner=BoxSavePlanner(),
                process_group=process_group,
                no_dist=no_dist,
            )
    except CheckpointException as failed:
        writer.abandon()
        raise_for_user(failed, f"cannot save {writer.final}")
    return writer.final
