"""The order of the data as arithmetic: permutations that depend on a key.

All inputs are integers, so no state is kept, and neither restarts nor layouts can change what is read. Only the raw 64-bit stream
of PCG64 and the hash of SeedSequence are used: numpy promises both for ever, while ``Generator.permutation`` may change from one
numpy to the next.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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
