"""Tokenizers without files: raw bytes, and ids written as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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


class SentencePieceTokenizer:
    """A sentencepiece model. The end of a document is the model's end-of-sentence id.

    A model trained with byte_fallback and without any normalisation (as tools/train_tokenizer.py does) gives back every text
    exactly, but for U+2581: that is sentencepiece's sign for a blank, and comes back as one. Other models give back what their
    normalisation left.

    Args:
        path: Model file (``--tokenizer-model``).
        add_bos: Put the model's beginning-of-sentence id before each text, as Llama 2 was trained.

    Raises:
        ValueError: not a sentencepiece model, or one without the ids that are needed.
    """

    def __init__(self, path: Path, *, add_bos: bool = False) -> None:
        from sentencepiece import SentencePieceProcessor  # only who uses it pays for the import

        try:
            self._model = SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise ValueError(
                f"--tokenizer-model {path} is not a sentencepiece model: {error}\n"
                "  It is not whole, or of another kind: tokenizer.json is read with --tokenizer-type HuggingFaceTokenizer, "
                "tiktoken's files (Llama 3) with TikTokenizer."
            ) from error
        self.vocab_size: int = self._model.vocab_size()
        self.eod: int = self._model.eos_id()
        bos, pad = self._model.bos_id(), self._model.pad_id()
        self.bos: int | None = bos if bos >= 0 else None
        self.pad: int | None = pad if pad >= 0 else None
        for name, id in (("eos", self.eod), ("bos", bos if add_bos else 0)):
            if id < 0:
                raise ValueError(
                    f"--tokenizer-model {path} has no {name} id, which this tokenizer type needs.\n"
                    f"  Train the model with {name}_id set (sentencepiece's default)."
                )
        self._first = [bos] if add_bos else []

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with bos before them if asked for.

        Raises:
            ValueError: half a surrogate pair in the text.
        """
        ids: list[int] = self._model.encode(text.encode())  # of half a pair the library itself says only that the type is wrong
        return self._first + ids if ids else ids

    def encode_array(self, text: str) -> NDArray[np.integer]:
        """As `encode`, as an array."""
        if not hasattr(self._model, "encode_as_numpy"):  # before sentencepiece 0.2.2
            return np.array(self.encode(text), np.int32)
        ids: NDArray[np.int32] = self._model.encode_as_numpy(text.encode())
        return np.concatenate((np.array(self._first, np.int32), ids)) if ids.size and self._first else ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids. The model's own normalisation (of blanks, for example) is not undone."""
        text: str = self._model.decode([int(id) for id in ids if id != self.eod])
        return text
