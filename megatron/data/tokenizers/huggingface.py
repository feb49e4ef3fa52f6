"""Hugging Face's tokenizer.json."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.data.tokenizers.bpe_rules import NotExactError
from megatron.data.tokenizers.byte_bpe import ByteBPETokenizer
from megatron.data.tokenizers.special_tokens import find_special_ids
from megatron.data.tokenizers.tiktoken_encoder import TiktokenEncoder
from megatron.data.tokenizers.tokenizer_json import byte_vocabulary, read_tokenizer_json
from megatron.data.tokenizers.tokenizers_library import LibraryTokenizer

_log = logging.getLogger(__name__)


class HuggingFaceTokenizer:
    """A tokenizer.json: byte-level BPE by tiktoken, everything else by the `tokenizers` library, which is slower.

    The end of a document is eos (`find_special_ids`). Post-processors are not applied: a document gets no bos before it, only the
    end of document after it where that is asked for. Special tokens written out in a text are ordinary text; added tokens that
    are not special (such as ``<think>``) are found in it, as the file says.

    The ids are those of the `tokenizers` library, but for marks that Unicode has had since version 10, in another than the
    canonical order, under a normaliser NFC: Python puts them in order, the library does not know them.

    Args:
        path: tokenizer.json; special tokens are looked up in the files beside it.

    Raises:
        ValueError: the file is not what it should be, or nothing says which token ends a document.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        file = read_tokenizer_json(path)
        self._special = find_special_ids(path, file.ids)
        self.vocab_size = max(file.ids.values()) + 1
        self.eod, self.bos, self.pad = self._special.eod, self._special.bos, self._special.pad
        with suppress(NotExactError):
            byte_vocabulary(file, self._special)  # to say at once what is wrong; a training run needs no more, and keeps none of it

    @cached_property
    def backend(self) -> ByteBPETokenizer | LibraryTokenizer:
        """What does the work; made at its first use.

        Raises:
            ValueError: the `tokenizers` library is needed and not there.
        """
        file = read_tokenizer_json(self._path)
        try:
            vocabulary = byte_vocabulary(file, self._special)
            return ByteBPETokenizer(vocabulary, TiktokenEncoder(vocabulary))
        except NotExactError as error:
            tokenizer = LibraryTokenizer(file, self._special, str(error))
            _log.warning("--tokenizer-model %s is run by the tokenizers library, slower than tiktoken: %s", self._path, error)
            return tokenizer

    def encode(self, text: str) -> list[int]:
        """Ids of a text.

        Raises:
            ValueError: half a surrogate pair in the text.
        """
        return self.backend.encode(text)

    def encode_array(self, text: str) -> NDArray[np.integer]:
        """As `encode`, as an array."""
        return self.backend.encode_array(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; special ones have none."""
        return self.backend.decode(ids)
