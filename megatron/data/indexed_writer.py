"""Writes the token files PREFIX.bin and PREFIX.idx, from documents or from whole datasets: complete under their final names, or not
at all. To join datasets, the .bin files are copied as they are, and the index is put together in blocks."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from megatron.data.indexed_dataset import COUNTS_OFFSET, HEADER, MAGIC, TOKEN_TYPES, VERSION, DatasetError, IndexedDataset, blocks


def unfinished(suffix: str) -> str:
    """The end of the name of a file that is being written. No other process uses the same one, on other machines either."""
    return f"{suffix}.partial-{socket.gethostname()}-{os.getpid()}"


def _header(dtype: np.dtype[Any], num_sequences: int, num_entries: int) -> bytes:
    code = next(code for code, known in TOKEN_TYPES.items() if np.dtype(known) == dtype.newbyteorder("="))
    return HEADER.pack(MAGIC, VERSION, code, num_sequences, num_entries)


def _publish(partial: Mapping[str, Path], prefix: str) -> None:
    """Give both files their final names. Whenever we are interrupted, no index lies beside a .bin of another dataset."""
    Path(f"{prefix}.idx").unlink(missing_ok=True)
    for suffix in (".bin", ".idx"):
        partial[suffix].replace(f"{prefix}{suffix}")


class IndexedDatasetWriter:
    """Writes documents of one sequence each. Memory use does not grow with what is written.

    Until `finalise` both files lie under temporary names beside the final ones. As a context manager it finalises at the end of
    the block, and removes the temporary files if the block failed.

    Args:
        prefix: Path without ``.bin`` and ``.idx``; its folder must exist.
        dtype: Type of the tokens, for example `token_dtype(vocab_size)`.
        sync: Write both to the disk before they get their final names, so that a loss of power leaves no empty files.
    """

    def __init__(self, prefix: str, dtype: DTypeLike, sync: bool = True) -> None:
        self.prefix = prefix
        self._sync = sync
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.num_documents = 0
        self.num_tokens = 0
        self._partial = {suffix: Path(prefix + unfinished(suffix)) for suffix in (".bin", ".idx")}
        self._tokens = self._partial[".bin"].open("wb")
        try:
            self._index = self._partial[".idx"].open("w+b")
        except OSError:
            self._tokens.close()
            self._partial[".bin"].unlink()
            raise
        self._index.write(_header(self.dtype, 0, 0))  # the counts are filled in at the end

    def add_document(self, tokens: ArrayLike) -> None:
        """Append one document.

        Raises:
            ValueError: a token does not fit the type of the file.
        """
        array = np.asarray(tokens)
        self.add_documents(array, [array.size])

    def add_documents(self, tokens: ArrayLike, lengths: Sequence[int] | NDArray[np.integer]) -> None:
        """Append several documents: all their tokens, one document after another, and the length of each.

        Raises:
            ValueError: a token does not fit the type of the file, or a document has 2**31 tokens or more.
        """
        array, counts = np.asarray(tokens), np.asarray(lengths, dtype=np.int64)
        assert counts.sum() == array.size, f"{counts.sum()} tokens in the lengths, {array.size} given"
        if array.size and array.dtype != self.dtype:
            low, high, bounds = array.min(), array.max(), np.iinfo(self.dtype)
            if array.dtype.kind not in "iu" or low < bounds.min or high > bounds.max:
                raise ValueError(
                    f"tokens from {low} to {high} ({array.dtype}) do not fit into {self.dtype.name} of {self.prefix}.bin"
                )
        if counts.size and counts.max() >= 2**31:
            raise ValueError(f"a document of {counts.max():,} tokens is too long for {self.prefix}.idx (below 2**31 = {2**31:,})")
        self._tokens.write(array.astype(self.dtype, copy=False).tobytes())
        self._index.write(counts.astype("<i4").tobytes())
        self.num_documents += counts.size
        self.num_tokens += array.size

    def finalise(self) -> None:
        """Complete both files and give them their final names."""
        try:
            self._write_offsets_and_documents()
            for file in (self._tokens, self._index):
                if self._sync:
                    _to_disk(file)
                file.close()
            _publish(self._partial, self.prefix)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Remove what was written."""
        for file in (self._tokens, self._index):
            with contextlib.suppress(OSError):  # the rest of the buffer may not fit on the disk either
                file.close()
        for path in self._partial.values():
            path.unlink(missing_ok=True)

    def _write_offsets_and_documents(self) -> None:
        end = HEADER.size + 4 * self.num_documents
        position = 0
        for block in blocks(self.num_documents):
            self._index.seek(HEADER.size + 4 * block.start)
            ends = position + np.cumsum(np.frombuffer(self._index.read(4 * (block.stop - block.start)), "<i4"), dtype="<i8")
            offsets = np.concatenate([np.array([position], "<i8"), ends[:-1]]) * self.dtype.itemsize
            position = int(ends[-1])
            self._index.seek(end + 8 * block.start)
            self._index.write(offsets.tobytes())
        self._index.seek(end + 8 * self.num_documents)
        for block in blocks(self.num_documents + 1):
            self._index.write(np.arange(block.start, block.stop, dtype="<i8").tobytes())
        self._index.seek(COUNTS_OFFSET)
        self._index.write(struct.pack("<QQ", self.num_documents, self.num_documents + 1))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.finalise()
        else:
            self.discard()


