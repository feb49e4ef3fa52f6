"""Reading and writing of the headers of safetensors files, without the safetensors library and without torch.

The format (https://huggingface.co/docs/safetensors): 8 bytes with the length of the header (unsigned, little-endian), the header
(JSON: key -> dtype, shape, and the offsets of the first and last byte of the data after the header), then the data without gaps.
The library's `save_file` is not used, because it needs all tensors in host memory at the same time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron.checkpoint.errors import DamagedCheckpointError
from megatron.checkpoint.storage import FileReader
from megatron.config.regular_file import parse_json

T = TypeVar("T")

_ALIGNMENT = 64
"""The data of a file starts at a multiple of this number of bytes."""
LENGTH_BYTES = 8
"""Size of the field before the header that holds the length of the header, in bytes."""


@dataclass(frozen=True)
class TensorEntry:
    """Tensor in a safetensors file, as the header lists it: key, dtype and shape."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def split_into_files(items: Sequence[T], num_bytes: Callable[[T], int], max_bytes: int | None) -> list[list[T]]:
    """Split items, such as tensors, into groups that each fit into one file. The order of the items does not change.

    Args:
        num_bytes: function that returns the size of an item's data.
        max_bytes: maximum size of a file's data. A single larger item gets its own file. None for one file.
    """
    groups: list[list[T]] = []
    size = 0
    for item in items:
        if not groups or (max_bytes is not None and size + num_bytes(item) > max_bytes):
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += num_bytes(item)
    return groups


def encode_header(entries: Sequence[TensorEntry], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the header of a safetensors file with its length: all bytes before the data. The data of the entries must follow in
    this order, without gaps.

    Args:
        metadata: strings about the file, stored under `__metadata__`.
    """
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    start = 0
    for entry in entries:
        end = start + entry.num_bytes
        header[entry.key] = {"dtype": DTYPES[entry.dtype].code, "shape": entry.shape, "data_offsets": (start, end)}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


class Header:
    """Header of an open safetensors file.

    Args:
        file: the open file.
        name: name of the file, for error messages.

    Raises:
        DamagedCheckpointError: the file has no readable header.
    """

    def __init__(self, file: FileReader, name: str) -> None:
        self.file, self._data_start, self._name = file, LENGTH_BYTES, name
        self._data_start += int.from_bytes(file.read(0, min(LENGTH_BYTES, file.size)), "little")
        try:
            is_complete = self._data_start <= file.size
            content = parse_json(file.read(LENGTH_BYTES, self._data_start - LENGTH_BYTES)) if is_complete else None
        except (ValueError, RecursionError) as error:
            raise DamagedCheckpointError(f"{name} has no readable header ({error}): the file is damaged; copy it again") from error
        if not isinstance(content, dict):
            problem = "its header is not a JSON object" if is_complete else "it ends before the end of its header"
            raise DamagedCheckpointError(f"{name} is damaged: {problem}; copy the file again")
        self._content: dict[str, Any] = content

    def get_data_offset(self, entry: TensorEntry) -> int:
        """Return the offset in the file, in bytes, at which the data of a tensor starts.

        Args:
            entry: key, dtype and shape that the tensor must have.

        Raises:
            DamagedCheckpointError: the file does not list the tensor, or lists it with another dtype, shape or size.
        """
        try:
            record = self._content[entry.key]
            start, end = record["data_offsets"]
            is_valid = record["dtype"] == DTYPES[entry.dtype].code and tuple(record["shape"]) == entry.shape
            is_valid &= end - start == entry.num_bytes and start >= 0
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedCheckpointError(
                f"{self._name} holds no readable entry {entry.key} ({error!r}): the file is damaged; copy it again"
            ) from error
        if not is_valid:
            raise DamagedCheckpointError(
                f"{self._name}: entry {entry.key} is {record}, but must be {entry.dtype} {list(entry.shape)}: "
                "the file is damaged; copy it again"
            )
        return int(self._data_start + start)


@dataclass(frozen=True)
class DType:
    """Dtype that checkpoints support: its name in safetensors files, and its size per element."""

    code: str
    """Name of the dtype in the header of a safetensors file."""
    itemsize: int
    """Bytes per element."""


DTYPES = {
    "float64": DType("F64", 8),
    "float32": DType("F32", 4),
    "bfloat16": DType("BF16", 2),
    "float16": DType("F16", 2),
    "int64": DType("I64", 8),
    "uint8": DType("U8", 1),
}
"""Supported dtypes by their names in the manifest, which are torch's names without the prefix `torch.`."""
