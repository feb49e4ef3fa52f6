"""The table of flags, generated from the settings dataclasses: the field that each flag sets, and the values that it accepts."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron.config.config import Config
from megatron.config.setting import SettingMetadata
from megatron.spec.activations import get_added_choices

_TYPE_NAMES = {int: "whole number", float: "number", str: "text"}
_MAX_INT = 10**15
"""Bound of integers. No setting has a meaningful value beyond it, and arithmetic below it is fast and exact."""


@dataclass(frozen=True)
class Flag:
    """Flag of the command line, and the settings field that it sets."""

    topic: str
    """Topic of the setting: name of a field of `Config`, such as ``model``."""
    field: str
    """Name of the setting: name of a field of the topic's dataclass, such as ``num_layers``."""
    value_type: type
    """Type of each value: bool, int, float or str."""
    builtin_choices: tuple[str, ...]
    """The allowed values without those that user modules register; empty if the values are not restricted to choices."""
    is_optional: bool
    """Whether the field may be None."""
    num_values: int | None
    """Number of values: 0 for a switch, None for any number of values."""
    default: Any
    """Value of the field if the flag is not given."""
    metadata: SettingMetadata = dataclasses.field(compare=False, repr=False)
    """Unit, interval and conditions of the setting."""
    special_values: tuple[str, ...] = ()
    """Words that are valid besides the values of `value_type`, such as "best" for a number."""

    @property
    def name(self) -> str:
        """Name of the flag without the leading dashes."""
        return self.field.replace("_", "-")

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed values, or empty if they are not restricted: the built-in choices and those that user modules have
        registered."""
        return (*self.builtin_choices, *get_added_choices(self.field)) if self.metadata.is_extensible else self.builtin_choices

    @property
    def is_tuple(self) -> bool:
        """Whether the field holds several values."""
        return self.num_values is None or self.num_values > 1

    @property
    def expected(self) -> str:
        """Description of the allowed values, for messages: "a whole number", "one of a, b"."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.metadata.is_extensible:
            return "a name that a module of --imports registers (none is registered)"
        if self.num_values is None:
            return f"any number of {_TYPE_NAMES[self.value_type]}s"
        if self.special_values:
            return f"a {_TYPE_NAMES[self.value_type]} or {' or '.join(self.special_values)}"
        return f"a {_TYPE_NAMES[self.value_type]}" if self.num_values == 1 else f"{self.num_values} {_TYPE_NAMES[self.value_type]}s"

    def parse(self, name: str, texts: Sequence[str]) -> Any:
        """Convert the texts of the flag's values to the value of the field.

        Args:
            name: name of the flag as given; for a switch it may start with ``no-``, which switches it off.
            texts: the values as typed.

        Raises:
            ValueError: the texts are not valid values. The message says which values the flag takes.
        """
        if self.is_optional and tuple(texts) == ("None",):
            return None
        if self.value_type is bool:
            if texts:
                raise ValueError(f"--{self.name} is a switch and takes no value. Give the flag alone (in a file: true or false)")
            return name == self.name
        if self.num_values is not None and len(texts) != self.num_values:
            actual = f"{len(texts)} value{'s' * (len(texts) > 1)}" if texts else "no value"
            raise ValueError(f"--{self.name} takes {self.expected}, but has {actual}")
        if not all(map(self._accepts, texts)):
            is_too_large = self.value_type is int and all(re.fullmatch(r"[+-]?\d+", text) for text in texts)
            raise ValueError(f"--{self.name} takes {self.expected}{' below 10^15' if is_too_large else ''}")
        converted = tuple(map(self._convert, texts))
        return converted if self.is_tuple else converted[0]

    def _convert(self, value: Any) -> Any:
        return value if value in self.special_values else self.value_type(value)

    def _accepts(self, text: str) -> bool:
        if text in self.special_values:
            return True
        if self.choices or self.metadata.is_extensible:
            return text in self.choices
        if self.value_type is str:
            # A value that looks like a flag is probably the next flag, after a forgotten value.
            return bool(text) and not (self.num_values is None and text.startswith("--"))
        try:
            value = self.value_type(text)
        except ValueError:
            return False
        return self.value_type is float or -_MAX_INT < value < _MAX_INT

    def from_json(self, value: Any) -> Any:
        """Convert a value that was read from JSON to the type of the field: lists become tuples, and integers become floats for
        float fields.

        Raises:
            ValueError: the value has another type.
        """
        if value is None and self.is_optional:
            return None
        items = value if self.is_tuple else [value]
        is_valid = (
            isinstance(items, list | tuple) and self.num_values in (None, 0, len(items)) and all(map(self._is_json_value, items))
        )
        if not is_valid:
            raise ValueError(
                f"the value of {self.topic}.{self.field} must be "
                f"{'true or false' if self.value_type is bool else self.expected}, not {value!r}"
            )
        converted = tuple(map(self._convert, items))
        return converted if self.is_tuple else converted[0]

    def _is_json_value(self, item: Any) -> bool:
        if item in self.special_values:
            return True
        # A saved record may name a choice of an extensible setting that is not registered now.
        if self.choices and item not in self.choices and not self.metadata.is_extensible:
            return False
        if self.value_type is float:
            return isinstance(item, int | float) and not isinstance(item, bool)
        return type(item) is self.value_type and (type(item) is not int or -_MAX_INT < item < _MAX_INT)


