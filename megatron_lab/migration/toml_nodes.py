"""Conversion of TOML settings files to the nodes of YAML files, so that both formats have the same keys, limits and errors."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any

import yaml
from yaml.error import Mark

_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|#[^\n]*|[\[{]|[\]}]|\n|[^"\'#\[\]{}\n]+', re.DOTALL
)
"""Strings, comments, brackets, line ends and other text of a TOML file."""
_KEY_PART = r'(?:[\w-]++|"(?:\\.|[^"\\\n])*+"|\'[^\'\n]*+\')'
_KEY = re.compile(
    r'"""(?:\\.|[^\\])*?(?:"{3,5}|\Z)|\'\'\'.*?(?:\'{3,5}|\Z)|#[^\n]*+|' + rf"({_KEY_PART}(?:[ \t]*+\.[ \t]*+{_KEY_PART})*+)",
    re.DOTALL,
)
"""Strings, comments, and, as group 1, words and keys with dots. The text before an invalid character is searched only once."""
_Path = tuple[str, ...]


class _FloatText(str):
    """Number with a fraction, as it is written in the file."""

    __slots__ = ()


def compose_toml(text: str, max_depth: int, max_nodes: int) -> yaml.MappingNode | None:
    """Parse a TOML text into the root node that a YAML text with the same content has; None for an empty text.

    Raises:
        ValueError: the text is not TOML, or exceeds a limit.
    """
    text = text.removeprefix("\ufeff")  # the byte order mark
    too_deep = f"it has more than {max_depth} levels"
    # The time of tomllib grows with the square of the number of parts of a key.
    if any(key.count(".") >= max_depth and len(re.findall(_KEY_PART, key)) > max_depth for key in _KEY.findall(text)):
        raise ValueError(too_deep)
    try:
        content = tomllib.loads(text, parse_float=_FloatText)
    except RecursionError as error:
        raise ValueError(too_deep) from error
    lines = _find_lines(text)
    num_nodes = 0

    def build(value: Any, path: _Path, depth: int) -> yaml.Node:
        nonlocal num_nodes
        num_nodes += 1
        if depth > max_depth:
            raise ValueError(too_deep)
        if num_nodes > max_nodes:
            raise ValueError(f"it holds more than {max_nodes:,} keys and values")
        mark = _create_mark(lines.get(path, 0))
        if isinstance(value, dict):
            pairs = []
            for key, inner_value in value.items():
                inner_path = (*path, key)
                key_mark = _create_mark(lines.get(inner_path, mark.line))
                key_node = yaml.ScalarNode("tag:yaml.org,2002:str", key, key_mark)
                pairs.append((key_node, build(inner_value, inner_path, depth + 1)))
            return yaml.MappingNode("tag:yaml.org,2002:map", pairs, mark)
        if isinstance(value, list):
            return yaml.SequenceNode("tag:yaml.org,2002:seq", [build(item, path, depth + 1) for item in value], mark)
        is_text = isinstance(value, str) and not isinstance(value, _FloatText)
        value_text = str(value).lower() if isinstance(value, bool) else str(value)
        return yaml.ScalarNode("tag:yaml.org,2002:str", value_text, mark, style='"' if is_text else None)

    root = build(content, (), 0)
    assert isinstance(root, yaml.MappingNode)
    return root if content else None


def _create_mark(line: int) -> Mark:
    return Mark("", 0, line, 0, None, 0)


def _find_lines(text: str) -> dict[_Path, int]:
    """Return the line, from 0 on, in which each key of a valid TOML text is first set, by the path of the key."""
    lines: dict[_Path, int] = {}

    def record(content: dict[str, Any], path: _Path, line: int) -> None:
        for key, value in content.items():
            lines.setdefault((*path, key), line)
            if isinstance(value, dict):
                record(value, (*path, key), line)

    table: _Path = ()
    for line, statement in _split_statements(text):
        content = tomllib.loads(statement)
        if statement.startswith("["):
            table, inner = (), content
            while inner:
                ((key, value),) = inner.items()
                table, inner = (*table, key), value[0] if isinstance(value, list) else value
                lines.setdefault(table, line)
        else:
            record(content, table, line)
    return lines


def _split_statements(text: str) -> Iterator[tuple[int, str]]:
    """Yield the table headers and assignments of a valid TOML text, each with its first line, from 0 on."""
    statement, depth, line, first_line = "", 0, 0, 0
    for token in _TOKEN.findall(text + "\n"):
        if not statement.strip():
            statement, first_line = "", line
        line += token.count("\n")
        if token == "\n" and depth == 0:
            if statement.strip():
                yield first_line, statement.strip()
            statement = ""
            continue
        depth += (token in ("[", "{")) - (token in ("]", "}"))
        statement += "" if token.startswith("#") else token
