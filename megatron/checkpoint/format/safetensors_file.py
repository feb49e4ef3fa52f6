"""Safetensors files: written in one stream, read through a memory map.

The format (https://huggingface.co/docs/safetensors): 8 bytes with the length of the header (unsigned, little-endian), the header
(JSON: key -> dtype, shape and the first and last byte of the data after the header), then the data without gaps. It is written
here, not by the library's `save_file`, because that wants all tensors in host memory at once.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.checkpoint.errors import DamagedCheckpointError
from megatron.checkpoint.format.digest import checksum

DTYPE_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
}
"""Dtypes that checkpoints hold, and their codes in the header."""

_ALIGNMENT = 64
"""The data starts at a multiple of this many bytes in the file."""


@dataclass(frozen=True)
class Entry:
    """One tensor in a file."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the data."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_file(path: Path, entries: Sequence[Entry], tensor_of: Callable[[int], torch.Tensor]) -> tuple[int, list[str]]:
    """Write a new file and bring it to the disk.

    Args:
        path: the file.
        entries: what goes into it.
        tensor_of: gives the tensor of the i-th entry, on any device; it is called once for each, when its turn comes, so that
            one tensor at a time is copied to the host.

    Returns:
        the size of the file in bytes, and the checksum of each entry.

    Raises:
        OSError: the file cannot be written.
    """
    # Wide dtypes first, so that every entry starts at a multiple of its element size.
    order = sorted(range(len(entries)), key=lambda index: -entries[index].dtype.itemsize)
    header, at = {}, 0
    for index in order:
        entry = entries[index]
        end = at + entry.num_bytes
        header[entry.key] = {"dtype": DTYPE_CODES[entry.dtype], "shape": entry.shape, "data_offsets": (at, end)}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    checksums = [""] * len(entries)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for index in order:
            data = bytes_of(tensor_of(index))
            file.write(data)
            checksums[index] = checksum(data)
        file.flush()
        os.fsync(file.fileno())
        return file.tell(), checksums


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The raw bytes of a tensor, row-major; a copy only if it is not contiguous in host memory."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


class MappedFile:
    """A file opened for reading; tensors are views of its memory map, so only what is touched is read.

    Raises:
        DamagedCheckpointError: the file is missing, has another size than it was written with, or no readable header.
    """

    def __init__(self, path: Path, num_bytes: int) -> None:
        self._path = path
        try:
            with open(path, "rb") as file:
                if (found := os.fstat(file.fileno()).st_size) != num_bytes:
                    raise DamagedCheckpointError(f"{path} has {found} bytes, it was written with {num_bytes}")
                # Copy on write: torch wants a writable buffer. Nothing is written.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            (length,) = struct.unpack_from("<Q", self._map)
            self._data_start = 8 + length
            self._header = json.loads(self._map[8 : self._data_start])
        except FileNotFoundError as error:
            raise DamagedCheckpointError(f"{path} is missing") from error
        except (ValueError, struct.error) as error:
            if isinstance(error, DamagedCheckpointError):
                raise
            raise DamagedCheckpointError(f"{path} has no readable header ({error})") from error

    def tensor(self, entry: Entry) -> torch.Tensor:
        """A view of an entry's data.

        Raises:
            DamagedCheckpointError: the file has no such entry, or with another dtype, shape or place.
        """
        try:
            found = self._header[entry.key]
            start, end = found["data_offsets"]
            sound = found["dtype"] == DTYPE_CODES[entry.dtype] and tuple(found["shape"]) == entry.shape
            sound &= end - start == entry.num_bytes and 0 <= start and self._data_start + end <= len(self._map)
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedCheckpointError(f"{self._path} holds no readable entry {entry.key} ({error!r})") from error
        if not sound:
            raise DamagedCheckpointError(f"{self._path}: entry {entry.key} is {found}, expected {entry.dtype} {entry.shape}")
        flat = torch.frombuffer(self._map, dtype=entry.dtype, count=math.prod(entry.shape), offset=self._data_start + start)
        return flat.view(entry.shape)
