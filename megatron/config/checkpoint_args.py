"""``--use-checkpoint-args``: the model's shape and the tokenizer come from the checkpoint that the run begins with."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import xxhash

from megatron.config.config import Config
from megatron.config.data import TOKENIZER_FILES, TOKENIZER_SETTINGS
from megatron.config.errors import ConfigError, Violation
from megatron.config.flags import flags
from megatron.config.model import FREE_AT_BEGINNING, FREE_FIELDS
from megatron.config.outputs import CheckpointConfig
from megatron.config.save import from_dict

_FLAGS = ("--use-checkpoint-args", "--load", "--pretrained-checkpoint", "--ckpt-step")
_FILE, _MANIFEST, _LATEST = "config.json", "manifest.json", "latest_checkpointed_iteration.txt"
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
    free = FREE_FIELDS | FREE_AT_BEGINNING if begins else FREE_FIELDS
    knows_tokenizer = saved.data.tokenizer_type is not None  # weights that were imported alone have none
    kept = {}
    for flag in flags().values():
        if not _is_taken(flag.topic, flag.field) or flag.field not in explicit:
            continue
        if flag.topic == "data" and not knows_tokenizer:
            continue
        mine = getattr(getattr(config, flag.topic), flag.field)
        theirs = _effective(saved, flag.topic, flag.field)
        if mine != theirs and flag.field in free:
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


def _is_taken(topic: str, field: str) -> bool:
    return topic == "model" or field in _TOKENIZER_FIELDS


def _effective(saved: Config, topic: str, field: str) -> Any:
    value = getattr(getattr(saved, topic), field)
    if value is None and field in _DERIVED:
        value = getattr(saved.model, _DERIVED[field])
    return value


def _chosen(checkpoint: CheckpointConfig) -> tuple[str, Config, bool]:
    """The checkpoint that the run begins with: that of --load or, if it holds none, of --pretrained-checkpoint.

    Returns:
        Its folder, its settings, and whether the run only begins with its weights.

    Raises:
        ConfigError: there is none, or none whose settings can be read.
    """
    load, base = checkpoint.load, checkpoint.pretrained_checkpoint
    if load is not None and checkpoint.ckpt_step is not None:
        folder = f"{load.rstrip('/')}/iter_{checkpoint.ckpt_step:07d}"
        return folder, _saved_config(folder), checkpoint.finetune
    for place in (load, base):
        if place is not None and (found := _newest_first(place)):
            return *_first_readable(found), checkpoint.finetune or place == base
    if base is not None and _FILE in names_in(base):
        return base, _saved_config(base), True
    raise _unreadable(f"There is no checkpoint in {' or '.join(place for place in (load, base) if place is not None)}.")


def _first_readable(folders: Sequence[str]) -> tuple[str, Config]:
    """The first folder with readable settings, and these. (A load passes over damaged checkpoints too.)"""
    first: ConfigError | None = None
    for folder in folders:
        try:
            return folder, _saved_config(folder)
        except ConfigError as error:
            first = first or error
    assert first is not None
    raise first


def _newest_first(folder: str) -> list[str]:
    """Checkpoints of a save folder: the one that the latest file names, then the others from the highest iteration down."""
    names = names_in(folder)
    numbers = (re.fullmatch(r"iter_(\d{7,18})", name) for name in names)
    found = [match[0] for match in sorted((match for match in numbers if match), key=lambda match: -int(match[1]))]
    with contextlib.suppress(OSError):
        text = read_bytes(folder, _LATEST).decode(errors="replace").strip()
        if re.fullmatch(r"\d{1,18}", text):
            found.sort(key=lambda name: name != f"iter_{int(text):07d}")  # stable
    return [f"{folder.rstrip('/')}/{name}" for name in found]


def _saved_config(folder: str) -> Config:
    """Settings of a checkpoint.

    Raises:
        ConfigError: they cannot be read.
    """
    file = f"{folder}/{_FILE}"
    try:
        data = read_bytes(folder, _FILE)
        record = json.loads(data)
    except OSError as error:
        raise _unreadable(f"{file} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise _unreadable(f"{file} is not valid JSON: {error}.") from error
    if _was_altered(folder, data):
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


def _was_altered(folder: str, config: bytes) -> bool:
    """Whether the manifest, if it can be read, has another checksum for the settings."""
    try:
        stored = json.loads(read_bytes(folder, _MANIFEST))["files"][_FILE]["checksum"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return False  # a load reports what is wrong with a manifest
    return stored != f"xxh3:{xxhash.xxh3_64_hexdigest(config)}" and str(stored).startswith("xxh3:")


def _unreadable(message: str) -> ConfigError:
    rule = "--use-checkpoint-args needs a checkpoint that was saved here; without it, describe the model by flags."
    return ConfigError([Violation(_FLAGS, message, rule)])


def names_in(folder: str) -> set[str]:
    """Names of files and folders in a folder; none if there is no such folder."""
    if "://" in folder:
        system, path = _remote(folder)
        try:
            return {name.rstrip("/").rsplit("/", 1)[-1] for name in system.ls(path, detail=False)}
        except OSError:
            return set()
    place = Path(folder)
    return {path.name for path in place.iterdir()} if place.is_dir() else set()


def read_bytes(folder: str, name: str) -> bytes:
    """The content of a file.

    Raises:
        OSError: it cannot be read.
    """
    if "://" in folder:
        system, path = _remote(folder)
        content: bytes = system.cat_file(f"{path.rstrip('/')}/{name}")
        return content
    return (Path(folder) / name).read_bytes()


def _remote(url: str) -> tuple[Any, str]:
    """File system and path of a URL.

    Raises:
        ConfigError: no installed package opens such a URL.
    """
    try:
        from fsspec.core import url_to_fs

        return url_to_fs(url)
    except (ImportError, ValueError) as error:
        rule = "URLs are opened by fsspec and its drivers: pip install fsspec, and for s3:// s3fs, for gs:// gcsfs."
        raise ConfigError([Violation((), f"{url} cannot be opened: {error}.", rule)]) from error
