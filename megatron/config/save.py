"""Conversion of settings to JSON types and back, to YAML, and to the record of settings, command line and versions that is saved
with a run; and the check of the types of JSON values that were read from a file."""

from __future__ import annotations

import dataclasses
import functools
import json
import platform
import types
import typing
from collections.abc import Sequence
from importlib import metadata
from typing import Any, Literal, NotRequired

from megatron.config.config import Config
from megatron.config.errors import ConfigError, Violation
from megatron.config.flags import build_config, get_flags, get_topics
from megatron.config.optional_packages import PACKAGES, import_optional
from megatron.config.version import DISTRIBUTION, __version__

_PACKAGES = ("torch", "numpy", *(package.distribution for package in PACKAGES.values()), "wandb")
_MAX_COUNT = 1 << 62
MAX_SHOWN_CHARS = 60
"""Maximum number of characters of a name or value from a file that an error message shows."""
_JSON_TYPE_NAMES = {
    int: "an integer from 0 to 2^62 - 1",
    float: "a finite number",
    str: "a text",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


def to_dict(config: Config) -> dict[str, Any]:
    """Convert settings to JSON types: a mapping of topics, each a mapping of setting names to values."""
    return {
        topic: {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        for topic, values in config.to_dict().items()
    }


def from_dict(nested: dict[str, Any], path: str | None = None) -> Config:
    """Build settings from the result of `to_dict`. A setting that is missing, as in files of older versions, has its default.

    Args:
        path: file that contains the settings, for the error message.

    Raises:
        ConfigError: a topic or field is unknown, or a value has a wrong type. The message names all of them.
    """
    values: dict[str, dict[str, Any]] = {topic: {} for topic in get_topics()}
    problems = []
    for topic, fields in nested.items():
        if topic not in values or not isinstance(fields, dict):
            problems.append(f"{topic} is not a topic of settings")
            continue
        for field, value in fields.items():
            flag = get_flags().get(field.replace("_", "-"))
            if flag is None or (flag.topic, flag.field) != (topic, field):
                problems.append(f"{topic}.{field} is not a setting")
                continue
            try:
                values[topic][field] = flag.from_json(value)
            except ValueError as error:
                problems.append(str(error))
    if problems:
        reason = (
            "They may come from another version of this program (read them with that version), or their file was edited or is "
            "damaged (copy it again)."
        )
        source = f"Saved settings in {path}" if path else "Saved settings"
        raise ConfigError([Violation((), f"{source} cannot be read: {'; '.join(problems)}.", reason)])
    return build_config(values)


def to_yaml(config: Config) -> str:
    """Format settings as YAML that ``--config`` reads back to the same values.

    Raises:
        ConfigError: PyYAML is not installed.
    """
    yaml = import_optional("yaml", "--print-config needs PyYAML")
    text: str = yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True, width=1000)
    if any(line_break in text for line_break in "\x85\u2028\u2029"):  # PyYAML writes these as they are, and reads "\x85" as "\n"
        text = yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=False, width=1000)
    return text


def run_record(config: Config, argv: Sequence[str]) -> dict[str, Any]:
    """Return what is saved with a run so that the run can be repeated: settings, command line and versions, in JSON types.

    Returns:
        ``config`` (the result of `to_dict`), ``command`` (the arguments of the command line) and ``versions`` of the project,
        Python and the installed packages.
    """
    return {"config": to_dict(config), "command": list(argv), "versions": dict(_read_versions())}


@functools.cache
def _read_versions() -> dict[str, str]:
    versions = {DISTRIBUTION: __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def check_json_type(value: object, hint: Any, key: str, *, is_open: bool = False) -> None:
    """Check that a value that was read from JSON has the type of an annotation. The values inside an object or a list are checked
    too.

    An annotation is `Any`, int (not negative), float, str, bool, a list, tuple or dict of annotations, a `Literal`, a dataclass or
    `TypedDict` (an object in JSON), or the union of an annotation and None. Fields of a dataclass with a default may be
    missing.

    Args:
        key: name of the value, for error messages, such as `progress.phases`; empty for the top level of a file.
        is_open: whether objects may have more entries than the dataclass or `TypedDict` has.

    Raises:
        ValueError: a value has another type. The message names the key of this value.
    """
    arguments = typing.get_args(hint)
    origin = typing.get_origin(hint) or hint
    if hint is Any or (value is None and type(None) in arguments):
        return
    if origin in (types.UnionType, typing.Union):
        (hint,) = [argument for argument in arguments if argument is not type(None)]
        check_json_type(value, hint, key, is_open=is_open)
    elif origin is Literal:
        if value not in arguments:
            raise ValueError(f"{key} is {_shorten(value)}, but must be one of {', '.join(map(str, arguments))}")
    elif origin in (list, tuple):
        _check_simple_type(value, list, key)
        assert isinstance(value, list)
        hints = arguments if origin is tuple and arguments[-1] is not Ellipsis else arguments[:1] * len(value)
        if len(hints) != len(value):
            raise ValueError(f"{key} has {len(value)} values, but must have {len(hints)}")
        for index, (item, item_hint) in enumerate(zip(value, hints, strict=True)):
            check_json_type(item, item_hint, f"{key}[{index}]", is_open=is_open)
    elif origin is dict:
        _check_simple_type(value, dict, key)
        assert isinstance(value, dict)
        for name, item in value.items():
            check_json_type(item, arguments[1] if arguments else Any, _join(key, name), is_open=is_open)
    elif origin in _JSON_TYPE_NAMES:
        _check_simple_type(value, origin, key)
    else:
        _check_simple_type(value, dict, key)
        assert isinstance(value, dict)
        fields, required = _get_entry_types(origin)
        if missing := [name for name in required if name not in value]:
            raise ValueError(f"the entry {_join(key, missing[0])} is missing")
        if not is_open and (unknown := sorted(value.keys() - fields.keys())):
            raise ValueError(f"the entry {_join(key, unknown[0])} is unknown")
        for name in fields.keys() & value.keys():
            check_json_type(value[name], fields[name], _join(key, name), is_open=is_open)


def _check_simple_type(value: object, expected: type, key: str) -> None:
    has_type = type(value) is expected or (expected is float and type(value) is int)
    if has_type and isinstance(value, int | float) and expected is not bool:
        has_type = abs(value) < _MAX_COUNT and (expected is float or value >= 0)
    if not has_type:
        raise ValueError(f"{key or 'the content'} is {_shorten(value)}, but must be {_JSON_TYPE_NAMES[expected]}")


def _join(key: str, name: str) -> str:
    return ".".join(filter(None, (key, name[:MAX_SHOWN_CHARS])))


def _shorten(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


@functools.cache
def _get_entry_types(json_type: type) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the annotations of the fields of a dataclass or `TypedDict`, and the names of the fields that may not be missing."""
    if dataclasses.is_dataclass(json_type):
        fields = dataclasses.fields(json_type)
        optional = {f.name for f in fields if (f.default, f.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)}
    else:
        hints = typing.get_type_hints(json_type, include_extras=True)
        is_total = json_type.__total__  # type: ignore[attr-defined]
        optional = {name for name, hint in hints.items() if not is_total or typing.get_origin(hint) is NotRequired}
    hints = typing.get_type_hints(json_type)
    return hints, frozenset(hints) - optional
