"""A rule's report, and the candidates from which the nearest valid settings are chosen."""

from __future__ import annotations

import dataclasses
import functools
import math
import shlex
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.config.config import Config
from megatron.config.flags import Flag, flag_for, flags
from megatron.config.setting import Beside
from megatron.spec.activations import read_with


@dataclass(frozen=True)
class Change:
    """Other values of some settings, or another world size, that might be valid."""

    fields: tuple[tuple[str, Any], ...] = ()
    world_size: int | None = None

    def apply(self, config: Config, world_size: int) -> tuple[Config, int]:
        """The settings and the world size after the change."""
        for name, value in self.fields:
            topic = flag_for(name).topic
            config = dataclasses.replace(config, **{topic: dataclasses.replace(getattr(config, topic), **{name: value})})
        return config, world_size if self.world_size is None else self.world_size

    def distance(self, config: Config, world_size: int) -> float:
        """How much it changes: for a number the factor, as a power of 2; a switch or a choice counts as a factor of 2.

        Another number of ranks is harder to get than another flag, and another model is another experiment: they count as more.
        """
        total = 0.0 if self.world_size is None else 1.0 + _steps(world_size, self.world_size)
        for name, value in self.fields:
            total += _steps(value_of(config, name), value) + (3.0 if flag_for(name).topic == "model" else 0.0)
        return total

    def __str__(self) -> str:
        """The change as a piece of a command line, or ``world size N``."""
        if self.world_size is not None:
            return f"world size {self.world_size}"
        return " ".join(_shown(flag_for(name), value) for name, value in self.fields)


@dataclass(frozen=True)
class Finding:
    """A violated rule."""

    message: str
    candidates: Sequence[Change | Sequence[Change]] = ()
    """Changes to try, and groups of such with the nearest first. Two valid ones of each group are shown."""
    why: str = ""
    """Why it is wrong and what can be done; if empty, what the rule itself says."""
    fields: tuple[str, ...] = ()
    """Names of the fields that take part; if empty, those that the rule names."""
    table: tuple[str, ...] = ()
    """Lines that illustrate it, such as which layers would lie where."""


_Check = Callable[[Config, int], Iterator[Finding]]


@dataclass(frozen=True)
class SettingsRule:
    """A rule between settings. It looks at them and the world size, and yields what is wrong.

    It yields nothing while a number that it looks at is out of range, or required and missing, since another rule reports that.
    """

    check: _Check
    named: tuple[str, ...]
    """Settings that its findings name."""
    reads: tuple[str, ...]
    """Further settings that it looks at."""
    why: str
    """The reason for it: whole sentences."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Every setting that it looks at; empty if it looks at each by itself."""
        return self.named + self.reads

    def __call__(self, config: Config, world_size: int, wrong: set[str] | None = None) -> Iterator[Finding]:
        """Yield what is wrong.

        Args:
            wrong: what `out_of_range` returns, if the caller has it. Most rules look at the same settings.
        """
        if wrong.isdisjoint(self.fields) if wrong is not None else all(in_range(config, field) for field in self.fields):
            for found in self.check(config, world_size):
                yield dataclasses.replace(found, why=found.why or self.why, fields=found.fields or self.named)


def rule(*named: str, reads: Sequence[str] = ()) -> Callable[[_Check], SettingsRule]:
    """Make a rule of a function, which names these settings and reads others too. Its docstring is the rule's reason."""
    return lambda check: SettingsRule(check, named, tuple(reads), " ".join((check.__doc__ or "").split()))


def divides(number: str, by: str, why: str, where: Beside | None = None) -> SettingsRule:
    """The rule that one setting divides by another, where a condition holds. It suggests multiples for the one, divisors for the
    other, and to take back what makes the condition hold."""
    conditions = tuple(where.others) if where is not None else ()

    def check(config: Config, world_size: int) -> Iterator[Finding]:
        value, divisor = value_of(config, number), value_of(config, by)
        if value is not None and divisor is not None and value % divisor and _holds(where, config):
            yield Finding(
                f"{shown(config, number)} does not divide by {shown(config, by)}.",
                [
                    try_values(by, divisor, divisors(value)),
                    try_values(number, value, multiples_near(value, divisor)),
                    without(config, *conditions),
                ],
            )

    return SettingsRule(check, (number, by, *conditions), (), why)


def at_most(lower: str, upper: str, why: str, where: Beside | None = None) -> SettingsRule:
    """The rule that one setting is not above another, where a condition holds. It suggests the value of each for the other."""
    conditions = tuple(where.others) if where is not None else ()

    def check(config: Config, world_size: int) -> Iterator[Finding]:
        low, high = value_of(config, lower), value_of(config, upper)
        if low is not None and high is not None and low > high and _holds(where, config):
            message = f"{shown(config, lower)} is above {shown(config, upper)}."
            yield Finding(message, [change(**{lower: high}), change(**{upper: low})])

    return SettingsRule(check, (lower, upper), conditions, why)


