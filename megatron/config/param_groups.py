"""Parser of --param-groups: patterns of parameter names, and the optimizer settings of the parameters that match.

In the settings an entry is one text, `embedding.* lr-mult=0.1 wd-mult=0`, so that it can be typed, saved with a run and compared on
resume. A YAML file, or the key `param-groups` of a --config file, contains the entries as a mapping:

    embedding.*: {lr-mult: 0.1, wd-mult: 0}
    layers.*.mlp.*.weight: {lr: 2e-4, min-lr: 2e-5}

Each value of a parameter comes from the last entry that matches the parameter's name and sets the value.
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
    """Entry of --param-groups: a pattern of parameter names, and optimizer settings for the parameters that match. Settings that
    are None stay as other flags or entries set them."""

    pattern: str
    """Shell pattern that the full name of a parameter must match: * matches any characters, including dots; ? matches one
    character; [0-3] one of these."""
    optimizer: str | None = None
    """Optimizer, as in --optimizer."""
    lr_mult: float | None = None
    """Factor on the learning rate at every step."""
    lr: float | None = None
    """Maximum learning rate of a separate schedule for these parameters, in place of --lr."""
    min_lr: float | None = None
    """Minimum learning rate of a separate schedule for these parameters, in place of --min-lr."""
    wd_mult: float | None = None
    """Factor on weight decay. It also enables the decay of biases and norms, which have none by default."""
    adam_beta1: float | None = None
    adam_beta2: float | None = None
    adam_eps: float | None = None

    def matches(self, name: str) -> bool:
        """Return whether the pattern matches a parameter name."""
        return fnmatchcase(name, self.pattern)


_DECAY = Interval(0.0, 1.0, includes_high=False)
_INTERVALS = {
    "lr-mult": Interval(0.0),
    "lr": Interval(0.0, includes_low=False),
    "min-lr": Interval(0.0),
    "wd-mult": Interval(0.0),
    "adam-beta1": _DECAY,
    "adam-beta2": _DECAY,
    "adam-eps": Interval(0.0, includes_low=False),
}
KEYS = ("optimizer", *_INTERVALS)
"""Keys that an entry may set."""


def format_entry(pattern: str, values: Iterable[tuple[str, object]]) -> str:
    """Format an entry of --param-groups as one text, such as `embedding.* lr-mult=0.1`.

    Args:
        values: pairs of a key and its value.
    """
    return " ".join([pattern, *(f"{key.replace('_', '-')}={value}" for key, value in values)])


@functools.lru_cache(maxsize=256)
def parse_entry(text: str) -> GroupEntry:
    """Parse an entry of --param-groups.

    Raises:
        ValueError: the text is not a valid entry. The message gives the reason.
    """
    pattern, *items = text.split()
    if "=" in pattern:
        raise ValueError(
            f"--param-groups {text!r} must start with a pattern of parameter names, not with {pattern}. "
            "Put a pattern first, such as embedding.*"
        )
    if not items:
        raise ValueError(
            f"--param-groups {text!r} sets nothing for {pattern}: add at least one of {', '.join(KEYS)}, such as {pattern} "
            "lr-mult=0.1"
        )
    values: dict[str, Any] = {}
    for item in items:
        key, equals, value = item.partition("=")
        key = key.replace("_", "-")
        if not equals:
            raise ValueError(f"--param-groups {text!r}: {item} is not of the form key=value. Write a pair such as lr-mult=0.1")
        if key not in KEYS:
            similar = difflib.get_close_matches(key, KEYS, n=1)
            raise ValueError(
                f"--param-groups {text!r}: there is no key {key}. {f'Did you mean {similar[0]}? ' if similar else ''}"
                f"Use one of {', '.join(KEYS)}"
            )
        if key.replace("-", "_") in values:
            raise ValueError(f"--param-groups {text!r} sets {key} twice: remove one of the two values")
        values[key.replace("-", "_")] = _parse_number(text, key, value) if key in _INTERVALS else value
    return GroupEntry(pattern, **values)


def _parse_number(text: str, key: str, value: str) -> float:
    try:
        parsed = float(value)
    except ValueError:
        parsed = math.nan
    if not _INTERVALS[key].contains(parsed):
        raise ValueError(
            f"--param-groups {text!r} sets {key}={value}, but {key} must be a number that is {_INTERVALS[key]}. Change the value"
        )
    return parsed


def merge_entries(entries: Iterable[str], name: str) -> dict[str, Any]:
    """Return the optimizer settings that the entries of --param-groups set for one parameter, by the names of the fields of
    `GroupEntry`. If several entries set the same field, the last one counts.

    Args:
        entries: texts of the entries.
        name: full name of the parameter.
    """
    values: dict[str, Any] = {}
    for text in entries:
        entry = parse_entry(text)
        if entry.matches(name):
            values |= {field: value for field, value in vars(entry).items() if value is not None and field != "pattern"}
    return values
