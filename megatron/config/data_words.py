"""The words of --data-path and its likes: which dataset has which weight."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.config.data import DataConfig

SPLIT_FIELDS = ("train_data_path", "valid_data_path", "test_data_path")
PATH_FIELDS = ("data_path", "data_args_path", *SPLIT_FIELDS, "per_split_data_args_path")
"""Settings that say where the datasets lie."""
_SPLIT_KEYS = ("train", "valid", "test")


@dataclass(frozen=True)
class WeightedPrefix:
    """A dataset of a blend."""

    weight: float | None
    """As given; None for a blend that follows the sizes of its datasets."""
    prefix: str


def parse_data_words(words: Sequence[str], flag: str = "--data-path") -> list[WeightedPrefix]:
    """Datasets and weights: one prefix, several prefixes, or weights and prefixes in turn.

    Raises:
        ValueError: weights and prefixes do not alternate, a weight is negative or not finite, or all of them are 0.
    """
    form = f"{flag} takes PREFIX, or PREFIX PREFIX ..., or WEIGHT PREFIX WEIGHT PREFIX ... (a prefix that is a number: ./{{}})"
    if not words:
        raise ValueError(f"{flag} has no value.\n  {form.format('7')}")
    if not any(map(is_number, words)):
        return [WeightedPrefix(None, word) for word in words]
    for at, word in enumerate(words):
        expected = "a prefix" if at % 2 else "a weight"
        if is_number(word) == bool(at % 2):
            raise ValueError(
                f"{flag} {' '.join(words)}: word {at + 1}, {word!r}, stands where {expected} belongs.\n  {form.format(word)}"
            )
    if len(words) % 2:
        raise ValueError(f"{flag} {' '.join(words)}: the last weight, {words[-1]}, has no prefix.\n  {form.format(words[-1])}")
    found = [WeightedPrefix(float(weight), prefix) for weight, prefix in zip(words[::2], words[1::2], strict=True)]
    for each in found:
        assert each.weight is not None
        if not (math.isfinite(each.weight) and each.weight >= 0):
            raise ValueError(f"{flag}: the weight of {each.prefix} is {each.weight}.\n  Weights are numbers of 0 or more.")
    if not any(each.weight for each in found):
        raise ValueError(f"{flag} {' '.join(words)}: all weights are 0.\n  Give at least one dataset a weight above 0.")
    return found


def split_words(data: DataConfig) -> tuple[bool, list[list[WeightedPrefix]]]:
    """Datasets and weights of training, validation and test, files of words read.

    Returns:
        whether the splits have datasets of their own (otherwise all three are the same, to be divided by --split), and the three
        lists (all empty for made-up data).

    Raises:
        ValueError: a file is missing or not what it should be, or words are no blend.
    """
    if data.mock_data:
        return False, [[], [], []]
    if has_own_splits(data):
        given = (data.train_data_path, data.valid_data_path, data.test_data_path)
        if data.per_split_data_args_path:
            given = _words_per_split(Path(data.per_split_data_args_path))
        return True, [
            parse_data_words(words, f"--{field.replace('_', '-')}") if words else []
            for words, field in zip(given, SPLIT_FIELDS, strict=True)
        ]
    flag, words = "--data-path", data.data_path
    if data.data_args_path:
        flag = f"--data-args-path {data.data_args_path}"
        words = tuple(_read_text(Path(data.data_args_path), "--data-args-path").split())
    return False, [parse_data_words(words, flag)] * 3


def _words_per_split(path: Path) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    flag = "--per-split-data-args-path"
    form = f'{flag} takes a JSON file {{"train": ["WEIGHT", "PREFIX", ...], "valid": [...], "test": [...]}}; train must be there.'
    try:
        found = json.loads(_read_text(path, flag))
    except ValueError as error:
        raise ValueError(f"{flag} {path}: {error}\n  {form}") from error
    if not isinstance(found, dict) or not found.get("train") or not set(found) <= set(_SPLIT_KEYS):
        raise ValueError(f"{flag} {path} has other entries than train, valid and test, or no train.\n  {form}")
    if not all(isinstance(words, list) and all(isinstance(word, str | int | float) for word in words) for words in found.values()):
        raise ValueError(f"{flag} {path}: an entry is not a list of words.\n  {form}")
    train, valid, test = (tuple(map(str, found.get(name, ()))) for name in _SPLIT_KEYS)
    return train, valid, test


def _read_text(path: Path, flag: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValueError(f"{flag} {path} cannot be read: {reason}.\n  Check the path.") from error


def path_flags(data: DataConfig) -> list[str]:
    """Fields that say where the datasets lie, as far as they are given."""
    return [field for field in PATH_FIELDS if getattr(data, field)]


def has_own_splits(data: DataConfig) -> bool:
    """Whether training, validation and test have datasets of their own."""
    return any(getattr(data, field) for field in (*SPLIT_FIELDS, "per_split_data_args_path"))


def is_number(text: str) -> bool:
    """Whether a word is a number, infinities and nan included."""
    try:
        float(text)
    except ValueError:
        return False
    return True
