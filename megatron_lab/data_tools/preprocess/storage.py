"""Files by local path, or by URL through fsspec (s3://, gs://, hf://, memory:// and so on; file:// is a local path); and the errors
that inputs and full disks lead to."""

from __future__ import annotations

import errno
import glob as local_glob
import hashlib
import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import xxhash

from megatron.config.extras import filesystem
from megatron.data.indexed_writer import appearing

BUFFER_BYTES = 1 << 20
JOB_FILE = "job.json"
"""A folder with this file is the PREFIX.parts of a job."""

_VERSION_FIELDS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created")


def is_url(path: str) -> bool:
    """Whether the path is opened by fsspec."""
    return "://" in path


def normal(path: str) -> str:
    """The same path as seen from any folder: absolute. A URL stays as it is, but a local one becomes a path."""
    path = path.removeprefix("file://") if path.startswith("file:///") else path
    return path if is_url(path) else os.path.abspath(path)


def stat(path: str) -> tuple[int, str] | None:
    """Size in bytes, and a text that changes with the content: size and time of change or entity tag; None if no file is there."""
    if not is_url(path):
        try:
            found = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return (found.st_size, f"{found.st_size} {found.st_mtime_ns}") if os.path.isfile(path) else None
    files, name = filesystem(path)
    try:
        info = files.info(name)
    except FileNotFoundError:
        return None
    if info["type"] != "file":
        return None
    size, version = int(info["size"]), next((info[field] for field in _VERSION_FIELDS if info.get(field) is not None), "")
    return size, f"{size} {version}"


def is_folder(path: str) -> bool:
    """Whether it is a folder, or a prefix of an object store under which there is something."""
    if not is_url(path):
        return os.path.isdir(path)
    files, name = filesystem(path)
    return bool(files.isdir(name))


def find(folder: str) -> Iterator[str]:
    """Every file in a folder and below it; each folder once, however many links lead there.

    Names that begin with a dot are left out, and so are the folders of unfinished preprocessing jobs.
    """
    if is_url(folder):
        files, name = filesystem(folder)
        found, own = sorted(files.find(name)), f"{name.rstrip('/')}/{JOB_FILE}"
        jobs = tuple(path.removesuffix(JOB_FILE) for path in found if path.endswith(f".parts/{JOB_FILE}") and path != own)
        for path in found:
            if not path.startswith(jobs or ("\0",)) and not any(part.startswith(".") for part in path[len(name) :].split("/")):
                yield files.unstrip_protocol(path)
        return
    seen: set[str] = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(parent)
        if real in seen or (parent != folder and _is_of_a_job(parent)):
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (os.path.join(parent, name) for name in names if not name.startswith("."))


def glob(pattern: str) -> list[str]:
    """Files and folders that a pattern matches, without those of an unfinished preprocessing job."""
    if is_url(pattern):
        files, name = filesystem(pattern)
        return [files.unstrip_protocol(path) for path in files.glob(name) if ".parts/" not in path]
    found = local_glob.glob(pattern, recursive=True)
    jobs = {parent for parent in {os.path.dirname(path) for path in found} if _is_of_a_job(parent)}
    return [path for path in found if os.path.dirname(path) not in jobs and not _is_of_a_job(path)]


def _is_of_a_job(folder: str) -> bool:
    """Whether it is the PREFIX.parts of an unfinished job, or what is left of one."""
    name, _, removed = folder.rpartition(".removed-")
    return (bool(removed) and name.endswith(".parts")) or (
        folder.endswith(".parts") and os.path.isfile(os.path.join(folder, JOB_FILE))
    )


def open_binary(path: str) -> BinaryIO:
    """Open a file to read and seek in, buffered."""
    if not is_url(path):
        return open(path, "rb", buffering=BUFFER_BYTES)
    files, name = filesystem(path)
    return cast(BinaryIO, io.BufferedReader(files.open(name, "rb"), BUFFER_BYTES))


def write_text(path: str, text: str, sync: bool = True) -> None:
    """Write a small file: whole, or not at all. Without `sync` a loss of power may leave it empty."""
    if is_url(path):
        files, name = filesystem(path)
        files.pipe_file(name, text.encode())
        return
    with appearing(path, sync=sync) as (file,):
        file.write(text.encode())


def upload(local: str, path: str) -> None:
    """Copy a local file to a URL."""
    files, name = filesystem(path)
    files.put_file(local, name)


def download(path: str, local: str) -> None:
    """Copy the file at a URL to a local file."""
    files, name = filesystem(path)
    files.get_file(name, local)


def remove(path: str) -> None:
    """Remove a file or a folder with all in it, if it exists."""
    if is_url(path):
        files, name = filesystem(path)
        if files.exists(name):
            files.rm(name, recursive=True)
    elif os.path.isdir(path):
        shutil.rmtree(path)
    else:
        Path(path).unlink(missing_ok=True)


_NO_ROOM = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota of this user is used up",
    errno.EFBIG: "the file is larger than the system lets it be",
}


@contextmanager
def told_where_no_room(folder: str, remedy: str) -> Iterator[None]:
    """Turn an error of a full disk into a message with the folder and a remedy.

    Raises:
        ValueError: instead of an OSError that says that nothing more can be written.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise ValueError(f"{folder}: {_NO_ROOM[error.errno]} ({error}).\n  {remedy}") from error


def digest(path: str | Path) -> str:
    """xxh3 of a file's content, or of all files of a folder with their names."""
    if Path(path).is_dir():
        files = sorted(file for file in Path(path).iterdir() if file.is_file())
        return xxhash.xxh3_128_hexdigest("".join(f"{file.name}\0{digest(file)}\0" for file in files).encode())
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
