"""The tokenizer of Hugging Face's tokenizer.json: run by tiktoken where that is exact, else by the `tokenizers` library."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.config.extras import optional
from megatron.data.tokenizer import Tokenizer
from megatron_lab.tokenizers.bpe_rules import NotExactError
from megatron_lab.tokenizers.byte_bpe import ByteBPETokenizer, TiktokenEncoder
from megatron_lab.tokenizers.tokenizer_json import (
    SpecialIds,
    TokenizerJson,
    byte_vocabulary,
    find_special_ids,
    merge_parts,
    read_tokenizer_json,
    spells_all_bytes,
)

_log = logging.getLogger(__name__)


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json: byte-level BPE by tiktoken, everything else by the `tokenizers` library, which is slower.

    The end of a document is eos (`find_special_ids`). Post-processors are not applied: a document gets no bos, and after it the end
    of document only where that is asked for. Special tokens written out in a text are ordinary text; added tokens that are not
    special (such as ``<think>``) are found in it, as the file says.

    The ids are those of the `tokenizers` library, with one exception under a normaliser NFC: marks newer than Unicode 10 that are
    not in canonical order. Python puts these in order; the library does not know them.

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
            byte_vocabulary(file, self._special)  # to report errors at once; a training run needs no more, and keeps none of it

    @cached_property
    def backend(self) -> ByteBPETokenizer | LibraryTokenizer:
        """The tokenizer that does the work; made at its first use.

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

    def encode_array(self, text: str) -> NDArray[np.integer]:
        return self.backend.encode_array(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self.backend.decode(ids)


class LibraryTokenizer(Tokenizer):
    """A tokenizer.json run by the `tokenizers` library.

    Special tokens written out in a text are ordinary text, as everywhere here: the library is configured so, and the end of a
    document gets a name in it that no text has. Whether ``decode`` gives back a text exactly depends on the file.

    Args:
        reason: Why tiktoken cannot be used, for messages.

    Raises:
        ValueError: the library is not installed or refuses the file, or ordinary text could give the end of a document.
    """

    def __init__(self, file: TokenizerJson, special: SpecialIds, reason: str) -> None:
        self._source = f"--tokenizer-model {file.path}"
        library = optional("tokenizers", f"{self._source} needs the tokenizers library ({reason})")
        self.vocab_size = max(file.ids.values()) + 1
        self.eod, self.bos, self.pad = special.eod, special.bos, special.pad
        self._special_ids = {special.eod, special.bos, special.pad} | {token["id"] for token in file.added if token.get("special")}
        document = _without_end(file, special.eod, self._source)
        try:
            self._tokenizer = library.Tokenizer.from_str(json.dumps(document))
        except Exception as error:  # the library raises this very class
            raise ValueError(f"{self._source} is not a tokenizer.json that the tokenizers library can read: {error}") from error
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode_array(self, text: str) -> NDArray[np.integer]:
        text.encode()  # of half a surrogate pair the library says only that the type is wrong
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if self.eod in ids:
            raise ValueError(f"{self._source}: ordinary text gives the id {self.eod}, which ends a document.")
        return np.array(ids, np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode([int(id) for id in ids if id not in self._special_ids])
        return text


def _without_end(file: TokenizerJson, eod: int, source: str) -> dict[str, Any]:
    """The file with another name for the end of a document, one that is in no text."""
    name = next(token for token, id in file.ids.items() if id == eod)
    hidden = f"\0\ue000{name}\ue000\0"
    document = copy.deepcopy(file.document)
    document["post_processor"] = None  # it adds special tokens, and names them
    for token in document.get("added_tokens") or []:
        if token["id"] == eod:
            token["content"] = hidden
            token["special"] = True
    model = document["model"]
    if isinstance(model["vocab"], list):
        for id, entry in enumerate(model["vocab"]):
            entry[0] = hidden if id == eod else entry[0]
        return document
    if file.is_bpe and spells_all_bytes(file):
        model["unk_token"] = None  # nothing is unknown
    if model.get("unk_token") == name or any(
        name in (*parts, "".join(parts)) for parts in map(merge_parts, model.get("merges", ()))
    ):
        raise ValueError(
            f"{source}: ordinary text would give {name!r}, which is to end a document: it must be a token that no merge uses.\n"
            "  Name another token as eos_token in tokenizer_config.json beside it."
        )
    model["vocab"] = {hidden if token == name else token: id for token, id in model["vocab"].items()}
    return document
