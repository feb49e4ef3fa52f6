"""Planning of a save, which assigns every slice to one rank, and writing of one rank's files.

Each slice is written only once, although several ranks may hold a replica. The bytes to write are balanced over these ranks. Each
file is written in one pass. The module needs no torch, so that a separate writer process can use it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.checkpoint.errors import CheckpointError, format_list
from megatron.checkpoint.manifest import (
    EMPTY_HASH,
    Checksum,
    ContentHash,
    Manifest,
    StoredFile,
    StoredSlice,
    StoredTensor,
    hash_content,
    is_partition,
    merge_tensors,
    slice_key,
)
from megatron.checkpoint.safetensors_file import DTYPES, TensorEntry, encode_header, split_into_files
from megatron.checkpoint.storage import Draft, FileWriter
from megatron.parallel.tensor_slice import TensorSlice


class LocalTensorSpec(NamedTuple):
    """Description of a global tensor on one rank: name, shape, dtype, and the slices that the rank holds, without their elements.
    There are no slices if the rank holds only padding."""

    name: str
    global_shape: tuple[int, ...]
    """Shape of the tensor in the unsharded model."""
    dtype: str
    slices: tuple[TensorSlice, ...]


class WriteItem(NamedTuple):
    """Slice that a rank writes, with the name, shape and dtype of its global tensor."""

    name: str
    global_shape: tuple[int, ...]
    """Shape of the tensor in the unsharded model."""
    dtype: str
    tensor_slice: TensorSlice

    @property
    def key(self) -> str:
        """Key of the slice in its data file, such as `name[0:128,64:128]`."""
        return slice_key(self.name, self.global_shape, self.tensor_slice)

    @property
    def num_bytes(self) -> int:
        """Size of the slice's data in bytes."""
        return self.tensor_slice.numel * DTYPES[self.dtype].itemsize

    @property
    def entry(self) -> TensorEntry:
        """Entry of the slice in the header of its safetensors file."""
        return TensorEntry(self.key, self.dtype, self.tensor_slice.sizes)


@dataclass(frozen=True)
class FilePlan:
    """Plan of one data file: its name, and its slices in the order of their data."""

    name: str
    """Name of the data file. Drafts in an object store add the token of the run (`Draft.get_file_name`)."""
    items: tuple[WriteItem, ...]

    @property
    def num_data_bytes(self) -> int:
        """Size of the file without its header, in bytes."""
        return sum(item.num_bytes for item in self.items)


@dataclass(frozen=True)
class SavePlan:
    """Plan of one rank for a save: the data files that the rank writes."""

    rank: int
    file_plans: tuple[FilePlan, ...]
    empty_tensors: tuple[LocalTensorSpec, ...] = ()
    """Tensors with zero elements. The manifest lists them, but no file holds them. Set on rank 0."""

    def get_buffer_ranges(self) -> dict[WriteItem, slice]:
        """Return where each slice lies in a buffer that holds all slices of this rank one after the other: its byte range."""
        items = [item for file in self.file_plans for item in file.items]
        ends = itertools.accumulate((item.num_bytes for item in items), initial=0)
        return {item: slice(start, end) for item, (start, end) in zip(items, itertools.pairwise(ends), strict=True)}


def plan_save(world_specs: Sequence[Sequence[LocalTensorSpec]], max_file_bytes: int | None = None) -> list[SavePlan]:
    """Plan which rank writes each slice. If several ranks hold a slice, the rank with the fewest bytes so far writes it; large
    slices are assigned first.

    Args:
        world_specs: for each rank, descriptions of its local tensors.
        max_file_bytes: start another data file when the current one would exceed this size. A slice is never split. None for one
            file per rank.

    Returns:
        the plan of each rank.

    Raises:
        CheckpointError: ranks disagree on a tensor's shape or dtype, a dtype is not supported, or the slices of a tensor do not
            cover the global tensor exactly once.
    """
    tensors = _merge_specs(world_specs)
    rank_items = [
        dict.fromkeys(WriteItem(*tensor[:3], tensor_slice) for tensor in specs for tensor_slice in tensor.slices)
        for specs in world_specs
    ]
    holders: dict[WriteItem, list[int]] = defaultdict(list)
    for rank, items in enumerate(rank_items):
        for item in items:
            holders[item].append(rank)
    slices: dict[str, list[TensorSlice]] = {name: [] for name in tensors}
    for item in holders:
        slices[item.name].append(item.tensor_slice)
    if incomplete := [name for name, tensor in tensors.items() if not is_partition(tensor.global_shape, slices[name])]:
        raise CheckpointError(
            f"internal error: the slices of all ranks do not cover these tensors exactly once: {format_list(incomplete)}. "
            "Please report this"
        )
    assigned_bytes, writers = [0] * len(world_specs), {}
    for item in sorted(holders, key=lambda item: (len(holders[item]) > 1, -item.num_bytes)):
        writers[item] = min(holders[item], key=assigned_bytes.__getitem__)
        assigned_bytes[writers[item]] += item.num_bytes
    empty_tensors = tuple(tensor._replace(slices=()) for name, tensor in tensors.items() if not slices[name])
    return [
        SavePlan(
            rank,
            _plan_files(rank, [item for item in items if writers[item] == rank], max_file_bytes),
            () if rank else empty_tensors,
        )
        for rank, items in enumerate(rank_items)
    ]


