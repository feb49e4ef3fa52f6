"""The tokenizer of any byte-level BPE vocabulary."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron.data.tokenizers.bpe_rules import ByteVocabulary, NotExactError
from megatron.data.tokenizers.tiktoken_encoder import TiktokenEncoder


class ByteBPETokenizer:
    """Byte-level BPE run by tiktoken. Special tokens written out in a text are ordinary text.

    ``decode`` gives back any text exactly (brought to NFC first, where the vocabulary asks for it).

    The encoder is made and tried at its first use (some tenths of a second for 50,000 tokens), since a training run only needs the
    sizes.

    Args:
        vocabulary: What the files say.
        encoder: One made already.
    """

    def __init__(self, vocabulary: ByteVocabulary, encoder: TiktokenEncoder | None = None) -> None:
        self.vocabulary = vocabulary
        self._made_encoder = encoder
        self.vocab_size = vocabulary.num_ids
        self.eod = vocabulary.eod
        self.bos = vocabulary.bos
        self.pad = vocabulary.pad

    @cached_property
    def _encoder(self) -> TiktokenEncoder:
        try:
            return self._made_encoder or TiktokenEncoder(self.vocabulary)
        except NotExactError as error:
            raise ValueError(f"{self.vocabulary.source}: {error}.\n  Install another version of tiktoken.") from error

    @cached_property
    def _bytes(self) -> dict[int, bytes]:
        """Of each id that has a text."""
        added = {id: text.encode() for text, id in self.vocabulary.added.items()}
        return {id: token for token, id in self.vocabulary.ids.items()} | added

    @cached_property
    def _added_pattern(self) -> re.Pattern[str]:
        """Any added token, the longest first."""
        return re.compile(f"({'|'.join(re.escape(token) for token in sorted(self.vocabulary.added, key=len, reverse=True))})")

    def encode(self, text: str) -> list[int]:
        """Ids of a text.

        Raises:
            ValueError: half a surrogate pair in the text.
        """
        ids: list[int] = self.encode_array(text).tolist()
        return ids

    def encode_array(self, text: str) -> NDArray[np.integer]:
        """Ids of a text, as an array that tiktoken filled.

        Raises:
            ValueError: half a surrogate pair in the text.
        """
        if any(token in text for token in self.vocabulary.added):
            return np.concatenate(list(self._encode_around_added(text)))
        return self._encode_ordinary(text)

    def _encode_around_added(self, text: str) -> Iterator[NDArray[np.uint32]]:
        for part in self._added_pattern.split(text):
            id = self.vocabulary.added.get(part)
            yield self._encode_ordinary(part) if id is None else np.array([id], np.uint32)

    def _encode_ordinary(self, text: str) -> NDArray[np.uint32]:
        if self.vocabulary.normalise and not text.isascii():
            text = unicodedata.normalize("NFC", text)
        return self._encoder.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; bytes that are not UTF-8 (a cut character) show as U+FFFD, ids without a text are left out."""
        return b"".join(self._bytes.get(int(id), b"") for id in ids).decode("utf-8", errors="replace")