def has_effect(config: Config, field: str) -> bool:
    """Whether a setting acts with the others: its condition holds, or an optimizer of the user's own reads it."""
    acts = flag_for(field).facts.acts
    return acts is None or _holds(acts, config) or field in read_with("optimizer", config.optimizer.optimizer)


def exclude_each_other(*fields: str, why: str) -> SettingsRule:
    """The rule that at most one of some settings is given. Each may be the one to stay."""

    def check(config: Config, world_size: int) -> Iterator[Finding]:
        changed = {field: value_of(config, field) for field in fields if is_changed(config, field)}
        given = tuple(field for field, value in changed.items() if value or (value == 0 and value is not False))
        if len(given) > 1:
            stay = [without(config, *(field for field in given if field != kept)) for kept in given]
            message = f"{' and '.join(shown(config, field) for field in given)} exclude each other."
            yield Finding(message, [stay], fields=given)

    return SettingsRule(check, fields, (), why)


def _holds(where: Beside | None, config: Config) -> bool:
    return where is None or where.holds(functools.partial(value_of, config))


def rules_in(*modules: types.ModuleType) -> tuple[SettingsRule, ...]:
    """The rules of modules, in the order in which they stand there."""
    return tuple(dict.fromkeys(found for module in modules for found in vars(module).values() if isinstance(found, SettingsRule)))


RANKS = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
"""The settings on which the number of data ranks depends."""


def change(**fields: Any) -> Change:
    """A change of settings by the names of their fields."""
    return Change(tuple(fields.items()))


def try_values(field: str, current: float, values: Iterable[Any]) -> tuple[Change, ...]:
    """Candidates for one setting, the nearest to its current value first."""
    return tuple(change(**{field: value}) for value in sorted(set(values), key=lambda value: (abs(value - current), value)))


def value_of(config: Config, field: str) -> Any:
    """The value of a setting."""
    return getattr(getattr(config, flag_for(field).topic), field)


def is_changed(config: Config, field: str) -> bool:
    """Whether a setting differs from its default."""
    return bool(value_of(config, field) != flag_for(field).default)


def without(config: Config, *fields: str, **others: Any) -> Change:
    """A change that takes these settings back, if they are given, and sets others."""
    return change(**{field: flag_for(field).default for field in fields if is_changed(config, field)}, **others)


def shown(config: Config, field: str) -> str:
    """A setting as a user types it: ``--lr 0.1``, ``--bf16``, ``--no-load-optim``."""
    return _shown(flag_for(field), value_of(config, field))


def in_range(config: Config, field: str) -> bool:
    """Whether a setting is no number, not given, or in its range. (0 stands for what is required and was not given.)"""
    interval = flag_for(field).facts.interval
    if interval is None:
        return True
    value = value_of(config, field)
    return value is None or (all(map(interval.holds, value)) if isinstance(value, tuple) else interval.holds(value))


@functools.cache
def with_range() -> tuple[str, ...]:
    """Return the names of the settings that have a range, in the order of the flags."""
    return tuple(flag.field for flag in flags().values() if flag.facts.interval is not None)


def out_of_range(config: Config) -> set[str]:
    """Return the names of the settings whose value is out of range, or required and missing."""
    return {field for field in with_range() if not in_range(config, field)}


@functools.lru_cache(maxsize=1024)
def divisors(number: int) -> list[int]:
    """Divisors of a positive number in ascending order (above 10^10 only pairs with a part up to 10^5, to stay quick)."""
    small = [part for part in range(1, min(math.isqrt(number), 10**5) + 1) if number % part == 0]
    return small + [number // part for part in reversed(small) if part * part != number]


def multiples_near(number: int, unit: int, reach: int = 8) -> list[int]:
    """Positive multiples of `unit` around a number, `reach` of them on each side."""
    middle = number // unit
    return [unit * count for count in range(max(1, middle - reach), middle + reach + 2)]


def data_size(config: Config, world_size: int) -> int | None:
    """Data-parallel size, or None where the layout does not fit the world."""
    sizes = [getattr(config.parallel, field) for field in RANKS]
    fits = world_size > 0 and min(sizes) > 0 and world_size % math.prod(sizes) == 0
    return world_size // math.prod(sizes) if fits else None


def _steps(old: Any, new: Any) -> float:
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) and value > 0 for value in (old, new))
    return abs(math.log2(new) - math.log2(old)) if numbers and new != old else float(new != old)


def _shown(flag: Flag, value: Any) -> str:
    if flag.kind is bool:
        return f"--{flag.name}" if value else f"--no-{flag.name}"
    values = value if isinstance(value, tuple) else (value,)
    return " ".join([f"--{flag.name}", *(shlex.quote(str(item)) for item in values)])
