"""Evaluation of all rules between settings, with suggestions of the nearest valid settings for each violated rule."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import IntEnum
from typing import Any

from megatron.config.checks import (
    data,
    experts,
    groups,
    lora,
    memory,
    model,
    parallel,
    pipeline,
    precision,
    sharding,
    single_settings,
    training,
)
from megatron.config.checks.finding import (
    Change,
    Finding,
    collect_rules,
    find_out_of_range,
    get_data_parallel_size,
)
from megatron.config.config import Config
from megatron.config.errors import Violation
from megatron.config.setting import get_flag_name

RULES = collect_rules(
    *(single_settings, model, parallel, experts, pipeline, sharding, memory, training, groups, precision),
    *(data, lora),
)
"""All rules. They are independent: each is evaluated, whatever the other rules report."""

_MAX_SUGGESTIONS = 2  # suggestions for one setting
_MAX_CANDIDATES = 64  # candidates tried for one setting, to limit the time


def find_violations(
    config: Config, world_size: int, explicit_fields: Collection[str] = (), fixed_fields: Collection[str] = ()
) -> list[Violation]:
    """Check settings against all rules for a world size. Returns the problems, in the order of the topics.

    Suggestions are verified with the rules: a suggested change removes its problem and adds no other. There is one exception: if
    the world size does not fit the layout, a suggestion may reveal problems that could not be checked before, such as those of the
    batch size.

    Args:
        explicit_fields: fields that the user set, to distinguish an explicit 0 from a missing setting.
        fixed_fields: fields whose values come from a checkpoint. No other value is suggested for them.
    """
    if world_size > single_settings.MAX_WORLD_SIZE:  # rules that factorize it would take long, and their messages would not help
        return [_to_violation(finding, ()) for finding in single_settings.check_world_size(config, world_size)]
    findings_by_rule = _evaluate_rules(config, world_size)
    counts = [len(findings) for findings in findings_by_rule]
    required_index = RULES.index(single_settings.check_required_settings)
    findings_by_rule[required_index] = [
        single_settings.report_explicit_zero(finding, config, world_size, explicit_fields)
        for finding in findings_by_rule[required_index]
    ]
    return [
        _to_violation(finding, _select_suggestions(finding, index, counts, config, world_size, fixed_fields))
        for index, findings in enumerate(findings_by_rule)
        for finding in findings
    ]


def is_harmless(config: Config, world_size: int, field: str, value: Any) -> bool:
    """Return whether a field can be set to a value without new violations of any rule."""
    counts_before, counts_after = (
        _evaluate_rules(*change.apply(config, world_size)) for change in (Change(), Change(((field, value),)))
    )
    return all(len(new) <= len(old) for new, old in zip(counts_after, counts_before, strict=True))


def _to_violation(finding: Finding, nearest: Sequence[Change]) -> Violation:
    flags = tuple(map(get_flag_name, finding.fields))
    return Violation(flags, finding.message, finding.reason, tuple(map(str, nearest)), finding.table, finding.is_missing)


def _evaluate_rules(config: Config, world_size: int) -> list[list[Finding]]:
    out_of_range_fields = find_out_of_range(config)
    return [list(rule(config, world_size, out_of_range_fields)) for rule in RULES]


def _select_suggestions(
    finding: Finding, index: int, counts: list[int], config: Config, world_size: int, fixed_fields: Collection[str]
) -> list[Change]:
    """Return the changes of settings to suggest for a violated rule, the smallest changes first.

    The rule proposes candidates, in groups of alternatives. From each group, the candidates with the best effect (`_Effect`) and
    the fewest remaining violations are selected.

    If the world size does not fit the layout, changes that make it fit come first. Until it fits, most rules about the batch cannot
    be checked, so changes that leave it unfit only seem to leave fewer violations.

    Args:
        finding: problem that the rule has found, with the proposed changes.
        index: index of the rule in `RULES`.
        counts: number of violations of each rule in `RULES` before a change.
        fixed_fields: fields whose values come from a checkpoint and must not be changed.
    """
    by_effect: dict[_Effect, list[Change]] = {effect: [] for effect in _Effect}
    for group in finding.candidates:
        effective = []
        allowed = [
            candidate
            for candidate in ([group] if isinstance(group, Change) else group)
            if not any(name in fixed_fields for name, _ in candidate.fields)
        ]
        for change in allowed[:_MAX_CANDIDATES]:
            counts_after = [len(findings) for findings in _evaluate_rules(*change.apply(config, world_size))]
            effect = _classify(change, config, world_size, counts, counts_after)
            if effect is not None and counts_after[index] < counts[index]:
                effective.append((effect, sum(counts_after), change))
        effective.sort(key=lambda item: item[:2])
        best = [change for effect, _, change in effective if effect == effective[0][0]]
        if effective:
            by_effect[effective[0][0]] += best[:_MAX_SUGGESTIONS]

    def by_distance(changes: list[Change]) -> list[Change]:
        return sorted(changes, key=lambda change: change.compute_distance(config, world_size))

    return by_distance(by_effect[_Effect.CLEAN] or by_effect[_Effect.REVEALING]) + by_distance(by_effect[_Effect.HIDING])


class _Effect(IntEnum):
    """Effect of a change that removes a violation, by which candidate changes are ranked for suggestions. The best effect is
    first."""

    CLEAN = 0
    """The change adds no violation, and the world size fits the layout."""
    REVEALING = 1
    """The change makes the world size fit the layout, so that other violations can be found."""
    HIDING = 2
    """The change adds no violation, but the world size still does not fit the layout."""


def _classify(change: Change, config: Config, world_size: int, counts_before: list[int], counts_after: list[int]) -> _Effect | None:
    """Classify a change of the settings by its effect on the violations and on whether the world size fits the layout. Return None
    if the change only replaces violations by others.

    Args:
        change: proposed change of the settings or of the world size.
        counts_before: number of violations of each rule in `RULES` before the change.
        counts_after: number of violations of each rule in `RULES` after the change.
    """
    is_divisible = get_data_parallel_size(*change.apply(config, world_size)) is not None
    if all(new <= old for new, old in zip(counts_after, counts_before, strict=True)):
        return _Effect.CLEAN if is_divisible else _Effect.HIDING
    is_revealing = is_divisible and get_data_parallel_size(config, world_size) is None and sum(counts_after) <= sum(counts_before)
    return _Effect.REVEALING if is_revealing else None
