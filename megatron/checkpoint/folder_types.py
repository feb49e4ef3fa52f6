"""Detection of the type of a folder with weights: a checkpoint or save folder of this program, of Megatron-LM, or of Hugging Face.

The type follows from the names of the files. Only config.json is read, to recognise a Hugging Face folder.
"""

from __future__ import annotations

from enum import StrEnum

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.save_folder import get_checkpoint_name, list_iterations
from megatron.checkpoint.storage import CONFIG, MANIFEST, Storage
from megatron.checkpoint.storage_url import open_storage
from megatron.config.regular_file import parse_json


class FolderType(StrEnum):
    """Type of a folder with weights. The string value names the type in error messages."""

    CHECKPOINT = "one checkpoint"
    RUN = "a --save folder"
    LEGACY = "a checkpoint of Megatron-LM"
    DIST = "a torch_dist checkpoint of Megatron-Core"
    HUGGING_FACE = "a Hugging Face folder"


_DIST_FILES = {"metadata.json", "common.pt"}
"""Files that every torch_dist checkpoint has."""
FOREIGN_TYPES = (FolderType.LEGACY, FolderType.DIST, FolderType.HUGGING_FACE)
"""Folder types that other programs write."""


def detect_folder_type(storage: Storage) -> FolderType | None:
    """Return the type of a folder, or None if it holds no weights of a known type."""
    names = storage.list_names()
    if MANIFEST in names:
        return FolderType.CHECKPOINT
    iterations = [get_checkpoint_name(iteration) for iteration in list_iterations(storage)]
    entries = {name: storage.list_names(name) for name in (*iterations, *(["release"] if "release" in names else []))}
    if any(MANIFEST in entry_names for entry_names in entries.values()):
        return FolderType.RUN
    if any(name.startswith("mp_rank_") for entry_names in (names, *entries.values()) for name in entry_names):
        return FolderType.LEGACY
    if any(_DIST_FILES <= {*entry_names} for entry_names in (names, *entries.values())):
        return FolderType.DIST
    if iterations:
        return FolderType.RUN  # a save folder without a complete checkpoint
    if CONFIG in names and _has_model_type(storage):
        return FolderType.HUGGING_FACE
    return None


def _has_model_type(storage: Storage) -> bool:
    """Return whether the folder's config.json has the key `model_type`, as in a Hugging Face folder."""
    try:
        content = parse_json(storage.read(CONFIG))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and "model_type" in content


def check_not_foreign(folder: str) -> None:
    """Check that a folder was not written by another program.

    Without this check a run would ignore the weights in such a folder and start from random weights.

    Raises:
        CheckpointError: the folder holds weights of another program, or is not a folder.
    """
    storage = open_storage(folder)
    if storage.local is not None and storage.local.exists() and not storage.local.is_dir():
        file_type = "a file" if storage.local.is_file() else "a device or a pipe"
        raise CheckpointError(f"cannot load from {folder}: the path is {file_type}. Give the --save folder of a run")
    folder_type = detect_folder_type(storage)
    if folder_type in FOREIGN_TYPES:
        raise CheckpointError(
            f"{folder} is {folder_type}, not a --save folder. Convert it with tools/checkpoint.py import, which prints "
            "how a run continues from the result"
        )
