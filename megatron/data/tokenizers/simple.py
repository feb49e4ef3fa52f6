"""Tokenizers without files: raw bytes, and ids written as numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class ByteTokenizer:
    """The 256 bytes of UTF-8, and the end of a document."""

    vocab_size = 257
    eod = 256
    bos: int | None = None
    pad: int | None = None

    def encode(self, text: str) -> list[int]:
        """The bytes of the text.

        Raises:
            ValueError: half a surrogate pair in the text.
        """
        return list(text.encode("utf-8"))

    def encode_array(self, text: str) -> NDArray[np.integer]:
        """The bytes of the text, as an array."""
        return np.frombuffer(text.encode("utf-8"), np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the bytes; bytes that are not UTF-8 (a cut character) show as U+FFFD."""
        return bytes(id for id in ids if id != self.eod).decode("utf-8", errors="replace")


class NullTokenizer:
    """Text that is already ids: numbers from 0 to size - 1 separated by blanks. The end of a document is `size`.

    Raises:
        ValueError: the size is not positive.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"--vocab-size must be at least 1, not {size}.")
        self.vocab_size = size + 1
        self.eod = size
        self.bos: int | None = None
        self.pad: int | None = None

    def encode(self, text: str) -> list[int]:
        """The numbers.

        Raises:
            ValueError: something else than a number, or a number out of range.
        """
        words = text.split()
        for word in words:
            if not (word.isascii() and word.isdigit() and int(word) < self.eod):
                raise ValueError(f"{word!r} is not an id from 0 to {self.eod - 1} (--vocab-size {self.eod} of NullTokenizer)")
        return [int(word) for word in words]

    def encode_array(self, text: str) -> NDArray[np.integer]:
        """As `encode`, as an array."""
        return np.array(self.encode(text), np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        """The numbers, separated by blanks."""
        return " ".join(str(id) for id in ids if id != self.eod)
