"""Parser for layer patterns and attention windows in Megatron-LM's syntax.

Patterns are the values of `--window-attn-skip-freq`, `--no-rope-freq` and `--moe-layer-freq`; windows those of `--window-size`.

A pattern is a number N, which stands for every N-th layer, or a list with 0 or 1 for each layer, such as `[1,1,0,1]`. Lists can be
repeated and concatenated, as in `[0]+([1]*5+[0])*4`. Patterns are parsed; they are never evaluated as Python code.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

LayerPattern = int | tuple[bool, ...]
"""Parsed layer pattern: a period N, or for each layer whether it is selected."""

_MAX_LAYERS = 100_000  # after repetition, so that a typo such as [1]*999999999 does not exhaust the memory
_SYNTAX = "a number N (every N-th layer) or a list with 0 or 1 for each layer, such as [1,1,0] or ([1]*5+[0])*4"


@functools.lru_cache(maxsize=64)
def parse_pattern(text: str | None) -> LayerPattern | None:
    """Parse a layer pattern, such as "4" or "[1,1,0,1]". Return None if `text` is None or invalid; `find_pattern_problem` then says
    what is wrong."""
    try:
        return None if text is None else _parse(text)
    except ValueError:
        return None


def find_pattern_problem(text: str, num_layers: int) -> str | None:
    """Return a sentence that says why a layer pattern is invalid for `num_layers` layers, or None if it is valid."""
    try:
        pattern = _parse(text)
    except ValueError as error:
        return str(error)
    if isinstance(pattern, int) or len(pattern) == num_layers:
        return None
    return f"The list in the layer pattern has {len(pattern)} entries, but the model has {num_layers} layers."


def is_marked(pattern: LayerPattern | None, layer_index: int) -> bool:
    """Return whether a layer pattern selects a layer. A number N selects the last of every N layers; a list selects the layers with
    a 1.

    Args:
        pattern: parsed pattern; None selects no layer.
        layer_index: counted from 0.
    """
    if pattern is None or isinstance(pattern, int):
        return pattern is not None and (layer_index + 1) % pattern == 0
    return layer_index < len(pattern) and pattern[layer_index]


def format_pattern(marks: tuple[bool, ...]) -> str:
    """Format a layer pattern as on the command line, such as [1,1,0,1].

    Args:
        marks: for each layer, whether the pattern selects it.
    """
    return f"[{','.join(str(int(mark)) for mark in marks)}]"


@functools.lru_cache(maxsize=64)
def parse_window(text: str | None) -> int | None:
    """Parse --window-size: "127,0" returns 127, the number of previous tokens that a token attends to besides itself.

    Return None if `text` is None or invalid.
    """
    match = None if text is None else re.fullmatch(r"\(?\s*(\d{1,15})\s*,\s*0\s*\)?", text)
    return int(match[1]) if match else None


def _parse(text: str) -> LayerPattern:
    if text.strip().isdecimal():
        period = int(text.strip()[:16])
        if period < 1:
            raise ValueError(f"The layer pattern N selects every N-th layer, but N is {period}. Set N to 1 or more.")
        return period
    tokens = re.findall(r"\d+|\S", text)
    marks, end = _parse_sum(tokens, 0)
    if end < len(tokens):
        raise ValueError(f"The layer pattern has an unexpected {tokens[end]!r}. Give {_SYNTAX}.")
    return tuple(marks)


def _parse_sum(tokens: list[str], position: int) -> tuple[list[bool], int]:
    """Parse lists joined by +, such as [0] + [1,1] * 2, from `tokens[position]` on.

    Returns:
        the value for each layer (True for 1), and the position after the last parsed token.
    """
    marks, position = _parse_product(tokens, position)
    while tokens[position : position + 1] == ["+"]:
        term, position = _parse_product(tokens, position + 1)
        marks = marks + term
    return marks, position


def _parse_product(tokens: list[str], position: int) -> tuple[list[bool], int]:
    """Parse a list, or a sum in parentheses, and the repetition factors after it (*N), from `tokens[position]` on.

    Returns:
        the value for each layer (True for 1), and the position after the last parsed token.
    """
    if tokens[position : position + 1] == ["("]:
        marks, position = _parse_sum(tokens, position + 1)
        if tokens[position : position + 1] != [")"]:
            raise ValueError("A parenthesis ( of the layer pattern is not closed. Add a closing parenthesis.")
        position += 1
    else:
        marks, position = _parse_list(tokens, position)
    while tokens[position : position + 1] == ["*"]:
        factor = tokens[position + 1] if position + 1 < len(tokens) else ""
        if not factor.isdecimal():
            raise ValueError(
                "The layer pattern has a * without a number after it. Write how often to repeat the list, such as [1]*4."
            )
        if len(marks) * int(factor[:16]) > _MAX_LAYERS:
            raise ValueError(
                f"The layer pattern covers more than {_MAX_LAYERS:,} layers, with its repetitions (*). Repeat the list less often."
            )
        marks, position = marks * int(factor), position + 2
    return marks, position


def _parse_list(tokens: list[str], position: int) -> tuple[list[bool], int]:
    if tokens[position : position + 1] != ["["] or "]" not in tokens[position:]:
        raise ValueError(f"The layer pattern is neither a number nor a list. Give {_SYNTAX}.")
    end = tokens.index("]", position)
    return list(_parse_entries(tokens[position + 1 : end])), end + 1


def _parse_entries(tokens: list[str]) -> Iterator[bool]:
    for position, token in enumerate(tokens):
        if token not in (("0", "1") if position % 2 == 0 else (",",)):
            raise ValueError(
                f"A list in the layer pattern has {token!r} at an invalid position. Write only 0 and 1, separated by commas."
            )
        if position % 2 == 0:
            yield token == "1"
