"""Building blocks of the rules about settings: problems that a rule reports, changes of settings that might fix a problem, and
functions that build rules of common forms, such as "A must be divisible by B"."""

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
from megatron.config.flags import Flag, get_flag, get_flags
from megatron.config.setting import Condition, get_flag_name
from megatron.spec.activations import get_choice_settings


@dataclass(frozen=True)
class Change:
    """Possible fix of a problem: new values of some settings, or another world size. Suggestions to the user are selected from such
    changes."""

    fields: tuple[tuple[str, Any], ...] = ()
    world_size: int | None = None

    def apply(self, config: Config, world_size: int) -> tuple[Config, int]:
        """Return the settings and the world size that result from applying the change to `config` and `world_size`."""
        for name, value in self.fields:
            topic = get_flag(name).topic
            config = dataclasses.replace(config, **{topic: dataclasses.replace(getattr(config, topic), **{name: value})})
        return config, world_size if self.world_size is None else self.world_size

    def compute_distance(self, config: Config, world_size: int) -> float:
        """Return how large the change is; smaller changes are suggested first. A number counts |log2(new value / old value)|. A
        switch or a choice counts 1, like doubling a number.

        A change of the world size counts 1 more, because ranks are harder to get than another flag. A change of a model setting
        counts 3 more, because another model is another experiment.
        """
        total = 0.0 if self.world_size is None else 1.0 + _compute_log2_distance(world_size, self.world_size)
        for name, value in self.fields:
            total += _compute_log2_distance(get_value(config, name), value) + (3.0 if get_flag(name).topic == "model" else 0.0)
        return total

    def __str__(self) -> str:
        """Format the change as flags of a command line, such as ``--lr 0.1``, or as ``world size N``."""
        if self.world_size is not None:
            return f"world size {self.world_size}"
        return " ".join(_format_flag(get_flag(name), value) for name, value in self.fields)


@dataclass(frozen=True)
class Finding:
    """Problem that a rule has found in the settings, with changes that might fix it."""

    message: str
    """Statement of what is wrong, with the values of the settings: one sentence."""
    candidates: Sequence[Change | Sequence[Change]] = ()
    """Changes that might fix the problem. A sequence of changes is a group of alternatives, the nearest first, of which at most
    two valid ones are shown."""
    reason: str = ""
    """Reason why the settings are wrong, and how to fix them. If empty, the reason of the rule is shown."""
    fields: tuple[str, ...] = ()
    """Names of the settings that the message is about. If empty, the `reported_fields` of the rule are used."""
    table: tuple[str, ...] = ()
    """Lines of a table that illustrates the problem, such as the layers of each pipeline stage."""
    is_missing: bool = False
    """Whether the problem is that a setting is missing."""


_Check = Callable[[Config, int], Iterator[Finding]]


