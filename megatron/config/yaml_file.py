"""Reader of ``--config`` files: YAML or TOML whose keys are flag names, flat or under topics, converted to flags as if they were
typed.

Scalars stay text, so that a value has the same meaning as on the command line. (YAML's own types would read ``1e-8`` as a string
and ``no`` as false.)
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import yaml

from megatron.config.errors import ConfigError, Violation
from megatron.config.flags import find_flag, get_flags, get_topics
from megatron.config.imports import import_object
from megatron.config.param_groups import format_entry
from megatron.config.parsed_flags import REQUESTS, GivenFlag, get_compat
from megatron.config.regular_file import read_regular_or_pipe

_MAPPING_SOURCE = "settings"
"""Source of settings that a program gives as a mapping, for messages."""
_NULLS = ("null", "Null", "NULL", "~", "")
_EXAMPLES = {
    "config": "It should hold lines such as `num-layers: 12`.",
    "param-groups": "It should hold lines such as `embedding.*: {lr-mult: 0.1}`: patterns of names, each with its values.",
}
"""Expected content of the file of each flag, for messages."""
_CONFIG_EXAMPLE = _EXAMPLES["config"]
_MAX_BYTES = 1_000_000
_MAX_NODES = 100_000  # keys and values: a list of datasets may be long
_MAX_ENTRIES = 10_000  # settings
_MAX_DEPTH = 20  # settings need three: the file, a topic, a list
_MAX_PROBLEMS = 20  # problems listed for one file
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, written in C


def read_yaml(path: str) -> list[GivenFlag]:
    """Read the settings of a ``--config`` file or model file, in the order of the file. A file whose name ends in .toml is TOML.

    Raises:
        ConfigError: the file cannot be read, is not YAML or TOML, is not a mapping of flag names, or sets a flag twice.
    """
    return _parse_settings(path, _compose(path, _read_file(path)))


def read_mapping(values: Mapping[str, Any]) -> list[GivenFlag]:
    """Read the settings of a Python mapping, as a program gives them: keys are flag or field names, flat or under topics. Values
    are parsed like those of a file.

    Raises:
        ConfigError: the mapping is invalid, or sets a flag twice.
    """
    try:
        text = yaml.safe_dump(_to_yaml_value(values), sort_keys=False, allow_unicode=True)
    except yaml.YAMLError as error:
        raise _build_config_error(
            f"The mapping of settings has the value {str(error.args[-1])[:40]}, which is not a text, a number, true, false, None "
            "or a "
            "list of these.",
            "Convert this value.",
        ) from error
    return _parse_settings(_MAPPING_SOURCE, _compose(_MAPPING_SOURCE, text))


def _to_yaml_value(value: Any) -> Any:
    """Convert a Python value to a type that YAML supports: a tuple to a list, a path to a string, a number of numpy or torch to a
    Python number. Mappings and lists are converted recursively."""
    if isinstance(value, Mapping):
        return {str(key): _to_yaml_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_to_yaml_value(inner) for inner in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.item() if hasattr(value, "item") else value


def _parse_settings(path: str, root: yaml.Node | None) -> list[GivenFlag]:
    """Parse the settings of a YAML file, or of a mapping that a Python program passes. `read_mapping` converts such a mapping to
    YAML first, so its settings have no line numbers.

    Args:
        path: path of the file, or `_MAPPING_SOURCE` for a mapping.
        root: top node of the YAML; None if the YAML is empty.

    Raises:
        ConfigError: with all problems of the file or mapping.
    """
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise _build_config_error(f"--config {path} is not a mapping of flag names to values.", _CONFIG_EXAMPLE)
    entries = list(islice(_iterate_entries(root), _MAX_ENTRIES + 1))
    if len(entries) > _MAX_ENTRIES:
        raise _build_config_error(
            f"--config {path} holds more than {_MAX_ENTRIES:,} settings.",
            f"Only {len(get_flags())} settings exist. {_CONFIG_EXAMPLE}",
        )
    settings: dict[str, GivenFlag] = {}
    problems: list[Violation] = []
    for topic, key, value in entries:
        try:
            source = path if path == _MAPPING_SOURCE else f"{path} line {key.start_mark.line + 1}"
            setting = _parse_setting(source, topic, key, value)
            if setting is not None:
                flag = find_flag(setting.name)
                name = flag.name if flag is not None else setting.name
                if name in settings:
                    raise _build_config_error(
                        f"{setting.source}: {name} was already set in {settings[name].source}.",
                        "Remove one of these entries.",
                        flag=name,
                    )
                settings[name] = setting
        except ConfigError as error:
            problems.extend(error.violations)
    if len(problems) > _MAX_PROBLEMS:
        num_hidden_text = f"{path} has {len(problems) - _MAX_PROBLEMS:,} more problems."
        problems[_MAX_PROBLEMS:] = [Violation(("--config",), num_hidden_text, "Is it the right file?")]
    if problems:
        raise ConfigError(problems)
    return list(settings.values())


def read_param_groups(path: str) -> tuple[str, ...]:
    """Read the entries of a --param-groups file, each as one text such as `embedding.* lr-mult=0.1`.

    Raises:
        ConfigError: the file cannot be read, or is not a mapping of patterns to mappings of values.
    """
    root = _compose(path, _read_file(path, "param-groups"), "param-groups")
    return () if root is None else _parse_param_groups(f"--param-groups {path}", root)


def _parse_param_groups(source: str, root: yaml.Node) -> tuple[str, ...]:
    """Parse a YAML mapping of name patterns to mappings of values into entries of --param-groups, each as one text such as
    `embedding.* lr-mult=0.1`.

    Args:
        source: file or setting that contains the mapping, for messages.

    Raises:
        ConfigError: the node is not a mapping of patterns to mappings.
    """
    pairs = root.value if isinstance(root, yaml.MappingNode) else [(root, root)]
    entries: list[str] = []
    for key, values in pairs:
        texts = [_get_text(node) for pair in values.value for node in pair] if isinstance(values, yaml.MappingNode) else [""]
        if any(text.split() != [text] for text in (_get_text(key), *texts)):
            message = f"{source}: {_get_text(key) or 'it'} is not a pattern with a mapping of single values."
            raise _build_config_error(message, _EXAMPLES["param-groups"], "param-groups")
        entries.append(format_entry(_get_text(key), zip(texts[::2], texts[1::2], strict=True)))
    return tuple(entries)


def _read_file(path: str, flag: str = "config") -> str:
    """Read the text of a file or a pipe, up to the maximum size of a settings file."""
    try:
        return read_regular_or_pipe(path, _MAX_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise _build_config_error(
            f"--{flag} {path} cannot be read: it is not text in UTF-8.", _EXAMPLES[flag], flag=flag
        ) from error
    except OSError as error:
        is_missing = error.errno in (errno.ENOENT, errno.EACCES, errno.EISDIR)
        raise _build_config_error(
            f"--{flag} {path} cannot be read: {error.strerror}.", "Check the path." if is_missing else _EXAMPLES[flag], flag=flag
        ) from error


def _compose(path: str, text: str, flag: str = "config") -> yaml.Node | None:
    """Parse a text in YAML, or in TOML if the name of the file ends in .toml, into its root node; None for an empty text.

    Limits on depth and number of nodes are checked first: a text with many nodes would take long, and one with many levels would
    overflow the stack.
    """
    if str(path).lower().endswith(".toml"):
        compose_toml = import_object("megatron_lab.migration.toml_nodes:compose_toml")
        try:
            toml_root: yaml.Node | None = compose_toml(text, _MAX_DEPTH, _MAX_NODES)
        except ValueError as error:
            raise _build_config_error(f"--{flag} {path} is not a TOML file of settings: {error}.", flag=flag) from error
        return toml_root
    depth = nodes = 0
    too_deep = f"has more than {_MAX_DEPTH} levels."
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            nodes += isinstance(event, yaml.NodeEvent)
            if depth > _MAX_DEPTH:
                line = event.start_mark.line + 1 if event.start_mark is not None else "?"
                raise _build_config_error(f"--{flag} {path} line {line} {too_deep}", _EXAMPLES[flag], flag=flag)
            if nodes > _MAX_NODES:
                raise _build_config_error(
                    f"--{flag} {path} holds more than {_MAX_NODES:,} keys and values.", _EXAMPLES[flag], flag=flag
                )
        root: yaml.Node | None = yaml.compose(text, Loader=_LOADER)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        # libyaml has its own limit of the depth, which its scanner may reach before the first event.
        if mark is not None and "nesting depth" in str(error):
            raise _build_config_error(f"--{flag} {path} line {mark.line + 1} {too_deep}", _EXAMPLES[flag], flag=flag) from error
        raise _build_config_error(f"--{flag} {path} is not valid YAML.", f"{' '.join(str(error).split())}.", flag=flag) from error
    return root


def _build_config_error(message: str, reason: str = "", flag: str = "config") -> ConfigError:
    return ConfigError([Violation((f"--{flag}",), message, reason)])


def _iterate_entries(root: yaml.MappingNode) -> Iterator[tuple[str | None, yaml.Node, yaml.Node]]:
    """Yield the topic, key and value of every setting in a file. The topic is None for a setting that is not under a topic."""
    for key, value in root.value:
        if isinstance(value, yaml.MappingNode) and _get_text(key) in get_topics():
            yield from ((_get_text(key), inner_key, inner_value) for inner_key, inner_value in value.value)
        else:
            yield None, key, value


def _get_text(node: yaml.Node) -> str:
    return node.value if isinstance(node, yaml.ScalarNode) else ""


def _parse_setting(source: str, topic: str | None, key: yaml.Node, value: yaml.Node) -> GivenFlag | None:
    """Parse one setting of a file.

    Returns None for a flag of Megatron-LM that this project refuses, if the file switches the flag off (false).

    Args:
        source: file and line, for messages.

    Raises:
        ConfigError: the key or the value is not that of a setting.
    """
    name = _get_text(key).replace("_", "-")
    if name == "param-groups" and isinstance(value, yaml.MappingNode):
        return GivenFlag(name, _parse_param_groups(f"{source}: {name}", value), f"--{name}", source)
    nodes = value.value if isinstance(value, yaml.SequenceNode) else [value]
    if not name or not all(isinstance(node, yaml.ScalarNode) for node in nodes):
        reason = f"Keys are flag names, or one of the topics {', '.join(get_topics())}; values are single values or lists."
        raise _build_config_error(f"{source}: {_get_text(key) or 'the key'} is not a setting.", reason)
    flag = find_flag(name)
    if name in get_topics() and flag is None:
        reason = f"Write `{name}:` and its settings below it, indented, or leave it out."
        raise _build_config_error(f"{source}: {name} is a topic that contains settings, not a setting.", reason)
    if name in REQUESTS:
        raise _build_config_error(
            f"{source}: {_get_text(key)} is allowed on the command line only.", "Remove this line from the file.", flag=name
        )
    if flag is not None and topic not in (None, flag.topic):
        raise _build_config_error(
            f"{source}: {flag.field} belongs under {flag.topic}, not under {topic}.", "Move this line.", flag=flag.name
        )
    texts: tuple[str, ...] = tuple(node.value for node in nodes)
    # Switches and flags of Megatron-LM accept true and false, optional settings accept null. A quoted value is text.
    unquoted = texts[0] if isinstance(value, yaml.ScalarNode) and not value.style else None
    other_flag = None if flag is not None else get_compat().COMPAT_FLAGS.get(name) or get_compat().TRANSLATIONS.get(name)
    if (
        unquoted is not None
        and unquoted.lower() in ("true", "false")
        and (other_flag is not None or (flag is not None and flag.value_type is bool))
    ):
        is_on, texts = unquoted.lower() == "true", ()
        if other_flag is not None and not other_flag.is_accepted and not is_on:
            return None  # a refused flag that is switched off
        if flag is not None:
            name = flag.name if is_on == (name == flag.name) else f"no-{flag.name}"
    elif unquoted in _NULLS and flag is not None and (flag.is_optional or flag.value_type is not bool):
        texts = ("None",) if flag.is_optional else ()
    return GivenFlag(name, texts, f"--{name}", source)
