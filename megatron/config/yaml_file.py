"""Reads a ``--config`` file: YAML whose keys are flag names, flat or under topics, turned into flags as if they were typed.

Scalars stay as text (YAML's own typing would read ``1e-8`` as a text and ``no`` as false), so that a value means the same here as
on the command line.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import yaml

from megatron.config.errors import ConfigError, Violation
from megatron.config.flags import flag_of, flags, topics
from megatron.config.given import REQUESTS, Given, of_megatron
from megatron.config.param_groups import as_text

_MAPPING = "settings"
"""The place of settings that a program gives as a mapping."""
_NULLS = ("null", "Null", "NULL", "~", "")
_EXAMPLES = {
    "config": "It should hold lines such as `num-layers: 12`.",
    "param-groups": "It should hold lines such as `embedding.*: {lr-mult: 0.1}`: patterns of names, each with its values.",
}
"""What the file of each flag holds."""
_EXAMPLE = _EXAMPLES["config"]
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
    return _settings(path, _compose(path, _read(path)))


def read_mapping(values: Mapping[str, Any]) -> list[Given]:
    """The settings of a mapping of a program: names of flags or of their fields, flat or under topics. They are read as those of a
    file are.

    Raises:
        ConfigError: it is none, or gives a setting twice.
    """
    try:
        text = yaml.safe_dump(_plain(values), sort_keys=False, allow_unicode=True)
    except yaml.YAMLError as error:
        raise _cannot("settings: a value is neither a text, a number, true, false or None, nor a list of these.") from error
    return _settings(_MAPPING, _compose(_MAPPING, text))


def _plain(value: Any) -> Any:
    """A value of Python as what YAML knows: tuples as lists, paths as texts, numbers of numpy and torch as Python's."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.item() if hasattr(value, "item") else value


def _settings(path: str, root: yaml.Node | None) -> list[Given]:
    """The settings of a file, or of a mapping, whose places have no lines."""
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise _cannot(f"--config {path} is not a mapping of flag names to values.", _EXAMPLE)
    entries = list(islice(_entries(root), _MOST_ENTRIES + 1))
    if len(entries) > _MOST_ENTRIES:
        raise _cannot(f"--config {path} holds more than {_MOST_ENTRIES:,} settings.", f"There are {len(flags())}. {_EXAMPLE}")
    found: dict[str, Given] = {}
    problems: list[Violation] = []
    for topic, key, value in entries:
        try:
            place = path if path == _MAPPING else f"{path} line {key.start_mark.line + 1}"
            given = _setting(place, topic, key, value)
            if given is not None:
                flag = flag_of(given.name)
                name = flag.name if flag is not None else given.name
                if name in found:
                    raise _cannot(f"{given.where}: {name} was already set in {found[name].where}.", flag=name)
                found[name] = given
        except ConfigError as error:
            problems.extend(error.violations)
    if len(problems) > _MOST_TOLD:
        more = f"{path} has {len(problems) - _MOST_TOLD:,} more problems."
        problems[_MOST_TOLD:] = [Violation(("--config",), more, "Is it the right file?")]
    if problems:
        raise ConfigError(problems)
    return list(found.values())


def read_groups(path: str) -> tuple[str, ...]:
    """The entries of a --param-groups file, each as one text.

    Raises:
        ConfigError: the file cannot be read, or is not a mapping of patterns to mappings of values.
    """
    root = _compose(path, _read(path, "param-groups"), "param-groups")
    return () if root is None else _entries_in(f"--param-groups {path}", root)


def _entries_in(where: str, root: yaml.Node) -> tuple[str, ...]:
    """The entries of --param-groups, each as one text, from a mapping of patterns to mappings.

    Raises:
        ConfigError: it is none.
    """
    pairs = root.value if isinstance(root, yaml.MappingNode) else [(root, root)]
    found: list[str] = []
    for key, values in pairs:
        texts = [_text(node) for pair in values.value for node in pair] if isinstance(values, yaml.MappingNode) else [""]
        if any(text.split() != [text] for text in (_text(key), *texts)):
            message = f"{where}: {_text(key) or 'it'} is not a pattern with a mapping of single values."
            raise _cannot(message, _EXAMPLES["param-groups"], "param-groups")
        found.append(as_text(_text(key), zip(texts[::2], texts[1::2], strict=True)))
    return tuple(found)


