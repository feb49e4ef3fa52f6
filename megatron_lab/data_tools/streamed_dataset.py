"""Samples from a Hugging Face dataset (--hf-dataset), whose texts are tokenized while the run trains.

The texts are divided into L lanes; L depends only on the dataset. The tokens of each lane form an endless stream, which is cut
into windows of --seq-length + 1 tokens that overlap by one token. Sample i of the run is the next window of lane i mod L. So the
tokens of a sample depend only on its index, and a rank tokenizes only the lanes of its samples. With D data-parallel ranks and
microbatches of b samples, where D * b divides L, a rank reads L / D lanes.

The number of consumed samples is the complete state: it determines how many tokens of each lane are consumed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.config.data import SPLIT_NAMES, DataConfig, WeightedPrefix
from megatron.data.history import BlendEntry, LengthPeriod, Phase, find_earlier_periods, merge_batch_phases
from megatron.data.indexed_dataset import DatasetError, get_token_dtype
from megatron.data.samples import DocumentSpan, SampleSource
from megatron.data.splits import DataSplit
from megatron.data.tokenizer import Tokenizer
from megatron_lab.data_tools.open_texts import OpenedTexts, hash_tokenizer, open_texts
from megatron_lab.data_tools.streamed_texts import StoredTexts, StreamedTexts, TextLanes
from megatron_lab.data_tools.token_lane import PositionStore, TokenLane, get_position_file, is_local_folder

_log = logging.getLogger(__name__)

_FORMAT_VERSION = 1
"""Version of the order of samples. A change of the order needs a new number, so that resumed runs and caches notice it."""
_MAX_KEPT_TOKENS = 2**23
"""Maximum number of tokens that the lanes of a source keep in memory after they are read."""


def open_split(
    split: int,
    blend: Sequence[WeightedPrefix],
    config: DataConfig,
    *,
    seed: int,
    seq_length: int,
    tokenizer: Tokenizer,
    datasets_by_prefix: dict[str, Any],
) -> StreamedSplit:
    """Open one split (training or validation) of the dataset that --hf-dataset names, and check that it has at least one sample.

    Args:
        split: 0 training, 1 validation.
        blend: indexed datasets of the split; always empty.
        datasets_by_prefix: datasets that are already open, by name. The dataset that this call opens is added.

    Raises:
        DatasetError: the dataset cannot be opened or read, its column contains no texts, or it has less than one sample.
    """
    split_name = config.hf_valid_split if split == 1 and config.hf_valid_split is not None else config.hf_split
    opened: OpenedTexts = datasets_by_prefix.get(split_name) or datasets_by_prefix.setdefault(
        split_name, open_texts(config, split_name)
    )
    # Documents are reserved only if no other setting names the validation data.
    num_reserved = 0 if config.hf_valid_split is not None or config.valid_data_path else config.hf_valid_documents
    texts = _build_texts(opened, config, num_reserved, (seed, split))
    fingerprint = _compute_fingerprint(opened, config, num_reserved, split, texts.num_lanes)
    data = StreamedSplit(
        split,
        config,
        seed,
        seq_length,
        tokenizer.vocab_size,
        tokenizer.eod,
        texts=texts,
        tokenizer=tokenizer,
        fingerprint=fingerprint,
    )
    data.check_size()
    return data


def _build_texts(opened: OpenedTexts, config: DataConfig, num_reserved: int, key: tuple[int, int]) -> TextLanes:
    """Build the lanes of the texts of a split.

    Args:
        num_reserved: number of documents of the training split that are reserved for validation.
        key: seed and index of the split.
    """
    reserved: dict[str, Any] = {"num_validation_documents": num_reserved, "reads_validation": bool(num_reserved) and key[1] == 1}
    if opened.has_random_access:
        return StoredTexts(opened.name, config.hf_text_column, opened.dataset, key, **reserved)
    if opened.has_one_document_per_shard:
        reserved["max_reserved_per_shard"] = 1
    return StreamedTexts(
        opened.name, config.hf_text_column, opened.dataset, key, shuffle_buffer=config.hf_shuffle_buffer, **reserved
    )


def _compute_fingerprint(opened: OpenedTexts, config: DataConfig, num_reserved: int, split: int, num_lanes: int) -> str:
    """Return the hash of everything that determines the samples, except the seed and the sequence length."""
    from xxhash import xxh3_128

    access = "stored" if opened.has_random_access else f"streamed {config.hf_shuffle_buffer}"
    parts = (_FORMAT_VERSION, opened.content_hash, config.hf_text_column, access, num_reserved, split, num_lanes)
    digest: str = xxh3_128(f"{parts} {hash_tokenizer(config)}".encode()).hexdigest()
    return digest


@dataclass(frozen=True, kw_only=True)
class StreamedSplit(DataSplit):
    """Training or validation data of a run that reads a Hugging Face dataset."""

    texts: TextLanes
    tokenizer: Tokenizer
    fingerprint: str

    def blend_entries(self) -> tuple[BlendEntry, ...]:
        """Return the description of the dataset for the data history. The number of its documents is not known, so it is 0."""
        return (BlendEntry(self.texts.name, self.fingerprint, 0, 0, 1.0),)

    def build_source(self, num_samples: int, phases: Sequence[Phase] = (), *, num_consumed: int | None = None) -> SampleSource:
        """Build the source of the split's samples. The arguments are those of `DataSplit.build_source`."""
        (entry,) = self.blend_entries()
        return StreamedDataset(
            self,
            find_earlier_periods(phases, entry) if phases else (),
            first_sample=merge_batch_phases(phases)[-1].first_sample if phases else 0,
        )

    def get_position_folder(self) -> Path | None:
        """Return the folder for the positions of the lanes. Its name contains a hash of everything that determines the tokens of
        the lanes, so that positions of another order are never used. None if no folder is set. Validation starts at its first
        sample each time, so its positions are not stored."""
        from xxhash import xxh3_64

        folder = self.config.data_cache_path
        if self.split or folder is None or not is_local_folder(folder):
            return None
        return Path(folder) / f"positions_{xxh3_64(f'{self.fingerprint} {self.seed}'.encode()).hexdigest()}"

    def check_size(self) -> None:
        """Read the first texts of the split.

        Raises:
            DatasetError: the split has fewer tokens than one sample, or a text cannot be read.
        """
        lanes = StreamedDataset(self, ()).lanes
        required, total = self.seq_length + 1, 0
        if self.texts.num_units:
            for lane in lanes:
                total += lane.count_epoch_tokens(required - total)
                if total >= required:
                    return
        reserved = ""
        if self.config.hf_valid_documents:
            reserved = " --hf-valid-documents reserves the first documents for validation: it may be too large, or too small."
        raise DatasetError(
            f"the {SPLIT_NAMES[self.split]} texts of {self.texts.name} have {total:,} tokens in the column "
            f"{self.texts.column}, but one sample needs {required:,} tokens (--seq-length {self.seq_length} + 1).\n"
            f"  Use a dataset with more text or a shorter --seq-length.{reserved}"
        )


