"""Selection of the storage by a path or URL: a local folder, an object store, or the memory of the nodes."""

from __future__ import annotations

import os
from pathlib import Path

from megatron.checkpoint.local_storage import LocalStorage
from megatron.checkpoint.storage import Storage, is_url
from megatron.config.imports import import_object
from megatron.config.optional_packages import open_filesystem

NODE_MEMORY_URL = "nodes://state"
"""URL of the memory of all nodes, the same on every rank. Each rank takes the folder of its node from an environment variable."""


def open_storage(location: str | os.PathLike[str]) -> Storage:
    """Return the `Storage` object that reads and writes a folder. The folder need not exist.

    Args:
        location: a local path, also as `file:///path`; a URL that fsspec knows, such as `s3://bucket/folder`; or `nodes://state`,
            the memory of the nodes of this job.

    Raises:
        ValueError: fsspec does not know this type of URL, or fsspec or the package that it needs for the URL is not installed.
    """
    text = os.fspath(location)
    if text.startswith(NODE_MEMORY_URL):
        node_storage: Storage = import_object("megatron_lab.node_memory.node_storage:NodeStorage").from_url(text)
        return node_storage
    if not is_url(text):
        return LocalStorage(Path(text.removeprefix("file://")))
    filesystem_object, root = open_filesystem(text)
    storage: Storage = import_object("megatron.checkpoint.object_storage:ObjectStorage")(text.rstrip("/"), filesystem_object, root)
    return storage
