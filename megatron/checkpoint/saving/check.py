"""Find out at the start, not after hours of training, that checkpoints cannot be written."""

from __future__ import annotations

import tempfile
from pathlib import Path

from megatron.checkpoint.errors import CheckpointError


def check_writable(folder: Path) -> None:
    """Make the save folder, and write and remove a file in it.

    Raises:
        CheckpointError: one of these is not possible.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".writable."):
            pass
    except OSError as error:
        raise CheckpointError(
            f"--save {folder}: cannot write there ({error.strerror}). Give a folder that can be made and written by this user"
        ) from error
