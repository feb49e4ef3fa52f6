"""Errors in settings. All problems are reported at once, each with its reason and the nearest valid settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Violation:
    """Problem with the settings, as it is reported to the user."""

    flags: tuple[str, ...]
    """The flags that the problem is about, as typed on the command line (``--lr``)."""
    message: str
    """Statement of what is wrong, with the values of the flags: one sentence."""
    reason: str = ""
    """Reason why the values are wrong and how to fix them: whole sentences."""
    nearest: tuple[str, ...] = ()
    """Settings that would fix the problem, each a part of a command line (``--lr 0.1``) or ``world size N``."""
    table: tuple[str, ...] = ()
    """Lines of a table that illustrates the problem, such as the layers of each pipeline stage."""
    is_missing: bool = False
    """Whether the problem is that a setting is missing."""


_MAX_MISSING = 2
"""Maximum number of missing settings that are reported one by one, besides other problems."""


class ConfigError(ValueError):
    """Error that reports all problems with the settings of a program."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        super().__init__(tuple(violations))
        self.violations = tuple(violations)

    def __str__(self) -> str:
        """Format each violation: a line with the message, then, indented, its table, its reason and its suggestions."""
        violations = _merge_missing(self.violations)
        lines = [f"{len(violations)} problems in the settings:"] if len(violations) > 1 else []
        for violation in violations:
            lines.append(violation.message)
            lines.extend(f"    {line}" for line in violation.table)
            advice = f"Nearest valid: {_join_settings(violation.nearest)}." if violation.nearest else ""
            explanation = " ".join(sentence for sentence in (violation.reason, advice) if sentence)
            if explanation:
                lines.append(f"  {explanation}")
        return "\n".join(lines)


def _merge_missing(problems: Sequence[Violation]) -> Sequence[Violation]:
    """Replace the violations about missing settings by a single one at the end if there are other problems. Otherwise these others
    would not be visible on a terminal."""
    missing = [problem for problem in problems if problem.is_missing]
    others = [problem for problem in problems if not problem.is_missing]
    if not others or len(missing) <= _MAX_MISSING:
        return problems
    flags = tuple(problem.flags[0] for problem in missing)
    message = f"These settings are missing too: {', '.join(flags)}."
    return [*others, Violation(flags, message, "--model NAME sets the shape of a model; --explain FLAG describes a flag.")]


def _join_settings(settings: Sequence[str]) -> str:
    """Join suggested settings, with the values of one flag together: ``--tensor-model-parallel-size 4 or 6, --num-attention-heads
    16``."""
    values: dict[str, list[str]] = {}
    for setting in settings:
        flag, space, value = setting.rpartition(" ")
        values.setdefault(flag if space else setting, []).extend([value] if space else [])
    return ", ".join(f"{flag} {' or '.join(options)}" if options else flag for flag, options in values.items())
