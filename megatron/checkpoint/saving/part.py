"""One rank's part of a checkpoint: its files, written in one pass. Needs no torch: a process of its own may do it."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.format.content import NO_SUMS, BoxSummer, Sums
from megatron.checkpoint.format.digest import Checksum
from megatron.checkpoint.format.manifest import Manifest, StoredBox, StoredFile, StoredTensor
from megatron.checkpoint.format.safetensors_file import header_bytes, in_file_order
from megatron.checkpoint.saving.plan import BoxToWrite, Held, RankPlan
from megatron.checkpoint.storage.protocol import Draft, Writing

_SYNC_BYTES = 128 << 20
"""Bytes that are brought to the disk at once."""


@dataclass(frozen=True)
class PartFile:
    """A data file: its boxes in the order of their data."""

    name: str
    """Before the draft has its say (`Draft.file_name`)."""
    boxes: tuple[BoxToWrite, ...]

    @functools.cached_property
    def num_data_bytes(self) -> int:
        """Size without the header."""
        return sum(box.entry.num_bytes for box in self.boxes)


@dataclass(frozen=True)
class Part:
    """What a rank writes."""

    rank: int
    files: tuple[PartFile, ...]
    empty: tuple[Held, ...] = ()


def part_of(rank: int, plan: RankPlan, max_file_bytes: int | None = None) -> Part:
    """A rank's files: one (or none), or as many as the size limit asks for; a box is never cut."""
    groups: list[list[BoxToWrite]] = []
    size = 0
    for box in plan.boxes:
        num_bytes = box.entry.num_bytes
        if not groups or (max_file_bytes is not None and size + num_bytes > max_file_bytes):
            groups.append([])
            size = 0
        groups[-1].append(box)
        size += num_bytes
    files = []
    for number, boxes in enumerate(groups):
        suffix = f"_{number:05d}" if len(groups) > 1 else ""
        order = in_file_order([box.entry for box in boxes])
        files.append(PartFile(f"rank_{rank:05d}{suffix}.safetensors", tuple(boxes[index] for index in order)))
    return Part(rank, tuple(files), tuple(plan.empty))


def write_part(
    draft: Draft, part: Part, data_of: Callable[[BoxToWrite], memoryview], progress: Callable[[], None] | None = None
) -> Manifest:
    """Write a rank's files and bring them to the disk.

    Args:
        draft: the checkpoint that is being written; its folder exists.
        part: what is written.
        data_of: gives the raw bytes of a box (row-major, little-endian); it is called once for each, when its turn comes.
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
    tensors = {held.name: StoredTensor(held.shape, held.dtype, (), NO_SUMS.hex) for held in part.empty}
    files = {}
    for file in part.files:
        name = draft.file_name(file.name)
        with _room_for(file.num_data_bytes, draft.storage.at(name)), draft.storage.create(name) as out:
            out.write(header_bytes([box.entry for box in file.boxes]))
            ahead = _Ahead(out, progress)
            for box in file.boxes:
                checksum, sums = _write_box(ahead, box, data_of(box))
                _add_box(tensors, box, StoredBox(box.box, name, box.key, checksum), sums)
            files[name] = StoredFile(out.num_bytes)
    return Manifest(tensors, files)


@contextlib.contextmanager
def _room_for(num_bytes: int, place: str) -> Iterator[None]:
    """Where there is no room for a file, the error says how much it needs."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise OSError(error.errno, f"{error.strerror} (make room: the file needs {num_bytes} bytes)", place) from error


class _Ahead:
    """Writes, and brings what is written to the disk now and then.

    Then nothing of it is left to do for long at the end, the memory of the system is not full of what waits for the disk, and who
    watches sees that the write goes on.
    """

    def __init__(self, out: Writing, progress: Callable[[], None] | None) -> None:
        self._out, self._progress, self._synced = out, progress, 0

    def write(self, data: memoryview) -> None:
        """Add all of it."""
        self._out.write(data)
        if self._progress is not None and self._out.num_bytes - self._synced >= _SYNC_BYTES:
            if (handle := self._out.fileno()) is not None:
                os.fdatasync(handle)
            self._synced = self._out.num_bytes
            self._progress()


def _write_box(out: _Ahead, box: BoxToWrite, data: memoryview) -> tuple[str, Sums]:
    """Write one box. Piece by piece, so that what is summed and written is still in the cache where it was last touched."""
    checksum, summer = Checksum(), BoxSummer(box.dtype, box.box, box.shape)
    for start, end in summer.pieces():
        piece = data[start:end]
        checksum.update(piece)
        summer.add(piece)
        out.write(piece)
    return checksum.text, summer.sums()


def _add_box(tensors: dict[str, StoredTensor], box: BoxToWrite, stored: StoredBox, sums: Sums) -> None:
    before = tensors.get(box.name)
    boxes = (*before.boxes, stored) if before else (stored,)
    total = Sums.from_hex(before.content).plus(sums) if before and before.content else sums
    tensors[box.name] = StoredTensor(box.shape, box.dtype, boxes, total.hex)
