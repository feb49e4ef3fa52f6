"""A rank's part of a checkpoint: which rank writes what, and the writing.

Every box is written once in the world; boxes are spread evenly over the ranks that hold them. A part is written in one pass. Needs
no torch, so that a separate process can do it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.checkpoint.errors import CheckpointError, listed
from megatron.checkpoint.manifest import (
    NO_SUMS,
    Checksum,
    Manifest,
    StoredBox,
    StoredFile,
    StoredTensor,
    Sums,
    box_key,
    content_sums,
    joined,
    tiles,
)
from megatron.checkpoint.safetensors_file import DTYPES, Entry, header_bytes, in_files
from megatron.checkpoint.storage import Draft, Writing
from megatron.parallel.boxes import Box


class HeldTensor(NamedTuple):
    """The boxes of a tensor that a rank holds; none if it holds only padding."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: str
    boxes: tuple[Box, ...]


class BoxToWrite(NamedTuple):
    """A box and its tensor."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: str
    box: Box

    @property
    def key(self) -> str:
        """Its name in a file."""
        return box_key(self.name, self.shape, self.box)

    @property
    def num_bytes(self) -> int:
        """Size of its data."""
        return self.box.numel * DTYPES[self.dtype].itemsize

    @property
    def entry(self) -> Entry:
        """Its entry in a file."""
        return Entry(self.key, self.dtype, self.box.sizes)


@dataclass(frozen=True)
class PartFile:
    """A data file: its boxes in the order of their data."""

    name: str
    """The name before the draft changes it (`Draft.file_name`)."""
    boxes: tuple[BoxToWrite, ...]

    @property
    def num_data_bytes(self) -> int:
        """Bytes without the header."""
        return sum(box.num_bytes for box in self.boxes)


@dataclass(frozen=True)
class RankPart:
    """What a rank writes."""

    rank: int
    files: tuple[PartFile, ...]
    empty: tuple[HeldTensor, ...] = ()
    """Tensors without elements. No file holds them, but the manifest lists them."""

    def places(self) -> dict[BoxToWrite, slice]:
        """Where the raw bytes of each box lie in memory that holds one box after the other, in the order of the files."""
        boxes = [box for file in self.files for box in file.boxes]
        ends = itertools.accumulate((box.num_bytes for box in boxes), initial=0)
        return {box: slice(start, end) for box, (start, end) in zip(boxes, itertools.pairwise(ends), strict=True)}


def share_out(world: Sequence[Sequence[HeldTensor]], max_file_bytes: int | None = None) -> list[RankPart]:
    """Give every box to one of the ranks that hold it: to the one with the fewest bytes so far, large boxes first.

    Args:
        world: what each rank holds.
        max_file_bytes: begin another data file where one would become larger; a box is never cut.

    Returns:
        what each rank writes.

    Raises:
        CheckpointError: ranks disagree on a tensor's shape or dtype, a dtype is not supported, or a tensor is not whole.
    """
    tensors = _agreed(world)
    held_boxes = [dict.fromkeys(BoxToWrite(*tensor[:3], box) for tensor in held for box in tensor.boxes) for held in world]
    holders: dict[BoxToWrite, list[int]] = defaultdict(list)
    for rank, boxes in enumerate(held_boxes):
        for box in boxes:
            holders[box].append(rank)
    cuts: dict[str, list[Box]] = {name: [] for name in tensors}
    for box in holders:
        cuts[box.name].append(box.box)
    if broken := [name for name, tensor in tensors.items() if not tiles(tensor.shape, cuts[name])]:
        raise CheckpointError(f"the boxes that the ranks hold do not make up whole tensors: {listed(broken)}")
    load, writers = [0] * len(world), {}
    for box in sorted(holders, key=lambda box: (len(holders[box]) > 1, -box.num_bytes)):
        writers[box] = min(holders[box], key=load.__getitem__)
        load[writers[box]] += box.num_bytes
    empty = tuple(tensor._replace(boxes=()) for name, tensor in tensors.items() if not cuts[name])
    return [
        RankPart(rank, _files(rank, [box for box in boxes if writers[box] == rank], max_file_bytes), () if rank else empty)
        for rank, boxes in enumerate(held_boxes)
    ]


def _agreed(world: Sequence[Sequence[HeldTensor]]) -> dict[str, HeldTensor]:
    """Every tensor in the world, as the first rank that holds it describes it."""
    found: dict[str, HeldTensor] = {}
    problems: list[str] = []
    for rank, held in enumerate(world):
        for tensor in held:
            name, shape, dtype, _ = tensor
            first = found.setdefault(name, tensor)
            if (first.shape, first.dtype) != (shape, dtype):
                problems.append(f"{name} is {shape} {dtype} on rank {rank}, {first.shape} {first.dtype} before")
            if dtype not in DTYPES:
                problems.append(f"{name} is {dtype}, a checkpoint holds {', '.join(DTYPES)}")
    if problems:
        raise CheckpointError(f"tensors cannot be saved: {listed(problems, '; ')}")
    return found


def _files(rank: int, boxes: Sequence[BoxToWrite], max_file_bytes: int | None) -> tuple[PartFile, ...]:
    """The boxes in one file (or none), or in as many as the size limit needs; wide dtypes first, so that each box is aligned."""
    files = []
    groups = in_files(boxes, lambda box: box.num_bytes, max_file_bytes)
    for number, group in enumerate(groups):
        suffix = f"_{number:05d}" if len(groups) > 1 else ""
        order = sorted(group, key=lambda box: -DTYPES[box.dtype].itemsize)
        files.append(PartFile(f"rank_{rank:05d}{suffix}.safetensors", tuple(order)))
    return tuple(files)


_SYNC_BYTES = 128 << 20
"""Bytes that are written to the disk at once."""


def write_part(
    draft: Draft, part: RankPart, data_of: Callable[[BoxToWrite], memoryview], progress: Callable[[], None] | None = None
) -> Manifest:
    """Write a rank's files to the disk.

    Args:
        draft: the checkpoint that is being written; its folder exists.
        part: what to write.
        data_of: gives the raw bytes of a box (row-major, little-endian); called once for each, when its turn comes.
        progress: called whenever some more is on the disk.

    Returns:
        a manifest of these files; the content of a tensor is what the part adds to it.

    Raises:
        CheckpointError: the folder is not there.
        OSError: a file cannot be written.
    """
    folder = draft.storage.local
    if folder is not None and not folder.is_dir():
        raise CheckpointError(
            f"rank {part.rank} does not see {folder}, which the first rank made: "
            f"--save must be a folder on a file system that all nodes share"
        )
    tensors = [(held.name, StoredTensor(held.shape, held.dtype, (), NO_SUMS.hex)) for held in part.empty]
    files = {}
    for file in part.files:
        name = draft.file_name(file.name)
        with _room_for(file.num_data_bytes, draft.storage.at(name)), draft.storage.create(name) as out:
            out.write(header_bytes([box.entry for box in file.boxes]))
            for box in file.boxes:
                checksum, sums = _write_box(out, box, data_of(box), progress)
                stored = StoredBox(box.box, name, box.key, checksum)
                tensors.append((box.name, StoredTensor(box.shape, box.dtype, (stored,), sums.hex)))
            files[name] = StoredFile(out.num_bytes)
    return Manifest(joined(tensors), files)


@contextlib.contextmanager
def _room_for(num_bytes: int, place: str) -> Iterator[None]:
    """If there is no room for a file, add to the error how much it needs."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise OSError(error.errno, f"{error.strerror} (make room: the file needs {num_bytes} bytes)", place) from error


def _write_box(out: Writing, box: BoxToWrite, data: memoryview, progress: Callable[[], None] | None) -> tuple[str, Sums]:
    """Write one box, piece by piece, so that each piece is summed and written while it is in the cache. Returns checksum and sums.

    If somebody asks for progress, what is written is brought to the disk now and then. So little is left to do at the end, the
    system's memory is not full of data that waits for the disk, and progress shows.
    """
    checksum = Checksum()

    def take(piece: memoryview) -> None:
        checksum.update(piece)
        before = out.num_bytes
        out.write(piece)
        if progress is not None and out.num_bytes // _SYNC_BYTES > before // _SYNC_BYTES:
            out.sync()
            progress()

    sums = content_sums(data, box.dtype, box.box, box.shape, take)
    return checksum.text, sums
