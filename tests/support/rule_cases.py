"""Settings for the tests of the rules between them: a base that runs, and what a case must report."""

from __future__ import annotations

import functools
import shlex

from megatron.config.checks import pipeline, pipeline_layers, sharding
from megatron.config.checks.finding import rules_in
from megatron.config.cli import parse
from megatron.config.config import Config
from megatron.config.errors import Violation
from megatron.config.rules import violations

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

PIPELINE_RULES = rules_in(pipeline, pipeline_layers)
SHARDING_RULES = rules_in(sharding)

Case = tuple[str, int, set[str], list[str], list[str]]
"""Extra flags, world size, flags of the violation that must take part, pieces of its text, suggestions that must be shown."""


def argv(extra: str) -> list[str]:
    """The base with more flags behind it, as a command line."""
    return shlex.split(" ".join([*(f"{flag} {value}" for flag, value in BASE.items()), extra]))


@functools.cache
def config_of(extra: str) -> Config:
    """Settings of the base with more flags."""
    return parse(argv(extra))


def reported(extra: str, world_size: int = 1) -> list[Violation]:
    """What the rules report."""
    return violations(config_of(extra), world_size)


def check_case(case: Case) -> None:
    """The violation is reported as the case says, and its suggestions are valid."""
    extra, world_size, fields, parts, nearest = case
    found = reported(extra, world_size)
    named = [item for item in found if fields <= set(item.flags) and parts[0] in item.message + item.rule]
    assert len(named) == 1, found
    for part in parts:
        assert part in f"{named[0].message} {named[0].rule}"
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
