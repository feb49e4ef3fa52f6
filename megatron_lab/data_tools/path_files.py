"""Files that name the datasets of a run (--data-args-path, --per-split-data-args-path)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.config.regular_file import find_path_problem, parse_json, read_text, shorten_path

_SPLIT_KEYS = ("train", "valid", "test")


def read_paths(path: str) -> tuple[str, tuple[str, ...]]:
    """Return the words in the file of --data-args-path, after the flag with the file, for error messages.

    Raises:
        ValueError: the file cannot be read, or a word is not a valid path.
    """
    source = f"--data-args-path {path}"
    texts = tuple(_read_text(Path(path), "--data-args-path").split())
    _check_prefixes(source, texts)
    return source, texts


def read_paths_per_split(path: str) -> tuple[list[Any], list[str]]:
    """Read the file of --per-split-data-args-path.

    Returns:
        the words of training, validation and test (empty without an entry), and a text that names the entry of each, for error
        messages. The words of validation are a dictionary from names to words if the file has several validation sets.

    Raises:
        ValueError: the file cannot be read or has another format, or a word is not a valid path.
    """
    flag = "--per-split-data-args-path"
    usage = (
        f'{flag} takes a JSON file {{"train": ["WEIGHT", "PREFIX", ...], "valid": [...] or {{NAME: [...], ...}}, "test": [...]}}; '
        "train is required."
    )
    try:
        content = parse_json(_read_text(Path(path), flag))
    except ValueError as error:
        raise ValueError(f"{flag} {path}: {error}\n  {usage}") from error
    if not isinstance(content, dict) or not content.get("train") or not set(content) <= set(_SPLIT_KEYS):
        raise ValueError(f"{flag} {path} must have the entry train, and no entries other than train, valid and test.\n  {usage}")
    sources = [f"the entry {name} of {flag} {path}" for name in _SPLIT_KEYS]
    words_per_split: list[Any] = []
    for name, source in zip(_SPLIT_KEYS, sources, strict=True):
        entry = content.get(name, [])
        named_lists = entry if name == "valid" and isinstance(entry, dict) and entry else {"": entry}
        words = {}
        for set_name, paths in named_lists.items():
            if not isinstance(paths, list) or not all(isinstance(path_or_weight, str | int | float) for path_or_weight in paths):
                entry_name = f"{name}, {set_name}" if set_name else name
                raise ValueError(f"{flag} {path}: the entry {entry_name} is not a list of weights and prefixes.\n  {usage}")
            words[set_name] = tuple(map(str, paths))
            _check_prefixes(source, words[set_name])
        words_per_split.append(words if named_lists is entry else words[""])
    return words_per_split, sources


def _check_prefixes(source: str, texts: Sequence[str]) -> None:
    """Check that the prefixes that a file names can be paths. (The rules check those of the command line.)

    Args:
        source: flag and file, for the error message.
    """
    for text in texts:
        if problem := find_path_problem(text):
            raise ValueError(f"{source} contains {shorten_path(text)}, which is not a valid path: {problem}.\n  Correct the file.")


def _read_text(path: Path, flag: str) -> str:
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValueError(f"{flag} {path} cannot be read: {reason}.\n  Check the path.") from error
