"""Safetensors files: their headers written and read without the library, and without torch.

The format (https://huggingface.co/docs/safetensors): 8 bytes with the length of the header (unsigned, little-endian), the header
(JSON: key -> dtype, shape and the first and last byte of the data after the header), then the data without gaps. It is written
here, not by the library's `save_file`, because that wants all tensors in host memory at once.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.checkpoint.errors import DamagedCheckpointError

_ALIGNMENT = 64
"""The data starts at a multiple of this many bytes in the file."""
LENGTH_BYTES = 8
"""Bytes before the header, which hold its length."""


@dataclass(frozen=True)
class Entry:
    """One tensor in a file."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the data."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def in_file_order(entries: Sequence[Entry]) -> list[int]:
    """Indices of the entries in the order of their data: wide dtypes first, so each starts at a multiple of its element size."""
    return sorted(range(len(entries)), key=lambda index: -DTYPES[entries[index].dtype].itemsize)


def header_bytes(entries: Sequence[Entry], metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes before the data, for a file that holds the data of these entries in this order, without gaps.

    Args:
        metadata: texts about the file.
    """
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for entry in entries:
        end = at + entry.num_bytes
        header[entry.key] = {"dtype": DTYPES[entry.dtype].code, "shape": entry.shape, "data_offsets": (at, end)}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def header_length(first: bytes | memoryview) -> int:
    """Bytes of the header, given the first `LENGTH_BYTES` bytes of the file."""
    return int(struct.unpack_from("<Q", first)[0])


class Header:
    """Where the entries of a file are.

    Args:
        content: key -> dtype, shape and data_offsets, as in the file.
        data_start: the byte of the file at which the data begins.
        name: name of the file, for messages.
    """

    def __init__(self, content: dict[str, Any], data_start: int, name: str) -> None:
        self._content, self._data_start, self._name = content, data_start, name

    @classmethod
    def parse(cls, start: bytes, name: str) -> Header:
        """Read a header from the start of a file, which must hold all of it.

        Raises:
            DamagedCheckpointError: there is no header that can be read.
        """
        try:
            content = json.loads(start[LENGTH_BYTES:])
        except (ValueError, RecursionError) as error:
            raise DamagedCheckpointError(f"{name} has no readable header ({error})") from error
        if not isinstance(content, dict):
            raise DamagedCheckpointError(f"{name} has no readable header (not a table)")
        return cls(content, len(start), name)

    def place(self, entry: Entry) -> int:
        """The byte of the file at which an entry's data begins.

        Raises:
            DamagedCheckpointError: the file has no such entry, or with another dtype, shape or size.
        """
        try:
            found = self._content[entry.key]
            start, end = found["data_offsets"]
            sound = found["dtype"] == DTYPES[entry.dtype].code and tuple(found["shape"]) == entry.shape
            sound &= end - start == entry.num_bytes and start >= 0
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedCheckpointError(f"{self._name} holds no readable entry {entry.key} ({error!r})") from error
        if not sound:
            raise DamagedCheckpointError(f"{self._name}: entry {entry.key} is {found}, expected {entry.dtype} {list(entry.shape)}")
        return int(self._data_start + start)


@dataclass(frozen=True)
class DType:
    """A dtype of stored elements."""

    code: str
    """Its name in the header of a safetensors file."""
    itemsize: int
    """Bytes of an element."""


DTYPES = {
    "float64": DType("F64", 8),
    "float32": DType("F32", 4),
    "bfloat16": DType("BF16", 2),
    "float16": DType("F16", 2),
    "int64": DType("I64", 8),
}
"""Dtypes by their names in the manifest (torch's, without the `torch.`)."""
