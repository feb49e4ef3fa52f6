"""What is said of each setting by itself: that it is given, in its range, and acts. The fields say what holds for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

from megatron.config.checks.finding import Change, Finding, change, data_size, is_changed, rule, shown, value_of
from megatron.config.config import Config
from megatron.config.flags import Flag, flags
from megatron.config.setting import Interval

LARGEST_WORLD = 1_048_576
"""Ranks: no machine has as many."""


@rule()
def required_are_given(config: Config, world_size: int) -> Iterator[Finding]:
    """What has no useful default must be given."""
    for flag in flags().values():
        if flag.facts.required and value_of(config, flag.field) in (None, 0):
            bound = f", {flag.facts.interval}" if flag.facts.interval else ""
            yield Finding((flag.field,), f"--{flag.name} is missing.", f"It takes {flag.expects}{bound}.")


def as_given(finding: Finding, config: Config, world_size: int, given: Collection[str]) -> Finding:
    """What `required_are_given` finds, of a setting that was given, as 0: settings alone do not tell that from one left out."""
    (field,) = finding.fields
    if field not in given or value_of(config, field) != 0:
        return finding
    return next(_out_of_range(config, world_size, flag) for flag in flags().values() if flag.field == field)


@rule()
def numbers_in_range(config: Config, world_size: int) -> Iterator[Finding]:
    """Every number lies in its interval."""
    for flag in flags().values():
        value, interval = value_of(config, flag.field), flag.facts.interval
        if interval is None or value is None or (flag.facts.required and value == 0):
            continue
        if not all(map(interval.holds, value if isinstance(value, tuple) else (value,))):
            yield _out_of_range(config, world_size, flag)


def _out_of_range(config: Config, world_size: int, flag: Flag) -> Finding:
    value, interval = value_of(config, flag.field), flag.facts.interval
    assert interval is not None
    nearest = _nearest_bounds(flag.field, value, interval)
    if flag.field == "global_batch_size" and config.training.micro_batch_size > 0:  # the bound itself is seldom a whole step
        ranks = data_size(config, world_size) or 1
        nearest += (change(global_batch_size=config.training.micro_batch_size * ranks),)
    return Finding(
        (flag.field,),
        f"{shown(config, flag.field)} is out of range.",
        f"{'Each number' if isinstance(value, tuple) else 'It'} must be {interval}.",
        (tuple(dict.fromkeys(nearest)),),
    )


def _nearest_bounds(field: str, value: Any, interval: Interval) -> tuple[Change, ...]:
    """The end of the interval on the side where the number lies, if it belongs to the interval."""
    if isinstance(value, tuple) or math.isnan(value):
        return ()
    end, belongs = (interval.low, interval.with_low) if value <= interval.low else (interval.high, interval.with_high)
    return (change(**{field: type(value)(end)}),) if belongs and math.isfinite(end) else ()


@rule()
def world_has_ranks(config: Config, world_size: int) -> Iterator[Finding]:
    """There is at least one rank, and not more than any machine has."""
    if not 1 <= world_size <= LARGEST_WORLD:
        nearest = Change(world_size=min(max(world_size, 1), LARGEST_WORLD))
        bounds = f"It must be at least 1 and at most {LARGEST_WORLD:,}."
        yield Finding((), f"The world size {world_size:,} is out of range.", bounds, ((nearest,),))


@rule()
def changed_settings_act(config: Config, world_size: int) -> Iterator[Finding]:
    """A setting that differs from its default has an effect."""
    for flag in flags().values():
        acts = flag.facts.acts
        if acts is not None and is_changed(config, flag.field) and not acts.holds(_look_up(config)):
            yield Finding(
                (flag.field,),
                f"{shown(config, flag.field)} would have no effect: it acts only {acts.words}.",
                "Leave it out, or make it act.",
                ((change(**acts.fix),) if acts.fix else (),),
            )


def idle_settings(config: Config, data_ranks: int, chunks: int) -> Iterator[str]:
    """One line for each setting that changes nothing beside the others, with the reason."""
    look_up = _look_up(config, data_ranks=data_ranks, chunks=chunks)
    for flag in flags().values():
        for idle in flag.facts.idle:
            if is_changed(config, flag.field) and idle.holds(look_up):
                yield f"{shown(config, flag.field)} has no effect: {idle.words}."


def _look_up(config: Config, **counted: int) -> Callable[[str], Any]:
    """The value of a setting, or of what was counted from the settings, by its name."""
    return lambda name: counted[name] if name in counted else value_of(config, name)
