"""Names in a save folder, and how files there get their final name.

::

    <save>/iter_0000100/                        a complete checkpoint
    <save>/.iter_0000200.saving/                being written, or left by a save that was killed
    <save>/.iter_0000050.removing/              being removed, or left by a removal that was killed
    <save>/latest_checkpointed_iteration.txt    the number of the checkpoint that was finished last
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

LATEST = "latest_checkpointed_iteration.txt"


def checkpoint_name(iteration: int) -> str:
    """Folder name of a complete checkpoint."""
    return f"iter_{iteration:07d}"


def saving_name(iteration: int) -> str:
    """Folder name of a checkpoint that is being written."""
    return f".{checkpoint_name(iteration)}.saving"


def checkpoints(folder: Path) -> dict[int, Path]:
    """Checkpoints in a save folder by iteration, ascending; empty if there is no such folder."""
    if not folder.is_dir():
        return {}
    named = ((re.fullmatch(r"iter_(\d{7,})", path.name), path) for path in folder.iterdir())
    return dict(sorted((int(match[1]), path) for match, path in named if match))


def latest_iteration(folder: Path) -> int | None:
    """What the latest file says; None if there is no such file or it holds no number."""
    try:
        text = (folder / LATEST).read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return int(text) if text.isdecimal() else None


def set_aside(path: Path) -> Path:
    """Take the final name from a checkpoint that is to be removed, so that half of one is never taken for a checkpoint."""
    removing = path.with_name(f".{path.name}.removing")
    if removing.exists():
        shutil.rmtree(removing)
    path.rename(removing)
    return removing


def remove_leftovers(folder: Path) -> None:
    """Remove what killed removals left behind."""
    for path in folder.glob(".iter_*.removing"):
        shutil.rmtree(path)


def write_synced(path: Path, data: bytes) -> None:
    """Write a file whose content is on the disk when this returns."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_synced(path: Path, data: bytes) -> None:
    """Replace a file by another in one step: readers see the old content or the new."""
    new = path.with_name(f".{path.name}.new")
    write_synced(new, data)
    new.replace(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Bring the names in a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
