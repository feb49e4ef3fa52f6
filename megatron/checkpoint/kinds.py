"""What kind of folder one has been given, by the names of the files in it."""

from __future__ import annotations

import json
from enum import StrEnum

from megatron.checkpoint.format.folder import checkpoint_name, iterations_in
from megatron.checkpoint.format.manifest import CONFIG, MANIFEST
from megatron.checkpoint.storage.protocol import Storage


class Kind(StrEnum):
    """Folders that hold weights."""

    CHECKPOINT = "one checkpoint"
    RUN = "a --save folder"
    LEGACY = "a checkpoint of Megatron-LM"
    HUGGING_FACE = "a Hugging Face folder"


FOREIGN = (Kind.LEGACY, Kind.HUGGING_FACE)
"""Of other programs."""


def kind_of(storage: Storage) -> Kind | None:
    """The kind of a folder; None if it holds no weights of any kind that is known here."""
    names = storage.names()
    if MANIFEST in names:
        return Kind.CHECKPOINT
    iterations = [checkpoint_name(iteration) for iteration in iterations_in(storage)]
    inside = {name: storage.names(name) for name in (*iterations, *(["release"] if "release" in names else []))}
    if any(MANIFEST in files for files in inside.values()):
        return Kind.RUN
    if any(name.startswith("mp_rank_") for files in (names, *inside.values()) for name in files):
        return Kind.LEGACY
    if iterations:
        return Kind.RUN  # of which nothing is complete
    if CONFIG in names and _names_a_model(storage):
        return Kind.HUGGING_FACE
    return None


def _names_a_model(storage: Storage) -> bool:
    """Whether config.json says a model type, as that of a Hugging Face folder does."""
    try:
        content = json.loads(storage.read(CONFIG))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and "model_type" in content
