"""``--use-checkpoint-args``: take the settings of the model and the tokenizer from the checkpoint from which a run starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set
from typing import Any

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.manifest import Checksum, checksums_match
from megatron.checkpoint.save_folder import get_checkpoint_name, list_iterations, read_latest
from megatron.checkpoint.storage import CONFIG, MANIFEST, Storage
from megatron.checkpoint.storage_url import open_storage
from megatron.config.config import Config
from megatron.config.data import TOKENIZER_FILE_SETTINGS, TOKENIZER_SETTINGS, sets_embedding_rows
from megatron.config.errors import ConfigError, Violation
from megatron.config.flags import get_flags
from megatron.config.model import CHANGEABLE_FIELDS, DECREASABLE_FIELDS, INCREASABLE_FIELDS, get_changeable_from_weights
from megatron.config.outputs import CheckpointConfig
from megatron.config.regular_file import parse_json
from megatron.config.save import from_dict
from megatron_lab.checkpoints.best_checkpoint import require_best
from megatron_lab.data_tools.hub_names import suggest_model_download

_CHECKPOINT_FLAGS = ("--use-checkpoint-args", "--load", "--pretrained-checkpoint", "--ckpt-step")
"""Flags that select the checkpoint."""
_DEFAULT_PROPERTIES = {"ffn_hidden_size": "ffn_size", "kv_channels": "head_size", "max_position_embeddings": "num_positions"}
"""Model fields that may be None, with the property that gives the actual value."""
_TOKENIZER_FIELDS = (
    "tokenizer_type",
    *(field for field in TOKENIZER_SETTINGS if field not in (*TOKENIZER_FILE_SETTINGS, "add_bos")),
)
"""Settings that determine the vocabulary. Tokenizer files are not included: they may have another path, which the user then
sets."""


def apply_checkpoint_args(config: Config, explicit: Set[str]) -> tuple[Config, list[Violation]]:
    """Replace the model and tokenizer settings of `config` with the settings of the checkpoint from which the run starts.

    A setting that the user has set explicitly is kept if it may differ from the checkpoint, for example the sequence length. Any
    other explicit setting must equal the checkpoint's value.

    Args:
        config: requested settings, with ``checkpoint.load`` or ``checkpoint.pretrained_checkpoint``.
        explicit: names of the settings that the user has set.

    Returns:
        The settings, and the violations: no checkpoint can be read, or flags contradict the checkpoint.
    """
    try:
        folder, saved, num_rows, starts_from_weights = _select_checkpoint(config.checkpoint)
    except ConfigError as error:
        replaced_flags = [f"--{flag.name}" for flag in get_flags().values() if _is_checkpoint_field(flag.topic, flag.field)]
        # Add the flags that the checkpoint would have replaced: rules about their default values are then not reported.
        return config, [
            dataclasses.replace(violation, flags=(*_CHECKPOINT_FLAGS, *replaced_flags)) for violation in error.violations
        ]
    violations = []
    changeable_fields = get_changeable_from_weights(saved.model) if starts_from_weights else CHANGEABLE_FIELDS
    has_tokenizer = saved.data.tokenizer_type is not None  # imported weights may have none
    overrides = {}
    for flag in get_flags().values():
        if not _is_checkpoint_field(flag.topic, flag.field) or flag.field not in explicit:
            continue
        if flag.topic == "data" and not has_tokenizer:
            continue
        requested = getattr(getattr(config, flag.topic), flag.field)
        saved_value: Any = getattr(getattr(saved, flag.topic), flag.field)
        if saved_value is None and flag.field in _DEFAULT_PROPERTIES:
            saved_value = getattr(saved.model, _DEFAULT_PROPERTIES[flag.field])
        if saved_value is None and flag.field == "vocab_size" and sets_embedding_rows(saved.data.tokenizer_type):
            saved_value = num_rows
        if requested != saved_value and (
            flag.field in changeable_fields
            or (flag.field in DECREASABLE_FIELDS and requested < saved_value)
            or (flag.field in INCREASABLE_FIELDS and requested > saved_value)
        ):
            overrides[flag.field] = requested
        elif requested != saved_value:
            violations.append(
                Violation(
                    (f"--{flag.name}", "--use-checkpoint-args"),
                    f"--{flag.name} is given as {requested}, but the checkpoint {folder} was trained with {saved_value}.",
                    f"--use-checkpoint-args uses the value of the checkpoint: remove --{flag.name}, or remove "
                    "--use-checkpoint-args and describe the model by flags.",
                )
            )
    model = saved.model
    if "seq_length" in overrides:  # a position table keeps its rows, and an export states the longest sequence
        model = dataclasses.replace(model, max_position_embeddings=model.num_positions)
    fields = _TOKENIZER_FIELDS if explicit & set(TOKENIZER_FILE_SETTINGS) else (*_TOKENIZER_FIELDS, *TOKENIZER_FILE_SETTINGS)
    fields = fields if "add_bos" in explicit else (*fields, "add_bos")
    saved_data = {field: getattr(saved.data, field) for field in fields} if has_tokenizer else {}
    data = dataclasses.replace(config.data, **saved_data)
    if data.vocab_size is None and (not has_tokenizer or explicit & set(TOKENIZER_FILE_SETTINGS)):
        # The weights determine the rows of the embedding. The tokenizer of the command line may have more or fewer ids.
        data = dataclasses.replace(data, vocab_size=num_rows if sets_embedding_rows(data.tokenizer_type) else None)
    return dataclasses.replace(config, model=dataclasses.replace(model, **overrides), data=data), violations


def get_checkpoint_fields() -> set[str]:
    """Return the names of the settings that must have the checkpoint's value, whatever the command line says."""
    return {
        flag.field
        for flag in get_flags().values()
        if _is_checkpoint_field(flag.topic, flag.field) and flag.field not in CHANGEABLE_FIELDS
    }


