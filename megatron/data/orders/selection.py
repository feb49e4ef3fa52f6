"""What is put into an order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron.data.indexed_dataset import IndexedDataset


@dataclass(frozen=True)
class Selection:
    """The documents of a split, the seed of their order, and the length in which they are read."""

    dataset: IndexedDataset
    documents: range
    """Neighbouring documents that belong to the split."""
    split: int
    """0 training, 1 validation, 2 test."""
    seed: int
    seq_length: int
    """Tokens that the model reads at once."""

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of the split."""
        return self.dataset.num_tokens(self.documents)
