"""Turns samples into the arrays of a microbatch, and says what the end of a document means there.

Shapes: `b` microbatch size, `s` sequence length, `D` documents in a microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from megatron.data.indexed_dataset import IndexedDataset


# ---- marks of tokens: which ones a model is to learn, and where documents end (see `loss_mask.py`)

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


_LOOKED_AT = 64
_TOKENS_LOOKED_AT = 2**22
"""How many tokens to search in documents that do not end with the token: it may stand inside (several texts in one document)."""


def missing_ends(dataset: IndexedDataset, documents: range, rules: DocumentRules) -> str | None:
    """A warning if rules about documents are on but no end of document is found in some 64 documents, spread over the range."""
    flags = [name for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss") if getattr(rules, name)]
    if not flags or not documents or _has_end(dataset, documents, rules.eod):
        return None
    named = ", ".join(f"--{name.replace('_', '-')}" for name in flags)
    return (
        f"{dataset.prefix}: none of {min(len(documents), _LOOKED_AT)} documents that were looked at has the end-of-document id "
        f"{rules.eod:,}, so {named} will do nothing for it. Make it again with tools/preprocess_data.py --append-eod, or give the "
        "tokenizer it was made with."
    )


def _has_end(dataset: IndexedDataset, documents: range, eod: int) -> bool:
    chosen = np.linspace(documents.start, documents.stop - 1, min(len(documents), _LOOKED_AT)).astype(np.int64).tolist()
    left = _TOKENS_LOOKED_AT
    for last_alone in (True, False):
        for document in chosen:
            first, stop = dataset.document_index[document : document + 2].tolist()
            for sequence in reversed(range(first, stop)):
                length = int(dataset.lengths[sequence])
                count = min(length, 1 if last_alone else left)
                if count and (dataset.read(sequence, length - count, count) == eod).any():
                    return True
                left -= 0 if last_alone else count
                if count and last_alone:
                    break
    return False
