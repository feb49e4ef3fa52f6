"""Load a checkpoint into any layout: the same call on every rank."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, listed, raise_for_user
from megatron.checkpoint.format.digest import matches
from megatron.checkpoint.format.folder import LATEST, checkpoint_name, checkpoints, latest_iteration
from megatron.checkpoint.format.manifest import CONFIG, MANIFEST, STATE, read_manifest
from megatron.checkpoint.global_tensor import GlobalTensor
from megatron.checkpoint.loading.plan import BoxLoadPlanner
from megatron.checkpoint.loading.reader import BoxReader
from megatron.checkpoint.saving.plan import TENSORS
from megatron.checkpoint.single import quiet_without_group


def find_checkpoint(folder: Path, step: int | None = None, *, tell: Callable[[str], None] = warnings.warn) -> Path | None:
    """The checkpoint to resume from. Reads no tensors. Let one rank call it and tell the others.

    Without `step` it is the one that was finished last, by the latest file; if that one is missing or incomplete, the newest
    complete one. (A folder may hold newer iterations than the latest file says, left by a run that was resumed from an earlier
    step: they are not taken while the latest is sound.)

    Args:
        folder: the save folder.
        step: the iteration to take (`--ckpt-step`).
        tell: is given a message where another checkpoint is taken than one may think.

    Returns:
        the folder of the checkpoint, or None if there has never been one.

    Raises:
        CheckpointError: `step` is not there, or no checkpoint there is complete, or `folder` is a checkpoint itself.
    """
    if (folder / MANIFEST).exists():
        raise CheckpointError(f"{folder} is a checkpoint itself: give --load {folder.parent}, with --ckpt-step to choose one")
    found = checkpoints(folder)
    if step is not None:
        if step not in found:
            there = listed([str(iteration) for iteration in reversed(found)]) or "none"
            raise CheckpointError(f"--ckpt-step {step}: {folder} has no such checkpoint; it has: {there}")
        if fault := _fault(found[step]):
            raise DamagedCheckpointError(f"--ckpt-step {step}: {fault}")
        return found[step]
    latest = latest_iteration(folder)
    if latest is None and not found:
        return None
    order = sorted(found, reverse=True)
    faults = []
    if latest is not None:
        order = [latest, *(iteration for iteration in order if iteration != latest)]
    elif found:
        faults.append(f"{folder / LATEST} is missing or unreadable")
    for iteration in order:
        path = folder / checkpoint_name(iteration)
        if fault := _fault(path):
            faults.append(fault)
            continue
        if faults:
            tell(f"taking {path}, because {'; '.join(faults)}")
        elif iteration != max(found):
            tell(f"taking {path}, which {LATEST} names; {found[max(found)]} is newer but was not saved last")
        return path
    raise DamagedCheckpointError(f"{folder} holds no complete checkpoint:\n  " + listed(faults, "\n  "))


def _fault(path: Path) -> str | None:
    """Why a checkpoint is not complete, or None if it is. Looks at the manifest and the sizes of the files."""
    try:
        manifest = read_manifest(path)
    except DamagedCheckpointError as error:
        return str(error)
    for name, file in manifest.files.items():
        if not (path / name).exists():
            return f"{path / name} is missing"
        if (found := (path / name).stat().st_size) != file.num_bytes:
            return f"{path / name} has {found} bytes, it was written with {file.num_bytes}"
    return None


def read_state(path: Path) -> dict[str, Any]:
    """The training state that was saved in the checkpoint in folder `path`.

    Raises:
        CheckpointError: not a complete checkpoint of a known version, or altered.
    """
    return _read_json(path, STATE)


def read_config(path: Path) -> dict[str, Any]:
    """The configuration that was saved in the checkpoint in folder `path`.

    Raises:
        CheckpointError: not a complete checkpoint of a known version, or altered.
    """
    return _read_json(path, CONFIG)


def _read_json(path: Path, name: str) -> dict[str, Any]:
    stored = read_manifest(path).files[name]
    try:
        data = (path / name).read_bytes()
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{path / name} is missing") from error
    if not matches(data, stored.checksum or ""):
        raise DamagedCheckpointError(f"{path / name} was altered (checksum)")
    return json.loads(data)


def load_tensors(
    path: Path,
    tensors: list[GlobalTensor],
    *,
    allow_unused: Callable[[str], bool] = lambda name: False,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Fill tensors in place from the checkpoint in folder `path`, whatever layout it was saved at.

    Call it on every rank of the group. Each rank reads only the stored boxes that overlap its own, and checks them. Floating-point
    dtypes are converted into each other; other dtypes must be equal.

    Args:
        path: folder of the checkpoint.
        tensors: what this rank holds; every element of their boxes is filled. Padding is left as it is.
        allow_unused: whether the stored tensor of this name may be left unread; the first rank's is asked.
        process_group: the ranks that load; by default all, or this process alone where torch.distributed is not initialised.

    Raises:
        CheckpointError: something asked for is not stored, something stored is not used by any rank, or shapes differ: all
            cases in one message, on every rank; nothing was changed. Or the format is newer than this program.
        DamagedCheckpointError: files are missing, truncated or altered; the tensors may be filled in part.
    """
    no_dist = process_group is None and not dist.is_initialized()
    try:
        with quiet_without_group(no_dist):
            dcp.load(
                {TENSORS: tensors},
                storage_reader=BoxReader(path),
                planner=BoxLoadPlanner(allow_unused),
                process_group=process_group,
                no_dist=no_dist,
            )
    except CheckpointException as failed:
        raise_for_user(failed, f"cannot load {path}")
