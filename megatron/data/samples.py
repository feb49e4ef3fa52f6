"""Numbered samples: what a source of them is, how they become the arrays of a microbatch, and how random orders depend on a key.

What the end of a document means in a microbatch is said by `DocumentRules`. A source without files is here too: made-up tokens.

Shapes: `b` microbatch size, `s` sequence length, `D` documents in a microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.config.data import SPLIT_NAMES

# ---- marks of tokens: which ones a model is to learn, and where documents end (see `indexed_dataset.py`)

LEARNED = 1
"""The token counts in the loss where it is the one to predict."""
ENDS = 2
"""The token is the last of its document."""
ENDS_IF_EOD = 4
"""It is, if it is the end-of-document token. Never in a file: it marks tokens of datasets that have no mask."""
UNMARKED = LEARNED | ENDS_IF_EOD
"""The marks of a token without marks."""


@dataclass(frozen=True)
class SamplePiece:
    """Consecutive tokens of one document within a sample."""

    prefix: str
    """Path of the indexed dataset without .bin and .idx."""
    document: int
    first_token: int
    """Index of its first token within the document."""
    num_tokens: int


class SampleSource(Protocol):
    """Numbered samples: the same number always gives the same tokens. Numbers never end, epoch after epoch.

    Safe to use from several threads.
    """

    seq_length: int

    def samples(self, first: int, count: int) -> NDArray[np.int64]:
        """Tokens of `count` samples from number `first` on, [count, s + 1].

        Raises:
            ValueError: a token id is not below the vocabulary size, or the order ends before these samples.
        """

    def marks(self, first: int, count: int) -> NDArray[np.uint8] | None:
        """Marks of the same tokens, [count, s + 1] (see `loss_mask`); None where no token has any.

        Raises:
            ValueError: the order ends before these samples.
        """
        return None

    def lineage(self, number: int) -> list[SamplePiece]:
        """Where the tokens of a sample come from, in order."""

    def describe(self, num_samples: int) -> list[str]:
        """Lines of the start-up log for a run that reads `num_samples` samples."""


@dataclass(frozen=True)
class DocumentRules:
    """What the end of a document does to the tokens around it: the end-of-document token, or where the data has marks, the token
    that they name. It belongs to the document that it ends."""

    eod: int
    reset_position_ids: bool = False
    """Positions count from 0 in each document instead of from the start of the sample."""
    reset_attention_mask: bool = False
    """A token attends only to its own document."""
    eod_mask_loss: bool = False
    """Positions whose *input* is the end do not count in the loss: the start of the next document cannot be predicted."""

    @property
    def every_stage_reads(self) -> bool:
        """Whether all layers depend on the tokens' documents, not only the first (tokens) and the last (labels)."""
        return self.reset_position_ids or self.reset_attention_mask


@dataclass(frozen=True)
class Microbatch:
    """What one data rank reads in one forward pass."""

    tokens: NDArray[np.int64]
    """Input ids, [b, s]."""
    labels: NDArray[np.int64]
    """Id to predict at each position, [b, s]."""
    loss_mask: NDArray[np.float32]
    """1 where the position counts in the loss, else 0, [b, s]."""
    first_sample: int
    """Number of the first sample; the others follow it."""
    positions: NDArray[np.int64] | None = None
    """Position of each token, [b, s]; None where each sample counts from 0 to s - 1."""
    bounds: NDArray[np.int32] | None = None
    """Bounds of attention, [D + 1]: the token at which each document starts, with the samples laid end to end, and b x s. None
    where a token attends to its whole sample."""


def read_microbatch(source: SampleSource, first_sample: int, size: int, rules: DocumentRules) -> Microbatch:
    """The microbatch of the `size` samples from `first_sample` on."""
    windows, marks = source.samples(first_sample, size), source.marks(first_sample, size)
    tokens, labels = np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])
    loss_mask = np.ones(tokens.shape, dtype=np.float32)
    if marks is not None:
        loss_mask[marks[:, 1:] & LEARNED == 0] = 0.0
    if rules.eod_mask_loss:
        loss_mask[_ends(tokens, marks, rules.eod)] = 0.0
    positions = bounds = None
    if rules.every_stage_reads:
        found = document_bounds(_ends(tokens, marks, rules.eod))
        if rules.reset_position_ids:
            starts = found[:-1].astype(np.int64)
            positions = (np.arange(tokens.size) - np.repeat(starts, np.diff(found))).reshape(tokens.shape)
        bounds = found if rules.reset_attention_mask else None
    return Microbatch(tokens, labels, loss_mask, first_sample, positions, bounds)


def _ends(tokens: NDArray[np.int64], marks: NDArray[np.uint8] | None, eod: int) -> NDArray[np.bool_]:
    """Which tokens [b, s] are the last of a document, by their marks [b, s + 1] or by themselves."""
    ends = tokens == eod
    if marks is not None:
        ends = (ends & (marks[:, :-1] & ENDS_IF_EOD > 0)) | (marks[:, :-1] & ENDS > 0)
    return ends


