"""``--use-checkpoint-args``: the model's shape and the tokenizer come from the checkpoint that is loaded."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from megatron.config.checks.data import TOKENIZER_FILES, TOKENIZER_SETTINGS
from megatron.config.config import Config
from megatron.config.errors import ConfigError, Violation
from megatron.config.flags import flags
from megatron.config.save import from_dict

_FLAGS = ("--use-checkpoint-args", "--load", "--ckpt-step")
_DERIVED = {"ffn_hidden_size": "ffn_size", "kv_channels": "head_size", "max_position_embeddings": "num_positions"}
"""Model fields that may be None, with the property that says what they then are."""
_TOKENIZER_FIELDS = ("tokenizer_type", *(field for field in TOKENIZER_SETTINGS if field not in TOKENIZER_FILES))
"""What decides the vocabulary, but for the files: they may lie elsewhere."""


def take_from_checkpoint(config: Config, explicit: Collection[str]) -> tuple[Config, list[Violation]]:
    """Replace the model and the tokenizer of `config` by those of the checkpoint in ``--load``.

    Args:
        config: settings as given, with ``checkpoint.load``.
        explicit: names of the fields that the user gave.

    Returns:
        The settings, and what stands against them: no readable checkpoint, or flags that contradict it.
    """
    assert config.checkpoint.load is not None
    try:
        step, saved = _saved_config(Path(config.checkpoint.load), config.checkpoint.ckpt_step)
    except ConfigError as error:
        taken = [f"--{flag.name}" for flag in flags().values() if _is_taken(flag.topic, flag.field)]
        # Naming the flags that would have come from it keeps rules about their defaults silent.
        return config, [dataclasses.replace(violation, flags=(*_FLAGS, *taken)) for violation in error.violations]
    problems = []
    for flag in flags().values():
        if not _is_taken(flag.topic, flag.field) or flag.field not in explicit:
            continue
        mine = getattr(getattr(config, flag.topic), flag.field)
        theirs = _effective(saved, flag.topic, flag.field)
        if mine != theirs:
            problems.append(
                Violation(
                    (f"--{flag.name}", "--use-checkpoint-args"),
                    f"--{flag.name} is given as {mine}, but the checkpoint of iteration {step} in {config.checkpoint.load} "
                    f"was trained with {theirs}.",
                    f"--use-checkpoint-args takes it from the checkpoint: leave --{flag.name} out, or leave "
                    "--use-checkpoint-args out and describe the whole model.",
                )
            )
    data = dataclasses.replace(config.data, **{field: getattr(saved.data, field) for field in _TOKENIZER_FIELDS})
    return dataclasses.replace(config, model=saved.model, data=data), problems


def _is_taken(topic: str, field: str) -> bool:
    return topic == "model" or field in _TOKENIZER_FIELDS


def _effective(saved: Config, topic: str, field: str) -> Any:
    value = getattr(getattr(saved, topic), field)
    if value is None and field in _DERIVED:
        value = getattr(saved.model, _DERIVED[field])
    return value


def _saved_config(folder: Path, step: int | None) -> tuple[int, Config]:
    """Iteration and settings of a checkpoint: the newest, or the one asked for.

    Raises:
        ConfigError: there is none, or its settings cannot be read.
    """
    if step is None:
        step = _newest(folder)
    file = folder / f"iter_{step:07d}" / "config.json"
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise _unreadable(f"{file} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise _unreadable(f"{file} is not valid JSON: {error}.") from error
    if not isinstance(record, dict) or not isinstance(record.get("config"), dict):
        raise _unreadable(f"{file} holds no settings: it has no mapping named config.")
    # Only what is taken has to be understood; other topics may come from another version.
    wanted = {topic: record["config"].get(topic) for topic in ("model", "data")}
    if not all(isinstance(part, dict) for part in wanted.values()):
        raise _unreadable(f"{file} holds no settings of the model and the data.")
    wanted["data"] = {field: value for field, value in wanted["data"].items() if _is_taken("data", field)}
    return step, from_dict(wanted)


def _newest(folder: Path) -> int:
    file = folder / "latest_checkpointed_iteration.txt"
    try:
        text = file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise _unreadable(f"There is no checkpoint in {folder}: {file.name} cannot be read ({error.strerror}).") from error
    if not text.isdecimal():
        raise _unreadable(f"{file} holds {text!r}, not the number of an iteration; name one with --ckpt-step.")
    return int(text)


def _unreadable(message: str) -> ConfigError:
    rule = "--use-checkpoint-args needs a checkpoint that was saved here; without it, describe the model by flags."
    return ConfigError([Violation(_FLAGS, message, rule)])
