"""A one-dimensional array in a file that shows whether it is whole and what it belongs to.

The file is a .npy file with 40 bytes after it: magic, the digest of the key, and a checksum (XXH3) of all before.
"""

from __future__ import annotations

import io
import mmap
import os
import struct
from pathlib import Path

import numpy as np
import xxhash
from numpy.lib import format as npy
from numpy.typing import NDArray

_FOOTER = struct.Struct("<8s16s16s")
_MAGIC = b"mindex1\0"


class DamagedFileError(Exception):
    """The message names the file and what is wrong with it."""


def write_array(path: Path, digest: bytes, array: NDArray) -> None:
    """Write an array.

    Args:
        path: Written in place: give a temporary name.
        digest: 16 bytes.
    """
    with path.open("w+b") as file:
        npy.write_array(file, np.ascontiguousarray(array), version=(1, 0), allow_pickle=False)
        file.write(_MAGIC + digest)
        file.flush()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as written:
            checksum = xxhash.xxh3_128_digest(written)
        file.write(checksum)


def read_array(path: Path, digest: bytes) -> NDArray:
    """Map an array that `write_array` wrote, read-only.

    Raises:
        DamagedFileError: the file is truncated, changed, or belongs to another digest.
        OSError: it cannot be opened.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= _FOOTER.size:
            raise DamagedFileError(f"the cached index {path} is truncated")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    magic, owner, checksum = _FOOTER.unpack_from(mapped, size - _FOOTER.size)
    if magic != _MAGIC or owner != digest:
        raise DamagedFileError(f"the cached index {path} is truncated or belongs to another dataset")
    with memoryview(mapped) as view, view[: size - len(checksum)] as content:
        if xxhash.xxh3_128_digest(content) != checksum:
            raise DamagedFileError(f"the cached index {path} is damaged: its checksum does not fit")
    head = io.BytesIO(mapped[:128])
    npy.read_magic(head)
    shape, _, dtype = npy.read_array_header_1_0(head)
    return np.frombuffer(mapped, dtype, shape[0], head.tell())
