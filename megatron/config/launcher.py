"""The launcher's variables in the environment: which process this is, and how many there are."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from megatron.config.errors import ConfigError, Violation


@dataclass(frozen=True)
class Launched:
    """One process of a job; without a launcher, the only one."""

    rank: int
    local_rank: int
    world_size: int


def launched() -> Launched:
    """Read which process this is.

    Raises:
        ConfigError: a variable is no whole number.
    """
    problems: list[Violation] = []

    def number(name: str, default: int) -> int:
        text = os.environ.get(name)
        if text is None:
            return default
        if not re.fullmatch(r"-?\d{1,30}", text):
            rule = "A launcher such as torchrun sets it; without a launcher leave it out of the environment."
            problems.append(Violation((), f"{name} in the environment is {text[:40]!r}, which is no whole number.", rule))
            return default
        return int(text)

    found = Launched(number("RANK", 0), number("LOCAL_RANK", 0), number("WORLD_SIZE", 1))
    if problems:
        raise ConfigError(problems)
    return found


def is_first_rank() -> bool:
    """Whether this process is the one that tells what all find."""
    rank = os.environ.get("RANK", "0")
    return not rank.isdigit() or not int(rank)  # what is no number is a problem to be told
