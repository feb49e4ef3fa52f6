"""Errors in settings: every problem at once, each with its reason and the nearest valid settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Violation:
    """One problem with the settings."""

    flags: tuple[str, ...]
    """The flags that take part in it, as typed on the command line (``--lr``)."""
    message: str
    """What is wrong, with the values: one sentence."""
    rule: str = ""
    """Why it is wrong and what can be done about it: whole sentences."""
    nearest: tuple[str, ...] = ()
    """Settings that would remove it, each a piece of a command line (``--lr 0.1``) or ``world size N``."""
    table: tuple[str, ...] = ()
    """Lines that illustrate it, such as which layers would lie where."""


class ConfigError(ValueError):
    """Settings that cannot be run."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        super().__init__(tuple(violations))
        self.violations = tuple(violations)

    def __str__(self) -> str:
        """For each violation a line on what is wrong, then, indented, its table, the reason, and what would be valid."""
        lines = [f"{len(self.violations)} problems in the settings:"] if len(self.violations) > 1 else []
        for violation in self.violations:
            lines.append(violation.message)
            lines.extend(f"    {line}" for line in violation.table)
            advice = f"Nearest valid: {_join(violation.nearest)}." if violation.nearest else ""
            explanation = " ".join(part for part in (violation.rule, advice) if part)
            if explanation:
                lines.append(f"  {explanation}")
        return "\n".join(lines)


def _join(settings: Sequence[str]) -> str:
    """Settings as text; those of one flag stand together: ``--tensor-model-parallel-size 4 or 6, --num-attention-heads 16``."""
    values: dict[str, list[str]] = {}
    for setting in settings:
        flag, space, value = setting.rpartition(" ")
        values.setdefault(flag if space else setting, []).extend([value] if space else [])
    return ", ".join(f"{flag} {' or '.join(found)}" if found else flag for flag, found in values.items())
