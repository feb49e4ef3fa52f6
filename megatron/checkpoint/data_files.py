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

import numpy as np
import torch

from megatron.checkpoint.errors import DamagedCheckpointError, TruncatedError
from megatron.checkpoint.global_tensor import torch_dtype
from megatron.checkpoint.manifest import Checksum, Manifest, StoredBox, matches
from megatron.checkpoint.safetensors_file import Entry, Header
from megatron.checkpoint.storage import Storage
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


class DataFiles(ExitStack):
    """The data files of one checkpoint. Several threads may read at once.

    Args:
        storage: the checkpoint's folder.
        manifest: the checkpoint's manifest.
    """

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        super().__init__()
        self._storage, self._manifest = storage, manifest
        self._piece_bytes = _PIECE_BYTES[storage.local is not None]
        self._headers: dict[str, Header] = {}
        self._lock = threading.Lock()
        self._checked: set[StoredBox] = set()

    def start(self, stored: StoredBox, dtype: str) -> int:
        """The byte of its file at which the box's data begins.

        Raises:
            DamagedCheckpointError: the file is missing or has another size, or does not hold the box.
        """
        return self._header(stored.file).place(Entry(stored.key, dtype, stored.box.sizes))

    def read(self, stored: StoredBox, dtype: str, parts: Sequence[BoxRead]) -> None:
        """Fill targets from a stored box. The box is checked when it is read for the first time.

        Args:
            stored: the box.
            dtype: name of its dtype.
            parts: the elements to read, with their targets.

        Raises:
            DamagedCheckpointError: the file is missing, truncated or altered; targets may have been filled.
        """
        start, file = self.start(stored, dtype), self._header(stored.file).file
        kind, checked, checksum = torch_dtype(dtype), stored in self._checked, Checksum()
        # What was checked before need not be read from end to end again.
        low, high = _flat_range(stored.box.sizes, [part.inner for part in parts]) if checked else (0, stored.box.numel)
        step = max(1, self._piece_bytes // kind.itemsize)
        straight = len(parts) == 1 and parts[0].goes_straight(stored, dtype)
        room = parts[0].target.view(-1) if straight else torch.empty(min(step, high - low), dtype=kind)
        try:
            for first in range(low, high, step):
                begin, count = first if straight else 0, min(step, high - first)
                some = room[begin : begin + count]
                raw = some.view(torch.uint8).numpy().data
                file.read_into(start + first * kind.itemsize, raw)
                checksum.update(raw)
                if not straight:
                    _spread(some, first, stored.box.sizes, parts)
        except OSError as error:
            raise self._told(stored.file, error) from error
        if checked:
            return
        if not matches(checksum.text, stored.checksum):
            raise DamagedCheckpointError(f"{self._storage.at(stored.file)}: the data of {stored.key} was altered (checksum)")
        self._checked.add(stored)

    def _header(self, name: str) -> Header:
        with self._lock:
            if name not in self._headers:
                self._headers[name] = self._opened(name)
            return self._headers[name]

    def _opened(self, name: str) -> Header:
        num_bytes, where = self._manifest.files[name].num_bytes, self._storage.at(name)
        try:
            file = self.enter_context(self._storage.open(name))
            if file.size != num_bytes:
                raise DamagedCheckpointError(f"{where} has {file.size} bytes, it was written with {num_bytes}")
            return Header(file, where)
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


def _flat_range(sizes: tuple[int, ...], inners: Sequence[Box]) -> tuple[int, int]:
    """The range of the flattened elements of a box of these sizes that holds all `inners`."""
    firsts = [np.ravel_multi_index(inner.offsets, sizes) for inner in inners]
    lasts = [np.ravel_multi_index([end.stop - 1 for end in inner.index], sizes) for inner in inners]
    return int(min(firsts)), int(max(lasts)) + 1
