"""Runs every rule between the settings and chooses, for each violated one, the nearest settings that are really valid."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import IntEnum
from typing import Any

from megatron.config.checks import (
    data,
    each,
    experts,
    groups,
    lora,
    memory,
    model,
    parallel,
    pipeline,
    precision,
    sharding,
    training,
)
from megatron.config.checks.finding import (
    Change,
    Finding,
    data_size,
    out_of_range,
    rules_in,
)
from megatron.config.config import Config
from megatron.config.errors import Violation
from megatron.config.setting import typed

RULES = rules_in(
    *(each, model, parallel, experts, pipeline, sharding, memory, training, groups, precision),
    *(data, lora),
)
"""All rules. None depends on another: each is evaluated whatever the others say."""

_SHOWN = 2  # suggestions for one setting
_TRIED = 64  # candidates for one setting, so that an answer never takes long


def violations(config: Config, world_size: int, given: Collection[str] = (), fixed: Collection[str] = ()) -> list[Violation]:
    """All violations of these settings with this many ranks, in the order of the topics.

    The rules themselves check what is suggested: it removes its violation and adds no other. There is one exception, where ranks
    and layout do not fit: a suggestion may bring up violations that could not be seen before, as the batch could not be divided.

    Args:
        given: fields that the user set, so that 0 is not taken for a setting that was left out.
        fixed: fields that nobody can set otherwise, as a checkpoint says what they are: no other value is suggested.
    """
    if world_size > each.LARGEST_WORLD:  # rules that divide by it would take long, and what they say would not help
        return [_worded(finding, ()) for finding in each.world_has_ranks(config, world_size)]
    found = _evaluate(config, world_size)
    counts = [len(findings) for findings in found]
    required = RULES.index(each.required_are_given)
    found[required] = [each.as_given(finding, config, world_size, given) for finding in found[required]]
    return [
        _worded(finding, _nearest(finding, index, counts, config, world_size, fixed))
        for index, findings in enumerate(found)
        for finding in findings
    ]


def is_harmless(config: Config, world_size: int, field: str, value: Any) -> bool:
    """Whether a setting can have a value without breaking a rule that is kept without it."""
    before, after = (_evaluate(*one.apply(config, world_size)) for one in (Change(), Change(((field, value),))))
    return all(len(new) <= len(old) for new, old in zip(after, before, strict=True))


def _worded(finding: Finding, nearest: Sequence[Change]) -> Violation:
    flags = tuple(map(typed, finding.fields))
    return Violation(flags, finding.message, finding.why, tuple(map(str, nearest)), finding.table)


def _evaluate(config: Config, world_size: int) -> list[list[Finding]]:
    wrong = out_of_range(config)
    return [list(rule(config, world_size, wrong)) for rule in RULES]


def _nearest(
    finding: Finding, index: int, counts: list[int], config: Config, world_size: int, fixed: Collection[str]
) -> list[Change]:
    """The best candidates of each group: those that help best and leave the fewest violations, the smallest changes first.

    If ranks and layout do not fit, candidates that make them fit come first. Until they do, little can be said of the batch, so a
    change that leaves them unfit seems to leave fewer violations.
    """
    by_help: dict[_Help, list[Change]] = {help_: [] for help_ in _Help}
    for group in finding.candidates:
        removing = []
        free = [
            each for each in ([group] if isinstance(group, Change) else group) if not any(name in fixed for name, _ in each.fields)
        ]
        for change in free[:_TRIED]:
            after = [len(findings) for findings in _evaluate(*change.apply(config, world_size))]
            help_ = _help(change, config, world_size, counts, after)
            if help_ is not None and after[index] < counts[index]:
                removing.append((help_, sum(after), change))
        removing.sort(key=lambda item: item[:2])
        best = [change for help_, _, change in removing if help_ == removing[0][0]]
        if removing:
            by_help[removing[0][0]] += best[:_SHOWN]

    def by_distance(changes: list[Change]) -> list[Change]:
        return sorted(changes, key=lambda change: change.distance(config, world_size))

    return by_distance(by_help[_Help.CLEAN] or by_help[_Help.REVEALING]) + by_distance(by_help[_Help.HIDING])


class _Help(IntEnum):
    """The effect of a change that removes a violation, the best first."""

    CLEAN = 0
    """It adds no violation, and ranks and layout fit."""
    REVEALING = 1
    """It makes ranks and layout fit, so that other violations can be seen."""
    HIDING = 2
    """It adds no violation, but ranks and layout still do not fit."""


def _help(change: Change, config: Config, world_size: int, before: list[int], after: list[int]) -> _Help | None:
    """The effect of a change, by the violations of each rule before and after; None if it only replaces violations by others."""
    fits = data_size(*change.apply(config, world_size)) is not None
    if all(new <= old for new, old in zip(after, before, strict=True)):
        return _Help.CLEAN if fits else _Help.HIDING
    revealing = fits and data_size(config, world_size) is None and sum(after) <= sum(before)
    return _Help.REVEALING if revealing else None
