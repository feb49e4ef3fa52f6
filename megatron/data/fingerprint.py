"""What makes a dataset the same one wherever its files lie."""

from __future__ import annotations

import numpy as np
import xxhash

from megatron.data.indexed_dataset import IndexedDataset

_BLOCKS, _BLOCK_BYTES = 256, 4096


def fingerprint(dataset: IndexedDataset) -> str:
    """Hash (XXH3, 128 bits) of the .idx file, the size of .bin and some of its bytes: 256 blocks of 4 KiB, evenly spread, the first
    and the last among them.

    The index alone does not tell datasets apart whose documents are all of one length, and .bin is too large to be read at a start.
    """
    state = xxhash.xxh3_128(f"{dataset.digest} {len(dataset.data)} ".encode())
    for start in np.linspace(0, max(len(dataset.data) - _BLOCK_BYTES, 0), _BLOCKS).astype(np.int64).tolist():
        state.update(dataset.data[start : start + _BLOCK_BYTES])
    return state.hexdigest()
