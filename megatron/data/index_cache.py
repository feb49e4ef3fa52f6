"""Keeps indexes of large datasets in files, so that they are made once and shared by the processes of a machine.

A file is found by a hash of everything that its content depends on. It appears under its name only when it is complete, and is
checked before use. So a cache may be deleted, copied, or shared by machines and runs at any time. Where it does not work, every
process computes the same arrays in its own memory.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import mmap
import os
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from megatron.config.regular_file import open_regular
from megatron.data.indexed_writer import appearing, of_this_host

VERSION = 1
"""Part of every key. Raise it when the content of the arrays changes its meaning."""
MIN_ENTRIES = 1 << 20
"""Indexes with fewer entries are not kept: they are computed in no time."""

_OLD_S = 24 * 3600.0

Build = Callable[[], tuple[NDArray, ...]]
Key = tuple[object, ...]


def cache_for(prefix: str, data_cache_path: str | None, note: Callable[[str], None] | None = None) -> IndexCache:
    """The cache of a dataset: --data-cache-path, or the folder `cache` beside the dataset."""
    return IndexCache(Path(data_cache_path) if data_cache_path else Path(prefix).parent / "cache", note)


class IndexCache:
    """Arrays by key. Safe to use from several threads and processes.

    Args:
        folder: Made at the first use; None keeps nothing.
        note: Called, once for each, with what keeps the cache from working; prints to stderr by default.
    """

    def __init__(self, folder: Path | None, note: Callable[[str], None] | None = None) -> None:
        self.folder = folder
        self.made: list[Path] = []
        """Files that this object wrote."""
        self.found: list[Path] = []
        """Files that it read instead of building the arrays."""
        self.fault: str | None = None
        """What keeps the cache from working, once it is known."""
        self._note = note or (lambda text: print(f"note: {text}", file=sys.stderr, flush=True))
        self._told: set[str] = set()

    def get(self, name: str, arrays: Sequence[str], key: Callable[[], Key], num_entries: int, build: Build) -> tuple[NDArray, ...]:
        """The arrays that `build` makes: read from the cache, or built by one process while the others wait.

        Args:
            name: Beginning of the file names.
            arrays: Names of the arrays, in the order in which `build` returns them; they are one-dimensional.
            key: All that their content depends on, as numbers and texts; called only if the cache is used.
            num_entries: Approximate size of the largest array; small ones are never kept.
            build: Makes the arrays.
        """
        if self.folder is None or num_entries < MIN_ENTRIES:
            return build()
        digest = hashlib.sha256(repr((VERSION, name, *key())).encode()).digest()[:16]
        # The name of the array too, so that a file is not taken for another of the same index.
        owners = (hashlib.sha256(digest + array.encode()).digest()[:16] for array in arrays)
        files = {self.folder / f"{name}-{digest.hex()}-{array}.npy": owner for array, owner in zip(arrays, owners, strict=True)}
        found = self._load(files)
        if found is not None:
            return found
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = (self.folder / "lock").open("ab")
        except OSError as error:
            self._tell_of(error)
            return build()
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)  # released with the file, also by a process that is killed
            except OSError as error:
                self._tell_of(error)
                return build()
            found = self._load(files)
            return found if found is not None else self._save(files, build())

    def _load(self, files: Mapping[Path, bytes]) -> tuple[NDArray, ...] | None:
        try:
            arrays = tuple(read_array(file, owner) for file, owner in files.items())
        except FileNotFoundError:
            return None
        except DamagedIndexError as error:
            self._tell(f"{error}; it is made again")
        except OSError as error:
            self._tell_of(error)
        else:
            self.found += [file for file in files if file not in self.made]
            return arrays
        return None

    def _save(self, files: Mapping[Path, bytes], arrays: tuple[NDArray, ...]) -> tuple[NDArray, ...]:
        """Write the arrays and return them from the files, or from memory if that does not work."""
        assert self.folder is not None
        _sweep(self.folder)
        try:
            for (file, owner), array in zip(files.items(), arrays, strict=True):
                with appearing(str(file), sync=False) as (opened,):
                    write_array(opened, owner, array)
                self.made.append(file)
        except OSError as error:
            self._tell_of(error)
            return arrays
        return self._load(files) or arrays

    def _tell_of(self, error: OSError) -> None:
        self.fault = (
            f"the index cache {self.folder} cannot be used ({error.strerror or error}): every process computes large indexes in "
            "its own memory, at each start. Give a folder that can be written with --data-cache-path."
        )
        self._tell(self.fault)

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._note(text)


def _sweep(folder: Path) -> None:
    """Remove what killed processes left. Whoever holds the lock is the only writer on this machine."""
    mark = of_this_host()
    for partial in folder.glob("*.partial-*"):
        try:
            if mark in partial.name or time.time() - partial.stat().st_mtime > _OLD_S:
                partial.unlink()
        except OSError:
            continue  # renamed or removed by another machine in the meantime


_FOOTER = struct.Struct("<8s16s16s")
_MAGIC = b"mindex1\0"


class DamagedIndexError(Exception):
    """A damaged file; the message names it and says what is wrong."""


def write_array(file: BinaryIO, digest: bytes, array: NDArray) -> None:
    """Write an array and a digest of 16 bytes to a new file, which can be read too."""
    npy.write_array(file, np.ascontiguousarray(array), version=(1, 0), allow_pickle=False)
    file.write(_MAGIC + digest)
    file.flush()
    from xxhash import xxh3_128_digest

    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as written:
        checksum = xxh3_128_digest(written)
    file.write(checksum)


def read_array(path: Path, digest: bytes) -> NDArray:
    """Map an array that `write_array` wrote, read-only.

    Raises:
        DamagedIndexError: the file is truncated, changed, or belongs to another digest.
        OSError: it cannot be opened.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= _FOOTER.size:
            raise DamagedIndexError(f"the cached index {path} is truncated")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    magic, owner, checksum = _FOOTER.unpack_from(mapped, size - _FOOTER.size)
    if magic != _MAGIC or owner != digest:
        raise DamagedIndexError(f"the cached index {path} is truncated or belongs to another dataset")
    from xxhash import xxh3_128_digest

    with memoryview(mapped) as view, view[: size - len(checksum)] as content:
        if xxh3_128_digest(content) != checksum:
            raise DamagedIndexError(f"the cached index {path} is damaged: its checksum does not fit")
    head = io.BytesIO(mapped[:128])
    npy.read_magic(head)
    shape, _, dtype = npy.read_array_header_1_0(head)
    return np.frombuffer(mapped, dtype, shape[0], head.tell())
