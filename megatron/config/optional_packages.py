"""Libraries that only some settings and inputs need.

The packages in `PACKAGES` are installed together with the project. They can be missing only in a checkout that was not installed.
Every other library is installed by the extra of this project that has the library's name.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from megatron.config.config import Config
from megatron.config.data import PATH_FIELDS
from megatron.config.errors import ConfigError, Violation
from megatron.config.setting import get_flag_name
from megatron.config.version import get_extra_install_command


class Package(NamedTuple):
    """Package that a run needs only for some settings and inputs."""

    distribution: str
    """Name of the package for pip."""
    purpose: str
    """Features that are unavailable without the package."""
    fields: tuple[str, ...] = ()
    """Settings fields that need the package. A run that sets one of them without the package is refused at its start."""


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
    "charset_normalizer": Package("charset-normalizer", "texts that are not UTF-8"),
}
"""Packages by the name of their module, in the order of the start-up note. Torch and numpy are always required."""

LOGGER_FIELDS: Mapping[str, str] = {"wandb": "wandb_project", "mlflow": "mlflow_experiment", "trackio": "trackio_project"}
"""Settings fields that need the package of a logger, by the name of its module. The extra of the same name installs it."""


def is_missing(module: str) -> bool:
    """Return whether a module cannot be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is None
    except (ImportError, ValueError):  # an entry of sys.modules without a spec, as in tests
        return True


def note_missing_packages() -> list[str]:
    """Return a line for the start-up log that lists the missing packages, or an empty list if all are installed."""
    missing = [package for module, package in PACKAGES.items() if is_missing(module)]
    if not missing:
        return []
    named = ", ".join(f"{package.distribution} ({package.purpose})" for package in missing)
    return [f"packages that are not installed, and what is unavailable without them: {named}"]


def find_missing_packages(config: Config) -> Iterator[Violation]:
    """Yield a problem for each package that a setting needs but that is not installed."""
    values = {field: value for topic in config.to_dict().values() for field, value in topic.items()}
    needs = [(module, package.distribution, package.fields) for module, package in PACKAGES.items()]
    for module, distribution, needing in [*needs, *((module, module, (field,)) for module, field in LOGGER_FIELDS.items())]:
        fields = [field for field in needing if values[field]]
        if fields and is_missing(module):
            flag = get_flag_name(fields[0])
            yield Violation((flag,), f"{flag} needs {distribution}, which is not installed.", f"{get_install_command(module)}.")


def get_install_command(library: str, extra: str | None = None) -> str:
    """Return the pip command that installs a library, or the extra of this project that contains the library.

    Args:
        library: name of a module, such as `tensorboard.summary`.
        extra: the extra that contains the library, by default the extra with the library's name.
    """
    name = library.partition(".")[0]
    package = PACKAGES.get(name)
    return get_extra_install_command(extra or name.replace("_", "-")) if package is None else f"pip install {package.distribution}"


def import_optional(library: str, needed: str, *, extra: str | None = None) -> Any:
    """Import and return an optional library, or a module of it.

    Args:
        library: dotted name of the module.
        needed: start of the error message, such as "--engine ray needs Ray".
        extra: the extra that installs the library, by default the extra with the library's name.

    Raises:
        ConfigError: the library is not installed. The message says how to install it.
    """
    try:
        return importlib.import_module(library)
    except ImportError as error:
        message = f"{needed}, which is not installed: {get_install_command(library, extra)}"
        raise ConfigError([Violation((), message)]) from error


def open_filesystem(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path in it.

    Raises:
        ValueError: fsspec, or the package that it needs for this protocol, is not installed, or fsspec does not know the protocol.
    """
    fsspec = import_optional("fsspec", f"{url}: URLs are opened through fsspec")
    try:
        fs, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:  # the error names the missing package, or the known protocols
        raise ValueError(f"{url}: {error}") from error
    return fs, path