@dataclass(frozen=True)
class SettingsRule:
    """Rule about a combination of settings. Calling the rule checks the settings for a world size and yields the problems.

    A rule is skipped while a number that it depends on is missing or out of range, because another rule reports that.
    """

    check: _Check
    reported_fields: tuple[str, ...]
    """Names of the settings that the messages of the rule are about."""
    depends_on: tuple[str, ...]
    """Names of the other settings that the rule reads."""
    reason: str
    """Reason of the rule in whole sentences, shown to the user below the message about a problem."""
    requirement: str = ""
    """Statement of the rule: one sentence. Empty if the reason states the rule too."""

    @property
    def statement(self) -> str:
        """Statement of the rule and its reason, for a page about the settings."""
        return f"{self.requirement} {self.reason}".lstrip()

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of all settings that the rule reads; empty for a rule about individual settings, which reads all of them."""
        return self.reported_fields + self.depends_on

    def __call__(self, config: Config, world_size: int, out_of_range_fields: set[str] | None = None) -> Iterator[Finding]:
        """Yield the problems that the rule finds.

        Args:
            out_of_range_fields: names of all settings that are missing or out of range (`find_out_of_range`), computed once by
                callers that evaluate many rules. None: the rule checks the ranges of the settings that it reads.
        """
        if (
            out_of_range_fields.isdisjoint(self.fields)
            if out_of_range_fields is not None
            else all(is_in_range(config, field) for field in self.fields)
        ):
            for finding in self.check(config, world_size):
                yield dataclasses.replace(
                    finding, reason=finding.reason or self.reason, fields=finding.fields or self.reported_fields
                )


def rule(*reported_fields: str, depends_on: Sequence[str] = ()) -> Callable[[_Check], SettingsRule]:
    """Return a decorator that makes a `SettingsRule` of a function. The docstring of the function becomes the reason of the rule,
    which users see in error messages and on the pages of --explain.

    Args:
        reported_fields: names of the settings that the messages of the rule are about.
        depends_on: names of the other settings that the function reads.
    """
    return lambda check: SettingsRule(check, reported_fields, tuple(depends_on), " ".join((check.__doc__ or "").split()))


def require_divisible(dividend: str, by: str, reason: str, condition: Condition | None = None) -> SettingsRule:
    """Build the rule that the setting `dividend` must be divisible by the setting `by`.

    The rule suggests other values of either setting, or to reset the settings of the condition to their defaults.

    Args:
        reason: why the rule holds, shown to the user.
        condition: values of other settings under which the rule applies; None for always.
    """
    conditions = tuple(condition.values) if condition is not None else ()

    def check(config: Config, world_size: int) -> Iterator[Finding]:
        dividend_value, divisor_value = get_value(config, dividend), get_value(config, by)
        if (
            dividend_value is not None
            and divisor_value is not None
            and dividend_value % divisor_value
            and _is_met(condition, config)
        ):
            yield Finding(
                f"{format_setting(config, dividend)} is not divisible by {format_setting(config, by)}.",
                [
                    try_values(by, divisor_value, find_divisors(dividend_value)),
                    try_values(dividend, dividend_value, find_multiples_near(dividend_value, divisor_value)),
                    reset(config, *conditions),
                ],
            )

    requirement = f"{get_flag_name(dividend)} must be divisible by {get_flag_name(by)}{_format_condition(condition)}."
    return SettingsRule(check, (dividend, by, *conditions), (), reason, requirement)


def require_not_above(lower: str, upper: str, reason: str, condition: Condition | None = None) -> SettingsRule:
    """Build the rule that the setting `lower` must not be above the setting `upper`. The rule suggests to set either of them to the
    value of the other.

    Args:
        reason: why the rule holds, shown to the user.
        condition: values of other settings under which the rule applies; None for always.
    """
    conditions = tuple(condition.values) if condition is not None else ()

    def check(config: Config, world_size: int) -> Iterator[Finding]:
        low, high = get_value(config, lower), get_value(config, upper)
        if low is not None and high is not None and low > high and _is_met(condition, config):
            message = f"{format_setting(config, lower)} is above {format_setting(config, upper)}."
            yield Finding(message, [create_change(**{lower: high}), create_change(**{upper: low})])

    requirement = f"{get_flag_name(lower)} must not be above {get_flag_name(upper)}{_format_condition(condition)}."
    return SettingsRule(check, (lower, upper), conditions, reason, requirement)


def has_effect(config: Config, field: str) -> bool:
    """Return whether a setting has an effect: the condition in its metadata (`active_if`) is met, or a user-defined optimizer reads
    the setting."""
    condition = get_flag(field).metadata.active_if
    return condition is None or _is_met(condition, config) or field in get_choice_settings("optimizer", config.optimizer.optimizer)


def require_exclusive(*fields: str, reason: str) -> SettingsRule:
    """Build the rule that at most one of these settings may be set. The rule suggests to reset all but one of them.

    Args:
        reason: why the settings exclude each other, shown to the user.
    """

    def check(config: Config, world_size: int) -> Iterator[Finding]:
        non_defaults = {field: get_value(config, field) for field in fields if is_set(config, field)}
        conflicting = tuple(field for field, value in non_defaults.items() if value or (value == 0 and value is not False))
        if len(conflicting) > 1:
            candidates = [reset(config, *(field for field in conflicting if field != remaining)) for remaining in conflicting]
            message = f"{' and '.join(format_setting(config, field) for field in conflicting)} exclude each other."
            yield Finding(message, [candidates], fields=conflicting)

    *flags, last_flag = map(get_flag_name, fields)
    return SettingsRule(check, fields, (), reason, f"{', '.join(flags)} and {last_flag} exclude each other.")


def _format_condition(condition: Condition | None) -> str:
    return "" if condition is None else f" {condition.description}"


def _is_met(condition: Condition | None, config: Config) -> bool:
    return condition is None or condition.is_met(functools.partial(get_value, config))


def collect_rules(*modules: types.ModuleType) -> tuple[SettingsRule, ...]:
    """Return all rules that these modules define, in the order of their definition."""
    return tuple(dict.fromkeys(value for module in modules for value in vars(module).values() if isinstance(value, SettingsRule)))


MODEL_PARALLEL_SIZES = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
"""Fields that determine the data-parallel size."""


def create_change(**fields: Any) -> Change:
    """Build a `Change` that gives settings new values. The keyword arguments are the names of the settings."""
    return Change(tuple(fields.items()))


def try_values(field: str, current: float, values: Iterable[Any]) -> tuple[Change, ...]:
    """Build one change for each candidate value of a setting. Changes to values near the current value come first."""
    return tuple(create_change(**{field: value}) for value in sorted(set(values), key=lambda value: (abs(value - current), value)))


def get_value(config: Config, field: str) -> Any:
    """Return the value of the setting with this field name, whichever settings dataclass has the field."""
    return getattr(getattr(config, get_flag(field).topic), field)


def is_set(config: Config, field: str) -> bool:
    """Return whether a setting differs from its default."""
    return bool(get_value(config, field) != get_flag(field).default)


def reset(config: Config, *fields: str, **updates: Any) -> Change:
    """Build a change that resets settings to their defaults, if they are set, and gives other settings new values.

    Args:
        fields: names of the settings to reset.
        updates: new values of other settings, by name.
    """
    return create_change(**{field: get_flag(field).default for field in fields if is_set(config, field)}, **updates)


def format_setting(config: Config, field: str) -> str:
    """Format a setting as it is typed on the command line: ``--lr 0.1``, ``--bf16``, ``--no-load-optim``."""
    return _format_flag(get_flag(field), get_value(config, field))


def is_in_range(config: Config, field: str) -> bool:
    """Return whether the value of a setting is in its allowed range. The answer is also True if the setting has no range or its
    value is None. A missing required number is 0 and therefore out of range."""
    interval = get_flag(field).metadata.interval
    if interval is None:
        return True
    value = get_value(config, field)
    if value is None or value in get_flag(field).special_values:
        return True
    return all(map(interval.contains, value)) if isinstance(value, tuple) else interval.contains(value)


@functools.cache
def get_bounded_fields() -> tuple[str, ...]:
    """Return the names of all settings that have an allowed range, in the order of the flags."""
    return tuple(flag.field for flag in get_flags().values() if flag.metadata.interval is not None)


def find_out_of_range(config: Config) -> set[str]:
    """Return the names of the settings whose value is outside its allowed range, including missing required numbers."""
    return {field for field in get_bounded_fields() if not is_in_range(config, field)}


@functools.lru_cache(maxsize=1024)
def find_divisors(n: int) -> list[int]:
    """Return the divisors of a positive number in ascending order. (Above 10^10 only those up to 10^5 and their cofactors, to limit
    the time.)"""
    small = [d for d in range(1, min(math.isqrt(n), 10**5) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def find_multiples_near(value: int, unit: int, num_per_side: int = 8) -> list[int]:
    """Return the positive multiples of `unit` that are nearest to `value`: at most `num_per_side` + 1 that are not above `value`,
    and `num_per_side` + 1 above."""
    quotient = value // unit
    return [unit * multiplier for multiplier in range(max(1, quotient - num_per_side), quotient + num_per_side + 2)]


def get_data_parallel_size(config: Config, world_size: int) -> int | None:
    """Return the data-parallel size, or None if the world size is not a multiple of TP x CP x PP (the tensor-, context- and
    pipeline-parallel sizes)."""
    sizes = [getattr(config.parallel, field) for field in MODEL_PARALLEL_SIZES]
    is_divisible = world_size > 0 and min(sizes) > 0 and world_size % math.prod(sizes) == 0
    return world_size // math.prod(sizes) if is_divisible else None


def _compute_log2_distance(old: Any, new: Any) -> float:
    are_positive = all(isinstance(value, int | float) and not isinstance(value, bool) and value > 0 for value in (old, new))
    return abs(math.log2(new) - math.log2(old)) if are_positive and new != old else float(new != old)


def _format_flag(flag: Flag, value: Any) -> str:
    if flag.value_type is bool:
        return f"--{flag.name}" if value else f"--no-{flag.name}"
    values = value if isinstance(value, tuple) else (value,)
    return " ".join([f"--{flag.name}", *(shlex.quote(str(item)) for item in values)])
