"""Choices that modules of the user's own add to settings (`--imports`, docs/python.md).

What a choice stands for is known to who registers it: an update rule (`megatron/optimizer/rules.py`), an activation
(`megatron/model/mlp.py`). Here are only the names, which the command line needs before torch is there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_added: dict[str, dict[str, frozenset[str]]] = {}
"""For a setting, by the name of its field: the choices that were added, with the further settings that each reads."""


def add_choice(field: str, name: str, built_in: Iterable[str], reads: Iterable[str] = ()) -> None:
    """Add a choice to a setting. The same one again replaces it, as when a cell of a notebook runs twice.

    Args:
        built_in: the choices that are there already.
        reads: fields of the optimizer's settings that act with this choice.

    Raises:
        ValueError: the name is taken, or cannot stand in a command line.
    """
    flag = f"--{field.replace('_', '-')}"
    if name in built_in:
        raise ValueError(f"{flag} {name} is there already: register it under another name")
    if not re.fullmatch(r"[A-Za-z][\w-]*", name):
        raise ValueError(f"{name!r} is no name for {flag}: it must begin with a letter, and hold letters, digits, _ and -")
    _added.setdefault(field, {})[name] = frozenset(reads)


def added(field: str) -> tuple[str, ...]:
    """The choices that were added to a setting."""
    return tuple(_added.get(field, ()))


def read_with(field: str, name: str) -> frozenset[str]:
    """The further settings that an added choice reads; none for any other choice."""
    return _added.get(field, {}).get(name, frozenset())
