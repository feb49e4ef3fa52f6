"""Sorts given flags into settings, flags without effect, and problems."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron.config.compat import NoEffect, find, find_family, known_names, refused_choice
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
    unknown: list[Given] = field(default_factory=list)
    """Flags with unknown names."""


def sort_given(stray: Sequence[str], given: Sequence[Given]) -> Sorted:
    """Look up every flag and check the form of its values."""
    found = Sorted()
    for word in stray:
        found.problems.append(Violation((), f"{word} belongs to no flag.", "Every setting starts with a flag; see --help."))
    for item in given:
        flag = flag_of(item.name)
        if flag is None:
            _stranger(item, found)
        else:
            _setting(flag, item, found)
    _unknown(found)
    _repeated(found)
    return found


def _unknown(found: Sorted) -> None:
    """Suggest what may have been meant, unless too many flags are unknown: then the fault is likely another."""
    for item in found.unknown[:_MOST_GUESSED]:
        _unnamed(item, found)
    more = found.unknown[_MOST_GUESSED:]
    if more:
        place = f"{more[0].where}: " if more[0].where else ""
        message = f"{place}{more[0].spelled} is not a flag, and {len(more) - 1:,} more are none."
        found.problems.append(Violation((f"--{more[0].name}",), message, "See --help for all flags."))
        found.doubtful.update(f"--{name}" for name in flags())  # any of them may have been meant


def _setting(flag: Flag, item: Given, found: Sorted) -> None:
    fault = flag.fault(item.values)
    if fault is None:
        found.settings.append((flag, item))
        return
    if item.where and flag.count == 1 and len(item.values) > 1:  # only lists of a file hold several
        fault = f"takes {flag.expects}, not a list of {len(item.values)}"
    found.doubtful.add(f"--{flag.name}")
    reason = refused_choice(flag.name, item.values[0]) if len(item.values) == 1 else None
    if reason is not None:
        found.problems.append(Violation((f"--{flag.name}",), f"{item}: {item.values[0]} {reason}."))
        return
    nearest = difflib.get_close_matches(item.values[0], flag.choices, n=1) if len(item.values) == 1 else []
    suggestions = tuple(f"--{flag.name} {choice}" for choice in nearest)
    found.problems.append(Violation((f"--{flag.name}",), f"{item}: --{flag.name} {fault}.", nearest=suggestions))


def _stranger(item: Given, found: Sorted) -> None:
    """Sort a flag that is no setting: without effect, refused, or unknown."""
    known = find(item.name)
    if known is None:
        found.unknown.append(item)
    elif isinstance(known, NoEffect):
        _without_effect(item, known, found)
    else:
        found.problems.append(Violation((f"--{item.name}",), f"{item} is refused.", known.reason))


def _without_effect(item: Given, known: NoEffect, found: Sorted) -> None:
    fault = known.fault(item.values)
    if fault is None:
        found.notes.append(f"{item} has no effect: {known.reason}.")
        return
    reason = refused_choice(item.name, item.values[0]) if item.values else None
    message = f"{item.values[0]} {reason}" if reason else f"{item.spelled} {fault}"
    found.problems.append(Violation((f"--{item.name}",), f"{item}: {message}."))


def _unnamed(item: Given, found: Sorted) -> None:
    """Sort a flag that is known at most by its form."""
    flag, name = f"--{item.name}", item.name.lstrip("-")
    family = None if difflib.get_close_matches(item.name, flags(), n=1, cutoff=0.85) else find_family(item.name)
    if family is not None:
        found.problems.append(Violation((flag,), f"{item} is refused.", family.reason))
        return
    names = nearest_names(name, _spellings()) or nearest_names(name, known_names())
    found.doubtful.update(f"--{name}" for name in names)
    place = f"{item.where}: " if item.where else ""
    advice = f"Perhaps you meant {' or '.join(f'--{name}' for name in names)}." if names else "See --help for all flags."
    found.problems.append(Violation((flag,), f"{place}{item.spelled} is not a flag.", advice))


def _spellings() -> list[str]:
    """The names of all settings, and the negative form of switches that are on by default."""
    return [*flags(), *(f"no-{flag.name}" for flag in flags().values() if flag.default is True)]


def _repeated(found: Sorted) -> None:
    """Note the settings that the command line gives more than once with different values."""
    last: dict[str, Given] = {}
    for flag, item in found.settings:
        before = last.get(flag.name)
        if before is not None and not before.where and (before.name, before.values) != (item.name, item.values):
            found.notes.append(f"{before} is overruled by {item}, which comes later.")
        last[flag.name] = item
