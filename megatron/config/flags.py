"""The table of flags, made from the dataclasses: which field a flag sets, and which values it takes."""

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
from megatron.config.setting import SettingFacts
from megatron.spec.activations import added

_KINDS = {int: "whole number", float: "number", str: "text"}
_LARGEST = 10**15
"""The largest value: no setting means anything beyond it, and arithmetic below it stays quick and exact."""


@dataclass(frozen=True)
class Flag:
    """A flag and its field."""

    topic: str
    """Field of Config, such as ``model``."""
    field: str
    """Field of the topic's dataclass, such as ``num_layers``."""
    kind: type
    """bool, int, float or str: the type of each value."""
    built_in: tuple[str, ...]
    """The only texts allowed, or empty; see `choices`."""
    optional: bool
    """Whether the field may be None."""
    count: int | None
    """How many values it takes: 0 for a switch, None for any number."""
    default: Any
    """Value of the field when the flag is not given."""
    facts: SettingFacts = dataclasses.field(compare=False, repr=False)
    """Its unit and range, and when it acts."""

    @property
    def name(self) -> str:
        """The flag without its two dashes."""
        return self.field.replace("_", "-")

    @property
    def choices(self) -> tuple[str, ...]:
        """The only texts allowed now, or empty: those built in, and those that modules of the user's own have added."""
        return (*self.built_in, *added(self.field)) if self.facts.opens else self.built_in

    @property
    def is_tuple(self) -> bool:
        """Whether the field holds several values."""
        return self.count is None or self.count > 1

    @property
    def expects(self) -> str:
        """The allowed values in words."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.facts.opens:
            return "a name that a module of --imports registers, and none does"
        if self.count is None:
            return f"any number of {_KINDS[self.kind]}s"
        return f"a {_KINDS[self.kind]}" if self.count == 1 else f"{self.count} {_KINDS[self.kind]}s"

    def read(self, name: str, texts: Sequence[str]) -> Any:
        """The field's value from the flag's spelling, which says whether a switch is on, and its values.

        Raises:
            ValueError: the texts cannot be its values; says what it takes.
        """
        if self.kind is bool:
            if texts:
                raise ValueError("is a switch and takes no value (in a file: true or false)")
            return name == self.name
        if self.optional and tuple(texts) == ("None",):
            return None
        if self.count is not None and len(texts) != self.count:
            raise ValueError(f"takes {self.expects}, not {len(texts) or 'none'}")
        if not all(map(self._accepts, texts)):
            too_large = self.kind is int and all(re.fullmatch(r"[+-]?\d+", text) for text in texts)
            raise ValueError(f"takes {self.expects}{' below 10^15' if too_large else ''}")
        converted = tuple(map(self.kind, texts))
        return converted if self.is_tuple else converted[0]

    def _accepts(self, text: str) -> bool:
        if self.choices or self.facts.opens:
            return text in self.choices
        if self.kind is str:
            # A value that looks like a flag is a flag whose value was forgotten.
            return bool(text) and not (self.count is None and text.startswith("--"))
        try:
            number = self.kind(text)
        except ValueError:
            return False
        return self.kind is float or -_LARGEST < number < _LARGEST

    def from_plain(self, value: Any) -> Any:
        """The field's value from JSON types: lists become tuples, whole numbers become float where the field is one.

        Raises:
            ValueError: the value is of another type.
        """
        if value is None and self.optional:
            return None
        items = value if self.is_tuple else [value]
        fits = isinstance(items, list | tuple) and self.count in (None, 0, len(items)) and all(map(self._is_plain, items))
        if not fits:
            raise ValueError(f"{self.topic}.{self.field} must be {'true or false' if self.kind is bool else self.expects}")
        converted = tuple(map(self.kind, items))
        return converted if self.is_tuple else converted[0]

    def _is_plain(self, item: Any) -> bool:
        if self.choices and item not in self.choices and not self.facts.opens:  # a record may name what is not registered here
            return False
        if self.kind is float:
            return isinstance(item, int | float) and not isinstance(item, bool)
        return type(item) is self.kind and (type(item) is not int or -_LARGEST < item < _LARGEST)


def _flag(topic: str, field: dataclasses.Field[Any], hint: Any) -> Flag:
    facts = field.metadata.get(SettingFacts, SettingFacts())
    arguments = typing.get_args(hint)
    optional = typing.get_origin(hint) in (types.UnionType, typing.Union)
    if optional:
        (hint,) = [argument for argument in arguments if argument is not type(None)]
        arguments = typing.get_args(hint)
    count: int | None = 0 if hint is bool else 1
    if typing.get_origin(hint) is tuple:
        count = None if arguments[-1] is Ellipsis else len(arguments)
        hint = arguments[0]
    choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
    return Flag(topic, field.name, str if choices else hint, choices, optional, count, field.default, facts)


@functools.cache
def topics() -> dict[str, type]:
    """Name of each part of Config with its dataclass."""
    return typing.get_type_hints(Config)


@functools.cache
def flags() -> dict[str, Flag]:
    """Every flag by its name without leading dashes."""
    found = []
    for topic, part in topics().items():
        hints = typing.get_type_hints(part)
        found += [_flag(topic, field, hints[field.name]) for field in dataclasses.fields(part)]
    return {flag.name: flag for flag in found}


@functools.cache
def flag_for(field: str) -> Flag:
    """The flag that sets a field."""
    return flags()[field.replace("_", "-")]


def build(parts: Mapping[str, Mapping[str, Any]]) -> Config:
    """Settings from values by topic and field; all others have their defaults."""
    return Config(**{topic: kind(**parts.get(topic, {})) for topic, kind in topics().items()})


def flag_of(name: str) -> Flag | None:
    """The flag that a name sets, if it is a setting. A leading ``no-`` switches off what is one without it."""
    switch = flags().get(name.removeprefix("no-"))
    return flags().get(name) or (switch if switch is not None and switch.kind is bool else None)


def nearest_names(name: str, names: Iterable[str]) -> list[str]:
    """Up to three names that the user may have meant: the same, those that hold all of its words, or those spelled alike."""
    names = list(names)
    if name in names:
        return [name]
    words = set(name.split("-"))
    with_words = [candidate for candidate in names if words <= set(candidate.split("-"))]
    if with_words:
        return sorted(with_words, key=len)[:3]
    alike = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    best = difflib.SequenceMatcher(None, name, alike[0]).ratio() if alike else 0.0
    return [candidate for candidate in alike if difflib.SequenceMatcher(None, name, candidate).ratio() > best - 0.1]
