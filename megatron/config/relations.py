"""Which rules are about which settings, read from the rules themselves: so it cannot fall behind them."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

from megatron.config.checks import inert, ranges
from megatron.config.flags import flags, topics
from megatron.config.rules import RULES

_OF_ONE = (*ranges.RULES, *inert.RULES)
"""Rules that look at each setting by itself."""


@functools.cache
def rules_about(field: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Of every rule that looks at a setting beside others: why it exists, and the others' names, in the order of the flags."""
    found = []
    for rule in RULES:
        fields = fields_of(rule)
        if field in fields and len(fields) > 1 and rule not in _OF_ONE:
            others = tuple(flag.field for flag in flags().values() if flag.field in fields and flag.field != field)
            found.append((" ".join((rule.__doc__ or "").split()), others))
    return tuple(found)


def fields_of(function: Callable[..., Any]) -> frozenset[str]:
    """The settings that a function reads or names, also by way of the functions of this room that it calls."""
    known = {flag.field for flag in flags().values()} - set(topics())  # --optimizer is also the name of its topic
    found = set(_names(function.__code__, function.__globals__, set()))
    # Lengths come in two units, and some rules put their names together.
    lengths = {f"{name.rstrip('_')}_{unit}" for name in found for unit in ("iters", "samples")}
    return frozenset((found | lengths) & known)


def _names(code: types.CodeType, around: dict[str, Any], seen: set[types.CodeType]) -> Iterator[str]:
    """Names and texts in compiled code, in what it calls here, and in what properties of the settings read."""
    if code in seen:
        return
    seen.add(code)
    yield from _texts(code.co_consts)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant, around, seen)
    for name in code.co_names:
        yield name
        value = around.get(name)
        if isinstance(value, types.FunctionType) and value.__module__.startswith("megatron.config."):
            yield from _names(value.__code__, value.__globals__, seen)
        else:
            yield from _texts(value)
        for topic in topics().values():
            reader = topic.__dict__.get(name)
            reader = reader.fget if isinstance(reader, property) else reader
            if isinstance(reader, types.FunctionType):
                yield from _names(reader.__code__, reader.__globals__, seen)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts(tuple(value.values()))
    elif isinstance(value, tuple | list | frozenset):
        for item in value:
            yield from _texts(item)
