"""Opening of a folder with weights in any supported format."""

from __future__ import annotations

import os
from typing import Literal

from megatron.checkpoint.errors import CheckpointError, format_list
from megatron.checkpoint.folder_types import FOREIGN_TYPES, FolderType, detect_folder_type
from megatron.checkpoint.save_folder import LATEST, find_checkpoint, get_checkpoint_name
from megatron.checkpoint.storage import CONFIG, MANIFEST, PathOrUrl
from megatron.checkpoint.storage_url import open_storage
from megatron_lab.data_tools.hub_names import suggest_model_download
from megatron_lab.data_tools.hub_snapshots import resolve_snapshot
from megatron_lab.foreign.dist_checkpoint import DistCheckpoint
from megatron_lab.foreign.huggingface.folder import HuggingFaceFolder
from megatron_lab.foreign.legacy_checkpoint import LegacyCheckpoint
from megatron_lab.foreign.source import StoredCheckpoint, WeightSource


def open_source(
    path: PathOrUrl, step: int | Literal["best"] | None = None, *, vocab_size: int | None = None, average: bool = False
) -> WeightSource:
    """Open a folder with weights as a `WeightSource`. The format is detected.

    Args:
        path: a --save folder (its newest complete checkpoint is read) or one checkpoint in it, both also as a URL; a Hugging Face
            folder, or the folder of a model in the cache of the Hub; or a Megatron-LM folder in either format, or one iteration in
            it.
        step: iteration to read from a folder with several iterations; "best" for the lowest validation loss (--keep-best).
        vocab_size: number of rows of the word embedding without padding, for a Megatron-LM checkpoint that does not record it.
        average: read the exponential moving averages of the weights (--ema-decay) instead of the weights.

    Raises:
        CheckpointError: the folder does not exist or has no supported format, or it does not contain iteration `step`.
        DamagedCheckpointError: the folder has no complete checkpoint.
    """
    path = resolve_snapshot(os.fspath(path))
    storage = open_storage(path)
    folder_type = detect_folder_type(storage)
    if folder_type in (FolderType.CHECKPOINT, FolderType.HUGGING_FACE) and step is not None:
        raise CheckpointError(f"{path} is {folder_type}, so no iteration ({step}) can be selected in it. Leave the iteration out")
    if average and folder_type in FOREIGN_TYPES:
        raise CheckpointError(f"{path} is {folder_type}, which holds no average of the weights. Remove --ema")
    if folder_type is FolderType.CHECKPOINT:
        return StoredCheckpoint(path, average=average)
    if folder_type is FolderType.RUN:
        notes: list[str] = []
        checkpoint = find_checkpoint(path, step, warn=notes.append)
        assert checkpoint is not None, "there is an iteration"
        return StoredCheckpoint(checkpoint, notes, average=average)
    if folder_type in (FolderType.LEGACY, FolderType.DIST):
        if step == "best":
            raise CheckpointError(f"{path} is {folder_type}, which marks no best iteration. Choose another --step")
        if step is not None and get_checkpoint_name(step) not in storage.list_names():
            raise CheckpointError(
                f"{path} has no iteration {step}: it has no folder {get_checkpoint_name(step)}. Choose another --step"
            )
        source_class = LegacyCheckpoint if folder_type is FolderType.LEGACY else DistCheckpoint
        return source_class(path if step is None else storage.get_location(get_checkpoint_name(step)), vocab_size)
    if folder_type is FolderType.HUGGING_FACE:
        return HuggingFaceFolder(path)
    if not (names := storage.list_names()):
        raise CheckpointError(f"{path}: there is no such folder, or it is empty. Check the path.{suggest_model_download(path)}")
    raise CheckpointError(
        f"{path} holds no weights in a supported format ({format_list(names)}). Choose a --save folder (iter_* and {LATEST}), one "
        f"checkpoint in it ({MANIFEST}), a Hugging Face folder ({CONFIG} with model_type), or a checkpoint folder of Megatron-LM "
        "(mp_rank_*/model_optim_rng.pt, or metadata.json and common.pt of torch_dist)"
    )
