"""Runs every rule between the settings and chooses, for each violated one, the nearest settings that are really valid."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.config.checks import (
    checkpoint,
    data,
    inert,
    model,
    optimizer,
    parallel,
    pipeline,
    pipeline_layout,
    pipeline_split,
    ranges,
    sharding,
    training,
)
from megatron.config.checks.finding import Change, Finding, Rule, data_size
from megatron.config.config import Config
from megatron.config.errors import Violation

RULES: tuple[Rule, ...] = (
    *ranges.RULES,
    *model.RULES,
    *parallel.RULES,
    *pipeline.RULES,
    *pipeline_split.RULES,
    *pipeline_layout.RULES,
    *sharding.RULES,
    *training.RULES,
    *optimizer.RULES,
    *data.RULES,
    *checkpoint.RULES,
    *inert.RULES,
)
"""All rules. None depends on another: each is evaluated whatever the others say."""

_SHOWN = 2  # suggestions for one setting
_TRIED = 64  # candidates for one setting, so that an answer never takes long


def violations(config: Config, world_size: int) -> list[Violation]:
    """Everything that stands against running these settings with this many ranks, in the order of the topics.

    The rules themselves check what is suggested: it removes its violation and adds no other. Only where ranks and layout do not
    fit may it bring up others that could not be seen before, as the batch could not be divided among ranks.
    """
    if world_size > ranges.LARGEST_WORLD:  # rules that divide by it would take long, and what they say would not help
        return [_worded(finding, ()) for finding in ranges.world_has_ranks(config, world_size)]
    found = _evaluate(config, world_size)
    counts = [len(findings) for findings in found]
    return [
        _worded(finding, _nearest(finding, index, counts, config, world_size))
        for index, findings in enumerate(found)
        for finding in findings
    ]


def _worded(finding: Finding, nearest: Sequence[Change]) -> Violation:
    flags = tuple(f"--{field.replace('_', '-')}" for field in finding.fields)
    return Violation(flags, finding.message, finding.rule, tuple(map(str, nearest)), finding.table)


def _evaluate(config: Config, world_size: int) -> list[list[Finding]]:
    return [list(rule(config, world_size)) for rule in RULES]


def _nearest(finding: Finding, index: int, counts: list[int], config: Config, world_size: int) -> list[Change]:
    """Of each group of candidates those that leave the fewest violations; all together the ones that change least first."""
    strict: list[Change] = []
    loose: list[Change] = []
    for group in finding.candidates:
        removing = []
        for change in group[:_TRIED]:
            changed = change.apply(config, world_size)
            after = [len(findings) for findings in _evaluate(*changed)]
            if after[index] < counts[index] and sum(after) <= sum(counts):
                adds_none = all(new <= old for new, old in zip(after, counts, strict=True))
                fits_now = data_size(config, world_size) is None and data_size(*changed) is not None
                removing.append((sum(after), adds_none, fits_now, change))
        removing.sort(key=lambda item: item[0])
        strict += [change for _, adds_none, _, change in removing if adds_none][:_SHOWN]
        loose += [change for _, _, fits_now, change in removing if fits_now][:_SHOWN]
    found = strict or loose
    return sorted(found, key=lambda change: change.distance(config, world_size))
