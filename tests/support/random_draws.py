"""Small draws that every part of a random command line is made of. What comes first is what a failure shrinks to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

Draw = Callable[[st.SearchStrategy[Any]], Any]


def chance(draw: Draw, one_in: int) -> bool:
    """True once in so many times."""
    return bool(draw(st.sampled_from([False] * (one_in - 1) + [True])))


def one_of(draw: Draw, *values: Any) -> Any:
    """One of the values."""
    return draw(st.sampled_from(values))


def number(draw: Draw, low: int, high: int) -> int:
    """A whole number of an interval."""
    return int(draw(st.integers(low, high)))


def switches(draw: Draw, *fields: str, one_in: int = 2) -> dict[str, bool]:
    """Each of these switches may be on."""
    return {field: True for field in fields if chance(draw, one_in)}


def options(draw: Draw, **fields: Any) -> dict[str, Any]:
    """Settings: one of the values of each field that has a list, the others as they are."""
    return {field: one_of(draw, *value) if isinstance(value, list) else value for field, value in fields.items()}


def sometimes(draw: Draw, one_in: int, **fields: Any) -> dict[str, Any]:
    """`options` once in so many times, else no settings."""
    return options(draw, **fields) if chance(draw, one_in) else {}
