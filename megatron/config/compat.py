"""Flags of Megatron-LM that are not settings here: refused with the reason, or accepted with a note that they change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from megatron.config.compat_tables import CHOICES, FAMILIES, NO_EFFECT, NO_EFFECT_VALUES, REFUSED, RENAMED


@dataclass(frozen=True)
class Refused:
    """A flag that cannot be had, and what to use instead."""

    reason: str


@dataclass(frozen=True)
class NoEffect:
    """A flag whose effect is always on, or cannot matter here."""

    reason: str
    takes_value: bool
    values: tuple[str, ...] = ()
    """The only values accepted, or empty for any."""

    def fault(self, values: Sequence[str]) -> str | None:
        """Why the flag may not be given with these values, or None."""
        if not self.takes_value:
            return "is a switch and takes no value" if values else None
        if len(values) != 1:
            return f"takes one value, not {len(values) or 'none'}"
        if self.values and values[0] not in self.values:
            return f"is supported as {' or '.join(self.values)} only"
        return None


def find(name: str) -> Refused | NoEffect | None:
    """What is known of a flag of Megatron-LM that is no setting here.

    Args:
        name: the flag with dashes, without the two in front.
    """
    if name in NO_EFFECT:
        return NoEffect(NO_EFFECT[name], takes_value=False)
    if name in NO_EFFECT_VALUES:
        return NoEffect(NO_EFFECT_VALUES[name][1], takes_value=True, values=NO_EFFECT_VALUES[name][0])
    if name in RENAMED:
        return Refused(f"Use {RENAMED[name]}.")
    if name in REFUSED:
        return Refused(REFUSED[name])
    return None


def find_family(name: str) -> Refused | None:
    """The family of flags that a name belongs to by its form, such as ``moe-...``; a mistyped setting can look like one too."""
    return next((Refused(reason) for pattern, reason in FAMILIES if fnmatchcase(name, pattern)), None)


def refused_choice(name: str, value: str) -> str | None:
    """Why a value that Megatron-LM knows is not a choice of this flag, or None if it is unknown there too."""
    return CHOICES.get((name, value))


def known_names() -> list[str]:
    """All names that `find` knows."""
    return [*NO_EFFECT, *NO_EFFECT_VALUES, *RENAMED, *REFUSED]
