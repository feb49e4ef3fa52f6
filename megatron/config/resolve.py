"""Settings that are derived from other settings before the rules are checked: the tokenizer type, and settings without effect,
which are reset.

A setting without effect is reset to its default, so that no code after the configuration can depend on its value.
"""

from __future__ import annotations

import os
from dataclasses import replace

from megatron.config.checks.finding import format_setting, has_effect, is_set, reset
from megatron.config.config import Config
from megatron.config.data import (
    DataConfig,
    TokenizerType,
    has_split_datasets,
    parse_split,
)
from megatron.config.errors import ConfigError, Violation
from megatron.config.flags import Flag, get_flag, get_flags
from megatron.config.imports import import_object
from megatron.config.setting import get_flag_name


def resolve_settings(config: Config) -> tuple[Config, list[str]]:
    """Derive settings that are not given from others, and reset settings without effect to their defaults. Returns the settings,
    and a line for the start-up log about each change."""
    config, notes = _infer_tokenizer_type(_select_tokenizer_snapshot(config))
    if config.training.skip_train:
        config = import_object("megatron_lab.data_tools.evaluation_run:adapt_settings")(config, notes)
    by_condition: dict[str, list[str]] = {}
    while idle := [flag for flag in get_flags().values() if is_set(config, flag.field) and _is_idle(flag, config)]:
        for flag in idle:
            assert flag.metadata.active_if is not None
            by_condition.setdefault(flag.metadata.active_if.description, []).append(format_setting(config, flag.field))
        config, _ = reset(config, *(flag.field for flag in idle)).apply(config, 1)
    notes += [
        format_no_effect_note(settings, f"{'it acts' if len(settings) == 1 else 'they act'} only {condition_text}")
        for condition_text, settings in by_condition.items()
    ]
    return _disable_empty_validation(config, notes)


def _is_idle(flag: Flag, config: Config) -> bool:
    """Return whether a setting has no effect and may be ignored.

    A strict condition means that the setting is refused if the condition is not met. Such a setting may be ignored only if the
    settings that the condition names have no effect either.
    """
    condition = flag.metadata.active_if
    if condition is None or has_effect(config, flag.field):
        return False
    other_conditions = [(name, get_flag(name).metadata.active_if) for name in condition.values]
    return not condition.strict or all(
        other_condition is not None and not other_condition.strict and not has_effect(config, name)
        for name, other_condition in other_conditions
    )


def format_no_effect_note(settings: list[str], reason: str) -> str:
    """Format the note about settings without effect that have the same reason."""
    return f"{', '.join(settings)} {'has' if len(settings) == 1 else 'have'} no effect: {reason}."


def _select_tokenizer_snapshot(config: Config) -> Config:
    """Replace the folder of a model in the cache of the Hugging Face Hub by the folder of its snapshot in --tokenizer-model."""
    path = config.data.tokenizer_model
    if path is None or not os.path.isdir(os.path.join(path, "snapshots")):
        return config
    try:
        snapshot = import_object("megatron_lab.data_tools.hub_snapshots:resolve_snapshot")(path)
    except ValueError as error:
        raise ConfigError([Violation(("--tokenizer-model",), f"--tokenizer-model {error}")]) from error
    return replace(config, data=replace(config.data, tokenizer_model=snapshot))


def _infer_tokenizer_type(config: Config) -> tuple[Config, list[str]]:
    """Set the tokenizer type from the tokenizer's files if it is not given. Returns the settings and a note."""
    data = config.data
    if data.tokenizer_type is not None or (inferred := _find_tokenizer_type(data)) is None:
        return config, []
    tokenizer_type, fields = inferred
    note = f"--tokenizer-type is {tokenizer_type}, which follows from {' and '.join(get_flag_name(field) for field in fields)}."
    return replace(config, data=replace(data, tokenizer_type=tokenizer_type)), [note]


def _find_tokenizer_type(data: DataConfig) -> tuple[TokenizerType, tuple[str, ...]] | None:
    """Return the tokenizer type that follows from other settings, and the names of these settings. They name the tokenizer's files,
    or are --mock-data with --vocab-size. None if no type follows."""
    if data.vocab_file is not None and (data.merge_file is not None or data.tokenizer_model is None):
        return "GPT2BPETokenizer", ("vocab_file", "merge_file") if data.merge_file is not None else ("vocab_file",)
    if data.tokenizer_model is not None:
        name = os.path.basename(data.tokenizer_model.rstrip("/"))
        if name.endswith(".model"):
            return "SentencePieceTokenizer", ("tokenizer_model",)
        if name == "tokenizer.json" or os.path.isfile(os.path.join(data.tokenizer_model, "tokenizer.json")):
            return "HuggingFaceTokenizer", ("tokenizer_model",)
    elif data.mock_data and data.vocab_size is not None:
        return "NullTokenizer", ("mock_data", "vocab_size")
    return None


def _disable_empty_validation(config: Config, notes: list[str]) -> tuple[Config, list[str]]:
    """Switch evaluation off if --split leaves no documents for validation. Returns the settings and all notes."""
    data, training = config.data, config.training
    if data.mock_data or data.hf_dataset is not None or has_split_datasets(data) or training.eval_iters <= 0:
        return config, notes
    try:
        training_share, validation_share, _ = parse_split(data.split)
    except ValueError:  # a rule reports it
        return config, notes
    if not training_share or validation_share:
        return config, notes
    note = (
        f"{format_setting(config, 'split')} leaves no documents for validation, so there is no evaluation (as with --eval-iters 0)."
    )
    return replace(config, training=replace(training, eval_iters=0)), [*notes, note]
