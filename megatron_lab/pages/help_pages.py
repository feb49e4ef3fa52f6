"""Texts of ``--help``: the main flags on one screen, the flags of a topic, and a search in names and help texts. ``--help all``
prints every flag with its full text."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from megatron.config.errors import ConfigError, Violation
from megatron.config.flags import Flag, find_flag, get_flags, get_topics, suggest_names
from megatron.config.parsed_flags import LIST_NAME, NO_VALUE
from megatron_lab.migration.flag_synonyms import find_advice
from megatron_lab.pages.flag_help import (
    PROGRAM_FLAGS,
    explain,
    format_flag_summary,
    format_full_help,
    format_off_note,
    get_flag_docs,
    get_page_width,
    list_refused_and_replaced_flags,
)

_ALL = "all"
"""Word after --help for the full text."""
_MAIN_FLAGS = (
    ("--model NAME", f"architecture (--model {LIST_NAME} prints all)"),
    ("--data-path PREFIX", "data that tools/preprocess_data.py made"),
    ("--tokenizer-model FILE", "its tokenizer: tokenizer.json or NAME.model;"),
    ("", "any other file also needs --tokenizer-type"),
    ("--seq-length N", "tokens of a training sequence"),
    ("--micro-batch-size N", "sequences that a device processes at once"),
    ("--global-batch-size N", "sequences of a step, over all devices"),
    ("--train-iters N", "number of steps"),
    ("--lr X", "maximum learning rate, such as 3e-4"),
    ("--bf16", "train in bfloat16 (updates in float32)"),
    ("--tensor-model-parallel-size N", "devices that split each layer"),
    ("--pipeline-model-parallel-size N", "devices that split the sequence of layers"),
    ("--save DIR --load DIR", "write checkpoints to DIR, resume from them"),
)
"""Flags that most runs set, and what they do in few words. An empty name continues the text of the flag before it."""
_MAIN_WIDTH = 33
"""Width of the column of flags in the main help."""
_LABEL_WIDTH = 32
"""Width of the column of flags in other tables."""
_VALUE_NOUNS = ("name", "file", "folder", "flag")
"""Values that are not numbers, of flags that are not settings."""
_MAX_TEXT_LINES = 2  # lines of help text per flag in a table
_MAX_NAMES = 8  # names of matching flags to list without their texts
_MAX_SCREEN = 23  # lines of a terminal, without the next prompt
_PLURAL = re.compile(r"(?<=[^\Ws]{3})s\b")  # end of a word such as "signals"; not that of "loss"
_STOP_WORDS = frozenset("a all an and by for from how in is of on or the to what which with".split())


class _Entry(NamedTuple):
    """Flag with its help text."""

    name: str
    label: str
    """Flag with its values, such as ``--lr X``."""
    docs: str
    note: str = ""
    """Note about the default, which is shown completely even if the help text is cut."""


def format_help(program: str, words: Sequence[str]) -> str:
    """Return the text of ``--help``.

    Args:
        program: name of the program in the text.
        words: words after --help: none for the main flags, a topic, `all`, or the name of a flag or other words to search for.
            `all` after the words of a search asks for all results.

    Raises:
        ConfigError: no flag matches the words. The message suggests topics and flags.
    """
    if not words:
        return _format_main_help(program)
    if tuple(words) == (_ALL,):
        return format_full_help(program)
    shows_all = words[-1] == _ALL
    query = " ".join(words[:-1] if shows_all else words).lower()
    topic = query.strip()
    if topic in get_topics():
        return _format_topic(topic)
    return _search(query, shows_all=shows_all)


def _format_main_help(program: str) -> str:
    lines = [
        f"python {program} FLAGS            train on one device",
        f"python {program} --nproc 8 FLAGS  train on 8 devices of this machine",
        "",
        *(f"  {label:<{_MAIN_WIDTH}}{text}" for label, text in _MAIN_FLAGS),
        "",
        *_wrap(f"--help TOPIC   flags of a topic: {', '.join(get_topics())}", " " * 15),
        "--help WORD    search, such as --help lr; --help all prints every flag",
        f"--recipe NAME  model with its published training settings (--recipe {LIST_NAME})",
        "--explain FLAG one flag in detail; --dry-run plans a run without starting it",
    ]
    return "\n".join(lines) + "\n"


def _format_topic(topic: str) -> str:
    entries = [_build_entry(flag) for flag in get_flags().values() if flag.topic == topic]
    return "\n".join([f"{topic}:", *_format_entries(entries), "", "--explain FLAG shows the full text of a flag."]) + "\n"


def _build_entry(flag: Flag) -> _Entry:
    return _Entry(flag.name, format_flag_summary(flag), get_flag_docs(flag), format_off_note(flag))


def _format_label(name: str, value_format: str) -> str:
    """Return a flag that is not a setting with the form of its value, such as ``--config FILE``."""
    noun = value_format.rpartition(" ")[2]
    value = "" if value_format == NO_VALUE else f" {noun.upper() if noun in _VALUE_NOUNS else 'N'}"
    return f"--{name}{value}"


def _format_entries(entries: Iterable[_Entry]) -> Iterator[str]:
    for entry in entries:
        yield from _format_entry(entry)


def _format_entry(entry: _Entry) -> list[str]:
    """Return the lines of one flag in a table: in the left column its name and values, in the right one the first sentence of its
    help text, which is cut if it is long, and the note. A long name has its own line."""
    indent = " " * _LABEL_WIDTH
    label = f"  {_shorten(entry.label, get_page_width() - 2)}"
    first_lines, first_indent = ([], f"{label:<{_LABEL_WIDTH}}") if len(label) < _LABEL_WIDTH - 1 else ([label], indent)
    summary = re.split(r"(?<=[^.]{3}\.) (?=[A-Z-])", entry.docs)[0].rstrip(".")
    text_lines = textwrap.wrap(
        summary,
        get_page_width(),
        initial_indent=first_indent,
        subsequent_indent=indent,
        max_lines=_MAX_TEXT_LINES,
        placeholder=" ...",
        break_on_hyphens=False,
    )
    if entry.note:
        note = f"({entry.note})"
        complete_lines = textwrap.wrap(
            f"{summary} {note}", get_page_width(), initial_indent=first_indent, subsequent_indent=indent, break_on_hyphens=False
        )
        note_lines = textwrap.wrap(note, get_page_width(), initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
        text_lines = complete_lines if len(complete_lines) <= _MAX_TEXT_LINES else [*text_lines, *note_lines]
    return [*first_lines, *text_lines]


def _shorten(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _search(query: str, *, shows_all: bool) -> str:
    """Return the page of a flag if the query is its name, and the flags whose names or help texts match, best first.

    Args:
        query: words to search for, in lower case.
        shows_all: show all flags that match, instead of as many as fit on one screen.

    Raises:
        ConfigError: no flag matches.
    """
    name = query.strip().lstrip("-").replace("_", "-").replace(" ", "-")
    lines: list[str] = []
    entries = list(dict.fromkeys([*_rank_entries(query), *_rank_entries(_PLURAL.sub("", query))]))
    if (flag := find_flag(name)) is not None or name in PROGRAM_FLAGS or name in list_refused_and_replaced_flags():
        page = explain(name).splitlines()
        head = page[: page.index("")] if "" in page else page
        properties = [line for line in page[len(head) + 1 :] if re.match(r"  (takes|unit|default) ", line)]
        lines += [*head, *properties]
        lines += _wrap(f"  --explain {name} shows its rules and related flags.", "    ") if flag is not None else []
        names = {name} if flag is None else {name, flag.name}
        entries = [entry for entry in entries if entry.name not in names]
    elif (advice := find_advice(name) or find_advice(_PLURAL.sub("", name))) is not None:
        lines += _wrap(f"--{name} is not a flag. {advice}", "  ")
    if not entries and not lines:
        raise ConfigError([_build_no_match(query, name)])
    if entries:
        max_lines = None if shows_all else _get_screen_height() - len(lines) - 1
        lines += ["", *_format_matches(entries, query.strip().lstrip("-"), max_lines)]
    return "\n".join(lines).lstrip("\n") + "\n"


def _format_matches(entries: list[_Entry], query: str, max_lines: int | None) -> list[str]:
    """Return the lines about the flags that match a search: as many with their texts as fit, then the names of the others.

    Args:
        max_lines: number of lines that fit; None for no limit.
    """
    footer = ["", "--explain FLAG shows the full text of a flag."]
    for num_texts in range(len(entries), 0, -1):
        lines = list(_format_entries(entries[:num_texts]))
        remaining = [f"--{entry.name}" for entry in entries[num_texts:]]
        if len(remaining) > _MAX_NAMES:
            remaining = [*remaining[:_MAX_NAMES], f"and {len(remaining) - _MAX_NAMES} more (all: --help {query} {_ALL})"]
        if remaining:
            lines += ["", *_wrap(f"Also: {', '.join(remaining)}", "  ")]
        if max_lines is None or len(lines) + len(footer) <= max_lines:
            break
    return [*lines, *footer]


def _rank_entries(query: str) -> list[_Entry]:
    """Return the flags whose names or help texts contain all words of a query. The flag whose name is the query comes first. Flags
    with the words in their names follow, then flags with parts of the words in their names, and then flags with the words in their
    texts."""
    words = list(re.findall(r"[\w.]+", query.replace("-", " ").replace("_", " ")))
    words = [word for word in words if word not in _STOP_WORDS] or words
    requests = [_Entry(name, _format_label(name, value), docs) for name, (value, docs) in PROGRAM_FLAGS.items()]
    ranked: list[tuple[int, int, _Entry]] = []
    for index, entry in enumerate([*requests, *map(_build_entry, get_flags().values())]):
        name_words = entry.name.split("-")
        text_words = set(re.findall(r"\w+", entry.docs.lower()))
        if entry.name == "-".join(words):
            rank = 0
        elif all(word in name_words for word in words):
            rank = 1 + (name_words[: len(words)] != words)
        elif all(any(part.startswith(word) for part in name_words) for word in words):
            rank = 3
        elif len("".join(words)) > 2 and all(word in entry.name for word in words):
            rank = 4
        elif all(word in text_words or word in name_words for word in words):
            rank = 5
        elif all(len(word) > 3 and (word in entry.docs.lower() or word in entry.name) for word in words):
            rank = 6
        else:
            continue
        ranked.append((rank, index, entry))
    return [entry for _, _, entry in sorted(ranked)] if words else []


def _build_no_match(query: str, name: str) -> Violation:
    similar = suggest_names(name, [*get_topics(), *get_flags(), *PROGRAM_FLAGS])
    suggestions = tuple(f"--help {suggestion}" for suggestion in similar)
    reason = "" if suggestions else f"The topics are {', '.join(get_topics())}; --help all prints every flag."
    return Violation(("--help",), f"--help {query.strip()}: no topic and no flag matches.", reason, suggestions)


def _get_screen_height() -> int:
    return max(_MAX_SCREEN, shutil.get_terminal_size((80, _MAX_SCREEN + 1)).lines - 1)


def _wrap(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, get_page_width(), subsequent_indent=indent, break_on_hyphens=False)
