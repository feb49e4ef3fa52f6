"""Metadata of settings: unit, allowed range, and the conditions under which a setting has an effect.

Each field of a settings dataclass declares its metadata: ``num_layers: int = setting(0, min_value=1, unit="layers",
required=True)``. The rules, ``--explain`` and the tests read the metadata from the field.
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
    """Interval of the allowed values of a number."""

    low: float
    high: float = math.inf
    includes_low: bool = True
    includes_high: bool = True

    def contains(self, value: float) -> bool:
        """Return whether a finite number is in the interval. NaN and infinity never are."""
        above = value >= self.low if self.includes_low else value > self.low
        below = value <= self.high if self.includes_high else value < self.high
        return math.isfinite(value) and above and below

    def __str__(self) -> str:
        low = f"at least {self.low:g}" if self.includes_low else f"above {self.low:g}"
        if self.high == math.inf:
            return low
        return f"{low} and {f'at most {self.high:.12g}' if self.includes_high else f'below {self.high:g}'}"


@dataclass(frozen=True)
class NotEqual:
    """Stands for any value except `value`, as the expected value of a setting in a `Condition`."""

    value: Any


IS_SET = object()
"""Any value except None, 0 and empty values, as the expected value in a `Condition`."""


@dataclass(frozen=True)
class Condition:
    """Condition on the values of other settings. It says when a setting has an effect, or when it has none."""

    values: Mapping[str, Any]
    """Expected value by the name of the setting: a value, a tuple of possible values, `NotEqual`, or `IS_SET`."""
    description: str
    """Text for messages: the condition in words or, for a condition under which a setting has no effect, the reason."""
    require_all: bool = False
    """Whether all entries of `values` must match; otherwise one matching entry is enough."""
    fix: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Values of other settings that make the condition true, to suggest if it is not met; empty to suggest nothing."""
    effect: str = "has no effect"
    """What the setting does when a condition of `SettingMetadata.idle_if` is met, as a phrase for messages: "has no effect",
    "saves no memory"."""
    strict: bool = False
    """Whether a setting that the user gives is refused, instead of ignored, while this condition is not met. Used for settings that
    change the model or protect state: a run that ignored them would train another model or lose state."""

    def is_met(self, get_value: Callable[[str], Any]) -> bool:
        """Return whether the condition is met.

        Args:
            get_value: returns the value of a setting by its name.
        """
        return (all if self.require_all else any)(_matches(get_value(name), expected) for name, expected in self.values.items())


@dataclass(frozen=True)
class SettingMetadata:
    """Metadata of a field of a settings dataclass."""

    unit: str | None = None
    """Unit of a numeric setting, such as steps or tokens. Every numeric setting has one."""
    interval: Interval | None = None
    """Allowed values of a numeric setting. Every numeric setting has an interval."""
    required: bool = False
    """Whether the setting has no useful default and must be set."""
    active_if: Condition | None = None
    """Condition under which the setting has an effect. A setting that is set although the condition is not met is reset to its
    default with a note, or refused if the condition is strict."""
    idle_if: tuple[Condition, ...] = ()
    """Conditions under which the setting has little or no effect, although `active_if` is met. The setting is accepted, and the
    start-up log gives the reason."""
    is_extensible: bool = False
    """Whether user modules can register choices in addition to those in the field's type (see
    `megatron/spec/activations.py`)."""
    is_path: bool = False
    """Whether a text is the path of a file or folder, which may also be a URL or a name. Of several texts, each may be a path."""


def setting(
    default: _T,
    *,
    unit: str | None = None,
    min_value: float | None = None,
    above: float | None = None,
    max_value: float = math.inf,
    below: float | None = None,
    required: bool = False,
    active_if: Condition | None = None,
    idle_if: Condition | tuple[Condition, ...] = (),
    is_extensible: bool = False,
    is_path: bool = False,
) -> _T:
    """Declare a field of a settings dataclass, with its default and metadata.

    The annotated return type is that of the default, not of the field, as for `dataclasses.field`.

    Args:
        default: value if the user does not set the setting.
        unit: unit of a number.
        min_value: smallest allowed number.
        above: exclusive lower bound of a number, instead of `min_value`.
        max_value: largest allowed number.
        below: exclusive upper bound of a number, instead of `max_value`.
        required: whether the setting must be set, because it has no useful default.
        active_if: condition under which the setting has an effect. If it is not met, the setting is reset to its default with a
            note, or refused if the condition is strict.
        idle_if: conditions under which the setting has little or no effect although `active_if` is met. The setting is accepted,
            and the start-up log gives the reason.
        is_extensible: whether user modules can add choices to those in the field's type.
        is_path: whether a text is the path of a file or folder.
    """
    interval = None
    low = min_value if min_value is not None else above
    if low is not None:
        interval = Interval(low, max_value if below is None else below, includes_low=above is None, includes_high=below is None)
    metadata = SettingMetadata(
        unit, interval, required, active_if, idle_if if isinstance(idle_if, tuple) else (idle_if,), is_extensible, is_path
    )
    field: Any = dataclasses.field(default=default, metadata={SettingMetadata: metadata})
    return field  # type: ignore[no-any-return]


def condition(
    description: str = "", *, require_all: bool = False, strict: bool = False, fix: Mapping[str, Any] | None = None, **values: Any
) -> Condition:
    """Build the condition under which a setting has an effect.

    Args:
        description: the condition in words that continue the message "it acts only ...". By default a text such as "with --flag-a 1
            or --flag-b" is generated.
        require_all: whether all expected values are required; otherwise one of them is enough.
        strict: refuse the setting if the condition is not met; otherwise a note is logged.
        fix: settings to suggest if the condition is not met; by default the first of `values`, if it is a switch or a choice.
        values: expected value by the name of the setting.
    """
    if not description:
        *leading, last = [_format_expected(name, expected) for name, expected in values.items()]
        description = f"with {', '.join(leading)} {'and' if require_all else 'or'} {last}" if leading else f"with {last}"
    if fix is None:
        name, expected = next(iter(values.items()))
        value = expected[0] if isinstance(expected, tuple) else expected
        fix = {name: value} if isinstance(value, bool | str) else {}
    return Condition(values, description, require_all, fix, strict=strict)


def idle_condition(reason: str, *, require_all: bool = False, effect: str = "has no effect", **values: Any) -> Condition:
    """Build a condition under which a setting has little or no effect.

    Args:
        reason: why the setting has no effect, for the start-up log.
        require_all: whether the setting is idle only if all of `values` match; otherwise one match is enough.
        effect: what the setting does under this condition, as a phrase for messages, such as "saves no memory".
        values: by the name of another setting, the value with which this setting is idle.
    """
    return Condition(values, reason, require_all, effect=effect)


def _matches(value: Any, expected: Any) -> bool:
    if expected is IS_SET:
        return bool(value)
    if isinstance(expected, NotEqual):
        return bool(value != expected.value)
    return value in expected if isinstance(expected, tuple) else bool(value == expected)


def get_flag_name(field: str) -> str:
    """Return the flag of a field as it is typed: `--num-layers` for `num_layers`."""
    return f"--{field.replace('_', '-')}"


def _format_expected(name: str, expected: Any) -> str:
    """Format a setting and its expected value for a message, such as "--device cpu"."""
    flag = get_flag_name(name)
    if expected is IS_SET or expected is True:
        return flag
    if isinstance(expected, NotEqual):
        return f"a {flag} other than {expected.value}"
    return f"{flag} {' or '.join(map(str, expected)) if isinstance(expected, tuple) else expected}"
