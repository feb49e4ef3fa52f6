"""Libraries that only some settings and inputs need: each is installed by the extra of the package that has its name."""

from __future__ import annotations

import importlib
from typing import Any

from megatron.config.version import how_to_install


def optional(library: str, needed: str, *, extra: str | None = None) -> Any:
    """Import a library, or a module of one.

    Args:
        needed: what needs it, for the message: "--engine ray needs Ray".
        extra: that installs it; by default the one of its name.

    Raises:
        ValueError: it is not installed. The message says how to install it.
    """
    try:
        return importlib.import_module(library)
    except ImportError as error:
        extra = extra or library.partition(".")[0].replace("_", "-")
        raise ValueError(f"{needed}, which is not installed: {how_to_install(extra)}") from error


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
