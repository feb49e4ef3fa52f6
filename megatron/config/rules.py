"""Runs every rule between the settings and chooses, for each violated one, the nearest settings that are really valid."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.config.checks import checkpoint, data, inert, model, optimizer, parallel, ranges, training
from megatron.config.checks.finding import Change, Finding, Rule
from megatron.config.config import Config
from megatron.config.errors import Violation

RULES: tuple[Rule, ...] = (
    *ranges.RULES,
    *model.RULES,
    *parallel.RULES,
    *training.RULES,
    *optimizer.RULES,
    *data.RULES,
    *checkpoint.RULES,
    *inert.RULES,
)
"""All rules. None depends on another: each is evaluated whatever the others say."""

_SHOWN = 2
_TRIED = 64


def violations(config: Config, world_size: int) -> list[Violation]:
    """Everything that stands against running these settings with this many ranks, in the order of the topics.

    A suggested setting is checked by the rules themselves: it removes its violation and adds no other.
    """
    found = _evaluate(config, world_size)
    counts = [len(findings) for findings in found]
    return [
        Violation(
            tuple(f"--{field.replace('_', '-')}" for field in finding.fields),
            finding.message,
            finding.rule,
            tuple(str(change) for group in finding.candidates for change in _valid(group, index, counts, config, world_size)),
        )
        for index, findings in enumerate(found)
        for finding in findings
    ]


def _evaluate(config: Config, world_size: int) -> list[list[Finding]]:
    return [list(rule(config, world_size)) for rule in RULES]


def _valid(candidates: Sequence[Change], index: int, counts: Sequence[int], config: Config, world_size: int) -> list[Change]:
    """Changes after which rule `index` finds less and no other rule finds more: those that leave least, then the nearest."""
    accepted: list[tuple[int, Change]] = []
    for change in candidates[:_TRIED]:
        after = [len(findings) for findings in _evaluate(*change.apply(config, world_size))]
        if after[index] < counts[index] and all(new <= old for new, old in zip(after, counts, strict=True)):
            accepted.append((sum(after), change))
    return [change for _, change in sorted(accepted, key=lambda item: item[0])[:_SHOWN]]
