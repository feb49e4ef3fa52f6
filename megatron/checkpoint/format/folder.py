"""Names in a save folder.

::

    <save>/iter_0000100/                        a complete checkpoint
    <save>/latest_checkpointed_iteration.txt    the number of the checkpoint that was finished last
    <save>/run.json                             settings and token of the run that began to save here last

What is being written or removed has other names; see `storage/local.py` and `storage/objects.py`.
"""

from __future__ import annotations

import re
from pathlib import Path

from megatron.checkpoint.storage.opening import open_storage
from megatron.checkpoint.storage.protocol import Storage

LATEST = "latest_checkpointed_iteration.txt"
RUN = "run.json"


def checkpoint_name(iteration: int) -> str:
    """Folder name of a complete checkpoint."""
    return f"iter_{iteration:07d}"


def iterations_in(save: Storage) -> list[int]:
    """Iterations that have a folder in a save folder, ascending, complete or not."""
    named = (re.fullmatch(r"iter_(\d{7,})", name) for name in save.names())
    return sorted(int(match[1]) for match in named if match)


def latest_in(save: Storage) -> int | None:
    """What the latest file of a save folder says; None if there is none or it holds no number."""
    try:
        text = save.read(LATEST).decode(errors="replace").strip()
    except (FileNotFoundError, IsADirectoryError):
        return None
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def checkpoints(folder: Path) -> dict[int, Path]:
    """Checkpoints in a local save folder by iteration, ascending; empty if there is no such folder."""
    return {iteration: folder / checkpoint_name(iteration) for iteration in iterations_in(open_storage(folder))}
