"""Samples by index: the interface of their sources, the arrays of a microbatch, mock data, and random orders that depend on a key.

`DocumentRules` defines how the end of a document affects a microbatch.

Shapes: `b` microbatch size, `s` sequence length, `D` documents in a microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.config.data import SPLIT_NAMES

# ---- Marks of tokens, a bit mask: whether a token counts in the loss, and where documents end (see `indexed_dataset.py`).

IN_LOSS = 1
"""Mark: the token counts in the loss where it is the label."""
DOCUMENT_END = 2
"""Mark: the token is the last of its document."""
DOCUMENT_END_IF_EOD = 4
"""Mark: the token is the last of its document if it is the end-of-document token.

Files never contain this mark. It applies to the tokens of datasets without a mask.
"""
PADDING = 8
"""Mark: the token is padding, which fills a sample after its last document. Files never contain this mark."""
DEFAULT_MARKS = IN_LOSS | DOCUMENT_END_IF_EOD
"""Marks of a token in a dataset without a mask."""


@dataclass(frozen=True)
class DocumentSpan:
    """Tokens of one document that follow each other in a sample."""

    prefix: str
    """Path of the indexed dataset without .bin and .idx."""
    document: int
    first_token: int
    """Index of the first token within the document."""
    num_tokens: int


class SampleSource(Protocol):
    """Source of samples, which are read by index. An index always gives the same tokens.

    Most sources have no last index: epochs follow each other without end. Safe to use from several threads.
    """

    seq_length: int

    def get_samples(self, first: int, count: int) -> NDArray[np.int64]:
        """Return the tokens of `count` samples from index `first` on, [count, s + 1], where s is the sequence length. The extra
        token is the last label.

        Raises:
            ValueError: a token id is not below the vocabulary size, or the source has no samples with these indices.
        """

    def get_marks(self, first: int, count: int) -> NDArray[np.uint8] | None:
        """Return a byte with marks for each token of these samples, [count, s + 1], or None if the source has no marks.

        The marks are bits. `IN_LOSS`: the token counts in the loss as a label. `DOCUMENT_END`: the token ends a document.
        `DOCUMENT_END_IF_EOD`: the token ends a document if it is the end-of-document token. `PADDING`: the token and all later
        tokens of the sample are padding.

        Raises:
            ValueError: the source has no samples with these indices.
        """
        return None

    def get_lineage(self, sample_index: int) -> list[DocumentSpan]:
        """Return the documents from which a sample's tokens come, in order."""

    def describe(self, num_samples: int) -> list[str]:
        """Return lines of the start-up log for a run that reads `num_samples` samples."""


@dataclass(frozen=True)
class DocumentRules:
    """Rules for the end of a document within a sample: whether positions restart, attention stops, and the next token counts in the
    loss.

    Without --data-loss-mask, every end-of-document token ends a document. With it, the data has a byte of marks for each token:

    - A token with the mark `DOCUMENT_END` ends a document.
    - An end-of-document token ends a document only if it has the mark `DOCUMENT_END_IF_EOD`. All tokens of datasets without a loss
      mask have this mark.

    The token that ends a document belongs to this document.
    """

    eod: int
    reset_position_ids: bool = False
    """Count positions from 0 in each document instead of from the start of the sample."""
    reset_attention_mask: bool = False
    """Let a token attend only to its own document."""
    eod_mask_loss: bool = False
    """Exclude positions whose *input* is the end of a document from the loss, because the start of the next document is
    unpredictable."""

    @property
    def needed_by_all_stages(self) -> bool:
        """Whether the layers of all pipeline stages need to know which document each token belongs to. Otherwise only the first
        layer (tokens) and the last layer (labels) need the data."""
        return self.reset_position_ids or self.reset_attention_mask