def _build_flag(topic: str, field: dataclasses.Field[Any], hint: Any) -> Flag:
    metadata = field.metadata.get(SettingMetadata, SettingMetadata())
    arguments = typing.get_args(hint)
    optional = typing.get_origin(hint) in (types.UnionType, typing.Union)
    special_values: tuple[str, ...] = ()
    if optional:
        hint, *literals = [argument for argument in arguments if argument is not type(None)]
        special_values = tuple(value for literal in literals for value in typing.get_args(literal))
        arguments = typing.get_args(hint)
    num_values: int | None = 0 if hint is bool else 1
    if typing.get_origin(hint) is tuple:
        num_values = None if arguments[-1] is Ellipsis else len(arguments)
        hint = arguments[0]
    choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
    return Flag(topic, field.name, str if choices else hint, choices, optional, num_values, field.default, metadata, special_values)


@functools.cache
def get_topics() -> dict[str, type]:
    """Return the dataclass of each topic of `Config`, by the name of the topic."""
    return typing.get_type_hints(Config)


@functools.cache
def get_flags() -> dict[str, Flag]:
    """Return all flags, by name without leading dashes."""
    result = []
    for topic, config_class in get_topics().items():
        hints = typing.get_type_hints(config_class)
        result += [_build_flag(topic, field, hints[field.name]) for field in dataclasses.fields(config_class)]
    return {flag.name: flag for flag in result}


@functools.cache
def get_flag(field: str) -> Flag:
    """Return the flag that sets the field of this name: the flag `num-layers` for `num_layers`."""
    return get_flags()[field.replace("_", "-")]


def build_config(values: Mapping[str, Mapping[str, Any]]) -> Config:
    """Build a `Config` from values by topic and name of the setting. All other settings have their defaults."""
    return Config(**{topic: config_class(**values.get(topic, {})) for topic, config_class in get_topics().items()})


def find_flag(name: str) -> Flag | None:
    """Return the flag with this name, or None if the name is not a setting. For a switch ``x``, the name ``no-x`` is found too."""
    switch = get_flags().get(name.removeprefix("no-"))
    return get_flags().get(name) or (switch if switch is not None and switch.value_type is bool else None)


def suggest_names(name: str, names: Iterable[str]) -> list[str]:
    """Return up to three names that the user may have meant: the name itself, names that contain all of its words, or names with a
    similar spelling."""
    names = list(names)
    if name in names:
        return [name]
    name_words = set(name.split("-"))
    matching = [candidate for candidate in names if name_words <= set(candidate.split("-"))]
    if matching:
        return sorted(matching, key=len)[:3]
    close_matches = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    best_ratio = difflib.SequenceMatcher(None, name, close_matches[0]).ratio() if close_matches else 0.0
    return [candidate for candidate in close_matches if difflib.SequenceMatcher(None, name, candidate).ratio() > best_ratio - 0.1]
