"""Sorts given flags into settings, flags without effect, and problems."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron.config.compat import CHOICES, KNOWN, NoEffect, find_family
from megatron.config.errors import Violation
from megatron.config.flags import Flag, flag_of, flags, nearest_names
from megatron.config.given import Given

_MOST_GUESSED = 20  # unknown flags for which near ones are looked for, which takes some milliseconds each


@dataclass
class Sorted:
    """The given flags, sorted."""

    settings: list[tuple[Flag, Given]] = field(default_factory=list)
    """Good settings in order. If a flag occurs more than once, the last counts."""
    notes: list[str] = field(default_factory=list)
    """A line for each flag that has no effect, and for each that was given twice."""
    problems: list[Violation] = field(default_factory=list)
    """Unknown and refused flags, and values that do not fit."""
    doubtful: set[str] = field(default_factory=set)
    """Flags (``--lr``) whose value is not known because of a problem: a rule about them would mislead."""

    @property
    def explicit(self) -> set[str]:
        """Fields that the user set."""
        return {flag.field for flag, item in self.settings if item.values != ("None",)}

    def doubt_all(self) -> None:
        """Nothing is known for sure."""
        self.doubtful.update(f"--{name}" for name in flags())


def sort_given(stray: Sequence[str], given: Sequence[Given]) -> Sorted:
    """Look up every flag and check the form of its values."""
    found = Sorted()
    for word in stray:
        found.problems.append(Violation((), f"{word} belongs to no flag.", "Every setting starts with a flag; see --help."))
    unknown = []
    for item in given:
        flag, known = flag_of(item.name), KNOWN.get(item.name)
        if flag is not None:
            if fault := flag.fault(item.values):
                found.doubtful.add(f"--{flag.name}")
                found.problems.append(_misused(item, flag.name, fault, flag.choices))
            else:
                found.settings.append((flag, item))
        elif isinstance(known, NoEffect):
            if fault := known.fault(item.values):
                found.problems.append(_misused(item, item.name, fault))
            else:
                found.notes.append(f"{item} has no effect: {known.reason}.")
        elif known is not None:
            found.problems.append(Violation((f"--{item.name}",), f"{item} is refused.", known.reason))
        else:
            unknown.append(item)
    _suggest(unknown, found)
    _note_repeated(found)
    return found


def _misused(item: Given, name: str, fault: str, choices: Sequence[str] = ()) -> Violation:
    """The problem of a flag that cannot have these values."""
    value = item.values[0] if len(item.values) == 1 else ""
    if reason := CHOICES.get(name, {}).get(value):
        return Violation((f"--{name}",), f"{item}: {value} {reason}.")
    nearest = tuple(f"--{name} {choice}" for choice in difflib.get_close_matches(value, choices, n=1))
    return Violation((f"--{name}",), f"{item}: --{name} {fault}.", nearest=nearest)


def _suggest(unknown: Sequence[Given], found: Sorted) -> None:
    """Suggest what may have been meant, unless too many flags are unknown: then the fault is likely another."""
    for item in unknown[:_MOST_GUESSED]:
        near = difflib.get_close_matches(item.name, flags(), n=1, cutoff=0.85)
        if not near and (family := find_family(item.name)) is not None:
            found.problems.append(Violation((f"--{item.name}",), f"{item} is refused.", family.reason))
            continue
        name = item.name.lstrip("-")
        names = nearest_names(name, _spellings()) or nearest_names(name, KNOWN)
        found.doubtful.update(f"--{name}" for name in names)
        advice = f"Perhaps you meant {' or '.join(f'--{name}' for name in names)}." if names else "See --help for all flags."
        found.problems.append(Violation((f"--{item.name}",), f"{item.place}{item.spelled} is not a flag.", advice))
    if more := unknown[_MOST_GUESSED:]:
        message = f"{more[0].place}{more[0].spelled} is not a flag, and {len(more) - 1:,} more are none."
        found.problems.append(Violation((f"--{more[0].name}",), message, "See --help for all flags."))
        found.doubt_all()  # any of them may have been meant


def _spellings() -> list[str]:
    """The names of all settings, and the negative form of switches that are on by default."""
    return [*flags(), *(f"no-{flag.name}" for flag in flags().values() if flag.default is True)]


def _note_repeated(found: Sorted) -> None:
    """Note the settings that the command line gives more than once with different values."""
    last: dict[str, Given] = {}
    for flag, item in found.settings:
        before = last.get(flag.name)
        if before is not None and not before.where and (before.name, before.values) != (item.name, item.values):
            found.notes.append(f"{before} is overruled by {item}, which comes later.")
        last[flag.name] = item
