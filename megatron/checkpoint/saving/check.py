"""Find out at the start, not after hours of training, that checkpoints cannot be written."""

from __future__ import annotations

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.storage.protocol import Storage


def check_writable(save: Storage) -> None:
    """Make the save folder, and write and remove a file in it.

    Raises:
        CheckpointError: one of these is not possible.
    """
    try:
        save.check_writable()
    except OSError as error:
        raise CheckpointError(
            f"--save {save.location}: cannot write there ({error.strerror or error}). "
            f"Give a folder that can be made and written by this user"
        ) from error