def _is_checkpoint_field(topic: str, field: str) -> bool:
    return topic == "model" or field in _TOKENIZER_FIELDS


def _select_checkpoint(checkpoint: CheckpointConfig) -> tuple[str, Config, int | None, bool]:
    """Select the checkpoint from which the run starts.

    A checkpoint in the folder of --load precedes a checkpoint in the folder of --pretrained-checkpoint.

    Returns:
        Location of the checkpoint, its settings, the number of rows of its word embedding (None if it is not recorded), and whether
            the run uses only its weights.

    Raises:
        ConfigError: neither folder has a checkpoint with settings that can be read.
    """
    load, pretrained = checkpoint.load, checkpoint.pretrained_checkpoint
    if load is not None and checkpoint.ckpt_step is not None:
        step = checkpoint.ckpt_step
        if step == "best":
            try:
                step = require_best(_open_folder(load)).iteration
            except CheckpointError as error:
                raise _build_error(f"--ckpt-step best: {error}.") from error
        return *_read_first([_open_folder(load).get_child(get_checkpoint_name(step))]), checkpoint.finetune
    for path in (load, pretrained):
        if path is not None and (candidates := _list_candidates(_open_folder(path))):
            return *_read_first(candidates), checkpoint.finetune or path == pretrained
    if pretrained is not None and _open_folder(pretrained).get_file_size(CONFIG) is not None:
        return *_read_first([_open_folder(pretrained)]), True
    paths = [path for path in (load, pretrained) if path is not None]
    advice = "".join(suggest_model_download(path, needs_import=True) for path in paths)
    raise _build_error(f"There is no checkpoint in {' or '.join(paths)}. Correct the path.{advice}")


def _open_folder(path: str) -> Storage:
    """Open the storage at the path or URL of a folder.

    Raises:
        ConfigError: this type of URL is not supported.
    """
    try:
        return open_storage(path)
    except ValueError as error:
        reason = "Each type of URL needs its driver: pip install s3fs for s3://, gcsfs for gs://."
        raise ConfigError([Violation((), f"{error}.", reason)]) from error


