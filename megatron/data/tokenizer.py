"""Tokenizers: conversion between text and token ids."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from megatron.config.data import DataConfig, TokenizerType, sets_embedding_rows
from megatron.config.imports import import_object
from megatron.config.optional_packages import import_optional

# ---- Base class of tokenizers, and simple tokenizers: raw bytes, ids as text, sentencepiece models.


class Tokenizer(ABC):
    """Converter between text and token ids."""

    vocab_size: int
    """Number that is greater than every id, including special ids. Ids of special tokens that have no row in the word embedding are
    left out."""
    eod: int
    """Id that ends a document."""
    bos: int | None = None
    """Id that starts a text, or None."""
    pad: int | None = None
    """Id for padding, or None."""
    leaves_out_bos: bool = False
    """Whether the user has set that texts begin without bos (--no-add-bos)."""
    prefix_ids: tuple[int, ...] = ()
    """Ids that `encode_array` puts before each text that has ids: bos, if the tokenizer's files or --add-bos ask for it."""
    suffix_ids: tuple[int, ...] = ()
    """Ids that the tokenizer's files ask for after each document. `encode_array` does not append them."""

    @property
    def notes(self) -> Sequence[str]:
        """Lines for the user about ids that are easily overlooked, such as special tokens without a row in the embedding."""
        return ()

    @property
    def text_notes(self) -> Sequence[str]:
        """Lines for the user about the ids before and after each text that is encoded."""
        return ()

    @property
    def document_start(self) -> list[int]:
        """Ids that start a document without text: those of `prefix_ids`, or else bos, or eod if the tokenizer has no bos or texts
        begin without it."""
        return list(self.prefix_ids) or [self.eod if self.bos is None or self.leaves_out_bos else self.bos]

    def get_document_end(self, *, append_eod: bool = True) -> list[int]:
        """Return the ids after the text of each document: `suffix_ids`, and eod if `append_eod` is set. eod occurs only once."""
        return [*self.suffix_ids, *([self.eod] if append_eod and self.suffix_ids[-1:] != (self.eod,) else [])]

    @abstractmethod
    def encode_segment(self, text: str) -> NDArray[np.integer]:
        """Return the ids of a text, or of a part of one, as an integer array, which may be read-only. Ordinary text never yields
        `eod`.

        Raises:
            ValueError: the text cannot be encoded, for example because it has half a surrogate pair.
        """

    def encode_array(self, text: str) -> NDArray[np.integer]:
        """Return the ids of a complete text: `prefix_ids`, and the ids of `encode_segment`. A text without ids gets no prefix."""
        ids = self.encode_segment(text)
        if not self.prefix_ids or not ids.size:
            return ids
        return np.concatenate((np.array(self.prefix_ids, np.min_scalar_type(max(self.prefix_ids))), ids))

    def encode(self, text: str) -> list[int]:
        """Return the ids of a complete text (`encode_array`) as a list."""
        ids: list[int] = self.encode_array(text).tolist()
        return ids

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of these ids. `eod` yields no text. Bytes that are not valid UTF-8 (a truncated character) become
        U+FFFD."""


class ByteTokenizer(Tokenizer):
    """Tokenizer whose ids are the 256 bytes of UTF-8, and one id for the end of a document."""

    vocab_size = 257
    eod = 256

    def encode_segment(self, text: str) -> NDArray[np.integer]:
        return np.frombuffer(text.encode("utf-8"), np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(id for id in ids if id != self.eod).decode("utf-8", errors="replace")


class NullTokenizer(Tokenizer):
    """Tokenizer for text that consists of ids: integers from 0 to size - 1, separated by spaces. The id `size` ends a document.

    Raises:
        ValueError: the size is not positive.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"--vocab-size must be at least 1, not {size}.")
        self.vocab_size, self.eod = size + 1, size

    def encode_segment(self, text: str) -> NDArray[np.integer]:
        numbers = text.split()
        for word in numbers:
            if not (word.isascii() and word.isdigit() and int(word) < self.eod):
                raise ValueError(
                    f"{word!r} is not an id from 0 to {self.eod - 1}: with --tokenizer-type NullTokenizer and --vocab-size "
                    f"{self.eod}, the text must consist of such ids, separated by spaces"
                )
        return np.array([int(word) for word in numbers], np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(id) for id in ids if id != self.eod)


