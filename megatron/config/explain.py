"""The answer to ``--explain FLAG``: what it does, its unit and default, and everything that knows it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from megatron.config.checks.inert import CONDITIONS
from megatron.config.checks.ranges import RANGES, REQUIRED
from megatron.config.compat import NoEffect, find, find_family
from megatron.config.errors import ConfigError, Violation
from megatron.config.field_docs import field_docs
from megatron.config.flags import Flag, flag_of, flags, nearest_names, topics
from megatron.config.relations import rules_about
from megatron.config.requests import HELP
from megatron.config.units import UNITS

_WIDTH = 110


def explain(name: str) -> str:
    """A page on one flag, given with or without its dashes.

    Raises:
        ConfigError: nobody knows such a flag; names those that may have been meant.
    """
    name = name.lstrip("-").replace("_", "-")
    flag = flag_of(name)
    if flag is not None:
        return "\n".join(_page(flag)) + "\n"
    if name in HELP:
        return "\n".join([f"--{name}", *_wrapped(HELP[name], "  ")]) + "\n"
    known = find(name) or find_family(name)
    if known is not None:
        fate = f"is accepted and has no effect: {known.reason}." if isinstance(known, NoEffect) else f"is refused. {known.reason}"
        return "\n".join(_wrapped(f"--{name} {fate}", "  ", "")) + "\n"
    nearest = tuple(f"--explain {near}" for near in nearest_names(name, [*flags(), *HELP]))
    raise ConfigError(
        [Violation(("--explain",), f"--{name} is not a flag.", "" if nearest else "See --help for all flags.", nearest)]
    )


def _page(flag: Flag) -> Iterator[str]:
    yield f"--{flag.name}" if flag.kind is not bool else f"--{flag.name}, --no-{flag.name}"
    yield from _wrapped(field_docs(topics()[flag.topic])[flag.field], "  ")
    yield ""
    yield from _wrapped(f"takes     {_takes(flag)}", "            ", "  ")
    if flag.field in UNITS:
        yield f"  unit      {UNITS[flag.field]}"
    yield f"  default   {_default(flag)}"
    yield f"  in files  under {flag.topic}: {flag.field}"
    yield from _conditions(flag)
    rules = rules_about(flag.field)
    if rules:
        yield "\n  Rules that it must keep:"
        for why, others in rules:
            yield from _wrapped(f"{why} (with {', '.join(map(_flag_name, others))})", "    ", "  - ")
    mentions = _mentions(flag)
    if mentions:
        yield "\n  See also:"
        for other in mentions:
            yield from _wrapped(f"--{other.name}: {field_docs(topics()[other.topic])[other.field]}", "    ", "  - ")


def _takes(flag: Flag) -> str:
    if flag.kind is bool:
        return "no value: it is a switch"
    bound = f", {'each ' if flag.is_tuple else ''}{RANGES[flag.field]}" if flag.field in RANGES else ""
    return f"{flag.expects}{bound}{', or None' if flag.optional and flag.field not in REQUIRED else ''}"


def _default(flag: Flag) -> str:
    if flag.field in REQUIRED:
        return "none: it must be given"
    if flag.kind is bool:
        return "on" if flag.default else "off"
    if isinstance(flag.default, tuple):
        return " ".join(map(str, flag.default)) or "no value"
    return "not set" if flag.default is None else str(flag.default)


def _conditions(flag: Flag) -> Iterator[str]:
    """When it acts, and what acts only with it."""
    for condition in CONDITIONS:
        if flag.field in condition.fields:
            yield from _wrapped(f"acts      only {condition.needs}", "            ", "  ")
    dependent = [field for condition in CONDITIONS if _names(condition.needs, flag) for field in condition.fields]
    if dependent:
        yield from _wrapped(f"needed by {', '.join(map(_flag_name, dict.fromkeys(dependent)))}", "            ", "  ")


def _mentions(flag: Flag) -> list[Flag]:
    """Settings whose texts name it, or that its own text names, and that share no rule with it."""
    told = {other for _, others in rules_about(flag.field) for other in others} | {flag.field}
    own = field_docs(topics()[flag.topic])[flag.field]
    return [
        other
        for other in flags().values()
        if other.field not in told and (_names(own, other) or _names(field_docs(topics()[other.topic])[other.field], flag))
    ]


def _names(text: str, flag: Flag) -> bool:
    words = (word.strip(".,;:()") for word in text.replace("/", " ").split())
    return f"--{flag.name}" in words


def _flag_name(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def _wrapped(text: str, indent: str, first: str | None = None) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )
