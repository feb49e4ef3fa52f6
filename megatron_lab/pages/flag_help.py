"""Texts of ``--help all`` and ``--explain FLAG``, generated from the fields of the settings, their docstrings, and the rules on
combinations of settings."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import io
import os
import shutil
import textwrap
from collections.abc import Iterator
from typing import Annotated, Any

from megatron.config.config import Config
from megatron.config.errors import ConfigError, Violation
from megatron.config.flags import Flag, find_flag, get_flags, get_topics, suggest_names
from megatron.config.optional_packages import is_missing, note_missing_packages
from megatron.config.parsed_flags import COUNT, GPUS_PER_NODE, LAUNCHER_FLAGS, NO_VALUE, REQUESTS, SEARCH_ADVICE
from megatron.config.rules import RULES
from megatron.config.setting import get_flag_name
from megatron_lab.migration.compat import COMPAT_FLAGS, TRANSLATIONS, NoEffectFlag, match_flag_pattern
from megatron_lab.migration.flag_synonyms import find_advice

_MIN_WIDTH, _MAX_WIDTH = 60, 110  # columns of a page
PROGRAM_FLAGS = {**LAUNCHER_FLAGS, **REQUESTS}
"""Accepted values and help text of each flag that is not a setting."""
_DESCRIPTION = (
    "Pretrain a GPT- or Llama-style model with tensor, pipeline and data parallelism, by the same command on one CPU and on "
    "many GPUs. Flags have the names and defaults of Megatron-LM; those that are not supported are refused, with a "
    "message that says what to use instead."
)


def format_full_help(program: str) -> str:
    """Return the text of ``--help all`` at the width of the terminal: flags grouped by topic, each with its docstring and default.

    If the package tyro is missing, the text has the same content in a simpler format.

    Args:
        program: name of the program in the usage line.
    """
    if is_missing("tyro"):
        return "\n".join(_iter_plain_help(program)) + "\n"
    import tyro  # the import takes 0.1 s, so only --help all makes it

    def build_request_field(name: str) -> tuple[str, Any, Any]:
        value_format, description = PROGRAM_FLAGS[name]
        if name == "gpus-per-node":
            return "gpus_per_node", Annotated[int, tyro.conf.arg(help=description)], GPUS_PER_NODE
        field_type: Any = {NO_VALUE: Annotated[bool, tyro.conf.FlagCreatePairsOff], COUNT: int | None}.get(value_format, str | None)
        field_name = f"asked_{name}".replace("-", "_")  # a topic may have the name without the prefix
        return (
            field_name,
            Annotated[field_type, tyro.conf.arg(name=name, help=description)],
            False if value_format == NO_VALUE else None,
        )

    command_line_class = dataclasses.make_dataclass(
        "CommandLine", map(build_request_field, PROGRAM_FLAGS), bases=(Config,), frozen=True
    )
    width = shutil.get_terminal_size().columns - 1  # a terminal may wrap a line that fills all columns
    with io.StringIO() as page:
        with contextlib.redirect_stdout(page), contextlib.suppress(SystemExit), _set_terminal_width(width):
            tyro.cli(
                command_line_class, args=["--help"], prog=program, description=_DESCRIPTION, config=(tyro.conf.OmitArgPrefixes,)
            )
        lines = [line.rstrip() for line in page.getvalue().splitlines()]
    return "\n".join(fitted for line in lines for fitted in _fill_paragraph(line, width)) + "\n"


@contextlib.contextmanager
def _set_terminal_width(width: int) -> Iterator[None]:
    """Set the width in columns that `shutil.get_terminal_size` returns in the `with` block."""
    previous = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(width)
    try:
        yield
    finally:
        if previous is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = previous


def _fill_paragraph(line: str, width: int) -> list[str]:
    """Wrap a line without indent, such as the description, which tyro does not wrap. Other lines are kept."""
    return textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) if line[:1].strip() else [line]


def _iter_plain_help(program: str) -> Iterator[str]:
    """Yield the lines of the ``--help all`` text in the simple format that is used if the package tyro is missing."""
    yield from _wrap(f"usage: {program} [flags]", "  ", "")
    yield from ("", *_wrap(_DESCRIPTION, ""), "", *_wrap(f"{note_missing_packages()[0]}", "  ", ""))
    for name, (value_format, description) in PROGRAM_FLAGS.items():
        yield from ("", f"--{name}" + ("" if value_format == NO_VALUE else f" {value_format}"), *_wrap(description, "    "))
    for topic in get_topics():
        yield f"\n{topic}:"
        for flag in get_flags().values():
            if flag.topic == topic:
                yield f"\n--{flag.name}" if flag.value_type is not bool else f"\n--{flag.name}, --no-{flag.name}"
                yield from _wrap(f"{format_flag_docs(flag)} (default: {_format_default(flag)})", "    ")


def explain(name: str) -> str:
    """Return the text that ``--explain`` prints about one flag.

    Args:
        name: name of the flag, with or without its leading dashes.

    Raises:
        ConfigError: the flag is unknown. The message suggests flags with similar names.
    """
    name = name.lstrip("-").replace("_", "-")
    flag = find_flag(name)
    if flag is not None:
        return "\n".join(_iter_page(flag)) + "\n"
    if name in PROGRAM_FLAGS:
        value_format, description = PROGRAM_FLAGS[name]
        return "\n".join([f"--{name}", *_wrap(description, "  "), "", f"  {'takes':9} {value_format}"]) + "\n"
    if (accepted := TRANSLATIONS.get(name)) is not None:
        return "\n".join(_wrap(f"--{name} is taken as {accepted.template.format('VALUE')}.", "  ", "")) + "\n"
    foreign = COMPAT_FLAGS.get(name) or match_flag_pattern(name)
    if foreign is not None:
        outcome = (
            f"is accepted and has no effect: {foreign.reason}."
            if isinstance(foreign, NoEffectFlag)
            else f"is refused. {foreign.reason}"
        )
        return "\n".join(_wrap(f"--{name} {outcome}", "  ", "")) + "\n"
    if (advice := find_advice(name)) is not None:
        raise ConfigError([Violation(("--explain",), f"--{name} is not a flag.", advice)])
    suggestions = tuple(f"--explain {suggestion}" for suggestion in suggest_names(name, [*get_flags(), *PROGRAM_FLAGS]))
    raise ConfigError([Violation(("--explain",), f"--{name} is not a flag.", "" if suggestions else SEARCH_ADVICE, suggestions)])


def _iter_page(flag: Flag) -> Iterator[str]:
    yield from _wrap(f"--{flag.name}" if flag.value_type is not bool else f"--{flag.name}, --no-{flag.name}", "  ", "")
    yield from _wrap(format_flag_docs(flag), "  ")
    yield ""
    for label, text in _iter_properties(flag):
        yield from _wrap(f"{label:9} {text}", "            ", "  ")
    if rules := find_rules(flag.field):
        yield "\n  Rules that its value must satisfy:"
        for reason, fields in rules:
            unnamed = [name for name in map(get_flag_name, fields) if name not in _tokenize(reason)]
            yield from _wrap(f"{reason} (with {', '.join(unnamed)})" if unnamed else reason, "    ", "  - ")
    if mentions := _find_mentions(flag):
        yield "\n  See also:"
        for mentioned in mentions:
            yield from _wrap(f"--{mentioned.name}: {get_flag_docs(mentioned)}", "    ", "  - ")


def _iter_properties(flag: Flag) -> Iterator[tuple[str, str]]:
    """Yield (label, text) of each property of a flag, for the page of ``--explain``.

    The properties include the accepted value, the default, and the conditions under which the flag takes effect. The last ones list
    the flags that take effect only with, or only without, this flag.
    """
    metadata = flag.metadata
    bound = f", {'each ' if flag.is_tuple else ''}{metadata.interval}" if metadata.interval is not None else ""
    optional = ", or None" if flag.is_optional and not metadata.required else ""
    yield "takes", "no value: it is a switch" if flag.value_type is bool else f"{flag.expected}{bound}{optional}"
    if metadata.unit is not None:
        yield "unit", metadata.unit
    yield "default", _format_default(flag)
    yield "in files", f"under {flag.topic}: {flag.field}"
    if metadata.active_if is not None:
        yield "acts", f"only {metadata.active_if.description}"
    for condition in metadata.idle_if:
        yield "idle", f"{'' if condition.effect == 'has no effect' else f'({condition.effect}) '}where {condition.description}"
    enabled_names: list[str] = []
    disabled_names: list[str] = []
    for dependent in get_flags().values():
        if dependent.metadata.active_if is not None and flag.field in dependent.metadata.active_if.values:
            (disabled_names if dependent.metadata.active_if.values[flag.field] in (None, False) else enabled_names).append(
                f"--{dependent.name}"
            )
    if enabled_names:
        yield "needed by", ", ".join(enabled_names)
    if disabled_names:
        yield "stops", ", ".join(disabled_names)


def _format_default(flag: Flag) -> str:
    if flag.metadata.required:
        return "none: it must be given"
    if flag.value_type is bool:
        return "on" if flag.default else "off"
    if isinstance(flag.default, tuple):
        return " ".join(map(str, flag.default)) or "no value"
    return "not set" if flag.default is None else str(flag.default)


def find_rules(field: str) -> list[tuple[str, tuple[str, ...]]]:
    """Return the rules on combinations of settings that involve this setting and others.

    Args:
        field: field name of the setting.

    Returns:
        For each rule: the rule's text with its reason, and the field names of the other settings, in the order of the flags. Rules
        with the same text count as one.
    """
    fields_by_statement: dict[str, set[str]] = {}
    for rule in RULES:
        if field in rule.fields and len(rule.fields) > 1:
            fields_by_statement.setdefault(rule.statement, set()).update(rule.fields)
    field_order = [flag.field for flag in get_flags().values() if flag.field != field]
    return [(statement, tuple(name for name in field_order if name in fields)) for statement, fields in fields_by_statement.items()]


def _find_mentions(flag: Flag) -> list[Flag]:
    """Return the flags that this flag's docstring mentions, and the flags whose docstrings mention this flag, for "See also".

    A flag is left out if the page already lists it, because a rule involves both flags.
    """
    covered = {field for _, fields in find_rules(flag.field) for field in fields} | {flag.field}
    text = get_flag_docs(flag)
    return [
        candidate
        for candidate in get_flags().values()
        if candidate.field not in covered and (_mentions_flag(text, candidate) or _mentions_flag(get_flag_docs(candidate), flag))
    ]


def _mentions_flag(text: str, flag: Flag) -> bool:
    return f"--{flag.name}" in _tokenize(text)


@functools.cache
def _tokenize(text: str) -> frozenset[str]:
    return frozenset(word.strip(".,;:()") for word in text.replace("/", " ").split())


def _wrap(text: str, indent: str, first_indent: str | None = None) -> list[str]:
    return textwrap.wrap(
        text,
        get_page_width(),
        initial_indent=indent if first_indent is None else first_indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def get_page_width() -> int:
    """Return the number of columns of a page: that of the terminal, within bounds, or 80 without a terminal. One column stays free,
    because some terminals wrap a line that fills all columns."""
    return min(_MAX_WIDTH, max(_MIN_WIDTH, shutil.get_terminal_size().columns - 1))


def format_flag_summary(flag: Flag) -> str:
    """Return a flag with the form of its values, such as ``--lr NUMBER`` or ``--tiktoken-pattern v1|v2``."""
    if flag.value_type is bool:
        return f"--{flag.name}"
    if flag.choices:
        return f"--{flag.name} {'|'.join(flag.choices)}"
    value = {int: "N", float: "X", str: "TEXT"}[flag.value_type]
    return f"--{flag.name} {'...' if flag.num_values is None else ' '.join([value] * flag.num_values)}"


def list_refused_and_replaced_flags() -> set[str]:
    """Return the names of Megatron-LM's flags that have pages although they are not settings here."""
    return {*COMPAT_FLAGS, *TRANSLATIONS}


def get_flag_docs(flag: Flag) -> str:
    """Return the help text of a flag, in one line."""
    return read_field_docs(get_topics()[flag.topic])[flag.field]


def format_flag_docs(flag: Flag) -> str:
    """Return the help text of a flag, in one line. That of a switch that is on by default ends with a note how to switch it off."""
    note = format_off_note(flag)
    return f"{get_flag_docs(flag)} {note[:1].upper()}{note[1:]}." if note else get_flag_docs(flag)


def format_off_note(flag: Flag) -> str:
    """Return how to switch off a switch that is on by default; an empty text for other flags. The help text of the switch says what
    it does while it is on."""
    return f"on by default; --no-{flag.name} switches it off" if flag.value_type is bool and flag.default else ""


@functools.cache
def read_field_docs(config_class: type) -> dict[str, str]:
    """Read the docstrings below the fields of a dataclass and of its base classes from the source code.

    Returns:
        The docstrings by field name, each joined to one line.
    """
    docs: dict[str, str] = {}
    for base in config_class.__bases__:
        docs |= read_field_docs(base) if dataclasses.is_dataclass(base) else {}
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(config_class))).body
    assert isinstance(definition, ast.ClassDef)
    for field, docstring in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(docstring, ast.Expr) and isinstance(docstring.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            docs[field.target.id] = " ".join(str(docstring.value.value).split())
    return docs
