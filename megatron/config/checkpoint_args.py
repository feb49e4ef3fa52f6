"""``--use-checkpoint-args``: the model's shape and the tokenizer come from the checkpoint that the run begins with."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Set
from typing import Any

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.checks.data import TOKENIZER_FILES, TOKENIZER_SETTINGS
from megatron.config.config import Config
from megatron.config.errors import ConfigError, Violation
from megatron.config.files import names_in, read_bytes
from megatron.config.flags import flags
from megatron.config.model import FREE_AT_BEGINNING, FREE_FIELDS
from megatron.config.save import from_dict

_FLAGS = ("--use-checkpoint-args", "--load", "--pretrained-checkpoint", "--ckpt-step")
_FILE, _LATEST = "config.json", "latest_checkpointed_iteration.txt"
_DERIVED = {"ffn_hidden_size": "ffn_size", "kv_channels": "head_size", "max_position_embeddings": "num_positions"}
"""Model fields that may be None, with the property that says what they then are."""
_TOKENIZER_FIELDS = ("tokenizer_type", *(field for field in TOKENIZER_SETTINGS if field not in TOKENIZER_FILES))
"""What decides the vocabulary, but for the files: they may lie elsewhere, and then they are given."""


def take_from_checkpoint(config: Config, explicit: Set[str]) -> tuple[Config, list[Violation]]:
    """Replace the model and the tokenizer of `config` by those of the checkpoint that the run begins with.

    Args:
        config: settings as given, with ``checkpoint.load`` or ``checkpoint.pretrained_checkpoint``.
        explicit: names of the fields that the user gave.

    Returns:
        The settings, and what stands against them: no readable checkpoint, or flags that contradict it.
    """
    try:
        folder, begins = _chosen(config.checkpoint)
        saved = _saved_config(folder)
    except ConfigError as error:
        taken = [f"--{flag.name}" for flag in flags().values() if _is_taken(flag.topic, flag.field)]
        # Naming the flags that would have come from it keeps rules about their defaults silent.
        return config, [dataclasses.replace(violation, flags=(*_FLAGS, *taken)) for violation in error.violations]
    problems = []
    free = FREE_FIELDS | FREE_AT_BEGINNING if begins else FREE_FIELDS
    kept = {}
    for flag in flags().values():
        if not _is_taken(flag.topic, flag.field) or flag.field not in explicit:
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
    data = dataclasses.replace(config.data, **{field: getattr(saved.data, field) for field in fields})
    return dataclasses.replace(config, model=dataclasses.replace(model, **kept), data=data), problems


def _is_taken(topic: str, field: str) -> bool:
    return topic == "model" or field in _TOKENIZER_FIELDS


def _effective(saved: Config, topic: str, field: str) -> Any:
    value = getattr(getattr(saved, topic), field)
    if value is None and field in _DERIVED:
        value = getattr(saved.model, _DERIVED[field])
    return value


def _chosen(checkpoint: CheckpointConfig) -> tuple[str, bool]:
    """Folder of the checkpoint that the run takes up: of --load, or where that holds none, of --pretrained-checkpoint; and whether it
    only begins with its weights.

    Raises:
        ConfigError: there is none.
    """
    load, base = checkpoint.load, checkpoint.pretrained_checkpoint
    if load is not None and checkpoint.ckpt_step is not None:
        return f"{load.rstrip('/')}/iter_{checkpoint.ckpt_step:07d}", checkpoint.finetune
    for folder in (load, base):
        if folder is not None and (found := _newest(folder)):
            return found, checkpoint.finetune or folder == base
    if base is not None and _FILE in names_in(base):
        return base, True
    raise _unreadable(f"There is no checkpoint in {' or '.join(folder for folder in (load, base) if folder is not None)}.")


def _newest(folder: str) -> str | None:
    """The checkpoint that the latest file names, or else the one of the highest iteration; None if there is none."""
    names = names_in(folder)
    found = sorted((int(match[1]), name) for name in names if (match := re.fullmatch(r"iter_(\d{7,})", name)))
    if not found:
        return None
    name = found[-1][1]
    if _LATEST in names:
        text = read_bytes(folder, _LATEST).decode(errors="replace").strip()
        if text.isdecimal() and (named := f"iter_{int(text):07d}") in names:
            name = named
    return f"{folder.rstrip('/')}/{name}"


def _saved_config(folder: str) -> Config:
    """Settings of a checkpoint.

    Raises:
        ConfigError: they cannot be read.
    """
    file = f"{folder}/{_FILE}"
    try:
        record = json.loads(read_bytes(folder, _FILE))
    except OSError as error:
        raise _unreadable(f"{file} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise _unreadable(f"{file} is not valid JSON: {error}.") from error
    if not isinstance(record, dict) or not isinstance(record.get("config"), dict):
        raise _unreadable(f"{file} holds no settings: it has no mapping named config.")
    # Only what is taken has to be understood; other topics may come from another version.
    wanted = {topic: record["config"].get(topic) for topic in ("model", "data")}
    if not all(isinstance(part, dict) for part in wanted.values()):
        raise _unreadable(f"{file} holds no settings of the model and the data.")
    fields = {*_TOKENIZER_FIELDS, *TOKENIZER_FILES}
    wanted["data"] = {field: value for field, value in wanted["data"].items() if field in fields}
    return from_dict(wanted)


def _unreadable(message: str) -> ConfigError:
    rule = "--use-checkpoint-args needs a checkpoint that was saved here; without it, describe the model by flags."
    return ConfigError([Violation(_FLAGS, message, rule)])
