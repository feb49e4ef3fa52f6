"""File operations on local paths and on URLs. fsspec opens URLs such as s3://, gs://, hf:// and memory://; file:// is a local path.

The module also turns errors of a full disk into messages for the user.
"""

from __future__ import annotations

import errno
import glob as local_glob
import hashlib
import io
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import xxhash

from megatron.config.optional_packages import open_filesystem
from megatron.config.regular_file import open_regular
from megatron.data.indexed_writer import write_atomically

BUFFER_BYTES = 1 << 20
JOB_FILE = "job.json"
"""File with the settings of a job. A folder that contains it is the PREFIX.parts folder of a job."""

_VERSION_FIELDS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created")


def is_url(path: str) -> bool:
    """Return whether a path is a URL that fsspec must open."""
    return "://" in path


def normalize_path(path: str) -> str:
    """Return an absolute path. A URL stays unchanged; only a file:// URL becomes a path."""
    path = path.removeprefix("file://") if path.startswith("file:///") else path
    return path if is_url(path) else os.path.abspath(path)


def stat(path: str) -> tuple[int, str] | None:
    """Return the size of a file in bytes and a version string that changes with its content; None if the file does not exist.

    The version string contains the size and the modification time. For a URL, it may contain another mark of the content instead of
    the time, such as the entity tag.
    """
    if not is_url(path):
        try:
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return (status.st_size, f"{status.st_size} {status.st_mtime_ns}") if os.path.isfile(path) else None
    filesystem, name = open_filesystem(path)
    try:
        info = filesystem.info(name)
    except FileNotFoundError:
        return None
    if info["type"] != "file":
        return None
    size, version = int(info["size"]), next((info[field] for field in _VERSION_FIELDS if info.get(field) is not None), "")
    return size, f"{size} {version}"


def is_folder(path: str) -> bool:
    """Return whether a path is a folder, or a prefix with files in an object store."""
    if not is_url(path):
        return os.path.isdir(path)
    filesystem, name = open_filesystem(path)
    return bool(filesystem.isdir(name))


def list_files(folder: str, on_hidden: Callable[[str], None] = lambda path: None) -> Iterator[str]:
    """Yield every file in a folder and its subfolders. A folder that several links name is visited only once.

    Names that start with a dot, and the folders of unfinished preprocessing jobs, are skipped.

    Args:
        on_hidden: called with the path of each file or local folder whose name starts with a dot.
    """
    if is_url(folder):
        filesystem, name = open_filesystem(folder)
        paths, job_file = sorted(filesystem.find(name)), f"{name.rstrip('/')}/{JOB_FILE}"
        jobs = tuple(path.removesuffix(JOB_FILE) for path in paths if path.endswith(f".parts/{JOB_FILE}") and path != job_file)
        for path in paths:
            if path.startswith(jobs or ("\0",)):
                continue
            if any(component.startswith(".") for component in path[len(name) :].split("/")):
                on_hidden(filesystem.unstrip_protocol(path))
            else:
                yield filesystem.unstrip_protocol(path)
        return
    seen: set[str] = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        real_path = os.path.realpath(parent)
        if real_path in seen or (parent != folder and _is_job_folder(parent)):
            folders.clear()
            continue
        seen.add(real_path)
        for name in sorted(name for name in (*folders, *names) if name.startswith(".")):
            on_hidden(os.path.join(parent, name))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (os.path.join(parent, name) for name in names if not name.startswith("."))


def glob(pattern: str) -> list[str]:
    """Return the files and folders that match a pattern such as data/*.jsonl, except for the folders of unfinished preprocessing
    jobs."""
    if is_url(pattern):
        filesystem, name = open_filesystem(pattern)
        return [filesystem.unstrip_protocol(path) for path in filesystem.glob(name) if ".parts/" not in path]
    paths = local_glob.glob(pattern, recursive=True)
    jobs = {parent for parent in {os.path.dirname(path) for path in paths} if _is_job_folder(parent)}
    return [path for path in paths if os.path.dirname(path) not in jobs and not _is_job_folder(path)]


def _is_job_folder(folder: str) -> bool:
    """Return whether a local folder is the PREFIX.parts folder of an unfinished preprocessing job, possibly partially removed."""
    name, _, removed = folder.rpartition(".removed-")
    return (bool(removed) and name.endswith(".parts")) or (
        folder.endswith(".parts") and os.path.isfile(os.path.join(folder, JOB_FILE))
    )


def open_binary(path: str) -> BinaryIO:
    """Open a file at a path or URL for buffered reading and seeking."""
    if not is_url(path):
        return io.BufferedReader(cast(io.RawIOBase, open_regular(path)), BUFFER_BYTES)
    filesystem, name = open_filesystem(path)
    return cast(BinaryIO, io.BufferedReader(filesystem.open(name, "rb"), BUFFER_BYTES))


def read_start(path: str, num_bytes: int) -> bytes:
    """Return the first bytes of a file at a path or URL: `num_bytes`, or fewer if the file is shorter."""
    if not is_url(path):
        with open_regular(path) as file:
            return cast(BinaryIO, file).read(num_bytes)
    filesystem, name = open_filesystem(path)
    return bytes(filesystem.cat_file(name, start=0, end=num_bytes))[:num_bytes]


def write_text(path: str, text: str, sync: bool = True) -> None:
    """Write a small file at a path or URL atomically.

    Args:
        sync: wait until the data is on disk. Without this, a power failure may leave an empty file.
    """
    if is_url(path):
        filesystem, name = open_filesystem(path)
        filesystem.pipe_file(name, text.encode())
        return
    with write_atomically(path, sync=sync) as (file,):
        file.write(text.encode())


def upload(local: str, path: str) -> None:
    """Copy a local file to a URL."""
    filesystem, name = open_filesystem(path)
    filesystem.put_file(local, name)


def download(path: str, local: str) -> None:
    """Copy the file at a URL to a local file."""
    filesystem, name = open_filesystem(path)
    filesystem.get_file(name, local)


def remove(path: str) -> None:
    """Remove a file, or a folder with its content, if it exists."""
    if is_url(path):
        filesystem, name = open_filesystem(path)
        if filesystem.exists(name):
            filesystem.rm(name, recursive=True)
    elif os.path.isdir(path):
        shutil.rmtree(path)
    else:
        Path(path).unlink(missing_ok=True)


_DISK_FULL_ERRORS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota of this user is used up",
    errno.EFBIG: "the file is larger than the system allows",
}


@contextmanager
def explain_disk_full(folder: str, remedy: str) -> Iterator[None]:
    """Context manager that converts an OSError because of a full disk, a quota or a file size limit to a ValueError for the user.

    Args:
        folder: folder that the message names.
        remedy: sentence that says what the user can do.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_FULL_ERRORS:
            raise
        raise ValueError(f"{folder}: {_DISK_FULL_ERRORS[error.errno]} ({error}).\n  {remedy}") from error


def compute_joint_digest(files: Iterable[Path]) -> str:
    """Return a hash of the names and contents of several files."""
    return xxhash.xxh3_128_hexdigest("".join(f"{file.name}\0{compute_digest(file)}\0" for file in files).encode())


def compute_digest(path: str | Path) -> str:
    """Return the xxh3 hash of a file's content."""
    with open_regular(path) as file:
        return hashlib.file_digest(cast(io.RawIOBase, file), xxhash.xxh3_128).hexdigest()
