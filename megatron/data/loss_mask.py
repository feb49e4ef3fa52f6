"""Loss masks in the data: which tokens a model is to learn, and where conversations end.

Beside a dataset PREFIX lies the indexed dataset PREFIX_loss_mask: for each token one byte of marks, in the same documents. With it
a model learns its own answers and not the questions (`tools/preprocess_data.py --chat-template` writes both).

Ends are marked too, because a token that ends a document elsewhere may end each turn of a conversation.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron.data.indexed_dataset import DatasetError, IndexedDataset, blocks

MARK_TYPE = np.uint8


def loss_mask_prefix(prefix: str) -> str:
    """Path of a dataset's loss mask, without .bin and .idx."""
    return f"{prefix}_loss_mask"


def has_loss_mask(prefix: str) -> bool:
    """Whether a dataset has a loss mask."""
    return Path(f"{loss_mask_prefix(prefix)}.idx").exists()


def open_loss_mask(dataset: IndexedDataset) -> IndexedDataset:
    """The marks of a dataset's tokens.

    Raises:
        DatasetError: a file is missing or damaged, or the marks are not those of this dataset.
    """
    marks = IndexedDataset(loss_mask_prefix(dataset.prefix))
    if marks.dtype != MARK_TYPE:
        raise DatasetError(
            f"{marks.prefix}.idx has tokens of type {marks.dtype.name}; marks are {np.dtype(MARK_TYPE).name}.\n"
            "  Make the dataset again with tools/preprocess_data.py --chat-template."
        )
    same = all(
        len(ours) == len(its) and all(np.array_equal(ours[block], its[block]) for block in blocks(len(ours)))
        for ours, its in ((dataset.lengths, marks.lengths), (dataset.document_index, marks.document_index))
    )
    if not same:
        raise DatasetError(
            f"{marks.prefix} marks other documents than {dataset.prefix} has: their lengths differ.\n"
            "  They are of two runs of tools/preprocess_data.py; make both again, or copy both."
        )
    return marks
