"""Small files of a folder, on disk or behind a URL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.config.errors import ConfigError, Violation


def names_in(folder: str) -> set[str]:
    """Names of files and folders in a folder; none if there is no such folder."""
    if "://" in folder:
        system, path = _remote(folder)
        try:
            return {name.rstrip("/").rsplit("/", 1)[-1] for name in system.ls(path, detail=False)}
        except OSError:
            return set()
    place = Path(folder)
    return {path.name for path in place.iterdir()} if place.is_dir() else set()


def read_bytes(folder: str, name: str) -> bytes:
    """Content of a file.

    Raises:
        OSError: it cannot be read.
    """
    if "://" in folder:
        system, path = _remote(folder)
        content: bytes = system.cat_file(f"{path.rstrip('/')}/{name}")
        return content
    return (Path(folder) / name).read_bytes()


def _remote(url: str) -> tuple[Any, str]:
    """File system and path of a URL.

    Raises:
        ConfigError: nothing is installed that opens such a URL.
    """
    try:
        from fsspec.core import url_to_fs

        return url_to_fs(url)
    except (ImportError, ValueError) as error:
        rule = "URLs are opened by fsspec and its drivers: pip install fsspec, and for s3:// s3fs, for gs:// gcsfs."
        raise ConfigError([Violation((), f"{url} cannot be opened: {error}.", rule)]) from error
