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
from megatron.config.flags import Flag, flags


@dataclass(frozen=True)
class Change:
    """Other values of some settings, or another world size, that might be valid."""

    fields: tuple[tuple[str, Any], ...] = ()
    world_size: int | None = None

    def apply(self, config: Config, world_size: int) -> tuple[Config, int]:
        """The settings and the world size after the change."""
        for name, value in self.fields:
            topic = _by_field(name).topic
            config = dataclasses.replace(config, **{topic: dataclasses.replace(getattr(config, topic), **{name: value})})
        return config, world_size if self.world_size is None else self.world_size

    def distance(self, config: Config, world_size: int) -> float:
        """How much it changes: for a number the factor, as a power of 2; a switch or a choice counts as a factor of 2.

        Another number of ranks is harder to get than another flag, and another model is another experiment: they count as more.
        """
        total = 0.0 if self.world_size is None else 1.0 + _steps(world_size, self.world_size)
        for name, value in self.fields:
            total += _steps(value_of(config, name), value) + (3.0 if _by_field(name).topic == "model" else 0.0)
        return total

    def __str__(self) -> str:
        """The change as a piece of a command line, or ``world size N``."""
        if self.world_size is not None:
            return f"world size {self.world_size}"
        return " ".join(_shown(_by_field(name), value) for name, value in self.fields)


@dataclass(frozen=True)
class Finding:
    """A violated rule."""

    fields: tuple[str, ...]
    """Names of the fields that take part."""
    message: str
    rule: str = ""
    candidates: tuple[tuple[Change, ...], ...] = ()
    """Groups of changes to try, each with the nearest first. Two valid ones of each group are shown."""
    table: tuple[str, ...] = ()
    """Lines that illustrate it, such as which layers would lie where."""


@dataclass(frozen=True)
class SettingsRule:
    """A rule between settings. It looks at them and the world size, and yields what is wrong.

    It yields nothing if a number that it needs is missing or out of range, since another rule reports that.
    """

    check: Callable[[Config, int], Iterator[Finding]]
    fields: tuple[str, ...]
    """Every setting that it looks at; empty if it looks at each by itself."""

    def __call__(self, config: Config, world_size: int) -> Iterator[Finding]:
        return self.check(config, world_size)

    @property
    def name(self) -> str:
        """Its name, for tests and debuggers."""
        return self.check.__name__

    @property
    def why(self) -> str:
        """The reason for it: a sentence."""
        return " ".join((self.check.__doc__ or "").split())


def rule(*fields: str) -> Callable[[Callable[[Config, int], Iterator[Finding]]], SettingsRule]:
    """Make a rule of a function, about these settings. Its docstring is the rule's text in ``--explain``."""
    return lambda check: SettingsRule(check, fields)


def rules_in(*modules: types.ModuleType) -> tuple[SettingsRule, ...]:
    """The rules of modules, in the order in which they stand there."""
    return tuple(dict.fromkeys(found for module in modules for found in vars(module).values() if isinstance(found, SettingsRule)))


RANKS = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
"""The settings on which the number of data ranks depends."""


def change(**fields: Any) -> Change:
    """A change of settings by the names of their fields."""
    return Change(tuple(fields.items()))


def switch_on(field: str) -> tuple[Change, ...]:
    """The group of candidates that switches one setting on."""
    return (change(**{field: True}),)


def try_values(field: str, current: float, values: Iterable[Any]) -> tuple[Change, ...]:
    """Candidates for one setting, the nearest to its current value first."""
    return tuple(change(**{field: value}) for value in sorted(set(values), key=lambda value: (abs(value - current), value)))


def value_of(config: Config, field: str) -> Any:
    """The value of a setting."""
    return getattr(getattr(config, _by_field(field).topic), field)


def is_changed(config: Config, field: str) -> bool:
    """Whether a setting differs from its default."""
    return bool(value_of(config, field) != _by_field(field).default)


def without(config: Config, *fields: str, **others: Any) -> Change:
    """A change that takes these settings back, if they are given, and sets others."""
    return change(**{field: _by_field(field).default for field in fields if is_changed(config, field)}, **others)


def exclusive(config: Config, fields: Iterable[str], why: str) -> Iterator[Finding]:
    """A finding if more than one of these settings differ from their defaults. Each may be the one to stay."""
    given = [field for field in fields if is_changed(config, field)]
    if len(given) > 1:
        message = f"{' and '.join(shown(config, field) for field in given)} exclude each other."
        stay = tuple(without(config, *(field for field in given if field != kept)) for kept in given)
        yield Finding(tuple(given), message, why, (stay,))


def shown(config: Config, field: str) -> str:
    """A setting as a user types it: ``--lr 0.1``, ``--bf16``, ``--no-load-optim``."""
    return _shown(_by_field(field), value_of(config, field))


def uneven(
    config: Config, number: str, by: str, why: str, *, fields: Sequence[str] = (), said: str = "does not divide by"
) -> Finding:
    """A finding about a setting that does not divide by another. It suggests multiples for the one, divisors for the other.

    Args:
        fields: settings that take part beside the two.
        said: what is wrong between the two.
    """
    value, divisor = value_of(config, number), value_of(config, by)
    message = f"{shown(config, number)} {said} {shown(config, by)}."
    multiples = try_values(number, value, multiples_near(value, divisor))
    return Finding((number, by, *fields), message, why, (try_values(by, divisor, divisors(value)), multiples))


def positive(*values: float | None) -> bool:
    """Whether all values are there and above zero, so that a rule can divide by them."""
    return all(value is not None and 0 < value < math.inf for value in values)


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
    if not positive(world_size, *sizes) or world_size % math.prod(sizes):
        return None
    return world_size // math.prod(sizes)


def _steps(old: Any, new: Any) -> float:
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) and value > 0 for value in (old, new))
    return abs(math.log2(new) - math.log2(old)) if numbers and new != old else float(new != old)


def _by_field(field: str) -> Flag:
    return flags()[field.replace("_", "-")]


def _shown(flag: Flag, value: Any) -> str:
    if flag.kind is bool:
        return f"--{flag.name}" if value else f"--no-{flag.name}"
    values = value if isinstance(value, tuple) else (value,)
    return " ".join([f"--{flag.name}", *(shlex.quote(str(item)) for item in values)])
