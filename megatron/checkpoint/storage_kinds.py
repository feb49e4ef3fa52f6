"""Opens the storage of a path or a URL: a local folder, an object store, or the memory of the nodes."""

from __future__ import annotations

import os
from pathlib import Path

from megatron.checkpoint.local_storage import LocalStorage
from megatron.checkpoint.storage import Storage, is_url
from megatron.config.extras import filesystem
from megatron.config.imports import named

LOCATION = "nodes://state"
"""The memory of all nodes, by the same name in every rank; each has its node's folder from its environment."""


def open_storage(location: str | os.PathLike[str]) -> Storage:
    """The folder with this path or URL, which need not exist.

    Args:
        location: a local path, also as `file:///path`; a URL that fsspec knows, such as `s3://bucket/folder`; or
            `nodes://state`, the memory of the nodes of this job.

    Raises:
        ValueError: fsspec, or the package that it needs for this kind of URL, is not installed, or it knows no such kind.
    """
    text = os.fspath(location)
    if text.startswith(LOCATION):
        found: Storage = named("megatron_lab.node_memory.node_storage:NodeStorage").at_url(text)
        return found
    if not is_url(text):
        return LocalStorage(Path(text.removeprefix("file://")))
    files, root = filesystem(text)
    storage: Storage = named("megatron.checkpoint.object_storage:ObjectStorage")(text.rstrip("/"), files, root)
    return storage
