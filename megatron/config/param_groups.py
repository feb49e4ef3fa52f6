"""--param-groups: patterns of parameter names, and what the parameters that they match have of their own.

In the settings an entry is one text, `embedding.* lr-mult=0.1 wd-mult=0`, so it can be typed, saved with a run and compared on
resume. A YAML file, or the key `param-groups` of a --config file, holds the same as a mapping:

    embedding.*: {lr-mult: 0.1, wd-mult: 0}
    layers.*.mlp.*.weight: {lr: 2e-4, min-lr: 2e-5}

Each value of a parameter comes from the last entry that matches its name and gives that value.
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from megatron.config.setting import Interval


@dataclass(frozen=True)
class GroupEntry:
    """One entry: a pattern and the values of those that match. None: it says nothing of that value."""

    pattern: str
    """As in a shell, over the global name: * stands for any characters, dots too; ? for one; [0-3] for one of these."""
    optimizer: str | None = None
    """Update rule, as --optimizer."""
    lr_mult: float | None = None
    """Factor on the learning rate at every step."""
    lr: float | None = None
    """Highest rate of a course of its own, as --lr."""
    min_lr: float | None = None
    """Lowest rate of a course of its own, as --min-lr."""
    wd_mult: float | None = None
    """Factor on weight decay; it also switches on the decay of biases and norms, which have none by themselves."""
    adam_beta1: float | None = None
    adam_beta2: float | None = None
    adam_eps: float | None = None

    def matches(self, name: str) -> bool:
        """Whether it speaks of a parameter."""
        return fnmatchcase(name, self.pattern)


_SHARE = Interval(0.0, 1.0, with_high=False)
_NUMBERS = {
    "lr-mult": Interval(0.0),
    "lr": Interval(0.0, with_low=False),
    "min-lr": Interval(0.0),
    "wd-mult": Interval(0.0),
    "adam-beta1": _SHARE,
    "adam-beta2": _SHARE,
    "adam-eps": Interval(0.0, with_low=False),
}
KEYS = ("optimizer", *_NUMBERS)
"""What an entry may say."""


def as_text(pattern: str, values: Iterable[tuple[str, object]]) -> str:
    """An entry as one text."""
    return " ".join([pattern, *(f"{key.replace('_', '-')}={value}" for key, value in values)])


@functools.lru_cache(maxsize=256)
def entry_of(text: str) -> GroupEntry:
    """An entry from its text.

    Raises:
        ValueError: it is none; says why.
    """
    pattern, *items = text.split()
    if "=" in pattern:
        raise ValueError(f"{pattern} stands where the pattern of names should")
    if not items:
        raise ValueError(f"it gives {pattern} nothing: name at least one of {', '.join(KEYS)}, such as {pattern} lr-mult=0.1")
    values: dict[str, Any] = {}
    for item in items:
        key, equals, value = item.partition("=")
        key = key.replace("_", "-")
        if not equals:
            raise ValueError(f"{item} is not of the form key=value")
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1)
            raise ValueError(f"{key} is not a value of a group; {f'did you mean {near[0]}?' if near else ''} {', '.join(KEYS)} are")
        if key.replace("-", "_") in values:
            raise ValueError(f"{key} is given twice")
        values[key.replace("-", "_")] = _number(key, value) if key in _NUMBERS else value
    return GroupEntry(pattern, **values)


def _number(key: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not _NUMBERS[key].holds(number):
        raise ValueError(f"{key}={value}: it must be a number {_NUMBERS[key]}")
    return number


def merged(texts: Iterable[str], name: str) -> dict[str, Any]:
    """The values that entries give to a parameter, by the names of the fields of `GroupEntry`: of each value the last."""
    found: dict[str, Any] = {}
    for text in texts:
        entry = entry_of(text)
        if entry.matches(name):
            found |= {field: value for field, value in vars(entry).items() if value is not None and field != "pattern"}
    return found
