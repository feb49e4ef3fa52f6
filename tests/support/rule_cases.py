"""Settings for the tests of the rules between them: a base that runs, and what a case must report."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable, Iterable
from typing import TypeVar

from megatron.config.checks import lora, pipeline, sharding
from megatron.config.checks.finding import SettingsRule, collect_rules
from megatron.config.cli import parse
from megatron.config.config import Config
from megatron.config.errors import Violation
from megatron.config.rules import find_violations

T = TypeVar("T")

BASE = {
    "--num-layers": "4",
    "--hidden-size": "96",
    "--num-attention-heads": "12",
    "--seq-length": "32",
    "--micro-batch-size": "2",
    "--lr": "0.001",
    "--train-iters": "100",
    "--mock-data": "",
    "--tokenizer-type": "NullTokenizer",
    "--vocab-size": "100",
}

PIPELINE_RULES = collect_rules(pipeline)
SHARDING_RULES = collect_rules(sharding)
LORA_RULES = collect_rules(lora)

Case = tuple[str, int, set[str], list[str], list[str]]
"""Extra flags, world size, flags of the violation that must take part, pieces of its text, suggestions that must be shown."""


def argv(extra: str) -> list[str]:
    """The base with more flags behind it, as a command line."""
    return shlex.split(" ".join([*(f"{flag} {value}" for flag, value in BASE.items()), extra]))


@functools.cache
def config_of(extra: str) -> Config:
    return parse(argv(extra))


def reported(extra: str, world_size: int = 1) -> list[Violation]:
    return find_violations(config_of(extra), world_size)


def every(cases: Iterable[T], check: Callable[[T], object]) -> None:
    """Check all of them, and name each that fails with what it says."""
    failed = []
    for case in cases:
        try:
            check(case)
        except AssertionError as error:
            failed.append(f"{case!r}: {error}")
    assert not failed, "\n\n".join(failed)


def check_rules_have_cases(rules: Iterable[SettingsRule], cases: Iterable[Case]) -> None:
    """Each rule is broken by a case."""
    settings = [(config_of(extra), world_size) for extra, world_size, *_ in cases]
    assert not [rule.reason for rule in rules if not any(list(rule(*each)) for each in settings)]


def check_case(case: Case) -> None:
    """The violation is reported as the case says, and its suggestions are valid."""
    extra, world_size, fields, parts, nearest = case
    found = reported(extra, world_size)
    named = [item for item in found if fields <= set(item.flags) and parts[0] in item.message + item.reason]
    assert len(named) == 1, found
    for part in parts:
        assert part in f"{named[0].message} {named[0].reason}"
    for suggestion in nearest:
        assert suggestion in named[0].nearest
    check_suggestions(extra, world_size, found)


def check_suggestions(extra: str, world_size: int, before: list[Violation]) -> None:
    """Each suggestion, put on the command line, leaves fewer violations, and where there was one it leaves none."""
    for violation in before:
        for suggestion in violation.nearest:
            if suggestion.startswith("world size "):
                after = reported(extra, int(suggestion.removeprefix("world size ")))
            else:
                after = reported(f"{extra} {suggestion}", world_size)
            assert len(after) < len(before), (suggestion, after)
