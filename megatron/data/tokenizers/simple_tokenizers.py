"""The base class of tokenizers, and the plain ones: raw bytes, ids written as numbers, sentencepiece's models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.config.extras import optional


class Tokenizer(ABC):
    """Turns text into token ids and back."""

    vocab_size: int
    """Every id, special ones included, is below it."""
    eod: int
    """Id that ends a document."""
    bos: int | None = None
    """Id that begins a text, if there is one. Only Llama2Tokenizer puts it there."""
    pad: int | None = None
    """Id for padding, if there is one."""

    @abstractmethod
    def encode_array(self, text: str) -> NDArray[np.integer]:
        """Ids of a text, as an array of some integer type, perhaps read-only. Ordinary text never gives `eod`.

        Raises:
            ValueError: the text cannot be encoded; it holds half a surrogate pair, for example.
        """

    def encode(self, text: str) -> list[int]:
        """The ids of `encode_array` as a list."""
        ids: list[int] = self.encode_array(text).tolist()
        return ids

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; `eod` has none. Bytes that are not UTF-8 (a cut character) show as U+FFFD."""


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8, and an id for the end of a document."""

    vocab_size = 257
    eod = 256

    def encode_array(self, text: str) -> NDArray[np.integer]:
        return np.frombuffer(text.encode("utf-8"), np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(id for id in ids if id != self.eod).decode("utf-8", errors="replace")


class NullTokenizer(Tokenizer):
    """Text that is already ids: numbers from 0 to size - 1 separated by blanks. The end of a document is `size`.

    Raises:
        ValueError: the size is not positive.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"--vocab-size must be at least 1, not {size}.")
        self.vocab_size, self.eod = size + 1, size

    def encode_array(self, text: str) -> NDArray[np.integer]:
        words = text.split()
        for word in words:
            if not (word.isascii() and word.isdigit() and int(word) < self.eod):
                raise ValueError(f"{word!r} is not an id from 0 to {self.eod - 1} (--vocab-size {self.eod} of NullTokenizer)")
        return np.array([int(word) for word in words], np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(id) for id in ids if id != self.eod)


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model. The end of a document is the model's end-of-sentence id.

    A model trained with byte_fallback and without normalisation (as by tools/train_tokenizer.py) gives back every text exactly,
    except U+2581: that is sentencepiece's sign for a blank, and comes back as one. Other models give back the normalised text.

    Args:
        path: Model file (``--tokenizer-model``).
        add_bos: Put the model's beginning-of-sentence id before each text, as Llama 2 was trained.

    Raises:
        ValueError: not a sentencepiece model, or one without the ids that are needed.
    """

    def __init__(self, path: Path, *, add_bos: bool = False) -> None:
        library = optional("sentencepiece", f"--tokenizer-model {path} needs sentencepiece")

        try:
            self._model = library.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise ValueError(
                f"--tokenizer-model {path} is not a sentencepiece model: {error}\n"
                "  It is not whole, or of another kind: tokenizer.json is read with --tokenizer-type HuggingFaceTokenizer, "
                "tiktoken's files (Llama 3) with TikTokenizer."
            ) from error
        self.vocab_size = self._model.vocab_size()
        self.eod = self._model.eos_id()
        self.bos, self.pad = (id if id >= 0 else None for id in (self._model.bos_id(), self._model.pad_id()))
        for name, missing in (("eos", self.eod < 0), ("bos", add_bos and self.bos is None)):
            if missing:
                raise ValueError(
                    f"--tokenizer-model {path} has no {name} id, which this tokenizer type needs.\n"
                    f"  Train the model with {name}_id set (sentencepiece's default)."
                )
        self._first = np.array([self.bos] if add_bos else [], np.int32)

    def encode_array(self, text: str) -> NDArray[np.integer]:
        raw = text.encode()  # of half a surrogate pair the library itself says only that the type is wrong
        ids: NDArray[np.int32]
        if hasattr(self._model, "encode_as_numpy"):
            ids = self._model.encode_as_numpy(raw)
        else:  # before sentencepiece 0.2.2
            ids = np.array(self._model.encode(raw), np.int32)
        return np.concatenate((self._first, ids)) if ids.size and self._first.size else ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._model.decode([int(id) for id in ids if id != self.eod])
        return text