class SentencePieceTokenizer(Tokenizer):
    """Tokenizer with a sentencepiece model. The model's end-of-sentence id ends a document.

    A model that was trained with byte_fallback and without normalization (as by tools/train_tokenizer.py) reproduces every text
    exactly, with one exception: sentencepiece uses U+2581 for a space, so this character is decoded as a space. Other models return
    normalized text.

    Args:
        path: model file (``--tokenizer-model``).
        add_bos: add the model's beginning-of-sentence id before each text, as in the training of Llama 2.

    Raises:
        ValueError: the file is not a sentencepiece model, or the model lacks a required id.
    """

    def __init__(self, path: Path, *, add_bos: bool = False) -> None:
        library = import_optional("sentencepiece", f"--tokenizer-model {path} needs sentencepiece")

        try:
            self._model = library.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise ValueError(
                f"--tokenizer-model {path} is not a sentencepiece model: {error}\n"
                "  The file is truncated or of another type: use --tokenizer-type HuggingFaceTokenizer for tokenizer.json, "
                "TikTokenizer for tiktoken's files (Llama 3)."
            ) from error
        self.vocab_size = self._model.vocab_size()
        self.eod = self._model.eos_id()
        self.bos, self.pad = (id if id >= 0 else None for id in (self._model.bos_id(), self._model.pad_id()))
        for name, missing in (("eos", self.eod < 0), ("bos", add_bos and self.bos is None)):
            if missing:
                raise ValueError(
                    f"--tokenizer-model {path} has no {name} id, which this tokenizer type needs.\n"
                    f"  Train the tokenizer again with sentencepiece's option --{name}_id set to 0 or more, as it is by default."
                )
        self.prefix_ids = (self.bos,) if add_bos and self.bos is not None else ()

    def encode_segment(self, text: str) -> NDArray[np.integer]:
        raw = text.encode()  # raises a clear error for half a surrogate pair, unlike the library
        if hasattr(self._model, "encode_as_numpy"):
            ids: NDArray[np.int32] = self._model.encode_as_numpy(raw)
            return ids
        return np.array(self._model.encode(raw), np.int32)  # before sentencepiece 0.2.2

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._model.decode([int(id) for id in ids if id != self.eod])
        return text


def require_tokenizer_json(path: str | None, tokenizer_type: str) -> Path:
    """Return the path of the tokenizer.json that --tokenizer-model names. The flag may also name the folder of this file.

    Raises:
        ValueError: the flag is not set, or the file does not exist.
    """
    if path is not None and Path(path).is_dir():
        path = str(Path(path) / "tokenizer.json")
    elif path is not None and not Path(path).exists():
        advice = _suggest_download(path, "--tokenizer-model", tokenizer_type)
        raise ValueError(
            f"--tokenizer-model {path}: there is no such file or folder, and nothing is downloaded.\n"
            f"  --tokenizer-type {tokenizer_type} reads a tokenizer.json, or a folder that holds one.{advice}"
        )
    return require_file("--tokenizer-model", path, tokenizer_type)


def require_file(flag: str, path: str | None, tokenizer_type: str) -> Path:
    """Return the path of the file that a flag names.

    Raises:
        ValueError: the flag is not set, or the file does not exist.
    """
    if path is None:
        raise ValueError(f"--tokenizer-type {tokenizer_type} needs {flag} FILE.")
    if not Path(path).is_file():
        advice = _suggest_download(path, flag, tokenizer_type) or " Check the path."
        raise ValueError(f"{flag} {path}: there is no such file.\n  --tokenizer-type {tokenizer_type} reads it.{advice}")
    return Path(path)


def _suggest_download(path: str, flag: str, tokenizer_type: str) -> str:
    suggest = import_object("megatron_lab.data_tools.hub_names:suggest_tokenizer_download")
    return str(suggest(path, flag, tokenizer_type))


