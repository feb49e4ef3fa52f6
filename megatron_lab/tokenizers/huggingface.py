"""Tokenizer for Hugging Face's tokenizer.json. It uses tiktoken if that gives exactly the same ids, else the slower `tokenizers`
library."""

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

from megatron.config.optional_packages import import_optional
from megatron.data.tokenizer import Tokenizer
from megatron_lab.tokenizers.bpe_rules import NotExactError
from megatron_lab.tokenizers.byte_bpe import ByteBPETokenizer, TiktokenEncoder
from megatron_lab.tokenizers.companion_tokens import asks_for_bos, format_names
from megatron_lab.tokenizers.text_frame import format_ids, read_text_frame
from megatron_lab.tokenizers.tokenizer_json import (
    SpecialIds,
    TokenizerJson,
    build_byte_vocabulary,
    covers_all_bytes,
    find_special_ids,
    get_special_ids,
    read_tokenizer_json,
    split_merge,
)

_CHARACTERS_BEFORE_WARNING = 10**6
"""Number of encoded characters after which a warning says that the tokenizer is slow. Its speed matters only for long texts."""

_log = logging.getLogger(__name__)


class HuggingFaceTokenizer(Tokenizer):
    """Tokenizer for a tokenizer.json. It uses tiktoken for byte-level BPE, and the `tokenizers` library, which is slower, for
    everything else.

    The end-of-document token is the eos token that `find_special_ids` reads from the files. The special tokens that the file's
    post-processor adds to each text, such as bos, are `prefix_ids` and `suffix_ids`. Special tokens that occur in a text are
    encoded as ordinary text. Added tokens that are not special (such as ``<think>``) are matched, as the file requires.

    The ids equal those of the `tokenizers` library, with one exception if the normalizer is NFC: combining marks that are newer
    than Unicode 10 and not in canonical order. Python reorders these marks; the library does not know them.

    Args:
        path: path of tokenizer.json. The special tokens are read from the files next to it.
        num_rows: number of rows of the word embedding. If the tokenizer has more ids, and all ids without a row are special tokens,
            which ordinary text never yields, they are left out of `vocab_size`.

    Raises:
        ValueError: the file is invalid, or no file defines the end-of-document token.
    """

    def __init__(self, path: Path, *, num_rows: int | None = None) -> None:
        self.path = path
        """Path of tokenizer.json."""
        file = read_tokenizer_json(path)
        self._special = find_special_ids(path, file.ids)
        self.num_ids = max(file.ids.values()) + 1
        """Number of ids, including those of special tokens without a row in the word embedding, which `vocab_size` leaves out."""
        self.added_tokens = {token["id"]: token["content"] for token in file.added}
        """Text of each added token, by its id."""
        self.vocab_size = self.num_ids
        self.eod, self.bos, self.pad = self._special.eod, self._special.bos, self._special.pad
        self._frame = read_text_frame(file)
        self.prefix_ids, self.suffix_ids = self._frame
        self._file_notes = [*file.notes, *self._leave_out_special_tokens(file, num_rows)]
        self._ignores_bos = not self._frame.prefix and asks_for_bos(path)
        shown_ids = {*self._frame.prefix, *self._frame.suffix, self.bos}
        self._names = {id: token for token, id in file.ids.items() if id in shown_ids}
        self._slow_reason: str | None = None  # why the slower library is used, until the warning
        self._num_characters = 0
        with suppress(NotExactError):
            # Report errors at once. The vocabulary is not kept, because a training run does not need it.
            build_byte_vocabulary(file, self._special)

    def _leave_out_special_tokens(self, file: TokenizerJson, num_rows: int | None) -> list[str]:
        """Set `vocab_size` to the number of rows of the word embedding if only special tokens have no row. Return a note about
        them."""
        if num_rows is None or num_rows >= self.vocab_size:
            return []
        left_out = {id: token for token, id in sorted(file.ids.items(), key=lambda item: item[1]) if id >= num_rows}
        if not left_out.keys() <= get_special_ids(file) - {self.eod, *self.prefix_ids, *self.suffix_ids}:
            return []
        self.vocab_size = num_rows
        self.bos, self.pad = (None if id in left_out else id for id in (self.bos, self.pad))
        return [
            f"the tokenizer has {self.num_ids:,} ids, the word embedding {num_rows:,} rows: no row for "
            f"{format_names([f'{token} ({id})' for id, token in left_out.items()])}, which ordinary text never yields"
        ]

    @property
    def notes(self) -> Sequence[str]:
        return self._file_notes

    @property
    def text_notes(self) -> Sequence[str]:
        prefix, requested = format_ids(self.prefix_ids, self._names), format_ids(self._frame.prefix, self._names)
        notes = []
        if self.prefix_ids:
            reason = f"; {self.path.name} requests it (--no-add-bos leaves it out)" if prefix == requested else " (--add-bos)"
            notes.append(f"each text begins with {prefix}{reason}")
        elif requested:
            notes.append(f"texts begin without {requested}, which {self.path.name} requests (--no-add-bos)")
        elif self._ignores_bos and self.bos is not None:
            notes.append(
                f"texts begin without {format_ids([self.bos], self._names)}: tokenizer_config.json has add_bos_token, but "
                f"{self.path.name} puts no token before texts, and transformers 5 follows {self.path.name}; --add-bos puts it there"
            )
        if self.suffix_ids:
            notes.append(f"each document ends with {format_ids(self.suffix_ids, self._names)}, which {self.path.name} requests")
        return notes

    @cached_property
    def backend(self) -> ByteBPETokenizer | LibraryTokenizer:
        """Tokenizer that encodes and decodes, built at its first use.

        Raises:
            ValueError: the `tokenizers` library is required but not installed.
        """
        file = read_tokenizer_json(self.path)
        try:
            vocab = build_byte_vocabulary(file, self._special)
            return ByteBPETokenizer(vocab, TiktokenEncoder(vocab))
        except NotExactError as error:
            self._slow_reason = str(error)
            return LibraryTokenizer(file, self._special, self._slow_reason)

    def encode_segment(self, text: str) -> NDArray[np.integer]:
        ids = self.backend.encode_segment(text)
        if self._slow_reason is not None:
            self._num_characters += len(text)
            if self._num_characters >= _CHARACTERS_BEFORE_WARNING:
                _log.warning("--tokenizer-model %s: %s.", self.path, self._slow_reason)
                self._slow_reason = None
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.backend.decode(ids)


