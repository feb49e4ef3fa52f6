"""Find out at the start, not after hours of training, that checkpoints cannot be written."""

from __future__ import annotations

from megatron.checkpoint.errors import CheckpointError, listed
from megatron.checkpoint.format.folder import checkpoint_name, iterations_in
from megatron.checkpoint.format.manifest import CONFIG, MANIFEST, STATE
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


def check_for_strangers(save: Storage) -> None:
    """Another program's checkpoints may have the names of ours: never write among them.

    Raises:
        CheckpointError: there are such.
    """
    names = [checkpoint_name(iteration) for iteration in iterations_in(save)]
    if strangers := [name for name in names if _is_strange(save.names(name))]:
        raise CheckpointError(
            f"--save {save.location} holds what is no checkpoint of this program: {listed(strangers)}. "
            f"Give another folder (tools/checkpoint.py import makes a checkpoint of a legacy one)"
        )


def _is_strange(files: list[str]) -> bool:
    ours = any(name in (CONFIG, MANIFEST, STATE) or name.startswith("rank_") for name in files)
    return bool(files) and not ours  # a damaged or killed one may lack any of them
