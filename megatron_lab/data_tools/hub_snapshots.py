"""Folders in which the Hugging Face Hub's programs store downloaded repositories.

The cache (https://huggingface.co/docs/huggingface_hub/guides/manage-cache) has a folder such as datasets--ORG--NAME or
models--ORG--NAME for each repository. There, snapshots/HASH contains links to the files of a revision, and refs/main the hash of
the newest one.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_SNAPSHOT = re.compile(r"(datasets|models)--[^/]+/snapshots/[^/]+/?$")


def resolve_snapshot(path: str) -> str:
    """Return the folder of the snapshot that the cache folder of a repository selects. Other paths are returned unchanged.

    It is the snapshot of refs/main, or the only one.

    Raises:
        ValueError: the snapshot of refs/main is missing, or there are several snapshots and no refs/main.
    """
    folder = Path(path)
    snapshots = folder / "snapshots"
    if "://" in path or not snapshots.is_dir() or not ((folder / "refs").is_dir() or (folder / "blobs").is_dir()):
        return path
    names = sorted(snapshot.name for snapshot in snapshots.iterdir() if snapshot.is_dir())
    main = folder / "refs" / "main"
    if main.is_file():
        if (name := main.read_text().strip()) in names:
            return str(snapshots / name)
        problem = f"refs/main names the snapshot {name}, which is missing"
    elif len(names) == 1:
        return str(snapshots / names[0])
    else:
        problem = "there is no refs/main that selects a snapshot"
    choice = f"Give one of its snapshots: {', '.join(str(snapshots / name) for name in names)}" if names else "Download it again"
    raise ValueError(f"{path} is the folder of a repository in the cache of the Hugging Face Hub, but {problem}.\n  {choice}.")


def is_dataset_download(folder: str) -> bool:
    """Return whether a local folder is a download of a repository of the Hub: a snapshot in the cache, or a folder of
    `hf download --local-dir`."""
    return bool(_SNAPSHOT.search(folder)) or os.path.isdir(os.path.join(folder, ".cache", "huggingface"))