def _merge_specs(world_specs: Sequence[Sequence[LocalTensorSpec]]) -> dict[str, LocalTensorSpec]:
    """Return one description for each tensor, by name: that of the first rank that holds the tensor.

    Raises:
        CheckpointError: ranks disagree on a tensor's shape or dtype, or a dtype is not supported.
    """
    merged: dict[str, LocalTensorSpec] = {}
    errors: list[str] = []
    for rank, specs in enumerate(world_specs):
        for tensor in specs:
            name, shape, dtype, _ = tensor
            first = merged.setdefault(name, tensor)
            if (first.global_shape, first.dtype) != (shape, dtype):
                errors.append(
                    f"{name} is {shape} {dtype} on rank {rank}, but {first.global_shape} {first.dtype} on a lower rank (internal "
                    "error)"
                )
            if dtype not in DTYPES:
                errors.append(f"{name} is {dtype}, but checkpoints support only {', '.join(DTYPES)}")
    if errors:
        raise CheckpointError(
            f"these tensors of the run cannot be saved: {format_list(errors, '; ')}. Change the dtype of your own tensors; "
            "otherwise please report this"
        )
    return merged


def _plan_files(rank: int, items: Sequence[WriteItem], max_file_bytes: int | None) -> tuple[FilePlan, ...]:
    """Distribute the slices that a rank writes over data files. There are several files only if `max_file_bytes` requires it, and
    none without slices.

    Within a file, slices with wide dtypes come first, so that the data of every slice is aligned.
    """
    file_plans = []
    groups = split_into_files(items, lambda item: item.num_bytes, max_file_bytes)
    for index, group in enumerate(groups):
        suffix = f"_{index:05d}" if len(groups) > 1 else ""
        sorted_items = sorted(group, key=lambda item: -DTYPES[item.dtype].itemsize)
        file_plans.append(FilePlan(f"rank_{rank:05d}{suffix}.safetensors", tuple(sorted_items)))
    return tuple(file_plans)


_SYNC_BYTES = 128 << 20
"""Number of written bytes after which a file is flushed to the disk and progress is reported."""


def write_rank_files(
    draft: Draft, plan: SavePlan, read_data: Callable[[WriteItem], memoryview], on_progress: Callable[[], None] | None = None
) -> Manifest:
    """Write a rank's data files.

    Args:
        draft: the unfinished checkpoint. Its folder exists.
        plan: the files to write.
        read_data: returns the raw bytes of a slice (row-major, little-endian). It is called once per slice, just before the write.
        on_progress: called each time more bytes have been flushed to the disk.

    Returns:
        the manifest of these files. The content hash of a tensor covers only the slices that this rank writes.

    Raises:
        CheckpointError: the draft's folder does not exist on this node.
        OSError: a file cannot be written.
    """
    folder = draft.storage.local
    if folder is not None and not folder.is_dir():
        raise CheckpointError(
            f"rank {plan.rank} does not see {folder}, which the first rank created: "
            f"set --save to a folder on a file system that all nodes share"
        )
    tensors = [(spec.name, StoredTensor(spec.global_shape, spec.dtype, (), EMPTY_HASH.hex)) for spec in plan.empty_tensors]
    stored_files = {}
    for file_plan in plan.file_plans:
        name = draft.get_file_name(file_plan.name)
        with _explain_full_disk(file_plan.num_data_bytes, draft.storage.get_location(name)), draft.storage.create(name) as writer:
            writer.write(encode_header([item.entry for item in file_plan.items]))
            for item in file_plan.items:
                checksum, content_hash = _write_slice(writer, item, read_data(item), on_progress)
                stored_slice = StoredSlice(item.tensor_slice, name, item.key, checksum)
                tensors.append((item.name, StoredTensor(item.global_shape, item.dtype, (stored_slice,), content_hash.hex)))
            stored_files[name] = StoredFile(writer.num_bytes)
    return Manifest(merge_tensors(tensors), stored_files)


@contextlib.contextmanager
def _explain_full_disk(num_bytes: int, location: str) -> Iterator[None]:
    """Within the context, add the size of the file to an error that means that the disk is full.

    Args:
        num_bytes: size of the file.
        location: path or URL of the file.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise OSError(error.errno, f"{error.strerror} (free space: the file needs {num_bytes} bytes)", location) from error


def _write_slice(
    writer: FileWriter, item: WriteItem, data: memoryview, on_progress: Callable[[], None] | None
) -> tuple[str, ContentHash]:
    """Write one slice to a data file in blocks. Each block is hashed and written while it is in the CPU cache.

    With `on_progress` the file is flushed to the disk regularly. Then little is left to flush at the end, the page cache does not
    fill with data that waits for the disk, and the caller sees progress.

    Returns:
        the checksum and the content hash of the slice.
    """
    checksum = Checksum()

    def write_block(block: memoryview) -> None:
        checksum.update(block)
        old_num_bytes = writer.num_bytes
        writer.write(block)
        if on_progress is not None and writer.num_bytes // _SYNC_BYTES > old_num_bytes // _SYNC_BYTES:
            writer.sync()
            on_progress()

    content_hash = hash_content(data, item.dtype, item.tensor_slice, item.global_shape, write_block)
    return checksum.text, content_hash
