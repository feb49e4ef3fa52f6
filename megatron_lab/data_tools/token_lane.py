"""Endless stream of the tokens of one lane of a dataset, read at any offset.

The documents of a lane are tokenized one after another, each followed by the end-of-document token. At the end of the lane's texts,
the next epoch follows. So the token at an offset depends only on the texts, their order and the tokenizer.

To continue at an offset, a lane starts at the nearest earlier document whose position it knows, and tokenizes from there. Known
positions are stored in a file. The file is only a cache: without it, the lane starts at its first document.
"""

from __future__ import annotations

import bisect
import logging
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.data.indexed_dataset import DatasetError
from megatron.data.samples import DocumentSpan
from megatron_lab.data_tools.streamed_texts import Spot, TextLanes

_log = logging.getLogger(__name__)

POSITION_INTERVAL = 2**17
"""Minimum number of tokens between two stored positions of a lane."""
_MAX_EMPTY_EPOCHS = 20
"""Epochs without text after which a lane gives up. A lane of few shards may get an empty one several times in a row."""
_MIN_CAPACITY = 2**12


class LanePosition(NamedTuple):
    """Start of a document in the stream of tokens of a lane."""

    num_tokens: int
    """Number of tokens of the lane before the document."""
    epoch: int
    spot: Spot
    """Block of texts that contains the document."""
    document: int
    """Index of the document in its block."""