class StreamedDataset(SampleSource):
    """Source of the samples of a Hugging Face dataset. Sample i is a window of lane i mod L.

    Args:
        data: split of the dataset.
        earlier_periods: number of samples that the run has already read from the dataset, for each sequence length in turn.
        first_sample: index in the run of the first sample that follows.
    """

    def __init__(self, data: StreamedSplit, earlier_periods: Sequence[LengthPeriod], *, first_sample: int = 0) -> None:
        self.seq_length = data.seq_length
        self._data, self._first_sample = data, first_sample
        self._earlier_periods = tuple(earlier_periods)
        self._num_earlier = sum(period.num_samples for period in earlier_periods)
        self._epochs: set[int] = set()
        self._epoch_lock = threading.Lock()
        folder, dtype = data.get_position_folder(), get_token_dtype(data.vocab_size)
        self.lanes = [
            TokenLane(
                data.texts,
                lane,
                data.tokenizer.encode_array,
                data.tokenizer.get_document_end(),
                dtype,
                PositionStore(get_position_file(folder, lane) if folder else None),
                get_history=self._get_history,
                notify_epoch=self._log_epoch,
            )
            for lane in range(data.texts.num_lanes)
        ]

    def get_samples(self, first: int, count: int) -> NDArray[np.int64]:
        samples = np.empty((count, self.seq_length + 1), dtype=np.int64)
        for row in range(count):
            lane, start = self.locate(first + row)
            samples[row] = self.lanes[lane].read(start, self.seq_length + 1)
        return samples

    def get_lineage(self, sample_index: int) -> list[DocumentSpan]:
        lane, start = self.locate(sample_index)
        return list(self.lanes[lane].iter_spans(start, self.seq_length + 1))

    def describe(self, num_samples: int) -> list[str]:
        texts = self._data.texts
        return [f"{SPLIT_NAMES[self._data.split]}: {texts.name}: {texts.describe()}; tokenized while the run trains"]

    def locate(self, sample_index: int) -> tuple[int, int]:
        """Return the lane of a sample, and the offset of the sample's first token in the stream of the lane."""
        num_lanes = len(self.lanes)
        index = self._num_earlier + sample_index - self._first_sample  # among all samples that were read from this dataset
        lane, start, first = index % num_lanes, 0, 0
        for period in self._earlier_periods:
            start += period.seq_length * _count_samples_of_lane(range(first, first + period.num_samples), lane, num_lanes)
            first += period.num_samples
        return lane, start + self.seq_length * _count_samples_of_lane(range(first, index), lane, num_lanes)

    def _get_history(self) -> int:
        """Return the number of tokens that each lane may keep in memory after they are read."""
        return _MAX_KEPT_TOKENS // max(1, sum(lane.is_open for lane in self.lanes))

    def _log_epoch(self, epoch: int) -> None:
        """Log that an epoch starts, when the first lane reaches it."""
        with self._epoch_lock:
            is_new = epoch not in self._epochs
            self._epochs.add(epoch)
        if is_new:
            _log.info(
                "%s: %s: epoch %d starts: a lane has read all of its documents, and goes on with another shuffle",
                SPLIT_NAMES[self._data.split], self._data.texts.name, epoch + 1,
            )  # fmt: skip


def _count_samples_of_lane(indices: range, lane: int, num_lanes: int) -> int:
    """Return how many of the sample indices belong to a lane: those that equal the lane modulo the number of lanes."""
    return -(-(indices.stop - lane) // num_lanes) - -(-(indices.start - lane) // num_lanes)
