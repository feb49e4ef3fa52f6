"""The facts about a setting beside its type, default and text: its unit, its range, and when it acts.

Each field of a topic states them: ``num_layers: int = setting(0, at_least=1, unit="layers", required=True)``. The checks,
``--explain`` and the tests read them there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True)
class Interval:
    """The interval of a setting's allowed numbers."""

    low: float
    high: float = math.inf
    with_low: bool = True
    with_high: bool = True

    def holds(self, value: float) -> bool:
        """Whether a finite number lies inside (nan and infinity never do)."""
        above = value >= self.low if self.with_low else value > self.low
        below = value <= self.high if self.with_high else value < self.high
        return math.isfinite(value) and above and below

    def __str__(self) -> str:
        low = f"at least {self.low:g}" if self.with_low else f"above {self.low:g}"
        if self.high == math.inf:
            return low
        return f"{low} and {f'at most {self.high:.12g}' if self.with_high else f'below {self.high:g}'}"


@dataclass(frozen=True)
class OtherThan:
    """Any value but this one."""

    value: Any


GIVEN = object()
"""Any value but None, 0 and empty ones."""


@dataclass(frozen=True)
class Beside:
    """Values of other settings with which a setting acts, or with which it does nothing."""

    others: Mapping[str, Any]
    """By name: a value, a tuple of possible values, `OtherThan`, or `GIVEN`."""
    words: str
    """The condition as shown to a user."""
    every: bool = False
    """Whether all of them must hold; otherwise one is enough."""
    fix: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Settings to suggest where it does not hold."""
    effect: str = "has no effect"
    """What the setting does where it holds, if it is a condition under which it does little."""
    strict: bool = False
    """Where it does not hold, the setting is refused: without it another model would be trained, or less be kept safe."""

    def holds(self, value: Callable[[str], Any]) -> bool:
        """Whether the settings, looked up by name, fulfil it."""
        return (all if self.every else any)(_is(value(name), wanted) for name, wanted in self.others.items())


@dataclass(frozen=True)
class SettingFacts:
    """The facts about a field of a topic."""

    unit: str | None = None
    """What its number counts or measures; every setting that is a number has one."""
    interval: Interval | None = None
    """The allowed numbers; every setting that is a number has one."""
    required: bool = False
    """Whether it has no useful default and must be given."""
    acts: Beside | None = None
    """The setting acts only with these. Changed without them it is taken back and noted, or refused if strict."""
    idle: tuple[Beside, ...] = ()
    """With these it changes nothing, or little, although its condition holds. It is then accepted, and the start-up log gives the
    reason."""
    opens: bool = False
    """Whether modules of the user's own add to its choices, see `megatron/spec/activations.py`."""


def setting(
    default: _T,
    *,
    unit: str | None = None,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float = math.inf,
    below: float | None = None,
    required: bool = False,
    acts: Beside | None = None,
    idle: Beside | tuple[Beside, ...] = (),
    opens: bool = False,
) -> _T:
    """A field of a topic, with its default and facts. (The return type is wrong on purpose, as that of `dataclasses.field` is.)"""
    interval = None
    low = at_least if at_least is not None else above
    if low is not None:
        interval = Interval(low, at_most if below is None else below, with_low=above is None, with_high=below is None)
    facts = SettingFacts(unit, interval, required, acts, idle if isinstance(idle, tuple) else (idle,), opens)
    field: Any = dataclasses.field(default=default, metadata={SettingFacts: facts})
    return field  # type: ignore[no-any-return]


def acts_with(
    words: str = "", *, every: bool = False, strict: bool = False, fix: Mapping[str, Any] | None = None, **others: Any
) -> Beside:
    """A condition under which a setting acts: one of the others (with `every`, each) is as named.

    Args:
        words: the condition after "it acts only", where "with --this 1 or --that" would not read well.
        strict: whether the setting is refused where it does not act; else it is only noted.
        fix: what to suggest, where the first of the others is not it.
    """
    if not words:
        *some, last = [_with_value(name, wanted) for name, wanted in others.items()]
        words = f"with {', '.join(some)} {'and' if every else 'or'} {last}" if some else f"with {last}"
    if fix is None:
        name, wanted = next(iter(others.items()))
        value = wanted[0] if isinstance(wanted, tuple) else wanted
        fix = {name: value} if isinstance(value, bool | str) else {}
    return Beside(others, words, every, fix, strict=strict)


def idle_with(because: str, *, every: bool = False, effect: str = "has no effect", **others: Any) -> Beside:
    """A condition under which a setting changes nothing or has only some effect, with the reason."""
    return Beside(others, because, every, effect=effect)


def _is(value: Any, wanted: Any) -> bool:
    if wanted is GIVEN:
        return bool(value)
    if isinstance(wanted, OtherThan):
        return bool(value != wanted.value)
    return value in wanted if isinstance(wanted, tuple) else bool(value == wanted)


def typed(field: str) -> str:
    """The flag of a field as a user types it."""
    return f"--{field.replace('_', '-')}"


def _with_value(name: str, wanted: Any) -> str:
    """A setting and its value as a user types them."""
    flag = typed(name)
    if wanted is GIVEN or wanted is True:
        return flag
    if isinstance(wanted, OtherThan):
        return f"a {flag} other than {wanted.value}"
    return f"{flag} {' or '.join(map(str, wanted)) if isinstance(wanted, tuple) else wanted}"
