"""Weights of a whole model from any folder that holds some."""

from __future__ import annotations

from megatron.checkpoint.errors import CheckpointError, listed
from megatron.checkpoint.format.folder import LATEST, checkpoint_name
from megatron.checkpoint.format.manifest import CONFIG, MANIFEST
from megatron.checkpoint.kinds import Kind, kind_of
from megatron.checkpoint.loading.find import Place, find_checkpoint
from megatron.checkpoint.source import WeightSource
from megatron.checkpoint.storage.opening import open_storage
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
    kind = kind_of(storage)
    if kind in (Kind.CHECKPOINT, Kind.HUGGING_FACE) and step is not None:
        raise CheckpointError(f"{path} is {kind}: there is no iteration {step} to choose")
    if kind is Kind.CHECKPOINT:
        return StoredCheckpoint(path)
    if kind is Kind.RUN:
        notes: list[str] = []
        found = find_checkpoint(path, step, tell=notes.append)
        assert found is not None, "there is an iteration"
        stored = StoredCheckpoint(found)
        stored.notes += notes
        return stored
    if kind is Kind.LEGACY:
        from megatron.checkpoint.legacy.folder import LegacyCheckpoint

        if step is not None and checkpoint_name(step) not in storage.names():
            raise CheckpointError(f"{path} has no iteration {step}")
        return LegacyCheckpoint(path if step is None else storage.at(checkpoint_name(step)), vocab_size)
    if kind is Kind.HUGGING_FACE:
        from megatron.checkpoint.huggingface.folder import HuggingFaceFolder

        return HuggingFaceFolder(path)
    if not (names := storage.names()):
        raise CheckpointError(f"{path}: there is no such folder, or it is empty")
    raise CheckpointError(f"{path} holds no weights that are known here ({listed(names)}). It may be {_KNOWN}")
