"""Texts about kinds of layers, as Megatron-LM spells them: `--window-attn-skip-freq`, `--no-rope-freq`, `--window-size`.

A pattern is a number N, which means every N-th layer, or a list with 0 or 1 for each layer: `[1,1,0,1]`, repeated and joined as in
`[0]+([1]*5+[0])*4`. It is read here, not run as Python.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

Pattern = int | tuple[bool, ...]
"""Every so-manieth layer, or for each layer whether it is marked."""

_MOST_LAYERS = 100_000  # after repeating; a slip such as [1]*999999999 must not fill the memory
_ALLOWED = "a number N (every N-th layer) or a list with 0 or 1 for each layer, such as [1,1,0] or ([1]*5+[0])*4"


@functools.lru_cache(maxsize=64)
def read_pattern(text: str | None) -> Pattern | None:
    """The pattern of a text; None where there is none or it cannot be read (`pattern_problem` says why)."""
    try:
        return None if text is None else _parse(text)
    except ValueError:
        return None


def pattern_problem(text: str, num_layers: int) -> str | None:
    """What is wrong with a text for so many layers, in a sentence; None if nothing is."""
    try:
        pattern = _parse(text)
    except ValueError as error:
        return str(error)
    if isinstance(pattern, int) or len(pattern) == num_layers:
        return None
    return f"It has {len(pattern)} entries for {num_layers} layers."


def marked(pattern: Pattern | None, layer: int) -> bool:
    """Whether a pattern marks a layer, counted from 0: the last of every N, or those with a 1."""
    if pattern is None or isinstance(pattern, int):
        return pattern is not None and (layer + 1) % pattern == 0
    return layer < len(pattern) and pattern[layer]


def pattern_text(marks: tuple[bool, ...]) -> str:
    """A list as a user types it."""
    return f"[{','.join(str(int(mark)) for mark in marks)}]"


@functools.lru_cache(maxsize=64)
def read_window(text: str | None) -> int | None:
    """Tokens before its own to which a token attends, of `--window-size 127,0`; None without a window, or if it cannot be read."""
    found = None if text is None else re.fullmatch(r"\(?\s*(\d{1,15})\s*,\s*0\s*\)?", text)
    return int(found[1]) if found else None


def _parse(text: str) -> Pattern:
    if text.strip().isdecimal():
        number = int(text.strip()[:16])
        if number < 1:
            raise ValueError("Every 0-th layer is none: N is at least 1.")
        return number
    tokens = re.findall(r"\d+|\S", text)
    found, rest = _sum(tokens, 0)
    if rest < len(tokens):
        raise ValueError(f"{tokens[rest]!r} does not belong there; allowed is {_ALLOWED}.")
    return tuple(found)


def _sum(tokens: list[str], at: int) -> tuple[list[bool], int]:
    """Lists joined by +, from a token on; and the token behind them."""
    found, at = _product(tokens, at)
    while tokens[at : at + 1] == ["+"]:
        more, at = _product(tokens, at + 1)
        found = found + more
    return found, at


def _product(tokens: list[str], at: int) -> tuple[list[bool], int]:
    """A list, or a sum in brackets, with the numbers that repeat it."""
    if tokens[at : at + 1] == ["("]:
        found, at = _sum(tokens, at + 1)
        if tokens[at : at + 1] != [")"]:
            raise ValueError("A bracket ( is not closed.")
        at += 1
    else:
        found, at = _list(tokens, at)
    while tokens[at : at + 1] == ["*"]:
        times = tokens[at + 1] if at + 1 < len(tokens) else ""
        if not times.isdecimal():
            raise ValueError("A number stands behind *.")
        if len(found) * int(times[:16]) > _MOST_LAYERS:
            raise ValueError(f"It means more than {_MOST_LAYERS:,} layers.")
        found, at = found * int(times), at + 2
    return found, at


def _list(tokens: list[str], at: int) -> tuple[list[bool], int]:
    if tokens[at : at + 1] != ["["] or "]" not in tokens[at:]:
        raise ValueError(f"It is neither a number nor a list; allowed is {_ALLOWED}.")
    end = tokens.index("]", at)
    return list(_entries(tokens[at + 1 : end])), end + 1


def _entries(inside: list[str]) -> Iterator[bool]:
    for place, token in enumerate(inside):
        if token not in (("0", "1") if place % 2 == 0 else (",",)):
            raise ValueError(f"A list holds 0 and 1, with commas between them, not {token!r}.")
        if place % 2 == 0:
            yield token == "1"