@dataclass(frozen=True)
class Microbatch:
    """Samples that one data-parallel rank reads for one forward pass, as arrays.

    Shapes: b samples, s tokens per sample, D documents.
    """

    tokens: NDArray[np.int64]
    """Input ids, [b, s]."""
    labels: NDArray[np.int64]
    """Id to predict at each position, [b, s]."""
    loss_mask: NDArray[np.float32]
    """1 where the position counts in the loss, else 0, [b, s]."""
    first_sample: int
    """Index of the first sample in the sample source. The other samples follow it."""
    positions: NDArray[np.int64] | None = None
    """Position of each token, [b, s]; None if the positions of each sample are 0 to s - 1."""
    cu_seqlens: NDArray[np.int32] | None = None
    """Cumulative lengths of the D documents, [D + 1], with all samples laid end to end; None if a token attends to its whole
    sample.

    Entry d is the token at which document d starts. The last entry is b * s, the number of tokens.
    """
    data_lengths: tuple[int, ...] | None = None
    """Number of tokens of each sample before its padding, of s + 1 tokens with the last label. None without padding, or if a token
    attends to its whole sample."""


def read_microbatch(source: SampleSource, first_sample: int, size: int, rules: DocumentRules) -> Microbatch:
    """Read the microbatch of `size` samples from `first_sample` on.

    `rules` determines what happens at the ends of documents: whether the position counts in the loss, whether positions restart at
    0, and whether attention stops.
    """
    windows, marks = source.get_samples(first_sample, size), source.get_marks(first_sample, size)
    tokens, labels = np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])
    loss_mask = np.ones(tokens.shape, dtype=np.float32)
    if marks is not None:
        loss_mask[marks[:, 1:] & IN_LOSS == 0] = 0.0
    if rules.eod_mask_loss:
        loss_mask[_find_ends(tokens, marks, rules.eod)] = 0.0
    positions = cu_seqlens = data_lengths = None
    if rules.needed_by_all_stages:
        document_offsets = compute_cu_seqlens(_find_ends(tokens, marks, rules.eod))
        if rules.reset_position_ids:
            starts = document_offsets[:-1].astype(np.int64)
            positions = (np.arange(tokens.size) - np.repeat(starts, np.diff(document_offsets))).reshape(tokens.shape)
        cu_seqlens = document_offsets if rules.reset_attention_mask else None
        if cu_seqlens is not None and marks is not None and (marks[:, -1] & PADDING).any():
            data_lengths = tuple((marks & PADDING == 0).sum(axis=1).tolist())
    return Microbatch(tokens, labels, loss_mask, first_sample, positions, cu_seqlens, data_lengths)


def _find_ends(tokens: NDArray[np.int64], marks: NDArray[np.uint8] | None, eod: int) -> NDArray[np.bool_]:
    """Return for each token, [b, s], whether it is the last of a document.

    Args:
        marks: byte of each token, [b, s + 1], with bits that say whether the token ends a document: always (`DOCUMENT_END`), or if
            it is the end-of-document token (`DOCUMENT_END_IF_EOD`). None if every end-of-document token ends a document.
        eod: end-of-document token.
    """
    is_end = tokens == eod
    if marks is not None:
        is_end = (is_end & (marks[:, :-1] & DOCUMENT_END_IF_EOD > 0)) | (marks[:, :-1] & DOCUMENT_END > 0)
    return is_end