def document_bounds(ends: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Where the documents of a microbatch begin, and b x s: [D + 1]. A sample ends its last document, whole or not.

    Args:
        ends: whether a token is the last of a document, [b, s].
    """
    ends = ends.copy()
    ends[:, -1] = True
    return np.concatenate([[0], np.flatnonzero(ends) + 1]).astype(np.int32)


# ---- The order of the data as arithmetic: permutations that depend on a key.
#
# All inputs are integers, so no state is kept, and neither restarts nor layouts can change what is read. Only the raw 64-bit stream
# of PCG64 and the hash of SeedSequence are used: numpy promises both for ever, while ``Generator.permutation`` may change from one
# numpy to the next.

# First number of a key. Keys that begin with the same one have the same length: SeedSequence hashes [1] and [1, 0] alike.
DOCUMENTS, WINDOWS, MOCK_RULE, MOCK_SAMPLE, LEFT_WINDOWS, WRITTEN = 1, 2, 3, 4, 5, 6

Key = tuple[int, ...]
_BLOCK = 1 << 20


def random_numbers(count: int, key: Key) -> NDArray[np.uint64]:
    """`count` uniform 64-bit numbers that follow from the key (stream, seed, split, epoch or sample, ...)."""
    return np.random.PCG64(np.random.SeedSequence(key)).random_raw(count)


def permutation(count: int, key: Key) -> NDArray[np.integer]:
    """The numbers below `count` in an order that depends on the key; int32 if that suffices.

    It sorts (random bits, number) packed into one 64-bit word. The words are unique, so every sort gives the same result, at the
    speed of a plain sort. Equal random bits (39 of them at 30 million) leave a pair in order: a bias far below anything visible.
    """
    bits = max(count - 1, 1).bit_length()
    words = random_numbers(count, key)
    words <<= np.uint64(bits)
    for start in range(0, count, _BLOCK):  # in blocks: no second array of this size
        words[start : start + _BLOCK] |= np.arange(start, min(start + _BLOCK, count), dtype=np.uint64)
    words.sort()
    words &= np.uint64((1 << bits) - 1)
    return words.astype(index_dtype(count))


def index_dtype(count: int) -> type[np.integer]:
    """The smallest type that numbers `count` things (half the memory for all but the largest datasets)."""
    return np.int32 if count <= 2**31 else np.int64


# ---- Made-up tokens from which a model can learn, for trying things out without a dataset.

_MOST_TOKENS = 64
_DOCUMENT_END = 0.1


class MockDataset(SampleSource):
    """Samples in which each token follows from the one before, except after the end of a document.

    The tokens run around a fixed circle of up to 64 ids, spread over the whole vocabulary so that every part of a split embedding
    is used. One position in ten, at random, holds the end of a document instead, after which the run starts anywhere on the circle.
    A model needs to learn 64 pairs, so the loss falls quickly: from log(vocab_size) to about 0.7 at 64 ids. The circle depends on
    the seed alone, so the validation loss falls too.

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
        count = min(vocab_size - 1, _MOST_TOKENS)
        ids = np.arange(count, dtype=np.int64) * (vocab_size - 1) // count
        ids += ids >= eod  # every id but the end of document
        self._circle = ids[permutation(count, (MOCK_RULE, seed, 0, 0))]

    def samples(self, first: int, count: int) -> NDArray[np.int64]:
        made = [self._sample(number) for number in range(first, first + count)]
        return np.stack(made) if made else np.empty((0, self.seq_length + 1), np.int64)

    def lineage(self, number: int) -> list[SamplePiece]:
        return [SamplePiece("made-up tokens", number, 0, self.seq_length + 1)]

    def describe(self, num_samples: int) -> list[str]:
        return [f"{SPLIT_NAMES[self.split]}: made-up tokens (--mock-data), {len(self._circle) + 1} different ids, never repeated"]

    def _sample(self, number: int) -> NDArray[np.int64]:
        """Tokens of a sample: a function of (seed, split, number) and the position."""
        draws, jumps = random_numbers(2 * (self.seq_length + 1), (MOCK_SAMPLE, self.seed, self.split, number)).reshape(2, -1)
        positions = np.arange(self.seq_length + 1)
        ends = draws < np.uint64(_DOCUMENT_END * 2**64)
        # A run starts after an end (and at the first position) at a random place of the circle and moves on by one.
        last_end = np.maximum.accumulate(np.where(ends, positions, 0))
        places = (jumps[last_end] % np.uint64(len(self._circle))).astype(np.int64) + positions - last_end
        return np.where(ends, self._eod, self._circle[places % len(self._circle)])
