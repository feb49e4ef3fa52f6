"""The pages of ``--help`` and ``--explain FLAG``, made from the facts and texts of the fields and rules."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import io
import textwrap
from collections.abc import Iterator
from typing import Annotated, Any

from megatron.config.config import Config
from megatron.config.errors import ConfigError, Violation
from megatron.config.extras import is_missing, missing_note
from megatron.config.flags import Flag, flag_of, flags, nearest_names, topics
from megatron.config.given import COUNT, GPUS_PER_NODE, NO_VALUE, REQUESTS
from megatron.config.rules import RULES
from megatron.config.setting import typed
from megatron_lab.migration.compat import KNOWN, TAKEN, NoEffect, find_family

_WIDTH = 110  # of a page of --explain
_DESCRIPTION = (
    "Pretrain a GPT- or Llama-style model with tensor, pipeline and data parallelism, by the same command on one CPU and on "
    "many GPUs. Flags have the names and defaults of Megatron-LM; those that cannot be had are refused with what to use instead."
)


def help_text(program: str) -> str:
    """The text of ``--help``, as wide as the terminal: grouped by topic, each flag with its docstring and default."""
    if is_missing("tyro"):
        return "\n".join(_plain_help(program)) + "\n"
    import tyro  # this import takes 0.1 s, which only this page has time for

    def request(name: str) -> tuple[str, Any, Any]:
        takes, text = REQUESTS[name]
        if name == "gpus-per-node":
            return "gpus_per_node", Annotated[int, tyro.conf.arg(help=text)], GPUS_PER_NODE
        kind: Any = {NO_VALUE: Annotated[bool, tyro.conf.FlagCreatePairsOff], COUNT: int | None}.get(takes, str | None)
        field = f"asked_{name}".replace("-", "_")  # a topic may have the same name
        return field, Annotated[kind, tyro.conf.arg(name=name, help=text)], False if takes == NO_VALUE else None

    command_line = dataclasses.make_dataclass("CommandLine", map(request, REQUESTS), bases=(Config,), frozen=True)
    with io.StringIO() as page:
        with contextlib.redirect_stdout(page), contextlib.suppress(SystemExit):
            tyro.cli(command_line, args=["--help"], prog=program, description=_DESCRIPTION, config=(tyro.conf.OmitArgPrefixes,))
        return page.getvalue()


def _plain_help(program: str) -> Iterator[str]:
    """Yield the lines of a page with the same facts, for a checkout without tyro."""
    yield from _wrapped(f"usage: {program} [flags]", "  ", "")
    yield from ("", *_wrapped(_DESCRIPTION, ""), "", *_wrapped(f"{missing_note()[0]}", "  ", ""))
    for name, (takes, text) in REQUESTS.items():
        yield from ("", f"--{name}" + ("" if takes == NO_VALUE else f" {takes}"), *_wrapped(text, "    "))
    for topic in topics():
        yield f"\n{topic}:"
        for flag in flags().values():
            if flag.topic == topic:
                yield f"\n--{flag.name}" if flag.kind is not bool else f"\n--{flag.name}, --no-{flag.name}"
                yield from _wrapped(f"{_text(flag)} (default: {_default(flag)})", "    ")


def explain(name: str) -> str:
    """The answer to ``--explain``: a page on one flag, given with or without its dashes.

    Raises:
        ConfigError: the flag is unknown; the message names those that may have been meant.
    """
    name = name.lstrip("-").replace("_", "-")
    flag = flag_of(name)
    if flag is not None:
        return "\n".join(_page(flag)) + "\n"
    if name in REQUESTS:
        return "\n".join([f"--{name}", *_wrapped(REQUESTS[name][1], "  ")]) + "\n"
    if (other := TAKEN.get(name)) is not None:
        return "\n".join(_wrapped(f"--{name} is taken as {other.words.format('VALUE')}.", "  ", "")) + "\n"
    known = KNOWN.get(name) or find_family(name)
    if known is not None:
        fate = f"is accepted and has no effect: {known.reason}." if isinstance(known, NoEffect) else f"is refused. {known.reason}"
        return "\n".join(_wrapped(f"--{name} {fate}", "  ", "")) + "\n"
    nearest = tuple(f"--explain {near}" for near in nearest_names(name, [*flags(), *REQUESTS]))
    raise ConfigError(
        [Violation(("--explain",), f"--{name} is not a flag.", "" if nearest else "See --help for all flags.", nearest)]
    )


def _page(flag: Flag) -> Iterator[str]:
    yield f"--{flag.name}" if flag.kind is not bool else f"--{flag.name}, --no-{flag.name}"
    yield from _wrapped(_text(flag), "  ")
    yield ""
    for label, fact in _facts(flag):
        yield from _wrapped(f"{label:9} {fact}", "            ", "  ")
    if rules := rules_about(flag.field):
        yield "\n  Rules that it must keep:"
        for why, others in rules:
            yield from _wrapped(f"{why} (with {', '.join(map(typed, others))})", "    ", "  - ")
    if mentions := _mentions(flag):
        yield "\n  See also:"
        for other in mentions:
            yield from _wrapped(f"--{other.name}: {_text(other)}", "    ", "  - ")


def _facts(flag: Flag) -> Iterator[tuple[str, str]]:
    """What it takes, when it acts, and what acts only with it, each with a label."""
    facts = flag.facts
    bound = f", {'each ' if flag.is_tuple else ''}{facts.interval}" if facts.interval is not None else ""
    optional = ", or None" if flag.optional and not facts.required else ""
    yield "takes", "no value: it is a switch" if flag.kind is bool else f"{flag.expects}{bound}{optional}"
    if facts.unit is not None:
        yield "unit", facts.unit
    yield "default", _default(flag)
    yield "in files", f"under {flag.topic}: {flag.field}"
    if facts.acts is not None:
        yield "acts", f"only {facts.acts.words}"
    for idle in facts.idle:
        yield "idle", f"{'' if idle.effect == 'has no effect' else f'({idle.effect}) '}where {idle.words}"
    needed: list[str] = []
    stopped: list[str] = []
    for other in flags().values():
        if other.facts.acts is not None and flag.field in other.facts.acts.others:
            (stopped if other.facts.acts.others[flag.field] in (None, False) else needed).append(f"--{other.name}")
    if needed:
        yield "needed by", ", ".join(needed)
    if stopped:
        yield "stops", ", ".join(stopped)


def _default(flag: Flag) -> str:
    if flag.facts.required:
        return "none: it must be given"
    if flag.kind is bool:
        return "on" if flag.default else "off"
    if isinstance(flag.default, tuple):
        return " ".join(map(str, flag.default)) or "no value"
    return "not set" if flag.default is None else str(flag.default)


def rules_about(field: str) -> list[tuple[str, tuple[str, ...]]]:
    """Each rule about a setting and others: its reason, and the others' names in the order of the flags."""
    order = [flag.field for flag in flags().values()]
    return [
        (rule.why, tuple(other for other in order if other in rule.fields and other != field))
        for rule in RULES
        if field in rule.fields and len(rule.fields) > 1
    ]


def _mentions(flag: Flag) -> list[Flag]:
    """Settings whose texts name this one, or that its own text names, and that share no rule with it."""
    told = {other for _, others in rules_about(flag.field) for other in others} | {flag.field}
    own = _text(flag)
    return [other for other in flags().values() if other.field not in told and (_names(own, other) or _names(_text(other), flag))]


def _names(text: str, flag: Flag) -> bool:
    return f"--{flag.name}" in _words(text)


@functools.cache
def _words(text: str) -> frozenset[str]:
    return frozenset(word.strip(".,;:()") for word in text.replace("/", " ").split())


def _wrapped(text: str, indent: str, first: str | None = None) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _text(flag: Flag) -> str:
    return field_docs(topics()[flag.topic])[flag.field]


@functools.cache
def field_docs(topic: type) -> dict[str, str]:
    """The texts below the fields of a dataclass and of those that it is made of, each as one line, by the fields' names."""
    found: dict[str, str] = {}
    for base in topic.__bases__:
        found |= field_docs(base) if dataclasses.is_dataclass(base) else {}
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(topic))).body
    assert isinstance(definition, ast.ClassDef)
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = " ".join(str(below.value.value).split())
    return found
