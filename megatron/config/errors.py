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


class ConfigError(ValueError):
    """Error that reports all problems with the settings of a program."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        super().__init__(tuple(violations))
        self.violations = tuple(violations)

    def __str__(self) -> str:
        """Format each violation: a line with the message, then, indented, its table, its reason and its suggestions."""
        lines = [f"{len(self.violations)} problems in the settings:"] if len(self.violations) > 1 else []
        for violation in self.violations:
            lines.append(violation.message)
            lines.extend(f"    {line}" for line in violation.table)
            advice = f"Nearest valid: {_join_settings(violation.nearest)}." if violation.nearest else ""
            explanation = " ".join(sentence for sentence in (violation.reason, advice) if sentence)
            if explanation:
                lines.append(f"  {explanation}")
        return "\n".join(lines)


def _join_settings(settings: Sequence[str]) -> str:
    """Join suggested settings, with the values of one flag together: ``--tensor-model-parallel-size 4 or 6, --num-attention-heads
    16``."""
    values: dict[str, list[str]] = {}
    for setting in settings:
        flag, space, value = setting.rpartition(" ")
        values.setdefault(flag if space else setting, []).extend([value] if space else [])
    return ", ".join(f"{flag} {' or '.join(options)}" if options else flag for flag, options in values.items())
