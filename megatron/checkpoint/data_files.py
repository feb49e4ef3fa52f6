"""Reader of a checkpoint's data files. It opens files on first use, reads slices directly into tensors and verifies their
checksums.

A slice is read from start to end in blocks that fit into the CPU cache. The checksum of a block is computed while the block is in
the cache. A block that could not be read directly into its target is then copied there. So a read passes over the memory once and
needs at most one block of additional memory. A file that is truncated during a read raises an error; with a memory map it would
kill the process.
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
from megatron.checkpoint.global_tensor import get_torch_dtype
from megatron.checkpoint.manifest import Checksum, Manifest, StoredSlice, checksums_match
from megatron.checkpoint.safetensors_file import Header, TensorEntry
from megatron.checkpoint.storage import Storage
from megatron.parallel.tensor_slice import TensorSlice, cover_flat_range

_READ_BYTES = {True: 1 << 20, False: 32 << 20}
"""Bytes per read: as many as fit into a CPU cache for a local file (True), more per request for a remote file (False)."""


class SliceRead(NamedTuple):
    """Request to copy a region of a stored slice (a part of a tensor in a data file) into a tensor in memory."""

    source: TensorSlice
    """Region to copy, with offsets relative to the start of the stored slice."""
    target: torch.Tensor
    """Tensor that receives the region. It has the shape of the region, and any strides, device and floating-point dtype."""

    def is_direct(self, stored_slice: StoredSlice, dtype: str) -> bool:
        """Return whether the bytes of the file can be read directly into the memory of `target`.

        This requires that the request covers the complete stored slice, and that `target` is contiguous, on the CPU and of the
        stored dtype.
        """
        target = self.target
        has_raw_layout = target.dtype == get_torch_dtype(dtype) and target.device.type == "cpu" and target.is_contiguous()
        return has_raw_layout and self.source == TensorSlice.full(stored_slice.tensor_slice.sizes)


class DataFileReader(ExitStack):
    """Reader of the data files of one checkpoint. It opens each file at its first use. Several threads may read at the same time.

    Args:
        storage: folder of the checkpoint.
        manifest: manifest of the checkpoint.
    """

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        super().__init__()
        self._storage, self._manifest = storage, manifest
        self._read_bytes = _READ_BYTES[storage.local is not None]
        self._headers: dict[str, Header] = {}
        self._lock = threading.Lock()
        self._verified: set[StoredSlice] = set()

    def get_data_offset(self, stored_slice: StoredSlice, dtype: str) -> int:
        """Return the offset of a stored slice's data, in bytes from the start of its data file.

        Args:
            dtype: name of the slice's dtype, such as `bfloat16`.

        Raises:
            DamagedCheckpointError: the file is missing, has another size, or does not hold the slice.
        """
        return self._get_header(stored_slice.file).get_data_offset(
            TensorEntry(stored_slice.key, dtype, stored_slice.tensor_slice.sizes)
        )

    def read(self, stored_slice: StoredSlice, dtype: str, reads: Sequence[SliceRead]) -> None:
        """Read regions of a stored slice into their target tensors, and verify the checksum of the slice when it is first read.

        Args:
            stored_slice: the slice.
            dtype: name of the slice's dtype, such as `bfloat16`.
            reads: regions to read, with their targets.

        Raises:
            DamagedCheckpointError: the file is missing, truncated or altered. The targets may already have been filled.
        """
        file_offset, file = self.get_data_offset(stored_slice, dtype), self._get_header(stored_slice.file).file
        torch_type, is_verified, checksum = get_torch_dtype(dtype), stored_slice in self._verified, Checksum()
        # The checksum needs the complete slice. A slice that is already verified is read only where needed.
        start_index, end_index = (
            _compute_flat_range(stored_slice.tensor_slice.sizes, [slice_read.source for slice_read in reads])
            if is_verified
            else (0, stored_slice.tensor_slice.numel)
        )
        block_numel = max(1, self._read_bytes // torch_type.itemsize)
        is_direct = len(reads) == 1 and reads[0].is_direct(stored_slice, dtype)
        buffer = reads[0].target.view(-1) if is_direct else torch.empty(min(block_numel, end_index - start_index), dtype=torch_type)
        try:
            for block_start in range(start_index, end_index, block_numel):
                buffer_offset, count = block_start if is_direct else 0, min(block_numel, end_index - block_start)
                block = buffer[buffer_offset : buffer_offset + count]
                block_bytes = block.view(torch.uint8).numpy().data
                file.read_into(file_offset + block_start * torch_type.itemsize, block_bytes)
                checksum.update(block_bytes)
                if not is_direct:
                    _copy_to_targets(block, block_start, stored_slice.tensor_slice.sizes, reads)
        except OSError as error:
            raise self._translate_error(stored_slice.file, error) from error
        if is_verified:
            return
        if not checksums_match(checksum.text, stored_slice.checksum):
            raise DamagedCheckpointError(
                f"{self._storage.get_location(stored_slice.file)}: the data of {stored_slice.key} was altered: "
                "its checksum does not match the manifest; copy the file again"
            )
        self._verified.add(stored_slice)

    def _get_header(self, name: str) -> Header:
        with self._lock:
            if name not in self._headers:
                self._headers[name] = self._open(name)
            return self._headers[name]

    def _open(self, name: str) -> Header:
        num_bytes, location = self._manifest.files[name].num_bytes, self._storage.get_location(name)
        try:
            file = self.enter_context(self._storage.open(name))
            if file.size != num_bytes:
                raise DamagedCheckpointError(
                    f"{location} has {file.size} bytes, but was written with {num_bytes} bytes: the file is damaged; copy it again"
                )
            return Header(file, location)
        except OSError as error:
            raise self._translate_error(name, error) from error

    def _translate_error(self, name: str, error: OSError) -> OSError | DamagedCheckpointError:
        """Convert an error of the storage to a `DamagedCheckpointError` if the file is missing or ends too early. Return any other
        error unchanged.

        Args:
            name: name of the data file.
        """
        location = self._storage.get_location(name)
        if isinstance(error, FileNotFoundError):
            return DamagedCheckpointError(f"{location} is missing; copy the file again")
        if isinstance(error, TruncatedError) or error.errno == errno.EIO:
            return DamagedCheckpointError(f"{location} cannot be read to its end ({error})")
        return error


def _copy_to_targets(block_data: torch.Tensor, block_start: int, sizes: tuple[int, ...], reads: Sequence[SliceRead]) -> None:
    """Copy a block of consecutive elements of a flattened slice into the tensors that requested them.

    Args:
        block_data: elements of the block, flat.
        block_start: index of the first element in the flattened slice.
        sizes: sizes of the slice.
        reads: requested regions of the slice, with their target tensors.
    """
    offset = 0
    for block_slice in cover_flat_range(sizes, block_start, block_start + block_data.numel()):
        sub_block = block_data[offset : offset + block_slice.numel].view(block_slice.sizes)
        offset += block_slice.numel
        for slice_read in reads:
            overlap = block_slice.intersect(slice_read.source)
            if overlap is not None:
                source = sub_block[overlap.relative_to(block_slice).index]
                slice_read.target[overlap.relative_to(slice_read.source).index].copy_(source)


def _compute_flat_range(sizes: tuple[int, ...], sources: Sequence[TensorSlice]) -> tuple[int, int]:
    """Return the smallest contiguous range of elements of a stored slice that contains all requested regions.

    Args:
        sizes: sizes of the stored slice, whose elements are in the file in row-major order.
        sources: requested regions, with offsets relative to the start of the stored slice.

    Returns:
        start and end of the range, as indices into the flattened slice.
    """
    starts = [np.ravel_multi_index(source.offsets, sizes) for source in sources]
    last_indices = [np.ravel_multi_index([interval.stop - 1 for interval in source.index], sizes) for source in sources]
    return int(min(starts)), int(max(last_indices)) + 1
