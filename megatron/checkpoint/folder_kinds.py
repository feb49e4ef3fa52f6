"""Tells by its file names what kind of folder holds weights; reads none of them."""

from __future__ import annotations

import json
from enum import StrEnum

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.save_folder import checkpoint_name, iterations_in
from megatron.checkpoint.storage import CONFIG, MANIFEST, Storage
from megatron.checkpoint.storage_kinds import open_storage


class FolderKind(StrEnum):
    """Kinds of folders that hold weights."""

    CHECKPOINT = "one checkpoint"
    RUN = "a --save folder"
    LEGACY = "a checkpoint of Megatron-LM"
    DIST = "a torch_dist checkpoint of Megatron-Core"
    HUGGING_FACE = "a Hugging Face folder"


_DIST = {"metadata.json", "common.pt"}
"""Files of a torch_dist checkpoint."""
FOREIGN = (FolderKind.LEGACY, FolderKind.DIST, FolderKind.HUGGING_FACE)
"""The kinds that other programs write."""


def kind_of(storage: Storage) -> FolderKind | None:
    """The kind of a folder; None if it holds no weights of a known kind."""
    names = storage.names()
    if MANIFEST in names:
        return FolderKind.CHECKPOINT
    iterations = [checkpoint_name(iteration) for iteration in iterations_in(storage)]
    inside = {name: storage.names(name) for name in (*iterations, *(["release"] if "release" in names else []))}
    if any(MANIFEST in files for files in inside.values()):
        return FolderKind.RUN
    if any(name.startswith("mp_rank_") for files in (names, *inside.values()) for name in files):
        return FolderKind.LEGACY
    if any(_DIST <= {*files} for files in (names, *inside.values())):
        return FolderKind.DIST
    if iterations:
        return FolderKind.RUN  # none of these is complete
    if CONFIG in names and _names_a_model(storage):
        return FolderKind.HUGGING_FACE
    return None


def _names_a_model(storage: Storage) -> bool:
    """Whether config.json has a model type, as that of a Hugging Face folder does."""
    try:
        content = json.loads(storage.read(CONFIG))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and "model_type" in content


def refuse_foreign(folder: str) -> None:
    """Refuse a folder that is no save folder: it is no reason to begin with random weights.

    Raises:
        CheckpointError: it is one of another program, or no folder.
    """
    storage = open_storage(folder)
    if storage.local is not None and storage.local.exists() and not storage.local.is_dir():
        what = "a file" if storage.local.is_file() else "a device or a pipe"
        raise CheckpointError(f"{folder} is {what}: give the --save folder of a run")
    kind = kind_of(storage)
    if kind in FOREIGN:
        raise CheckpointError(
            f"{folder} is {kind}, not a --save folder: bring it into one by tools/checkpoint.py import, which says how a run goes "
            "on with that"
        )