class LibraryTokenizer(Tokenizer):
    """Tokenizer for a tokenizer.json that uses the `tokenizers` library.

    Special tokens that occur in a text are encoded as ordinary text, as by all tokenizers of this framework. For this purpose, the
    end-of-document token is renamed to a text that does not occur in documents. Whether ``decode`` returns a text exactly depends
    on the file.

    Args:
        file: content of the tokenizer.json.
        special: ids of the special tokens.
        reason: why the library is used instead of tiktoken, for messages.

    Raises:
        ValueError: the library is not installed or rejects the file, or ordinary text could be encoded to the end-of-document
            token.
    """

    def __init__(self, file: TokenizerJson, special: SpecialIds, reason: str) -> None:
        self._source = f"--tokenizer-model {file.path}"
        library = import_optional("tokenizers", f"{self._source}: {reason}. This needs the tokenizers library")
        self.vocab_size = max(file.ids.values()) + 1
        self.eod, self.bos, self.pad = special.eod, special.bos, special.pad
        self._special_ids = {special.eod, special.bos, special.pad} | get_special_ids(file)
        document = _hide_eod(file, special.eod, self._source)
        try:
            self._tokenizer = library.Tokenizer.from_str(json.dumps(document))
        except Exception as error:  # the library raises exactly this class
            raise ValueError(
                f"{self._source} is not a tokenizer.json that the tokenizers library can read: {error}.\n"
                "  The file is damaged or has another format: copy it again."
            ) from error
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode_segment(self, text: str) -> NDArray[np.integer]:
        text.encode()  # gives a better message for half a surrogate pair than the library
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if self.eod in ids:
            raise ValueError(
                f"{self._source}: ordinary text is encoded to the id {self.eod}, which marks the end of a document, so documents "
                "would be split inside this text.\n  Use a tokenizer with a separate end-of-document token."
            )
        return np.array(ids, np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode([int(id) for id in ids if id not in self._special_ids])
        return text


def _hide_eod(file: TokenizerJson, eod: int, source: str) -> dict[str, Any]:
    """Return the content of a tokenizer.json in which the end-of-document token has a new name. The name does not occur in any
    text, so no text is encoded to this token.

    Args:
        file: content of the tokenizer.json.
        eod: id of the end-of-document token.
        source: flag and file, for error messages.

    Raises:
        ValueError: merges use the end-of-document token, or it is also the token for unknown text.
    """
    eod_token = next(token for token, id in file.ids.items() if id == eod)
    hidden_token = f"\0\ue000{eod_token}\ue000\0"
    document = copy.deepcopy(file.document)
    document["post_processor"] = None  # it refers to special tokens by name
    for token in document.get("added_tokens") or []:
        if token["id"] == eod:
            token["content"] = hidden_token
            token["special"] = True
    model = document["model"]
    if isinstance(model["vocab"], list):
        for id, entry in enumerate(model["vocab"]):
            entry[0] = hidden_token if id == eod else entry[0]
        return document
    if file.is_bpe and covers_all_bytes(file):
        model["unk_token"] = None  # every byte has a token, so nothing is unknown
    if model.get("unk_token") == eod_token or any(
        eod_token in (*tokens, "".join(tokens)) for tokens in map(split_merge, model.get("merges", ()))
    ):
        raise ValueError(
            f"{source}: ordinary text could be encoded to {eod_token!r}, which ends a document. The end must be a token that no "
            "merge uses.\n"
            "  Name another token as eos_token in the tokenizer_config.json next to the file."
        )
    model["vocab"] = {hidden_token if token == eod_token else token: id for token, id in model["vocab"].items()}
    return document
