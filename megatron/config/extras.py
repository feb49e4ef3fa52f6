"""Libraries that only some settings and inputs need.

Those in `PACKAGES` come with every installation, but a checkout that is not installed may run without them. All others are
installed by the extra of the package that has their name.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from megatron.config.config import Config
from megatron.config.data import PATH_FIELDS
from megatron.config.errors import ConfigError, Violation
from megatron.config.setting import typed
from megatron.config.version import how_to_install


class Package(NamedTuple):
    """A package that a checkout can do without."""

    distribution: str
    """Name for pip."""
    purpose: str
    """Features that are unavailable without the package."""
    settings: tuple[str, ...] = ()
    """Fields of the settings that need the package. A run that has one of them set is refused at its start."""


PACKAGES: Mapping[str, Package] = {
    "tyro": Package("tyro", "the wide page of --help"),
    "yaml": Package("PyYAML", "--config, --model, --print-config and the step times of plans"),
    "xxhash": Package("xxhash", "checkpoints and datasets in files", ("save", "load", "pretrained_checkpoint", *PATH_FIELDS)),
    "tiktoken": Package("tiktoken", "tokenizers of byte-level BPE"),
    "regex": Package("regex", "tokenizers of byte-level BPE"),
    "sentencepiece": Package("sentencepiece", "tokenizers of sentencepiece"),
    "safetensors": Package("safetensors", "checkpoints of Hugging Face"),
    "jinja2": Package("jinja2", "chat templates"),
    "tensorboard": Package("tensorboard", "--tensorboard-dir", ("tensorboard_dir",)),
}
"""Packages by the name of their module, in the order of the start-up note. Torch and numpy are always required."""


def is_missing(module: str) -> bool:
    """Return whether a module cannot be imported. It is not imported."""
    try:
        return importlib.util.find_spec(module) is None
    except (ImportError, ValueError):  # an entry without a spec, as of a test
        return True


def missing_note() -> list[str]:
    """Return a line for the start-up log on the packages that are missing; none if all are there."""
    missing = [package for module, package in PACKAGES.items() if is_missing(module)]
    if not missing:
        return []
    named = ", ".join(f"{package.distribution} ({package.purpose})" for package in missing)
    return [f"packages that are not installed, and what is unavailable without them: {named}"]


def missing_packages(config: Config) -> Iterator[Violation]:
    """Find the settings that need a missing package."""
    values = {field: value for topic in config.values().values() for field, value in topic.items()}
    for module, package in PACKAGES.items():
        fields = [field for field in package.settings if values[field]]
        if fields and is_missing(module):
            flag = typed(fields[0])
            yield Violation((flag,), f"{flag} needs {package.distribution}, which is not installed.", f"{how_to_get(module)}.")


def how_to_get(library: str, extra: str | None = None) -> str:
    """Return the command that installs a library, or the extra that holds it."""
    name = library.partition(".")[0]
    package = PACKAGES.get(name)
    return how_to_install(extra or name.replace("_", "-")) if package is None else f"pip install {package.distribution}"


def optional(library: str, needed: str, *, extra: str | None = None) -> Any:
    """Import a library, or a module of a library.

    Args:
        needed: start of the error message, such as "--engine ray needs Ray".
        extra: the extra that installs the library, by default the extra with the library's name.

    Raises:
        ConfigError: the library is not installed. The message says how to install it.
    """
    try:
        return importlib.import_module(library)
    except ImportError as error:
        message = f"{needed}, which is not installed: {how_to_get(library, extra)}"
        raise ConfigError([Violation((), message)]) from error


def filesystem(url: str) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the path in it.

    Raises:
        ValueError: fsspec, or what it needs for this kind of URL, is not installed, or it knows no such kind.
    """
    fsspec = optional("fsspec", f"{url}: URLs are opened through fsspec")
    try:
        files, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:  # names the package that is missing, or the protocols that are known
        raise ValueError(f"{url}: {error}") from error
    return files, path