def _list_candidates(save_folder: Storage) -> list[Storage]:
    """Return the checkpoints of a save folder in the order in which they are tried.

    The first is the checkpoint that the file of the latest iteration names. The others follow, newest first.
    """
    try:
        iterations, latest = list_iterations(save_folder), read_latest(save_folder)
    except OSError:
        return []
    return [save_folder.get_child(get_checkpoint_name(i)) for i in sorted(iterations, key=lambda i: (i != latest, -i))]


def _read_first(folders: Sequence[Storage]) -> tuple[str, Config, int | None]:
    """Return the location, the settings and the rows of the word embedding of the first checkpoint whose settings can be read.

    Unreadable checkpoints are skipped, as they are when a run loads a checkpoint.

    Args:
        folders: checkpoints, in the order in which they are tried.

    Raises:
        ConfigError: no settings can be read. The message is about the first checkpoint.
    """
    first_error: ConfigError | None = None
    for folder in folders:
        try:
            return folder.location, *_read_config(folder)
        except ConfigError as error:
            first_error = first_error or error
    assert first_error is not None
    raise first_error


def _read_config(folder: Storage) -> tuple[Config, int | None]:
    """Read the model and tokenizer settings of a checkpoint, and the number of rows of its word embedding. All other settings have
    their default values.

    Raises:
        ConfigError: the settings cannot be read.
    """
    file = folder.get_location(CONFIG)
    try:
        data = folder.read(CONFIG)
        record = parse_json(data)
    except OSError as error:
        raise _build_error(f"{file} cannot be read: {error.strerror or error}. Check the path and its permissions.") from error
    except (ValueError, RecursionError) as error:
        raise _build_error(f"{file} is not valid JSON: {error}. Copy the checkpoint again.") from error
    try:
        saved_checksum = parse_json(folder.read(MANIFEST))["files"][CONFIG]["checksum"]
        is_altered = not checksums_match(Checksum(data).text, saved_checksum)
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        is_altered = False  # loading the checkpoint reports a damaged manifest
    if is_altered:
        raise _build_error(
            f"{file} was altered since it was saved: its checksum differs from that in the manifest. Copy the checkpoint again."
        )
    if isinstance(record, dict) and "config" not in record and {"architectures", "model_type"} & set(record):
        raise _build_error(
            f"{file} belongs to a model of Hugging Face, not to a checkpoint of this project. Import the model, and name the "
            f"folder of the result:\n  python tools/checkpoint.py import {file.removesuffix(CONFIG).rstrip('/')} imported --verify"
        )
    if not isinstance(record, dict) or not isinstance(record.get("config"), dict):
        raise _build_error(f"{file} holds no settings: it has no mapping named config. Copy the checkpoint again.")
    # Parse only the settings that are used: other topics may come from another version of this project.
    settings_by_topic = {topic: record["config"].get(topic) for topic in ("model", "data")}
    if not all(isinstance(settings, dict) for settings in settings_by_topic.values()):
        raise _build_error(
            f"{file} holds no settings of the model and the data (mappings config.model and config.data). Copy the checkpoint "
            "again."
        )
    fields = {"tokenizer_type", *TOKENIZER_SETTINGS}
    settings_by_topic["data"] = {field: value for field, value in settings_by_topic["data"].items() if field in fields}
    num_rows = record.get("vocab_size")
    return from_dict(settings_by_topic), num_rows if isinstance(num_rows, int) else None


def _build_error(message: str) -> ConfigError:
    reason = (
        "--use-checkpoint-args needs a checkpoint of this project, or one that tools/checkpoint.py import has created from another "
        "framework's checkpoint. Without --use-checkpoint-args, describe the model by flags."
    )
    return ConfigError([Violation(_CHECKPOINT_FLAGS, message, reason)])