def compute_embedding_rows(tokenizer: Tokenizer, config: DataConfig) -> int:
    """Return the number of rows of the word embedding: the number of the tokenizer's ids, or --vocab-size if it is set.

    --vocab-size may be larger, because imported weights may have spare rows. `build_tokenizer` has already left out special tokens
    without a row. NullTokenizer and TikTokenizer already include --vocab-size in their number of ids.

    Raises:
        ValueError: --vocab-size is smaller than the number of the tokenizer's ids.
    """
    requested_rows = config.vocab_size
    if requested_rows is None or not sets_embedding_rows(config.tokenizer_type):  # others use --vocab-size themselves
        return tokenizer.vocab_size
    if requested_rows < tokenizer.vocab_size:
        raise ValueError(
            f"--vocab-size {requested_rows:,} is less than the {tokenizer.vocab_size:,} ids of the tokenizer "
            f"({config.tokenizer_model or config.vocab_file}).\n  The word embedding needs a row for each id that a text may have: "
            "leave --vocab-size out, or give at least that number. If it comes from a checkpoint (--use-checkpoint-args), this is "
            "not its tokenizer."
        )
    return requested_rows


def predict_embedding_rows(config: DataConfig) -> int:
    """Return the number of rows of the word embedding for a dry run. If --vocab-size is set, the tokenizer's files are not read.

    Raises:
        ValueError: the vocabulary size is not known, or a file is missing or of another type.
    """
    if config.vocab_size is not None and config.tokenizer_type != "NullTokenizer":
        return config.vocab_size
    if config.tokenizer_type is None:
        raise ValueError("the size of the vocabulary is not known: set --vocab-size N, or --tokenizer-type with its files.")
    return compute_embedding_rows(build_tokenizer(config), config)


def build_tokenizer(config: DataConfig) -> Tokenizer:
    """Build the tokenizer from local files. Nothing is downloaded.

    Raises:
        ValueError: no tokenizer type is set, a flag or file is missing, a file is of another type, or --add-bos is set for a
            tokenizer without bos.
    """
    tokenizer = _build_tokenizer(config)
    if config.add_bos is False:
        tokenizer.prefix_ids, tokenizer.leaves_out_bos = (), True
    elif config.add_bos and not tokenizer.prefix_ids:
        if tokenizer.bos is None:
            raise ValueError("--add-bos: this tokenizer has no bos token. Leave the flag out.")
        tokenizer.prefix_ids = (tokenizer.bos,)
    return tokenizer


def _build_tokenizer(config: DataConfig) -> Tokenizer:
    tokenizer_type = config.tokenizer_type
    if tokenizer_type == "ByteTokenizer":
        return ByteTokenizer()
    if tokenizer_type == "NullTokenizer":
        if config.vocab_size is None:
            raise ValueError("--tokenizer-type NullTokenizer needs --vocab-size N.")
        return NullTokenizer(config.vocab_size)
    if tokenizer_type == "GPT2BPETokenizer":
        vocab_file = require_file("--vocab-file", config.vocab_file, tokenizer_type)
        return _build_byte_bpe("read_gpt2_bpe", vocab_file, require_file("--merge-file", config.merge_file, tokenizer_type))
    if tokenizer_type == "HuggingFaceTokenizer":
        tokenizer: Tokenizer = import_object("megatron_lab.tokenizers.huggingface:HuggingFaceTokenizer")(
            require_tokenizer_json(config.tokenizer_model, tokenizer_type), num_rows=config.vocab_size
        )
        return tokenizer
    if tokenizer_type == "TikTokenizer":
        return _build_byte_bpe("read_tiktoken", require_file("--tokenizer-model", config.tokenizer_model, tokenizer_type), config)
    if tokenizer_type in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"):
        path = require_file("--tokenizer-model", config.tokenizer_model, tokenizer_type)
        return SentencePieceTokenizer(path, add_bos=tokenizer_type == "Llama2Tokenizer")
    raise ValueError(f"--tokenizer-type must be one of {', '.join(get_args(TokenizerType))}, not {tokenizer_type}.")


def _build_byte_bpe(reader: str, *source: object) -> Tokenizer:
    """Build a byte-level BPE tokenizer from a vocabulary.

    Args:
        reader: name of the function in `megatron_lab/tokenizers/vocabulary_files.py` that reads the vocabulary.
        source: arguments of the reader function.
    """
    vocabulary = import_object(f"megatron_lab.tokenizers.vocabulary_files:{reader}")(*source)
    tokenizer: Tokenizer = import_object("megatron_lab.tokenizers.byte_bpe:ByteBPETokenizer")(vocabulary)
    return tokenizer
