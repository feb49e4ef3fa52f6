"""Texts of a Hugging Face dataset in a fixed order, divided into lanes that are read independently of each other.

The order of the texts depends only on the dataset, the seed, the split and the settings of the stream. In each epoch, the units of
the dataset (shards of a stream, documents of a dataset in the Arrow cache) are permuted, and lane l of L lanes reads the units l,
l + L, l + 2L and so on. Each document therefore occurs once in every epoch of all lanes together.
"""

from __future__ import annotations

import functools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.data.indexed_dataset import DatasetError
from megatron.data.samples import DOCUMENT_ORDER, STREAM_BLOCK_ORDER, compute_permutation

_log = logging.getLogger(__name__)

_RETRY_DELAYS_S = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds to wait before each further attempt to read a block of texts."""
_LANE_COUNTS = (48, 24, 16, 12, 8, 6, 4, 3, 2, 1)
"""Possible numbers of lanes. All are divisors of 48, so that most numbers of data ranks divide the largest one or share a large
factor with it."""
_MAX_IMBALANCE = 1.25
"""Maximum number of units of the longest lane, relative to the mean over the lanes."""
MAX_RESHARDED_FILES = 2 * _LANE_COUNTS[0]
"""A stream with fewer files is divided into smaller shards (row groups of parquet files), so that it has enough for all lanes."""
_DOCUMENTS_PER_LANE = 64
"""Minimum number of documents per lane of a dataset with random access. Lanes with few documents would differ much in length."""
_MIN_VALIDATION_SHARDS = 16
_VALIDATION_DOCUMENTS_PER_SHARD = 256
_READ_DOCUMENTS = 64
"""Documents that are read together from a dataset with random access."""


class Spot(NamedTuple):
    """Start of a block of texts within the units that a lane reads in one epoch."""

    unit: int = 0
    """Index among the lane's units of the epoch; 0 for a dataset with random access."""
    part: int = 0
    """Index of the part of the shard, such as a row group of a parquet file."""
    block: int = 0
    """Index of the block within the part."""


class TextBlock(NamedTuple):
    """Consecutive documents of a lane, in the order in which the lane reads them."""

    spot: Spot
    texts: list[str | None]
    origin: str
    """Name of the dataset and index of the shard that contain the documents, for messages."""
    rows: list[int]
    """Index of each document within its origin."""


