"""Settings as plain data: to JSON types and exactly back, as YAML, and as the record that is kept with a run."""

from __future__ import annotations

import functools
import platform
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from megatron.config.config import Config
from megatron.config.errors import ConfigError, Violation
from megatron.config.extras import PACKAGES, optional
from megatron.config.flags import build, flags, topics
from megatron.config.version import DISTRIBUTION, __version__

_PACKAGES = ("torch", "numpy", *(package.distribution for package in PACKAGES.values()), "wandb")


def to_dict(config: Config) -> dict[str, Any]:
    """Settings as nested JSON types, one mapping a topic."""
    return {
        topic: {name: list(value) if isinstance(value, tuple) else value for name, value in part.items()}
        for topic, part in config.values().items()
    }


def from_dict(nested: dict[str, Any]) -> Config:
    """Settings from the result of `to_dict`. A missing field (an older record) takes its default.

    Raises:
        ConfigError: a topic or field is unknown, or a value has a wrong type; all of them are named.
    """
    parts: dict[str, dict[str, Any]] = {topic: {} for topic in topics()}
    problems = []
    for topic, part in nested.items():
        if topic not in parts or not isinstance(part, dict):
            problems.append(f"{topic} is not a topic of settings")
            continue
        for field, value in part.items():
            flag = flags().get(field.replace("_", "-"))
            if flag is None or (flag.topic, flag.field) != (topic, field):
                problems.append(f"{topic}.{field} is not a setting")
                continue
            try:
                parts[topic][field] = flag.from_plain(value)
            except ValueError as error:
                problems.append(f"{error}, not {value!r}")
    if problems:
        rule = "They may come from another version."
        raise ConfigError([Violation((), f"Saved settings cannot be read: {'; '.join(problems)}.", rule)])
    return build(parts)


def to_yaml(config: Config) -> str:
    """Settings as YAML that ``--config`` reads back to the same values.

    Raises:
        ConfigError: PyYAML is not installed.
    """
    yaml = optional("yaml", "--print-config needs PyYAML")
    text: str = yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True, width=1000)
    if any(line_break in text for line_break in "\x85\u2028\u2029"):  # PyYAML writes these as they are, and reads "\x85" as "\n"
        text = yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=False, width=1000)
    return text


def run_record(config: Config, argv: Sequence[str]) -> dict[str, Any]:
    """The record that is saved with a run so that it can be repeated, in JSON types.

    Returns:
        ``config`` (see `to_dict`), ``command`` (the words of the command line) and ``versions`` of the project, of
        Python and of the packages that are installed.
    """
    return {"config": to_dict(config), "command": list(argv), "versions": dict(_versions())}


@functools.cache
def _versions() -> dict[str, str]:
    found = {DISTRIBUTION: __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
