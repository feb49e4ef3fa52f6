"""Names and blends of several validation sets (--valid-data-path NAME=PREFIX, --multiple-validation-sets)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from megatron.config.data import Blends, DataConfig, WeightedPrefix, parse_blend

_SET_START = re.compile(r"([A-Za-z0-9_][\w.-]*)=(.*)", re.DOTALL)
"""Word that starts a validation set: its name and the first word of its blend. A path whose first folder contains an equals sign
has to start with ./ to be no such word."""


def parse_sets(texts: Sequence[str] | Mapping[str, Sequence[str]], flag: str, one_per_dataset: bool) -> Blends:
    """Parse the value of --valid-data-path into the blend of each set, by the name of the set.

    Args:
        texts: the words of the value, or the words of each set by its name.
        flag: the flag, for error messages.
        one_per_dataset: whether each dataset is a set, if the words name no sets.

    Raises:
        ValueError: the words of a set are not a blend, or the sets have no distinct names.
    """
    words_by_name = texts if isinstance(texts, Mapping) else _group_by_name(texts, flag)
    if not words_by_name:
        assert not isinstance(texts, Mapping)
        blend = parse_blend(texts, flag)
        return separate_datasets(blend, flag) if one_per_dataset else {"": blend}
    for name in words_by_name:
        if _SET_START.fullmatch(f"{name}=") is None:
            raise ValueError(
                f"{flag}: {name!r} is not a valid name of a validation set.\n"
                "  A name starts with a letter, a digit or _ and contains only letters, digits, _, - and . characters."
            )
    return {name: parse_blend(words, f"{flag}, set {name},") for name, words in words_by_name.items()}


def _group_by_name(words: Sequence[str], flag: str) -> dict[str, list[str]]:
    """Return the words of each set by its name; empty if no word starts a set.

    Raises:
        ValueError: only some words belong to a named set, two sets have the same name, or a set has no words.
    """
    groups: dict[str, list[str]] = {}
    group: list[str] | None = None
    for i, word in enumerate(words):
        match = _SET_START.fullmatch(word)
        if match is None:
            if group is not None:
                group.append(word)
            continue
        name, first_word = match.groups()
        if group is None and i:
            raise ValueError(
                f"{flag} {' '.join(words)}: {words[0]} has no name, but {name} has one.\n"
                "  Name every validation set: NAME=PREFIX NAME=PREFIX ... (write a prefix that contains = as ./PREFIX)."
            )
        if name in groups:
            raise ValueError(f"{flag} has two validation sets with the name {name}.\n  Give each set its own name.")
        if not first_word:
            raise ValueError(f"{flag}: {word} has no dataset after the equals sign.\n  Write {name}=PREFIX without a space.")
        group = groups[name] = [first_word]
    return groups


def separate_datasets(blend: Sequence[WeightedPrefix], flag: str) -> Blends:
    """Make a set of each dataset of a blend. The name of a set is the shortest end of its path that no other path has.

    Raises:
        ValueError: a dataset occurs twice.
    """
    paths = [tuple(part for part in dataset.prefix.split("/") if part not in ("", ".")) for dataset in blend]
    for path, dataset in zip(paths, blend, strict=True):
        if paths.count(path) > 1:
            raise ValueError(
                f"{flag} names {dataset.prefix} twice, but with --multiple-validation-sets each dataset is a set.\n"
                "  Name the dataset once."
            )
    names = [_find_distinct_end(path, [other for other in paths if other != path]) for path in paths]
    return {name: [WeightedPrefix(None, dataset.prefix)] for name, dataset in zip(names, blend, strict=True)}


def list_set_notes(data: DataConfig) -> list[str]:
    """Return lines for the start-up log about weights that have no effect on the validation sets."""
    words = data.valid_data_path or data.data_path
    if data.multiple_validation_sets and len(words) > 1 and parse_blend(words)[0].weight is not None:
        return ["validation: the weights have no effect, because each dataset is a set (--multiple-validation-sets)"]
    return []


def _find_distinct_end(path: tuple[str, ...], others: Sequence[tuple[str, ...]]) -> str:
    """Return the shortest end of a path, in whole folder names, that is not the end of any other path."""
    lengths = (n for n in range(1, len(path)) if all(other[-n:] != path[-n:] for other in others))
    return "/".join(path[-next(lengths, len(path)) :])