def choose_num_lanes(num_units: int, min_units: int = 1) -> int:
    """Return the number of lanes for a dataset: the largest number for which each lane has at least `min_units` units, and the
    longest lane is not much longer than the mean."""
    for count in _LANE_COUNTS:
        longest = -(-num_units // count)
        if num_units >= count * min_units and longest * count <= _MAX_IMBALANCE * num_units:
            return count
    return 1


class TextLanes(ABC):
    """Texts of one split of a dataset, divided into lanes.

    Args:
        name: name of the dataset for messages.
        column: column that contains the texts.
        num_units: number of units that are permuted in each epoch and divided over the lanes.
        num_lanes: number of lanes. It must depend only on the dataset.
        key: seed and index of the split, on which the order depends.
    """

    def __init__(self, name: str, column: str, num_units: int, num_lanes: int, key: tuple[int, int]) -> None:
        self.name, self.column, self.num_units, self.num_lanes, self.key = name, column, num_units, num_lanes, key
        self._order_of_epoch = functools.lru_cache(maxsize=2)(self._compute_order)

    @abstractmethod
    def describe(self) -> str:
        """Return a description of the texts and their order for the start-up log."""

    @abstractmethod
    def _read_blocks(self, lane: int, epoch: int, spot: Spot) -> Iterator[TextBlock]:
        """Yield the blocks of a lane in one epoch from `spot` on. Any exception may be raised."""

    def iter_blocks(self, lane: int, epoch: int, spot: Spot) -> Iterator[TextBlock]:
        """Yield the blocks of a lane in one epoch from `spot` on. A failed read is repeated after a pause: five times, or once
        if the content of a file is invalid.

        Raises:
            DatasetError: the texts cannot be read, or the dataset has no such column of texts.
        """
        num_failures = 0
        while True:
            try:
                for block in self._read_blocks(lane, epoch, spot):
                    yield block
                    num_failures, spot = 0, block.spot._replace(block=block.spot.block + 1)
                return
            except DatasetError:
                raise
            except Exception as error:  # the libraries of the stores raise exceptions of many classes
                problem = f"{type(error).__name__}: {error}".rstrip(": ")
                # A ValueError, also of the libraries that parse files, means that a file is damaged or a transfer was incomplete.
                if num_failures == (1 if isinstance(error, ValueError) else len(_RETRY_DELAYS_S)):
                    raise DatasetError(
                        f"{self.name}: {num_failures + 1} attempts to read failed at {self._describe_spot(lane, epoch, spot)}: "
                        f"{problem}\n  Check the network or the file, then start the run again: it continues with the same samples."
                    ) from error
                delay = _RETRY_DELAYS_S[num_failures]
                num_failures += 1
                _log.warning("%s: reading failed (%s); next attempt in %g s", self.name, problem, delay)
                time.sleep(delay)

    def get_units(self, lane: int, epoch: int) -> NDArray[np.integer]:
        """Return the units that a lane reads in an epoch, in order."""
        return self._order_of_epoch(epoch)[lane :: self.num_lanes]

    def _compute_order(self, epoch: int) -> NDArray[np.integer]:
        return compute_permutation(self.num_units, (DOCUMENT_ORDER, *self.key, epoch))

    def _describe_spot(self, lane: int, epoch: int, spot: Spot) -> str:
        return f"lane {lane}, epoch {epoch + 1}"

    def _get_texts(self, table: Any) -> list[str | None]:
        """Return the texts of an Arrow table.

        Raises:
            DatasetError: the table has no such column, or the column does not contain texts.
        """
        if self.column not in table.column_names:
            raise DatasetError(format_missing_column(self.name, self.column, table.column_names))
        values: list[str | None] = table.column(self.column).to_pylist()
        if (other := next((value for value in values if not isinstance(value, str | None)), None)) is not None:
            raise DatasetError(
                f"{self.name}: the column {self.column} contains values of type {type(other).__name__}, not texts.\n"
                "  Give a column of texts with --hf-text-column. tools/preprocess_data.py --chat-template converts conversations."
            )
        return values


def format_missing_column(name: str, column: str, columns: Sequence[str]) -> str:
    """Return the error message for a dataset without the requested text column."""
    return (
        f"{name} has no column {column}; its columns are {', '.join(columns)}.\n"
        "  Give the column of the texts with --hf-text-column."
    )


class StreamedTexts(TextLanes):
    """Texts of a dataset that is streamed: its files are read from their start, and nothing is stored.

    The units are the shards of the dataset. A lane reads blocks of consecutive documents of a shard and shuffles each block.

    Args:
        dataset: `datasets.IterableDataset` that yields Arrow tables.
        shuffle_buffer: number of documents in the blocks of all lanes together; 0 to keep the order of the documents in a shard.
        num_validation_documents: number of documents that are reserved for validation. They are the first documents of
            at least 16 shards, as far as the dataset has so many, and of each shard only documents of its first part.
        reads_validation: read these documents instead of all others.
        max_reserved_per_shard: number of reserved documents for which one shard suffices.
    """

    def __init__(
        self,
        name: str,
        column: str,
        dataset: Any,
        key: tuple[int, int],
        *,
        shuffle_buffer: int,
        num_validation_documents: int = 0,
        reads_validation: bool = False,
        max_reserved_per_shard: int = _VALIDATION_DOCUMENTS_PER_SHARD,
    ) -> None:
        self._dataset = dataset
        num_shards = dataset.num_shards
        num_reserved = -(-num_validation_documents // max_reserved_per_shard)
        num_reserved = min(num_shards, max(num_reserved, _MIN_VALIDATION_SHARDS)) if num_validation_documents else 0
        self._reserved = dict.fromkeys(
            (i * num_shards // num_reserved for i in range(num_reserved)), -(-num_validation_documents // max(num_reserved, 1))
        )
        self._reads_validation = reads_validation
        self._shards = sorted(self._reserved) if reads_validation else range(num_shards)
        super().__init__(name, column, len(self._shards), choose_num_lanes(len(self._shards)), key)
        self._shuffles = shuffle_buffer > 0
        self._block_size = max(1, shuffle_buffer // self.num_lanes) if self._shuffles else _READ_DOCUMENTS

    def describe(self) -> str:
        order = f"shuffled in blocks of {self._block_size:,} documents" if self._shuffles else "in the order of each shard"
        return f"streamed from {self.num_units:,} shards in {self.num_lanes} lanes, {order}"

    def _read_blocks(self, lane: int, epoch: int, spot: Spot) -> Iterator[TextBlock]:
        units = self.get_units(lane, epoch)
        for unit in range(spot.unit, len(units)):
            shard = self._shards[units[unit]]
            parts = self._split_shard(shard)
            for part in range(spot.part, len(parts)):
                for block, table in enumerate(parts[part].iter(batch_size=self._block_size)):
                    if block < spot.block:
                        continue
                    if (rows := self._select_rows(shard, part, block, len(table))) is None:
                        break
                    if self._shuffles:
                        key = (STREAM_BLOCK_ORDER, *self.key, epoch, shard, part, block)
                        rows = [rows[i] for i in compute_permutation(len(rows), key).tolist()]
                    texts, first = self._get_texts(table), block * self._block_size
                    origin = f"{self.name}, shard {shard}" + (f", part {part}" if len(parts) > 1 else "")
                    yield TextBlock(Spot(unit, part, block), [texts[row - first] for row in rows], origin, list(rows))
                spot = Spot()
                if self._reads_validation:
                    break
            spot = Spot()

    def _split_shard(self, shard: int) -> list[Any]:
        """Return the parts of a shard that can be opened without reading those before: the row groups of a parquet file, else the
        shard."""
        dataset = self._dataset.shard(num_shards=self._dataset.num_shards, index=shard)
        parts = dataset.reshard()
        if parts.num_shards <= 1:
            return [dataset]
        return [parts.shard(num_shards=parts.num_shards, index=i) for i in range(parts.num_shards)]

    def _select_rows(self, shard: int, part: int, block: int, num_rows: int) -> list[int] | None:
        """Return the rows of a block that belong to this split. None if all later blocks of the part belong to another one."""
        first = block * self._block_size
        limit = self._reserved.get(shard, 0) if part == 0 else 0
        if self._reads_validation:
            return list(range(first, min(first + num_rows, limit))) if first < limit else None
        return list(range(max(first, limit), first + num_rows))

    def _describe_spot(self, lane: int, epoch: int, spot: Spot) -> str:
        units = self.get_units(lane, epoch)
        shard = self._shards[units[min(spot.unit, len(units) - 1)]]
        return f"shard {shard} of {self._dataset.num_shards} (counted from 0)"


class StoredTexts(TextLanes):
    """Texts of a dataset with random access, which `datasets` keeps as memory-mapped Arrow files. The units are the documents.

    Args:
        dataset: `datasets.Dataset` that returns Arrow tables.
        num_validation_documents: number of documents that are reserved for validation, evenly spaced.
        reads_validation: read these documents instead of all others.
    """

    def __init__(
        self,
        name: str,
        column: str,
        dataset: Any,
        key: tuple[int, int],
        *,
        num_validation_documents: int = 0,
        reads_validation: bool = False,
    ) -> None:
        num_rows = len(dataset)
        count = min(num_validation_documents, num_rows)
        reserved = np.arange(count, dtype=np.int64) * num_rows // max(count, 1)
        self._rows = reserved if reads_validation else np.setdiff1d(np.arange(num_rows, dtype=np.int64), reserved)
        self._dataset = dataset
        super().__init__(name, column, len(self._rows), choose_num_lanes(len(self._rows), _DOCUMENTS_PER_LANE), key)

    def describe(self) -> str:
        return f"{self.num_units:,} documents in random order, in {self.num_lanes} lanes"

    def _read_blocks(self, lane: int, epoch: int, spot: Spot) -> Iterator[TextBlock]:
        rows = self._rows[self.get_units(lane, epoch)]
        for block in range(spot.block, -(-len(rows) // _READ_DOCUMENTS)):
            selected = rows[block * _READ_DOCUMENTS : (block + 1) * _READ_DOCUMENTS].tolist()
            yield TextBlock(Spot(block=block), self._get_texts(self._dataset[selected]), self.name, selected)