def compute_cu_seqlens(is_end: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return the cumulative lengths of the D documents of a microbatch, [D + 1], with all samples laid end to end.

    The end of a sample also ends its last document, even if the document is incomplete.

    Args:
        is_end: whether each token is the last of a document, [samples, tokens per sample].
    """
    is_end = is_end.copy()
    is_end[:, -1] = True
    return np.concatenate([[0], np.flatnonzero(is_end) + 1]).astype(np.int32)


# ---- Order of the data: permutations that depend only on a key.
#
# A permutation is a function of integers. It has no state, so neither restarts nor layouts change the order. The code uses only the
# raw 64-bit stream of PCG64 and the hash of SeedSequence, because numpy guarantees that these two never change.
# ``Generator.permutation`` may change with a new version of numpy.

# First integer of a key: the use of the random numbers. Keys with the same first integer must have the same length, because
# SeedSequence gives [1] and [1, 0] the same hash.
DOCUMENT_ORDER, WINDOW_ORDER, MOCK_CIRCLE, MOCK_SAMPLE, UNREAD_WINDOW_ORDER, SHUFFLED_FILE, STREAM_BLOCK_ORDER = 1, 2, 3, 4, 5, 6, 7

Key = tuple[int, ...]
_BLOCK = 1 << 20


def generate_random_bits(count: int, key: Key) -> NDArray[np.uint64]:
    """Return `count` uniform pseudo-random 64-bit integers that depend only on the key.

    Args:
        key: integers that identify the random stream: its purpose, the seed, the split, the epoch or sample, and so on.
    """
    return np.random.PCG64(np.random.SeedSequence(key)).random_raw(count)


def compute_permutation(count: int, key: Key) -> NDArray[np.integer]:
    """Return a permutation of the integers below `count` that depends only on the key (integers, as for `generate_random_bits`);
    int32 if possible.

    The function sorts pairs (random bits, integer), each packed into 64 bits. All pairs differ, so every sorting algorithm gives
    the same result, and sorting 64-bit integers is fast. The integer leaves room for fewer random bits, for example 39 at 30
    million integers. Integers with equal random bits stay in ascending order, which is a negligible bias.
    """
    bits = max(count - 1, 1).bit_length()
    packed = generate_random_bits(count, key)
    packed <<= np.uint64(bits)
    for start in range(0, count, _BLOCK):  # in blocks, so that no second array of this size is needed
        packed[start : start + _BLOCK] |= np.arange(start, min(start + _BLOCK, count), dtype=np.uint64)
    packed.sort()
    packed &= np.uint64((1 << bits) - 1)
    return packed.astype(get_index_dtype(count))


def get_index_dtype(count: int) -> type[np.integer]:
    """Return the smallest integer type for indices below `count`: int32 if possible, otherwise int64. All but the largest datasets
    therefore need only half the memory."""
    return np.int32 if count <= 2**31 else np.int64


# ---- Mock data: generated tokens from which a model can learn, for trials without a dataset.

_MAX_CIRCLE = 64
_END_PROBABILITY = 0.1


class MockDataset(SampleSource):
    """Source of mock samples, in which each token follows from the previous token, except after the end of a document.

    The tokens run around a fixed circle of up to 64 ids. The ids are spread over the vocabulary so that every part of a sharded
    embedding is used. At random, one position in ten holds the end-of-document token. After it, the tokens continue at a random id
    of the circle.

    A model needs to learn 64 pairs, so the loss falls quickly: from log(vocab_size) to about 0.7 at 64 ids. The circle depends only
    on the seed, so the validation loss falls too.

    Raises:
        ValueError: the vocabulary is too small.
    """

    def __init__(self, *, split: int, seed: int, seq_length: int, vocab_size: int, eod: int) -> None:
        if vocab_size < 2:
            raise ValueError(f"--mock-data needs a vocabulary of at least 2 ids, not {vocab_size}: use a larger --vocab-size.")
        self.split = split
        self.seed = seed
        self.seq_length = seq_length
        self._eod = eod
        count = min(vocab_size - 1, _MAX_CIRCLE)
        ids = np.arange(count, dtype=np.int64) * (vocab_size - 1) // count
        ids += ids >= eod  # all ids except the end-of-document id
        self._circle = ids[compute_permutation(count, (MOCK_CIRCLE, seed, 0, 0))]

    def get_samples(self, first: int, count: int) -> NDArray[np.int64]:
        samples = [self._build_sample(sample_index) for sample_index in range(first, first + count)]
        return np.stack(samples) if samples else np.empty((0, self.seq_length + 1), np.int64)

    def get_lineage(self, sample_index: int) -> list[DocumentSpan]:
        return [DocumentSpan("made-up tokens", sample_index, 0, self.seq_length + 1)]

    def describe(self, num_samples: int) -> list[str]:
        return [f"{SPLIT_NAMES[self.split]}: made-up tokens (--mock-data), {len(self._circle) + 1} different ids, never repeated"]

    def _build_sample(self, sample_index: int) -> NDArray[np.int64]:
        """Return the tokens of a sample. They depend only on (seed, split, sample index) and the position in the sample."""
        draws, jumps = generate_random_bits(2 * (self.seq_length + 1), (MOCK_SAMPLE, self.seed, self.split, sample_index)).reshape(
            2, -1
        )
        positions = np.arange(self.seq_length + 1)
        ends = draws < np.uint64(_END_PROBABILITY * 2**64)
        # After each end of a document (and at the first position), start at a random id of the circle, then follow the circle.
        last_end = np.maximum.accumulate(np.where(ends, positions, 0))
        circle_indices = (jumps[last_end] % np.uint64(len(self._circle))).astype(np.int64) + positions - last_end
        return np.where(ends, self._eod, self._circle[circle_indices % len(self._circle)])