class PositionStore:
    """Known positions of a lane, in memory and in a file that several processes may extend.

    Each line of the file has the numbers of one position and their checksum. Incomplete and damaged lines are ignored.

    Args:
        file: path of the file; None to keep the positions in memory only.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._positions = [LanePosition(0, 0, Spot(), 0)]
        self._num_read_bytes = 0
        self._read_file()

    def find(self, num_tokens: int) -> LanePosition:
        """Return the last known position at or before an offset in the stream."""
        return self._positions[bisect.bisect_right(self._positions, num_tokens, key=lambda position: position.num_tokens) - 1]

    def add(self, position: LanePosition) -> None:
        """Add a position, unless one is known nearby, to the memory and to the file."""
        self._read_file()  # another process may have written it
        if position.num_tokens - self.find(position.num_tokens).num_tokens < POSITION_INTERVAL:
            return
        bisect.insort(self._positions, position)
        if self._file is None:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("ab") as file:
                file.write(_format_position(position))
        except OSError as error:
            _log.warning(
                "%s cannot be written (%s): a resumed run may have to tokenize more text again", self._file, error.strerror
            )
            self._file = None

    def _read_file(self) -> None:
        """Add the positions that the file has got since the last call."""
        if self._file is None:
            return
        try:
            with self._file.open("rb") as file:
                file.seek(self._num_read_bytes)
                content = file.read()
        except OSError:
            return
        complete = content[: content.rfind(b"\n") + 1]
        self._num_read_bytes += len(complete)
        new = filter(None, map(_parse_position, complete.splitlines()))
        self._positions = sorted({*self._positions, *new})


def _format_position(position: LanePosition) -> bytes:
    numbers = b"%d %d %d %d %d %d" % (position.num_tokens, position.epoch, *position.spot, position.document)
    return b"%s %08x\n" % (numbers, zlib.crc32(numbers))


def _parse_position(line: bytes) -> LanePosition | None:
    """Return the position in a line of the file; None if the line is damaged."""
    numbers, _, checksum = line.rpartition(b" ")
    if checksum != b"%08x" % zlib.crc32(numbers):
        return None
    num_tokens, epoch, unit, part, block, document = map(int, numbers.split())
    return LanePosition(num_tokens, epoch, Spot(unit, part, block), document)


class _Document(NamedTuple):
    """Document of a lane."""

    epoch: int
    spot: Spot
    block_index: int
    """Index of the document in its block."""
    text: str
    origin: str
    row: int
    """Index of the document within its origin, a dataset or a shard of it."""


class TokenLane:
    """Stream of the tokens of one lane. Safe to use from several threads.

    Args:
        texts: texts of the dataset.
        lane: index of the lane.
        encode: returns the tokens of a text.
        end: tokens that follow each document, such as the end-of-document token.
        dtype: type of the tokens in memory.
        positions: known positions of the lane.
        get_history: returns the number of tokens that the lane may keep in memory after they are read, for threads that read the
            stream in another order and for evaluations that read it again.
        notify_epoch: called with the index of an epoch when the lane starts it.
    """

    def __init__(
        self,
        texts: TextLanes,
        lane: int,
        encode: Callable[[str], NDArray[np.integer]],
        end: Sequence[int],
        dtype: type[np.integer],
        positions: PositionStore,
        *,
        get_history: Callable[[], int],
        notify_epoch: Callable[[int], None],
    ) -> None:
        self._texts, self._lane, self._encode, self._end, self._positions = texts, lane, encode, end, positions
        self._get_history, self._notify_epoch = get_history, notify_epoch
        self._lock = threading.Lock()
        self._documents: Iterator[_Document] | None = None
        self._tokens = np.empty(_MIN_CAPACITY, dtype)
        self._first = self._stop = 0  # offsets in the stream of the tokens in memory

    @property
    def is_open(self) -> bool:
        """Whether the lane has been read."""
        return self._documents is not None

    def read(self, start: int, count: int) -> NDArray[np.integer]:
        """Return `count` tokens from offset `start` of the stream on.

        Raises:
            DatasetError: a text cannot be read or tokenized, or the lane has no texts.
        """
        with self._lock:
            try:
                self._seek(start)
                while self._stop < start + count:
                    self._append_document(needed_from=start)
            except BaseException:
                self._documents = None  # the iterator has ended; the next call starts again
                raise
            return self._tokens[start - self._first : start - self._first + count].copy()

    def iter_spans(self, start: int, count: int) -> Iterator[DocumentSpan]:
        """Yield the documents of which `count` tokens from offset `start` on come, with the ranges of their tokens."""
        position = self._positions.find(start)
        offset = position.num_tokens
        for document in self._iter_documents(position):
            length = len(self._tokenize(document))
            first, stop = max(offset, start), min(offset + length, start + count)
            if first < stop:
                yield DocumentSpan(document.origin, document.row, first - offset, stop - first)
            offset += length
            if offset >= start + count:
                return

    def count_epoch_tokens(self, limit: int) -> int:
        """Return the number of tokens in the first epoch of the lane, or a number of at least `limit` without reading further."""
        total = 0
        for document in self._iter_documents(LanePosition(0, 0, Spot(), 0), num_epochs=1):
            total += len(self._tokenize(document))
            if total >= limit:
                break
        return total

    def _seek(self, start: int) -> None:
        """Let the lane continue at the best known position at or before `start`, if its tokens in memory do not lead there."""
        position = self._positions.find(start)
        if self._documents is not None and self._first <= start and position.num_tokens <= self._stop:
            return
        if start - position.num_tokens > 4 * POSITION_INTERVAL:
            _log.info(
                "%s: no stored position near token %s of lane %d; the lane tokenizes %s tokens again",
                self._texts.name, f"{start:,}", self._lane, f"{start - position.num_tokens:,}",
            )  # fmt: skip
        self._documents = self._iter_documents(position)
        self._first = self._stop = position.num_tokens

    def _append_document(self, *, needed_from: int) -> None:
        """Append the tokens of the next document to those in memory. Drop old tokens, but none from offset `needed_from` on."""
        assert self._documents is not None
        document = next(self._documents)
        if self._stop - self._positions.find(self._stop).num_tokens >= POSITION_INTERVAL:
            self._positions.add(LanePosition(self._stop, document.epoch, document.spot, document.block_index))
        tokens = self._tokenize(document)
        if self._stop - self._first + len(tokens) > len(self._tokens):
            keep_from = max(self._first, min(needed_from, self._stop - self._get_history()))
            kept = self._tokens[keep_from - self._first : self._stop - self._first]
            if 2 * (len(kept) + len(tokens)) > len(self._tokens):
                self._tokens = np.empty(2 * (len(kept) + len(tokens)), self._tokens.dtype)
            self._tokens[: len(kept)] = kept.copy()
            self._first = keep_from
        offset = self._stop - self._first
        self._tokens[offset : offset + len(tokens)] = tokens
        self._stop += len(tokens)

    def _tokenize(self, document: _Document) -> NDArray[np.integer]:
        """Return the tokens of a document, with the end-of-document token; none for a text without tokens.

        Raises:
            DatasetError: the text cannot be encoded.
        """
        try:
            tokens = self._encode(document.text)
        except ValueError as error:
            raise DatasetError(f"{document.origin}, row {document.row}: the text cannot be encoded: {error}") from error
        return np.append(tokens, np.asarray(self._end, self._tokens.dtype)) if len(tokens) else tokens

    def _iter_documents(self, position: LanePosition, *, num_epochs: int | None = None) -> Iterator[_Document]:
        """Yield the documents of the lane from a position on, epoch after epoch. Documents without text are left out.

        Args:
            num_epochs: number of epochs after which the iterator ends; None for no end.

        Raises:
            DatasetError: the lane has no texts.
        """
        epoch, spot, first = position.epoch, position.spot, position.document
        num_empty_epochs = 0
        while num_epochs is None or epoch < position.epoch + num_epochs:
            is_empty = True
            for block in self._texts.iter_blocks(self._lane, epoch, spot):
                for index in range(first, len(block.texts)):
                    if text := block.texts[index]:
                        is_empty = False
                        yield _Document(epoch, block.spot, index, text, block.origin, block.rows[index])
                first = 0
            num_empty_epochs = num_empty_epochs + 1 if is_empty else 0
            if num_empty_epochs == _MAX_EMPTY_EPOCHS:
                raise DatasetError(
                    f"{self._texts.name}: lane {self._lane} has no text in the column {self._texts.column}.\n"
                    "  Look at the dataset, or give another column with --hf-text-column."
                )
            epoch, spot, first = epoch + 1, Spot(), 0
            if num_epochs is None:
                self._notify_epoch(epoch)


def get_position_file(folder: Path, lane: int) -> Path:
    """Return the path of the file with the known positions of a lane."""
    return folder / f"lane_{lane:02d}.txt"


def is_local_folder(folder: str | os.PathLike[str] | None) -> bool:
    """Return whether positions can be stored in a folder: it is set and is not a URL."""
    return folder is not None and "://" not in str(folder)
