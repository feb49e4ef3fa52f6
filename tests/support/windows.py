"""Samples that are given one by one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron.data.indexed_dataset import MARK_TYPE
from megatron.data.samples import DEFAULT_MARKS, DOCUMENT_END, PADDING, DocumentSpan


class Windows:
    """Sample n is row n of an array, [N, s + 1]."""

    def __init__(self, rows: NDArray[np.int64] | list[list[int]], data_lengths: Sequence[int] | None = None) -> None:
        self.rows = np.asarray(rows, dtype=np.int64)
        self.seq_length = self.rows.shape[1] - 1
        self.opened: list[int] = []
        """Samples in the order in which they were read."""
        self.data_lengths = data_lengths
        """Number of tokens of each row before its padding, or None if no row has any."""

    def get_samples(self, first: int, count: int) -> NDArray[np.int64]:
        """`count` rows from the first on."""
        self.opened += range(first, first + count)
        assert first + count <= len(self.rows), "there are no such samples"
        return self.rows[first : first + count].copy()

    def get_marks(self, first: int, count: int) -> NDArray[np.uint8] | None:
        """None without padding: all tokens count, and documents end with the end-of-document token."""
        if self.data_lengths is None:
            return None
        marks = np.full((count, self.seq_length + 1), DEFAULT_MARKS, dtype=MARK_TYPE)
        for row, length in zip(marks, self.data_lengths[first : first + count], strict=True):
            row[length - 1] |= DOCUMENT_END
            row[length:] = PADDING
        return marks

    def get_lineage(self, number: int) -> list[DocumentSpan]:
        return [DocumentSpan("windows", number, 0, self.seq_length + 1)]

    def describe(self, num_samples: int) -> list[str]:
        return [f"{len(self.rows)} windows, of which {num_samples} are read"]