def _read(path: str, flag: str = "config") -> str:
    """The text of a file or a pipe. No more is read than settings can be long."""
    try:
        mode = os.stat(path).st_mode
        if not any(kind(mode) for kind in (stat.S_ISREG, stat.S_ISFIFO, stat.S_ISDIR)):  # of a folder the system says it well
            raise _cannot(f"--{flag} {path} is neither a file nor a pipe.", _EXAMPLES[flag], flag=flag)
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise _cannot(
                f"--{flag} {path} is larger than {_MOST_BYTES:,} bytes.",
                f"Settings are never as long. {_EXAMPLES[flag]}",
                flag=flag,
            )
        return data.decode("utf-8")
    except ConfigError:
        raise
    except UnicodeDecodeError as error:
        raise _cannot(f"--{flag} {path} cannot be read: it is not text in UTF-8.", flag=flag) from error
    except (OSError, ValueError) as error:  # the latter for a name that no file can have
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise _cannot(f"--{flag} {path} cannot be read: {reason}.", flag=flag) from error


def _compose(path: str, text: str, flag: str = "config") -> yaml.Node | None:
    """The root of a text, which is not parsed if it is too large: that takes long for many nodes, and fills the stack at many
    levels."""
    depth = nodes = 0
    too_deep = f"has more than {_MOST_DEPTH} levels."
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            nodes += isinstance(event, yaml.NodeEvent)
            if depth > _MOST_DEPTH:
                line = event.start_mark.line + 1 if event.start_mark is not None else "?"
                raise _cannot(f"--{flag} {path} line {line} {too_deep}", _EXAMPLES[flag], flag=flag)
            if nodes > _MOST_NODES:
                raise _cannot(f"--{flag} {path} holds more than {_MOST_NODES:,} keys and values.", _EXAMPLES[flag], flag=flag)
        root: yaml.Node | None = yaml.compose(text, Loader=_LOADER)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        if mark is not None and "nesting depth" in str(error):  # libyaml's own limit, which its scanner may reach before any event
            raise _cannot(f"--{flag} {path} line {mark.line + 1} {too_deep}", _EXAMPLES[flag], flag=flag) from error
        raise _cannot(f"--{flag} {path} is not valid YAML.", f"{' '.join(str(error).split())}.", flag=flag) from error
    return root


def _cannot(message: str, rule: str = "", flag: str = "config") -> ConfigError:
    return ConfigError([Violation((f"--{flag}",), message, rule)])


def _entries(root: yaml.MappingNode) -> Iterator[tuple[str | None, yaml.Node, yaml.Node]]:
    """Every key and value, with the topic that it stands under."""
    for key, value in root.value:
        if isinstance(value, yaml.MappingNode) and _text(key) in topics():
            yield from ((_text(key), inner_key, inner_value) for inner_key, inner_value in value.value)
        else:
            yield None, key, value


def _text(node: yaml.Node) -> str:
    return node.value if isinstance(node, yaml.ScalarNode) else ""


def _setting(where: str, topic: str | None, key: yaml.Node, value: yaml.Node) -> Given | None:
    """The setting of an entry; None if it says no to something refused.

    Raises:
        ConfigError: it is none.
    """
    name = _text(key).replace("_", "-")
    if name == "param-groups" and isinstance(value, yaml.MappingNode):
        return Given(name, _entries_in(f"{where}: {name}", value), f"--{name}", where)
    nodes = value.value if isinstance(value, yaml.SequenceNode) else [value]
    if not name or not all(isinstance(node, yaml.ScalarNode) for node in nodes):
        rule = f"Keys are flag names, or one of the topics {', '.join(topics())}; values are single values or lists."
        raise _cannot(f"{where}: {_text(key) or 'the key'} is not a setting.", rule)
    flag = flag_of(name)
    if name in topics() and flag is None:
        rule = f"Write `{name}:` and its settings below it, indented, or leave it out."
        raise _cannot(f"{where}: {name} is a heading under which settings stand, not a setting.", rule)
    if name in REQUESTS:
        raise _cannot(f"{where}: {_text(key)} may be given on the command line only.", flag=name)
    if flag is not None and topic not in (None, flag.topic):
        raise _cannot(f"{where}: {flag.field} belongs under {flag.topic}, not {topic}.", flag=flag.name)
    texts: tuple[str, ...] = tuple(node.value for node in nodes)
    # Switches and flags of other programs know true and false, optional settings know null. What is quoted is a text.
    plain = texts[0] if isinstance(value, yaml.ScalarNode) and not value.style else None
    known = None if flag is not None else of_megatron().KNOWN.get(name) or of_megatron().TAKEN.get(name)
    if plain is not None and plain.lower() in ("true", "false") and (known is not None or (flag is not None and flag.kind is bool)):
        on, texts = plain.lower() == "true", ()
        if known is not None and not known.is_accepted and not on:
            return None  # it is not asked for
        if flag is not None:
            name = flag.name if on == (name == flag.name) else f"no-{flag.name}"
    elif plain in _NULLS and flag is not None and flag.kind is not bool:
        texts = ("None",) if flag.optional else ()
    return Given(name, texts, f"--{name}", where)
