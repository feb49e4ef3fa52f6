"""Conversion of settings to JSON types and back, to YAML, and to the record of settings, command line and versions that is saved
with a run."""

from __future__ import annotations

import functools
import platform
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from megatron.config.config import Config
from megatron.config.errors import ConfigError, Violation
from megatron.config.flags import build_config, get_flags, get_topics
from megatron.config.optional_packages import PACKAGES, import_optional
from megatron.config.version import DISTRIBUTION, __version__

_PACKAGES = ("torch", "numpy", *(package.distribution for package in PACKAGES.values()), "wandb")


def to_dict(config: Config) -> dict[str, Any]:
    """Convert settings to JSON types: a mapping of topics, each a mapping of setting names to values."""
    return {
        topic: {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        for topic, values in config.to_dict().items()
    }


def from_dict(nested: dict[str, Any]) -> Config:
    """Build settings from the result of `to_dict`. A setting that is missing, as in files of older versions, has its default.

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
        raise ConfigError([Violation((), f"Saved settings cannot be read: {'; '.join(problems)}.", reason)])
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
