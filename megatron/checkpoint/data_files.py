"""Data files of a checkpoint, opened when first needed: boxes out of them straight into tensors, checked on the way.

A box is read from its first byte to its last in pieces that fit into a core's cache. While a piece is there its checksum is taken,
and it is copied if it could not be read straight into the target. So a read costs one pass over the memory and needs no more than
a piece beside the target, and a file that is truncated meanwhile is an error (under a memory map it would kill the process).
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch

from megatron.checkpoint.content_sums import Checksum, matches
from megatron.checkpoint.errors import DamagedCheckpointError, TruncatedError
from megatron.checkpoint.global_tensor import torch_dtype
from megatron.checkpoint.manifest import Manifest, StoredBox
from megatron.checkpoint.safetensors_file import Entry, Header
from megatron.checkpoint.storage import Reading, Storage
from megatron.parallel.boxes import Box, flat_range_boxes

_PIECE_BYTES = {True: 1 << 20, False: 32 << 20}
"""Bytes that are read at once: of a local file as many as fit into a cache, of a remote one as many as are worth a request."""


class BoxRead(NamedTuple):
    """Elements of a stored box that go into a target."""

    inner: Box
    """Their box, with offsets relative to the stored box."""
    target: torch.Tensor
    """Tensor of the same sizes; any strides, device and floating-point dtype."""

    def goes_straight(self, stored: StoredBox, dtype: str) -> bool:
        """Whether it is the whole box, and the target's memory must hold just its raw bytes."""
        target = self.target
        takes_bytes = target.dtype == torch_dtype(dtype) and target.device.type == "cpu" and target.is_contiguous()
        return takes_bytes and self.inner == Box.whole(stored.box.sizes)


class _OpenFile(NamedTuple):
    reading: Reading
    header: Header


class DataFiles:
    """The data files of one checkpoint. Several threads may read at once.

    Args:
        storage: the checkpoint's folder.
        manifest: the checkpoint's manifest.
    """

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self._storage, self._manifest = storage, manifest
        self._piece_bytes = _PIECE_BYTES[storage.local is not None]
        self._open: dict[str, _OpenFile] = {}
        self._lock = threading.Lock()
        self._stack = ExitStack()
        self._checked: set[StoredBox] = set()

    def start(self, stored: StoredBox, dtype: str) -> int:
        """The byte of its file at which the box's data begins.

        Raises:
            DamagedCheckpointError: the file is missing or has another size, or does not hold the box.
        """
        return self._file(stored.file).header.place(Entry(stored.key, dtype, stored.box.sizes))

    def read(self, stored: StoredBox, dtype: str, parts: Sequence[BoxRead]) -> None:
        """Fill targets from a stored box. The box is checked when it is read for the first time.

        Args:
            stored: the box.
            dtype: name of its dtype.
            parts: the elements to read, with their targets.

        Raises:
            DamagedCheckpointError: the file is missing, truncated or altered; targets may have been filled.
        """
        start = self.start(stored, dtype)
        reading = self._file(stored.file).reading
        whole, kind = Box.whole(stored.box.sizes), torch_dtype(dtype)
        checked = stored in self._checked
        # What was checked before need not be read from end to end again.
        low, high = _flat_range(whole, [part.inner for part in parts]) if checked else (0, whole.numel)
        checksum = Checksum()
        try:
            if len(parts) == 1 and parts[0].goes_straight(stored, dtype):
                into = parts[0].target.view(-1).view(torch.uint8).numpy().data
                for at in range(0, len(into), self._piece_bytes):
                    piece = into[at : at + self._piece_bytes]
                    reading.read_into(start + at, piece)
                    checksum.update(piece)
            else:
                step = max(1, self._piece_bytes // kind.itemsize)
                scratch = torch.empty(min(step, high - low), dtype=kind)
                for first in range(low, high, step):
                    some = scratch[: min(step, high - first)]
                    raw = some.view(torch.uint8).numpy().data
                    reading.read_into(start + first * kind.itemsize, raw)
                    checksum.update(raw)
                    _spread(some, first, stored.box.sizes, parts)
        except OSError as error:
            raise self._told(stored.file, error) from error
        if checked:
            return
        if not matches(checksum.text, stored.checksum):
            raise DamagedCheckpointError(f"{self._storage.at(stored.file)}: the data of {stored.key} was altered (checksum)")
        self._checked.add(stored)

    def __enter__(self) -> DataFiles:
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._stack.close()
            self._open.clear()

    def _file(self, name: str) -> _OpenFile:
        with self._lock:
            if name not in self._open:
                self._open[name] = self._opened(name)
            return self._open[name]

    def _opened(self, name: str) -> _OpenFile:
        num_bytes, where = self._manifest.files[name].num_bytes, self._storage.at(name)
        try:
            reading = self._stack.enter_context(self._storage.open(name))
            if reading.size != num_bytes:
                raise DamagedCheckpointError(f"{where} has {reading.size} bytes, it was written with {num_bytes}")
            return _OpenFile(reading, Header(reading, where))
        except OSError as error:
            raise self._told(name, error) from error

    def _told(self, name: str, error: OSError) -> OSError | DamagedCheckpointError:
        """The meaning of a failure of the storage: data that is missing, or an error to be passed on as it is."""
        where = self._storage.at(name)
        if isinstance(error, FileNotFoundError):
            return DamagedCheckpointError(f"{where} is missing")
        if isinstance(error, TruncatedError) or error.errno == errno.EIO:
            return DamagedCheckpointError(f"{where} cannot be read to its end ({error})")
        return error


def _spread(some: torch.Tensor, first: int, sizes: tuple[int, ...], parts: Sequence[BoxRead]) -> None:
    """Copy consecutive elements of a flattened box, from index `first` on, to their targets."""
    at = 0
    for box in flat_range_boxes(sizes, first, first + some.numel()):
        block = some[at : at + box.numel].view(box.sizes)
        at += box.numel
        for part in parts:
            common = box.intersect(part.inner)
            if common is not None:
                source = block[common.relative_to(box).index]
                part.target[common.relative_to(part.inner).index].copy_(source)


def _flat_range(whole: Box, inners: Sequence[Box]) -> tuple[int, int]:
    """The range of a box's flattened elements that holds all `inners`."""

    def flat(index: Sequence[int]) -> int:
        number = 0
        for at, size in zip(index, whole.sizes, strict=True):
            number = number * size + at
        return number

    lasts = [tuple(o + n - 1 for o, n in zip(inner.offsets, inner.sizes, strict=True)) for inner in inners]
    return min(flat(inner.offsets) for inner in inners), max(flat(last) for last in lasts) + 1
