"""Values of flags that cannot be, or hardly can: by the type, the interval and the conditions of each."""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.config.flags import Flag, get_flag, get_flags
from megatron.config.setting import IS_SET, NotEqual
from tests.support.cli import command_words

NOT_NUMBERS = ("", " ", "x", "1x", "None", "0x10", "1,5", "٣٣x", "1e", "{}", "%s", "\udce9", "1/2")
ODD_NUMBERS = (
    *("-1", "0", "1", "-0", "3", "1_000", "2147483648", "9223372036854775808", f"1{'0' * 30}", "9" * 5000),
    *("nan", "inf", "-inf", "1e999", "0.5"),
)
BAD_PATHS = (
    *("missing", "missing/deeper/x", "file", "file/x", "folder", "pipe", "socket", "locked", "locked/x", "readonly", "readonly/x"),
    *("loop", "loop/x", "dangling", "/dev/zero", "/dev/full", "/dev/null", "/proc/self/x"),
    *("x" * 300, "x" * 6000, "x/" * 3000, "x/" * 500),
    *("\udce9", "é", " ", "-x", "%s", "{}", "*", "~", "nosuch://x", "file:///", "://", "x\ny", "\x1b[31m", "."),
)
"""Paths in the folder of a command that `put_bad_paths` has prepared, and elsewhere."""
TEXTS = ("", " ", "x", "-1", "None", "x" * 5000, "\udce9", "é", "%s", "{}", "\n", "1", "[", "(((", "a,b", ",", "t*999999999")


def draw_flag(flag: Flag, draw: random.Random) -> tuple[list[str], bool]:
    """Words of a flag of pretrain_gpt.py with a bad value.

    Returns:
        the words, and whether they must be refused.
    """
    if flag.value_type is bool:
        value = draw.choice(("true", "1", "x", "", "None"))
        return draw.choice(([f"--{flag.name}={value}"], [f"--{flag.name}", value])), True
    text, is_wrong = _draw_value(flag, draw)
    count = flag.num_values or draw.choice((1, 1, 2))
    if draw.random() < 0.1:
        count, is_wrong = count + draw.choice((-1, 1)), is_wrong or flag.num_values is not None
    if draw.random() < 0.3 and count == 1:
        return [f"--{flag.name}={text}"], is_wrong
    return [f"--{flag.name}", *[text] * count], is_wrong and not (count == 0 and flag.num_values is None)


def _draw_value(flag: Flag, draw: random.Random) -> tuple[str, bool]:
    if flag.value_type in (int, float):
        if draw.random() < 0.4:
            text = draw.choice(NOT_NUMBERS)
            return text, not (text == "None" and flag.is_optional)
        text = draw.choice(ODD_NUMBERS)
        try:
            value = flag.value_type(text)
        except ValueError:
            return text, True
        interval = flag.metadata.interval
        # A range is not checked for a setting that has no effect, which a note says.
        return text, interval is not None and not interval.contains(value) and flag.metadata.active_if is None
    if flag.choices:
        text = draw.choice((*TEXTS[:6], flag.choices[0].upper() + "x"))
        return text, not (text == "None" and flag.is_optional)
    return draw.choice(BAD_PATHS if flag.metadata.is_path else TEXTS), False


def list_companions(flag: Flag) -> list[str]:
    """Words that make a flag have an effect."""
    words: list[str] = []
    condition = flag.metadata.active_if
    if condition is not None:
        entries = condition.fix or dict([next(iter(condition.values.items()))])
        settings = {name: _find_value(get_flag(name), value) for name, value in entries.items()}
        words = command_words({name: value for name, value in settings.items() if value is not None})
    return words


def _find_value(flag: Flag, expected: Any) -> Any:
    if expected is IS_SET:
        return "companion" if flag.value_type is str else 1
    if isinstance(expected, NotEqual):
        return next((choice for choice in flag.choices if choice != expected.value), None)
    return expected[0] if isinstance(expected, tuple) and not flag.is_tuple and expected else expected


def draw_option(action: argparse.Action, draw: random.Random) -> tuple[list[str], bool]:
    """Words of an option of a tool with a bad value; and whether they must be refused."""
    option = action.option_strings[-1]
    if action.nargs == 0:
        return [f"{option}={draw.choice(('x', '', '1'))}"], True
    if action.choices is not None:
        return [option, draw.choice(("", "x", "None"))], True
    if action.type is not None and draw.random() < 0.7:
        pools: Mapping[Any, Sequence[str]] = {int: NOT_NUMBERS, float: NOT_NUMBERS}
        return [f"{option}={draw.choice(pools.get(action.type, (*NOT_NUMBERS, *ODD_NUMBERS)))}"], action.type in pools
    return [f"{option}={draw.choice((*BAD_PATHS, *TEXTS, *ODD_NUMBERS))}"], False


def list_flags() -> list[Flag]:
    """All flags of pretrain_gpt.py."""
    return list(get_flags().values())
