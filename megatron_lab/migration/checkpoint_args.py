"""``--use-checkpoint-args``: the model's shape and the tokenizer come from the checkpoint that the run begins with."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence, Set
from typing import Any

from megatron.checkpoint.manifest import Checksum, matches
from megatron.checkpoint.save_folder import checkpoint_name, iterations_in, latest_in
from megatron.checkpoint.storage import CONFIG, MANIFEST, Storage
from megatron.checkpoint.storage_kinds import open_storage
from megatron.config.config import Config
from megatron.config.data import TOKENIZER_FILES, TOKENIZER_SETTINGS
from megatron.config.errors import ConfigError, Violation
from megatron.config.flags import flags
from megatron.config.model import FREE_DOWNWARD, FREE_FIELDS, FREE_UPWARD, free_at_beginning
from megatron.config.outputs import CheckpointConfig
from megatron.config.save import from_dict

_FLAGS = ("--use-checkpoint-args", "--load", "--pretrained-checkpoint", "--ckpt-step")
_DERIVED = {"ffn_hidden_size": "ffn_size", "kv_channels": "head_size", "max_position_embeddings": "num_positions"}
"""Model fields that may be None, with the property that gives their value then."""
_TOKENIZER_FIELDS = ("tokenizer_type", *(field for field in TOKENIZER_SETTINGS if field not in TOKENIZER_FILES))
"""Settings that decide the vocabulary. Files are not among them: they may lie elsewhere, and are given then."""


def take_from_checkpoint(config: Config, explicit: Set[str]) -> tuple[Config, list[Violation]]:
    """Replace the model and the tokenizer of `config` by those of the checkpoint that the run begins with.

    Args:
        config: settings as given, with ``checkpoint.load`` or ``checkpoint.pretrained_checkpoint``.
        explicit: names of the fields that the user gave.

    Returns:
        The settings, and the problems: no readable checkpoint, or flags that contradict it.
    """
    try:
        folder, saved, begins = _chosen(config.checkpoint)
    except ConfigError as error:
        taken = [f"--{flag.name}" for flag in flags().values() if _is_taken(flag.topic, flag.field)]
        # Naming the flags that would have come from it keeps rules about their defaults silent.
        return config, [dataclasses.replace(violation, flags=(*_FLAGS, *taken)) for violation in error.violations]
    problems = []
    free = free_at_beginning(saved.model) if begins else FREE_FIELDS
    knows_tokenizer = saved.data.tokenizer_type is not None  # weights that were imported alone have none
    kept = {}
    for flag in flags().values():
        if not _is_taken(flag.topic, flag.field) or flag.field not in explicit:
            continue
        if flag.topic == "data" and not knows_tokenizer:
            continue
        mine = getattr(getattr(config, flag.topic), flag.field)
        theirs: Any = getattr(getattr(saved, flag.topic), flag.field)
        if theirs is None and flag.field in _DERIVED:
            theirs = getattr(saved.model, _DERIVED[flag.field])
        if mine != theirs and (
            flag.field in free or (flag.field in FREE_DOWNWARD and mine < theirs) or (flag.field in FREE_UPWARD and mine > theirs)
        ):
            kept[flag.field] = mine
        elif mine != theirs:
            problems.append(
                Violation(
                    (f"--{flag.name}", "--use-checkpoint-args"),
                    f"--{flag.name} is given as {mine}, but the checkpoint {folder} was trained with {theirs}.",
                    f"--use-checkpoint-args takes it from the checkpoint: leave --{flag.name} out, or leave "
                    "--use-checkpoint-args out and describe the whole model.",
                )
            )
    model = saved.model
    if "seq_length" in kept and model.position_embedding_type == "learned_absolute":  # the rows followed from the old length
        model = dataclasses.replace(model, max_position_embeddings=model.num_positions)
    fields = _TOKENIZER_FIELDS if explicit & set(TOKENIZER_FILES) else (*_TOKENIZER_FIELDS, *TOKENIZER_FILES)
    taken_data = {field: getattr(saved.data, field) for field in fields} if knows_tokenizer else {}
    data = dataclasses.replace(config.data, **taken_data)
    return dataclasses.replace(config, model=dataclasses.replace(model, **kept), data=data), problems


def set_by_checkpoint() -> set[str]:
    """Fields whose values the checkpoint sets, whatever the command line says."""
    return {flag.field for flag in flags().values() if _is_taken(flag.topic, flag.field) and flag.field not in FREE_FIELDS}


def _is_taken(topic: str, field: str) -> bool:
    return topic == "model" or field in _TOKENIZER_FIELDS


def _chosen(checkpoint: CheckpointConfig) -> tuple[str, Config, bool]:
    """The checkpoint that the run begins with: that of --load or, if it holds none, of --pretrained-checkpoint.

    Returns:
        Its folder, its settings, and whether the run only begins with its weights.

    Raises:
        ConfigError: there is none, or none whose settings can be read.
    """
    load, base = checkpoint.load, checkpoint.pretrained_checkpoint
    if load is not None and checkpoint.ckpt_step is not None:
        return *_first_readable([_open(load).child(checkpoint_name(checkpoint.ckpt_step))]), checkpoint.finetune
    for place in (load, base):
        if place is not None and (found := _newest_first(_open(place))):
            return *_first_readable(found), checkpoint.finetune or place == base
    if base is not None and _open(base).size(CONFIG) is not None:
        return *_first_readable([_open(base)]), True
    raise _unreadable(f"There is no checkpoint in {' or '.join(place for place in (load, base) if place is not None)}.")


def _open(place: str) -> Storage:
    try:
        return open_storage(place)
    except ValueError as error:
        rule = "Each kind of URL needs its driver too: pip install s3fs for s3://, gcsfs for gs://."
        raise ConfigError([Violation((), f"{error}.", rule)]) from error


def _newest_first(save: Storage) -> list[Storage]:
    """Checkpoints of a save folder: the one that the latest file names, then the others from the highest iteration down."""
    try:
        found, latest = iterations_in(save), latest_in(save)
    except OSError:
        return []
    return [save.child(checkpoint_name(iteration)) for iteration in sorted(found, key=lambda one: (one != latest, -one))]


def _first_readable(folders: Sequence[Storage]) -> tuple[str, Config]:
    """The first folder with readable settings, and these. (A load passes over damaged checkpoints too.)

    Raises:
        ConfigError: there is none; says why of the first.
    """
    first: ConfigError | None = None
    for folder in folders:
        try:
            return folder.location, _saved_config(folder)
        except ConfigError as error:
            first = first or error
    assert first is not None
    raise first


def _saved_config(folder: Storage) -> Config:
    """Settings of a checkpoint.

    Raises:
        ConfigError: they cannot be read.
    """
    file = folder.at(CONFIG)
    try:
        data = folder.read(CONFIG)
        record = json.loads(data)
    except OSError as error:
        raise _unreadable(f"{file} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise _unreadable(f"{file} is not valid JSON: {error}.") from error
    try:
        stored = json.loads(folder.read(MANIFEST))["files"][CONFIG]["checksum"]
        altered = not matches(Checksum(data).text, stored)
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        altered = False  # a load reports what is wrong with a manifest, or with a kind of checksum
    if altered:
        raise _unreadable(f"{file} was altered since it was saved (checksum).")
    if not isinstance(record, dict) or not isinstance(record.get("config"), dict):
        raise _unreadable(f"{file} holds no settings: it has no mapping named config.")
    # Only the settings that are taken must be understood; other topics may come from another version.
    wanted = {topic: record["config"].get(topic) for topic in ("model", "data")}
    if not all(isinstance(part, dict) for part in wanted.values()):
        raise _unreadable(f"{file} holds no settings of the model and the data.")
    fields = {*_TOKENIZER_FIELDS, *TOKENIZER_FILES}
    wanted["data"] = {field: value for field, value in wanted["data"].items() if field in fields}
    return from_dict(wanted)


def _unreadable(message: str) -> ConfigError:
    rule = (
        "--use-checkpoint-args needs a checkpoint that was saved here, or that tools/checkpoint.py import has made of another "
        "program's; without it, describe the model by flags."
    )
    return ConfigError([Violation(_FLAGS, message, rule)])
