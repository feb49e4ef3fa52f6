"""A storage by path or URL."""

from __future__ import annotations

import os
from pathlib import Path

from megatron.checkpoint.storage.local import LocalStorage
from megatron.checkpoint.storage.objects import ObjectStorage
from megatron.checkpoint.storage.protocol import Storage


def is_url(location: str) -> bool:
    """Whether fsspec is asked for it."""
    return "://" in location and not location.startswith("file://")


def open_storage(location: str | os.PathLike[str]) -> Storage:
    """The folder with this path or URL, which need not exist.

    Args:
        location: a local path, also as `file:///path`; a URL that fsspec knows, such as `s3://bucket/folder`.

    Raises:
        ValueError: fsspec, or the package that it needs for this kind of URL, is not installed, or it knows no such kind.
    """
    text = os.fspath(location)
    if not is_url(text):
        return LocalStorage(Path(text.removeprefix("file://")))
    try:
        import fsspec
    except ImportError as error:
        raise ValueError(
            f"{text}: URLs are opened through fsspec, which is not installed: pip install 'megatron-3d[fsspec]'"
        ) from error
    try:
        files, root = fsspec.core.url_to_fs(text)
    except (ImportError, ValueError) as error:  # names the package that is missing, or the protocols that are known
        raise ValueError(f"{text}: {error}") from error
    return ObjectStorage(text.rstrip("/"), files, root)
