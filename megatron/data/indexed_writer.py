"""Writes the token files PREFIX.bin and PREFIX.idx: complete under their final names, or not at all."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from megatron.data.indexed_dataset import COUNTS_OFFSET, HEADER, MAGIC, TOKEN_TYPES, VERSION, blocks


def unfinished(suffix: str) -> str:
    """End of the name of a file that is being written; no other process writes one of this name, on other machines neither."""
    return f"{suffix}.partial-{socket.gethostname()}-{os.getpid()}"


class IndexedDatasetWriter:
    """Writes documents of one sequence each; memory use does not grow with what is written.

    Until `finalise` both files lie under temporary names beside the final ones. As a context manager it finalises at the end of
    the block and removes the temporary files if the block failed.

    Args:
        prefix: Path without ``.bin`` and ``.idx``; its folder must exist.
        dtype: Type of the tokens, for example `token_dtype(vocab_size)`.
        sync: Have them on the disk before they get their final names, so that a loss of power leaves no empty ones.
    """

    def __init__(self, prefix: str, dtype: DTypeLike, sync: bool = True) -> None:
        self.prefix = prefix
        self._sync = sync
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.num_documents = 0
        self.num_tokens = 0
        self._code = next(code for code, known in TOKEN_TYPES.items() if np.dtype(known) == np.dtype(dtype))
        self._partial = {suffix: Path(prefix + unfinished(suffix)) for suffix in (".bin", ".idx")}
        self._tokens = self._partial[".bin"].open("wb")
        try:
            self._index = self._partial[".idx"].open("w+b")
        except OSError:
            self._tokens.close()
            self._partial[".bin"].unlink()
            raise
        self._index.write(HEADER.pack(MAGIC, VERSION, self._code, 0, 0))  # the counts are filled in at the end

    def add_document(self, tokens: ArrayLike) -> None:
        """Append one document.

        Raises:
            ValueError: a token does not fit the type of the file.
        """
        array = np.asarray(tokens)
        self.add_documents(array, [array.size])

    def add_documents(self, tokens: ArrayLike, lengths: Sequence[int] | NDArray[np.integer]) -> None:
        """Append several documents: their tokens one after another, and how many each has.

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
                file.flush()
                if self._sync:
                    os.fsync(file.fileno())
                file.close()
            # An index never lies beside a .bin of another dataset, whenever we are interrupted.
            Path(f"{self.prefix}.idx").unlink(missing_ok=True)
            for suffix in (".bin", ".idx"):
                self._partial[suffix].replace(f"{self.prefix}{suffix}")
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Remove what was written."""
        for file in (self._tokens, self._index):
            with contextlib.suppress(OSError):  # what is still in the buffer may not fit on the disk either
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
