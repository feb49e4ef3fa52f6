"""Random samples with ends of documents, and loss masks that differ much between microbatches. They depend only on the seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.data.indexed_dataset import MARK_TYPE
from megatron.data.samples import ENDS_IF_EOD, LEARNED, SamplePiece

_DOCUMENTS = 3
"""Number of documents in a sample, on average."""


@dataclass
class RandomSamples:
    """Numbered samples (a `SampleSource`) and the mask of each. Any number can be asked for.

    Args:
        seed: other seeds give other samples.
        seq_length: tokens in a sample.
        vocab_size: rows of the word embedding.
        eod: the end-of-document token.
        micro_batch_size: samples that share a kind of mask.
        empty_masks: whether the mask of a microbatch may leave no token; only where a step has several.
    """

    seed: int
    seq_length: int
    vocab_size: int
    eod: int
    micro_batch_size: int
    empty_masks: bool

    def samples(self, first: int, count: int) -> NDArray[np.int64]:
        """Tokens of `count` samples from number `first` on, [count, s + 1]."""
        return np.stack([self._tokens(number) for number in range(first, first + count)])

    def masks(self, first: int, count: int) -> NDArray[np.float32]:
        """Masks [count, s]: 1 where the position counts in the loss, else 0.

        From one microbatch to the next, all tokens count, half of them, one, none (or a quarter). In each sample in which some
        count, one of these has an input that is no end of a document, so that other rules do not take away the last one.
        """
        return np.stack([self._mask(number) for number in range(first, first + count)])

    def marks(self, first: int, count: int) -> NDArray[np.uint8]:
        """The masks as the loader takes them: a mark of the token to predict, [count, s + 1]."""
        marks = np.full((count, self.seq_length + 1), ENDS_IF_EOD, dtype=MARK_TYPE)
        marks[:, 1:] |= LEARNED * self.masks(first, count).astype(MARK_TYPE)
        return marks

    def lineage(self, number: int) -> list[SamplePiece]:
        """One piece for each sample."""
        return [SamplePiece("random", number, 0, self.seq_length + 1)]

    def describe(self, num_samples: int) -> list[str]:
        """A line that says that they are random."""
        return [f"{num_samples} samples of random tokens"]

    def _tokens(self, number: int) -> NDArray[np.int64]:
        random = np.random.default_rng((self.seed, number))
        tokens = random.integers(self.vocab_size - 1, size=self.seq_length + 1)
        tokens += tokens >= self.eod  # every other token, all equally likely
        ends = random.random(self.seq_length + 1) < min(0.5, _DOCUMENTS / self.seq_length)
        ends[0] = False
        tokens[ends] = self.eod
        return tokens

    def _mask(self, number: int) -> NDArray[np.float32]:
        microbatch, place = divmod(number, self.micro_batch_size)
        count = (self.seq_length, (self.seq_length + 1) // 2, int(place == 0), 0 if self.empty_masks else self.seq_length // 4 + 1)
        mask = np.zeros(self.seq_length, dtype=np.float32)
        if kept := count[microbatch % len(count)]:
            random = np.random.default_rng((self.seed, number, 1))
            inner = random.permutation(np.flatnonzero(self._tokens(number)[:-1] != self.eod))
            rest = random.permutation(np.setdiff1d(np.arange(self.seq_length), inner[:1]))
            mask[np.concatenate([inner[:1], rest[: kept - 1]])] = 1.0
        return mask
