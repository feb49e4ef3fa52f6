"""Opens the weights in a folder of any kind."""

from __future__ import annotations

from megatron.checkpoint.errors import CheckpointError, listed
from megatron.checkpoint.folder_kinds import FOREIGN, FolderKind, kind_of
from megatron.checkpoint.save_folder import LATEST, checkpoint_name, find_checkpoint
from megatron.checkpoint.storage import CONFIG, MANIFEST, Place
from megatron.checkpoint.storage_kinds import open_storage
from megatron_lab.foreign.dist_checkpoint import DistCheckpoint
from megatron_lab.foreign.huggingface.folder import HuggingFaceFolder
from megatron_lab.foreign.legacy_checkpoint import LegacyCheckpoint
from megatron_lab.foreign.source import StoredCheckpoint, WeightSource


def open_source(path: Place, step: int | None = None, *, vocab_size: int | None = None, average: bool = False) -> WeightSource:
    """Open the weights in a folder.

    Args:
        path: a --save folder, of which the newest complete checkpoint is taken, or one checkpoint in it (both also by URL); a
            Hugging Face folder; a folder of Megatron-LM in either format, or one iteration in it.
        step: the iteration to take from a folder that holds several.
        vocab_size: rows of the word embedding without padding, for a checkpoint of Megatron-LM that does not give it.
        average: take the moving average of the weights (--ema-decay) for the weights.

    Raises:
        CheckpointError: there is no such folder, or it is none of these, or `step` is not in it.
        DamagedCheckpointError: no checkpoint there is complete.
    """
    storage = open_storage(path)
    kind = kind_of(storage)
    if kind in (FolderKind.CHECKPOINT, FolderKind.HUGGING_FACE) and step is not None:
        raise CheckpointError(f"{path} is {kind}: there is no iteration {step} to choose")
    if average and kind in FOREIGN:
        raise CheckpointError(f"{path} is {kind}, which holds no average of the weights: leave --ema out")
    if kind is FolderKind.CHECKPOINT:
        return StoredCheckpoint(path, average=average)
    if kind is FolderKind.RUN:
        notes: list[str] = []
        found = find_checkpoint(path, step, tell=notes.append)
        assert found is not None, "there is an iteration"
        return StoredCheckpoint(found, notes, average=average)
    if kind in (FolderKind.LEGACY, FolderKind.DIST):
        if step is not None and checkpoint_name(step) not in storage.names():
            raise CheckpointError(f"{path} has no iteration {step}")
        opened = LegacyCheckpoint if kind is FolderKind.LEGACY else DistCheckpoint
        return opened(path if step is None else storage.at(checkpoint_name(step)), vocab_size)
    if kind is FolderKind.HUGGING_FACE:
        return HuggingFaceFolder(path)
    if not (names := storage.names()):
        raise CheckpointError(f"{path}: there is no such folder, or it is empty")
    raise CheckpointError(
        f"{path} holds no weights that are known here ({listed(names)}). It may be a --save folder (iter_* and {LATEST}), one "
        f"checkpoint in it ({MANIFEST}), a Hugging Face folder ({CONFIG} with model_type), or a checkpoint of Megatron-LM "
        "(mp_rank_*/model_optim_rng.pt, or metadata.json and common.pt of torch_dist)"
    )
