"""Reads a ``--config`` file: YAML whose keys are flag names, flat or under topics, turned into flags as if they were typed.

Scalars stay as text (YAML's own typing would read ``1e-8`` as a text and ``no`` as false), so that a value means the same here as
on the command line.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from itertools import islice

import yaml

from megatron.config.compat import NoEffect, Refused, find
from megatron.config.errors import ConfigError, Violation
from megatron.config.flags import flag_of, flags, switch, topics
from megatron.config.given import HELP, Given

_NULLS = ("null", "Null", "NULL", "~", "")
_EXAMPLE = "It should hold lines such as `num-layers: 12`."
_MOST_BYTES = 1_000_000
_MOST_NODES = 100_000  # keys and values: a list of datasets may be long
_MOST_ENTRIES = 10_000  # settings, each of which is looked up
_MOST_DEPTH = 20  # settings take three: the file, a topic, a list
_MOST_TOLD = 20  # problems that are listed of one file
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, written in C


def read_yaml(path: str) -> list[Given]:
    """The settings of a file, in order.

    Raises:
        ConfigError: the file cannot be read, is not YAML, is not a mapping of flag names, or sets a flag twice.
    """
    root = _compose(path, _read(path))
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise _cannot(f"--config {path} is not a mapping of flag names to values.", _EXAMPLE)
    given: list[Given] = []
    problems: list[Violation] = []
    entries = list(islice(_entries(root), _MOST_ENTRIES + 1))
    if len(entries) > _MOST_ENTRIES:
        raise _cannot(f"--config {path} holds more than {_MOST_ENTRIES:,} settings.", f"There are {len(flags())}. {_EXAMPLE}")
    for topic, key, value in entries:
        outcome = _setting(path, key, value)
        if isinstance(outcome, Violation):
            problems.append(outcome)
        else:
            given.extend(outcome)
            problems.extend(_misplaced(outcome, topic))
    problems.extend(_twice(given))
    if len(problems) > _MOST_TOLD:
        more = f"{path} has {len(problems) - _MOST_TOLD:,} more problems."
        problems[_MOST_TOLD:] = [Violation(("--config",), more, "Is it the right file?")]
    if problems:
        raise ConfigError(problems)
    return given


def _read(path: str) -> str:
    """The text of a file or a pipe. No more is read than settings can be long."""
    data = None
    try:
        if _is_file_or_pipe(os.stat(path).st_mode):
            with open(path, "rb") as file:
                data = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # the latter for a name that no file can have
        reason = getattr(error, "strerror", None) or str(error)
        raise _cannot(f"--config {path} cannot be read: {reason}.") from error
    if data is None:
        raise _cannot(f"--config {path} is neither a file nor a pipe.", _EXAMPLE)
    if len(data) > _MOST_BYTES:
        raise _cannot(f"--config {path} is larger than {_MOST_BYTES:,} bytes.", f"Settings are never as long. {_EXAMPLE}")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _cannot(f"--config {path} cannot be read: it is not text in UTF-8.") from error


def _is_file_or_pipe(mode: int) -> bool:
    """Whether it is one of these, or a directory, for which the system gives a good error itself."""
    return stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISDIR(mode)


def _compose(path: str, text: str) -> yaml.Node | None:
    try:
        fault = _too_much(text)
        root: yaml.Node | None = None if fault else yaml.compose(text, Loader=_LOADER)
    except yaml.YAMLError as error:
        raise _cannot(f"--config {path} is not valid YAML.", f"{' '.join(str(error).split())}.") from error
    if fault:
        raise _cannot(f"--config {path} {fault}.", _EXAMPLE)
    return root


def _too_much(text: str) -> str | None:
    """Why the text is too large to be parsed, or None. Parsing takes long for many nodes, and fills the stack at many levels."""
    depth = nodes = 0
    for event in yaml.parse(text, Loader=_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        nodes += isinstance(event, yaml.NodeEvent)
        if depth > _MOST_DEPTH:
            line = event.start_mark.line + 1 if event.start_mark is not None else "?"
            return f"line {line} has more than {_MOST_DEPTH} levels"
        if nodes > _MOST_NODES:
            return f"holds more than {_MOST_NODES:,} keys and values"
    return None


def _cannot(message: str, rule: str = "") -> ConfigError:
    return ConfigError([Violation(("--config",), message, rule)])


def _entries(root: yaml.MappingNode) -> Iterator[tuple[str | None, yaml.Node, yaml.Node]]:
    """Every key and value, with the topic that it stands under."""
    for key, value in root.value:
        if isinstance(value, yaml.MappingNode) and _text(key) in topics():
            yield from ((_text(key), inner_key, inner_value) for inner_key, inner_value in value.value)
        else:
            yield None, key, value


def _text(node: yaml.Node) -> str:
    return node.value if isinstance(node, yaml.ScalarNode) else ""


def _setting(path: str, key: yaml.Node, value: yaml.Node) -> list[Given] | Violation:
    """The settings of one entry (none if it says no to something refused), or what is wrong with it."""
    where = f"{path} line {key.start_mark.line + 1}"
    name = _text(key).replace("_", "-")
    if isinstance(value, yaml.ScalarNode):
        texts: tuple[str, ...] = (value.value,)
    elif isinstance(value, yaml.SequenceNode) and all(isinstance(item, yaml.ScalarNode) for item in value.value):
        texts = tuple(item.value for item in value.value)
    else:
        name = ""
    if not name:
        rule = f"Keys are flag names, or one of the topics {', '.join(topics())}; values are single values or lists."
        return Violation(("--config",), f"{where}: {_text(key) or 'the key'} is not a setting.", rule)
    if name in topics() and flag_of(name) is None:
        rule = f"Write `{name}:` and its settings below it, indented, or leave it out."
        return Violation(("--config",), f"{where}: {name} is a heading under which settings stand, not a setting.", rule)
    if name in HELP:
        return Violation((f"--{name}",), f"{where}: {_text(key)} may be given on the command line only.")
    if isinstance(value, yaml.ScalarNode):
        return _scalar(name, texts[0], not value.style, where)
    return [Given(name, texts, f"--{name}", where)]


def _scalar(name: str, text: str, plain: bool, where: str) -> list[Given]:
    """The setting of a single value: switches and flags of other programs know true and false, optional fields know null."""
    as_written = [Given(name, (text,), f"--{name}", where)]
    if not plain:  # quoted: a text, whatever it says
        return as_written
    if text.lower() in ("true", "false"):
        on = text.lower() == "true"
        found, stranger = switch(name), find(name)
        if found is not None:
            name = found[0].name if found[1] == on else f"no-{found[0].name}"
        elif isinstance(stranger, Refused) and not on:
            return []  # what is refused is not asked for
        elif not isinstance(stranger, NoEffect | Refused):
            return as_written
        return [Given(name, (), f"--{name}", where)]
    flag = flags().get(name)
    if text in _NULLS and flag is not None and flag.kind is not bool:
        return [Given(name, ("None",) if flag.optional else (), f"--{name}", where)]
    return as_written


def _misplaced(given: list[Given], topic: str | None) -> list[Violation]:
    """Problems of an entry that stands under a topic which is not its own."""
    problems = []
    for setting in given if topic is not None else ():
        flag = flag_of(setting.name)
        if flag is not None and flag.topic != topic:
            message = f"{setting.where}: {flag.field} belongs under {flag.topic}, not {topic}."
            problems.append(Violation((f"--{flag.name}",), message))
    return problems


def _twice(given: list[Given]) -> list[Violation]:
    """Problems of settings that the file holds more than once."""
    first: dict[str, Given] = {}
    problems = []
    for setting in given:
        flag = flag_of(setting.name)
        name = flag.name if flag is not None else setting.name
        if name in first:
            problems.append(Violation((f"--{name}",), f"{setting.where}: {name} was already set in {first[name].where}."))
        first.setdefault(name, setting)
    return problems