_COPIED_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class JoinedSize:
    """Sizes of a joined dataset."""

    num_sequences: int
    num_documents: int
    num_tokens: int
    bin_bytes: int
    """Bytes of .bin."""


def join(prefixes: Sequence[str], output: str, folder: str | None = None, remedy: str = "Write to another disk.") -> JoinedSize:
    """Write OUTPUT.bin and OUTPUT.idx, the documents of all datasets in this order: complete, or not at all.

    Memory holds a block at a time. The result depends on the documents alone, not on how they were divided.

    Args:
        prefixes: datasets, without .bin and .idx; at least one.
        output: the joined dataset, which must not be one of them; its folder must exist.
        folder: where the files lie until they are complete, on the same disk; None: beside the output.
        remedy: what else to do where there is no room, for the message.

    Raises:
        DatasetError: a dataset is damaged, or they differ in the type of their tokens.
        ValueError: not enough room on the disk.
    """
    dtype, joined = _measure(prefixes)
    free = shutil.disk_usage(Path(output).parent).free
    num_bytes = joined.bin_bytes + HEADER.size + 12 * joined.num_sequences + 8 * (joined.num_documents + 1)
    if free < num_bytes:
        raise ValueError(
            f"{Path(output).absolute().parent}: the disk has {free / 1e6:,.1f} MB free, but {output} takes "
            f"{num_bytes / 1e6:,.1f} MB.\n  Make room there. {remedy}"
        )
    beside = Path(output) if folder is None else Path(folder, Path(output).name)
    partial = {suffix: Path(f"{beside}{unfinished(suffix)}") for suffix in (".bin", ".idx")}
    try:
        with partial[".bin"].open("wb") as file:
            for prefix in prefixes:
                with open(f"{prefix}.bin", "rb") as source:
                    shutil.copyfileobj(source, file, _COPIED_AT_ONCE)
            if file.tell() != joined.bin_bytes:
                raise OSError("a .bin file was changed while it was copied")
            _to_disk(file)
        _write_index(prefixes, partial[".idx"], dtype, joined)
        _publish(partial, output)
    finally:
        for path in partial.values():
            path.unlink(missing_ok=True)
    return joined


def _measure(prefixes: Sequence[str]) -> tuple[np.dtype[Any], JoinedSize]:
    """The common token type, and the sizes. Every dataset is checked before anything is written."""
    dtype: np.dtype[Any] = IndexedDataset(prefixes[0]).dtype
    sequences = documents = tokens = bin_bytes = 0
    for prefix in prefixes:
        dataset = IndexedDataset(prefix)
        size = len(dataset.data)
        if dataset.dtype != dtype:
            raise DatasetError(
                f"{prefix} holds tokens of type {dataset.dtype.name}, but {prefixes[0]} holds {dtype.name}.\n"
                "  Datasets of one vocabulary have one type: preprocess the text of one of them again with the other's tokenizer."
            )
        if size % dtype.itemsize:
            raise DatasetError(
                f"{prefix}.bin has {size:,} bytes, which is no whole number of tokens of {dtype.itemsize} bytes.\n"
                "  It is damaged: make or copy it again."
            )
        sequences += len(dataset.lengths)
        documents += dataset.num_documents
        tokens += dataset.num_tokens(range(dataset.num_documents))
        bin_bytes += size
    return dtype, JoinedSize(sequences, documents, tokens, bin_bytes)


def _write_index(prefixes: Sequence[str], path: Path, dtype: np.dtype[Any], joined: JoinedSize) -> None:
    """Write the three lists of the index at once, each through a file handle of its own."""
    first, second = HEADER.size + 4 * joined.num_sequences, HEADER.size + 12 * joined.num_sequences
    with path.open("wb") as lengths:
        lengths.write(_header(dtype, joined.num_sequences, joined.num_documents + 1))
        lengths.flush()
        with path.open("r+b") as offsets, path.open("r+b") as documents:
            offsets.seek(first)
            documents.seek(second)
            documents.write(np.zeros(1, "<i8").tobytes())
            byte = sequence = 0
            for prefix in prefixes:
                dataset = IndexedDataset(prefix)
                for block in blocks(len(dataset.lengths)):
                    lengths.write(dataset.lengths[block].tobytes())
                    offsets.write((dataset.offsets[block] + byte).tobytes())
                for block in blocks(dataset.num_documents):
                    documents.write((dataset.document_index[block.start + 1 : block.stop + 1] + sequence).tobytes())
                byte += len(dataset.data)
                sequence += len(dataset.lengths)
        _to_disk(lengths)


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
