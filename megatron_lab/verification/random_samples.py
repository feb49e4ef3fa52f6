"""Random samples with end-of-document tokens, and loss masks that differ strongly between microbatches. All depend only on the seed
and the index of the sample."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.data.indexed_dataset import MARK_TYPE
from megatron.data.samples import DOCUMENT_END, DOCUMENT_END_IF_EOD, IN_LOSS, PADDING, DocumentSpan

_DOCUMENTS_PER_SAMPLE = 3
"""Mean number of documents in a sample."""


@dataclass
class RandomSamples:
    """Unlimited random samples and loss masks. A sample is generated from the seed and its index when it is read, so this can
    replace a data set.

    Args:
        seed: determines all samples and masks.
        seq_length: input tokens of a sample.
        vocab_size: rows of the word embedding.
        eod: id of the end-of-document token.
        micro_batch_size: number of consecutive samples in a microbatch. It determines which samples have masks of the same type.
        allows_empty_masks: whether the mask of a microbatch may exclude all tokens. A step then needs several microbatches.
        has_padding: whether the ends of most samples are padding, as with --whole-documents.
    """

    seed: int
    seq_length: int
    vocab_size: int
    eod: int
    micro_batch_size: int
    allows_empty_masks: bool
    has_padding: bool = False

    def get_samples(self, first: int, count: int) -> NDArray[np.int64]:
        """Return the tokens of `count` samples from index `first` on, int64 [count, s + 1]."""
        return np.stack([self._generate_tokens(index) for index in range(first, first + count)])

    def get_masks(self, first: int, count: int) -> NDArray[np.float32]:
        """Return the loss masks of `count` samples from index `first` on, [count, s]: 1 where the position counts in the loss, else
        0.

        Of every four successive microbatches, the first counts all tokens, the second half of the tokens of each sample, and the
        third a single token. The fourth counts no token or, unless `allows_empty_masks` is set, about a quarter of the tokens of
        each sample. Of the counted tokens of a sample, at least one has an input that is not an end-of-document token, so
        --eod-mask-loss does not exclude all of them. Padding does not count.
        """
        return np.stack([self._generate_mask(index) for index in range(first, first + count)])

    def get_marks(self, first: int, count: int) -> NDArray[np.uint8]:
        """Return the loss masks of `count` samples from index `first` on, in the format of the data loader: a byte for each token,
        uint8 [count, s + 1]. The bits of a byte say whether the token counts in the loss, whether a document may end there, and
        whether the token is padding."""
        marks = np.full((count, self.seq_length + 1), DOCUMENT_END_IF_EOD, dtype=MARK_TYPE)
        marks[:, 1:] |= IN_LOSS * self.get_masks(first, count).astype(MARK_TYPE)
        for row, length in zip(marks, self.get_data_lengths(first, count), strict=True):
            if length < len(row):
                row[length - 1] |= DOCUMENT_END
                row[length:] = PADDING
        return marks

    def get_data_lengths(self, first: int, count: int) -> list[int]:
        """Return the number of tokens before the padding, of s + 1, for `count` samples from index `first` on.

        With padding, one sample in five has none, one has a single token of it, and the others a random number.
        """
        length = self.seq_length + 1
        if not self.has_padding:
            return [length] * count
        return [
            length - min(index % 5, 1)
            if index % 5 < 2
            else int(np.random.default_rng((self.seed, index, 2)).integers(2, length, endpoint=True))
            for index in range(first, first + count)
        ]

    def get_lineage(self, sample_index: int) -> list[DocumentSpan]:
        """Return the document span from which a sample comes: one invented document that covers the sample."""
        return [DocumentSpan("random", sample_index, 0, self.seq_length + 1)]

    def describe(self, num_samples: int) -> list[str]:
        """Return a line for the log which says that the samples are random."""
        return [f"{num_samples} samples of random tokens"]

    def _generate_tokens(self, sample_index: int) -> NDArray[np.int64]:
        random = np.random.default_rng((self.seed, sample_index))
        tokens = random.integers(self.vocab_size - 1, size=self.seq_length + 1)
        tokens += tokens >= self.eod  # all tokens except eod, with equal probability
        ends = random.random(self.seq_length + 1) < min(0.5, _DOCUMENTS_PER_SAMPLE / self.seq_length)
        ends[0] = False
        tokens[ends] = self.eod
        (length,) = self.get_data_lengths(sample_index, 1)
        tokens[length:] = self.eod
        return tokens

    def _generate_mask(self, sample_index: int) -> NDArray[np.float32]:
        microbatch, index_in_microbatch = divmod(sample_index, self.micro_batch_size)
        counts = (
            self.seq_length,
            (self.seq_length + 1) // 2,
            int(index_in_microbatch == 0),
            0 if self.allows_empty_masks else self.seq_length // 4 + 1,
        )
        mask = np.zeros(self.seq_length, dtype=np.float32)
        if num_counted := counts[microbatch % len(counts)]:
            random = np.random.default_rng((self.seed, sample_index, 1))
            (length,) = self.get_data_lengths(sample_index, 1)
            candidates = random.permutation(np.flatnonzero(self._generate_tokens(sample_index)[: length - 1] != self.eod))
            remaining_positions = random.permutation(np.setdiff1d(np.arange(length - 1), candidates[:1]))
            mask[np.concatenate([candidates[:1], remaining_positions[: num_counted - 1]])] = 1.0
        return mask
