"""Reads a ``--config`` file: YAML whose keys are flag names, flat or under topics, turned into flags as if they were typed.

Scalars stay the text that stands in the file (YAML's own typing would read ``1e-8`` as a text and ``no`` as false), so that
a value means the same here as on the command line.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml

from megatron.config.compat import NoEffect, Refused, find
from megatron.config.errors import ConfigError, Violation
from megatron.config.flags import flag_of, flags, switch, topics
from megatron.config.given import Given
from megatron.config.requests import HELP

_NULLS = ("null", "Null", "NULL", "~", "")


def read_yaml(path: str) -> list[Given]:
    """Settings of a file, in its order.

    Raises:
        ConfigError: the file cannot be read, is not YAML, is not a mapping of flag names, or sets a flag twice.
    """
    try:
        root = yaml.compose(Path(path).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise ConfigError([Violation(("--config",), f"--config {path} cannot be read: {reason}.")]) from error
    except (yaml.YAMLError, RecursionError) as error:
        rule = " ".join(str(error).split())
        raise ConfigError([Violation(("--config",), f"--config {path} is not valid YAML.", f"{rule}.")]) from error
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        rule = "It should hold lines such as `num-layers: 12`."
        raise ConfigError([Violation(("--config",), f"--config {path} is not a mapping of flag names to values.", rule)])
    given: list[Given] = []
    problems: list[Violation] = []
    for topic, key, value in _entries(root):
        outcome = _setting(path, key, value)
        if isinstance(outcome, Violation):
            problems.append(outcome)
        else:
            given.extend(outcome)
            problems.extend(_misplaced(outcome, topic))
    problems.extend(_twice(given))
    if problems:
        raise ConfigError(problems)
    return given


def _entries(root: yaml.MappingNode) -> Iterator[tuple[str | None, yaml.Node, yaml.Node]]:
    """Every key and value with the topic that it stands under."""
    for key, value in root.value:
        if isinstance(value, yaml.MappingNode) and _text(key) in topics():
            yield from ((_text(key), inner_key, inner_value) for inner_key, inner_value in value.value)
        else:
            yield None, key, value


def _text(node: yaml.Node) -> str:
    return node.value if isinstance(node, yaml.ScalarNode) else ""


def _setting(path: str, key: yaml.Node, value: yaml.Node) -> list[Given] | Violation:
    """What one entry sets (nothing where it says no to something refused), or what is wrong with it."""
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
    if name in HELP:
        return Violation((f"--{name}",), f"{where}: {_text(key)} may be given on the command line only.")
    if isinstance(value, yaml.ScalarNode):
        return _scalar(name, texts[0], value.style is None, where)
    return [Given(name, texts, f"--{name}", where)]


def _scalar(name: str, text: str, plain: bool, where: str) -> list[Given]:
    """A single value: switches and flags of other programs know true and false, optional fields know null."""
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
    """The settings of an entry that stands under a topic which is not its own."""
    problems = []
    for setting in given if topic is not None else ():
        flag = flag_of(setting.name)
        if flag is not None and flag.topic != topic:
            message = f"{setting.where}: {flag.field} belongs under {flag.topic}, not {topic}."
            problems.append(Violation((f"--{flag.name}",), message))
    return problems


def _twice(given: list[Given]) -> list[Violation]:
    """Settings that the file holds more than once."""
    first: dict[str, Given] = {}
    problems = []
    for setting in given:
        flag = flag_of(setting.name)
        name = flag.name if flag is not None else setting.name
        if name in first:
            problems.append(Violation((f"--{name}",), f"{setting.where}: {name} was already set in {first[name].where}."))
        first.setdefault(name, setting)
    return problems
