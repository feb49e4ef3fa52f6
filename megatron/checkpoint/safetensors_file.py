"""Safetensors files: their headers written and read without the library, and without torch.

The format (https://huggingface.co/docs/safetensors): 8 bytes with the length of the header (unsigned, little-endian), the header
(JSON: key -> dtype, shape and the first and last byte of the data after the header), then the data without gaps. It is written
here, not by the library's `save_file`, because that wants all tensors in host memory at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron.checkpoint.errors import DamagedCheckpointError
from megatron.checkpoint.storage import Reading

T = TypeVar("T")

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


def in_files(items: Sequence[T], num_bytes: Callable[[T], int], max_bytes: int | None) -> list[list[T]]:
    """The items in order, cut into files of at most `max_bytes` bytes of data (more where a single item is larger)."""
    files: list[list[T]] = []
    size = 0
    for item in items:
        if not files or (max_bytes is not None and size + num_bytes(item) > max_bytes):
            files.append([])
            size = 0
        files[-1].append(item)
        size += num_bytes(item)
    return files


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
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


class Header:
    """The place of each entry in a file.

    Args:
        file: the file.
        name: its name, for messages.

    Raises:
        DamagedCheckpointError: there is no header that can be read.
    """

    def __init__(self, file: Reading, name: str) -> None:
        self.file, self._data_start, self._name = file, LENGTH_BYTES, name
        self._data_start += int.from_bytes(file.read(0, min(LENGTH_BYTES, file.size)), "little")
        try:
            if self._data_start > file.size:
                raise ValueError("the file ends before")
            content = json.loads(file.read(LENGTH_BYTES, self._data_start - LENGTH_BYTES))
            if not isinstance(content, dict):
                raise ValueError("not a table")
        except (ValueError, RecursionError) as error:
            raise DamagedCheckpointError(f"{name} has no readable header ({error})") from error
        self._content: dict[str, Any] = content

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
    "uint8": DType("U8", 1),
}
"""Dtypes by their names in the manifest (torch's, without the `torch.`)."""
