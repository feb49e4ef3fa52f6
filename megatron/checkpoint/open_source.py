"""Weights of a whole model from any folder that holds some: told apart by the files in it."""

from __future__ import annotations

import json

from megatron.checkpoint.errors import CheckpointError, listed
from megatron.checkpoint.format.folder import LATEST, checkpoint_name
from megatron.checkpoint.format.manifest import CONFIG, MANIFEST
from megatron.checkpoint.loading.find import Place, find_checkpoint
from megatron.checkpoint.source import WeightSource
from megatron.checkpoint.storage.opening import open_storage
from megatron.checkpoint.storage.protocol import Storage
from megatron.checkpoint.stored import StoredCheckpoint

_KNOWN = (
    f"a --save folder (iter_* and {LATEST}), one checkpoint in it ({MANIFEST}), a Hugging Face folder ({CONFIG} with model_type), "
    "or a checkpoint of Megatron-LM (mp_rank_*/model_optim_rng.pt)"
)


def open_source(path: Place, step: int | None = None, *, vocab_size: int | None = None) -> WeightSource:
    """The weights in a folder.

    Args:
        path: a --save folder, of which the newest complete checkpoint is taken, or one checkpoint in it (both also by URL); a
            Hugging Face folder; a folder of Megatron-LM, or one iteration in it.
        step: the iteration to take of a folder that holds several.
        vocab_size: rows of the word embedding without padding, for a checkpoint of Megatron-LM that does not say it.

    Raises:
        CheckpointError: there is no such folder, or it is none of these, or `step` is not in it.
        DamagedCheckpointError: no checkpoint there is complete.
    """
    storage = open_storage(path)
    names = storage.names()
    if not names:
        raise CheckpointError(f"{path}: there is no such folder, or it is empty")
    if MANIFEST in names:
        _refuse_step(step, path, "one checkpoint")
        return StoredCheckpoint(path)
    if _is_legacy(storage, names):
        from megatron.checkpoint.legacy.folder import LegacyCheckpoint

        if step is not None and checkpoint_name(step) not in names:
            raise CheckpointError(f"{path} has no iteration {step}")
        return LegacyCheckpoint(path if step is None else storage.at(checkpoint_name(step)), vocab_size)
    if LATEST in names or any(name.startswith("iter_") for name in names):
        notes: list[str] = []
        found = find_checkpoint(path, step, tell=notes.append)
        if found is None:
            raise CheckpointError(f"{path} holds no checkpoint")
        stored = StoredCheckpoint(found)
        stored.notes += notes
        return stored
    if CONFIG in names and "model_type" in _json(storage, CONFIG):
        _refuse_step(step, path, "a Hugging Face folder")
        from megatron.checkpoint.huggingface.folder import HuggingFaceFolder

        return HuggingFaceFolder(path)
    raise CheckpointError(f"{path} holds no weights that are known here ({listed(names)}). It may be {_KNOWN}")


def _is_legacy(storage: Storage, names: list[str]) -> bool:
    """Whether it is a folder of Megatron-LM, or one iteration in it."""
    iterations = [name for name in names if name.startswith("iter_") or name == "release"]
    return any(name.startswith("mp_rank_") for name in (*names, *(name for it in iterations for name in storage.names(it))))


def _refuse_step(step: int | None, path: Place, what: str) -> None:
    if step is not None:
        raise CheckpointError(f"{path} is {what}: there is no iteration {step} to choose")


def _json(storage: Storage, name: str) -> dict[str, object]:
    try:
        content = json.loads(storage.read(name))
    except ValueError as error:
        raise CheckpointError(f"{storage.at(name)} is not valid JSON ({error})") from error
    return content if isinstance(content, dict) else {}
