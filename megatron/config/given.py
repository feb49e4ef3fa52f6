"""The command line cut into flags with their values, each remembering where it was given."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_FLAG = re.compile(r"--[A-Za-z]|-[A-Za-z]")


@dataclass(frozen=True)
class Given:
    """A flag as it was given."""

    name: str
    """Its name with dashes inside and none in front: ``lr-decay-style``."""
    values: tuple[str, ...]
    spelled: str
    """As the user wrote it."""
    where: str = ""
    """File and line, or empty for the command line."""

    def __str__(self) -> str:
        """The setting for a message, such as ``run.yaml line 3: --lr abc``."""
        place = f"{self.where}: " if self.where else ""
        return place + " ".join((self.spelled, *(value or repr(value) for value in self.values)))


def split(argv: Sequence[str]) -> tuple[list[str], list[Given]]:
    """Cut a command line at its flags; ``--flag=value``, underscores for dashes and negative numbers are understood.

    Returns:
        The words before the first flag, which belong to nothing, and the flags in order.
    """
    stray: list[str] = []
    found: list[Given] = []
    for word in argv:
        if _FLAG.match(word) and not _is_number(word):
            spelled, equals, value = word.partition("=")
            values = (value,) if equals else ()
            name = spelled.lstrip("-").replace("_", "-")
            if not spelled.startswith("--") and name != "h":
                name = f"-{name}"  # one dash: no flag of ours, but the message should say so
            found.append(Given(name, values, spelled))
        elif found:
            last = found[-1]
            found[-1] = Given(last.name, (*last.values, word), last.spelled)
        else:
            stray.append(word)
    return stray, found


def is_count(text: str, most: int) -> bool:
    """Whether a text is a whole number from 1 to `most`, of less than a million million."""
    return text.isascii() and text.isdigit() and 1 <= int(text[:12]) <= most


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
