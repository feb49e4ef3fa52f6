"""The kind of a given folder, by the names of the files in it; and the weights of a whole model from a folder of any kind."""

from __future__ import annotations

import json
from enum import StrEnum

from megatron.checkpoint.errors import CheckpointError, listed
from megatron.checkpoint.manifest import CONFIG, MANIFEST
from megatron.checkpoint.save_folder import LATEST, checkpoint_name, find_checkpoint, iterations_in
from megatron.checkpoint.source import WeightSource
from megatron.checkpoint.storage import Place, Storage, open_storage
from megatron.checkpoint.stored import StoredCheckpoint


class FolderKind(StrEnum):
    """Kinds of folders that hold weights."""

    CHECKPOINT = "one checkpoint"
    RUN = "a --save folder"
    LEGACY = "a checkpoint of Megatron-LM"
    HUGGING_FACE = "a Hugging Face folder"


FOREIGN = (FolderKind.LEGACY, FolderKind.HUGGING_FACE)
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


_KNOWN = (
    f"a --save folder (iter_* and {LATEST}), one checkpoint in it ({MANIFEST}), a Hugging Face folder ({CONFIG} with model_type), "
    "or a checkpoint of Megatron-LM (mp_rank_*/model_optim_rng.pt)"
)


def open_source(path: Place, step: int | None = None, *, vocab_size: int | None = None) -> WeightSource:
    """Open the weights in a folder.

    Args:
        path: a --save folder, of which the newest complete checkpoint is taken, or one checkpoint in it (both also by URL); a
            Hugging Face folder; a folder of Megatron-LM, or one iteration in it.
        step: the iteration to take from a folder that holds several.
        vocab_size: rows of the word embedding without padding, for a checkpoint of Megatron-LM that does not give it.

    Raises:
        CheckpointError: there is no such folder, or it is none of these, or `step` is not in it.
        DamagedCheckpointError: no checkpoint there is complete.
    """
    storage = open_storage(path)
    kind = kind_of(storage)
    if kind in (FolderKind.CHECKPOINT, FolderKind.HUGGING_FACE) and step is not None:
        raise CheckpointError(f"{path} is {kind}: there is no iteration {step} to choose")
    if kind is FolderKind.CHECKPOINT:
        return StoredCheckpoint(path)
    if kind is FolderKind.RUN:
        notes: list[str] = []
        found = find_checkpoint(path, step, tell=notes.append)
        assert found is not None, "there is an iteration"
        stored = StoredCheckpoint(found)
        stored.notes += notes
        return stored
    if kind is FolderKind.LEGACY:
        from megatron.checkpoint.legacy_checkpoint import LegacyCheckpoint

        if step is not None and checkpoint_name(step) not in storage.names():
            raise CheckpointError(f"{path} has no iteration {step}")
        return LegacyCheckpoint(path if step is None else storage.at(checkpoint_name(step)), vocab_size)
    if kind is FolderKind.HUGGING_FACE:
        from megatron.checkpoint.huggingface.folder import HuggingFaceFolder

        return HuggingFaceFolder(path)
    if not (names := storage.names()):
        raise CheckpointError(f"{path}: there is no such folder, or it is empty")
    raise CheckpointError(f"{path} holds no weights that are known here ({listed(names)}). It may be {_KNOWN}")
