"""Tokenizers: text to token ids and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from megatron.config.data import DataConfig, TokenizerType
from megatron.config.extras import optional
from megatron.config.imports import named

# ---- Builds the tokenizer that the flags ask for, and says how many rows the word embedding has.

# ---- The base class of tokenizers, and the plain ones: raw bytes, ids written as numbers, sentencepiece's models.


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


def required_tokenizer_json(path: str | None, tokenizer_type: str) -> Path:
    """The tokenizer.json that --tokenizer-model names: the file, or its folder.

    Raises:
        ValueError: the flag is missing, or the file.
    """
    if path is not None and Path(path).is_dir():
        path = str(Path(path) / "tokenizer.json")
    elif path is not None and not Path(path).exists():
        raise ValueError(
            f"--tokenizer-model {path}: there is no such file or folder, and nothing is downloaded.\n"
            f"  --tokenizer-type {tokenizer_type} reads a tokenizer.json, or a folder that holds one; save the tokenizer there."
        )
    return required_file("--tokenizer-model", path, tokenizer_type)


def required_file(flag: str, path: str | None, tokenizer_type: str) -> Path:
    """The file that a flag names.

    Raises:
        ValueError: the flag is missing, or the file.
    """
    if path is None:
        raise ValueError(f"--tokenizer-type {tokenizer_type} needs {flag} FILE.")
    if not Path(path).is_file():
        raise ValueError(f"{flag} {path}: there is no such file.\n  --tokenizer-type {tokenizer_type} reads it; check the path.")
    return Path(path)


def embedding_rows(tokenizer: Tokenizer, config: DataConfig) -> int:
    """Rows of the word embedding: the ids of the tokenizer, or more by --vocab-size (weights from elsewhere may have spare rows).

    Raises:
        ValueError: --vocab-size is less than the tokenizer's ids.
    """
    asked = config.vocab_size
    if asked is None or config.tokenizer_type in ("NullTokenizer", "TikTokenizer"):  # these are made of it
        return tokenizer.vocab_size
    if asked < tokenizer.vocab_size:
        raise ValueError(
            f"--vocab-size {asked:,} is less than the {tokenizer.vocab_size:,} ids of the tokenizer "
            f"({config.tokenizer_model or config.vocab_file}).\n  The word embedding needs a row for each: leave "
            f"--vocab-size out, or give at least that number."
        )
    return asked


def planned_rows(config: DataConfig) -> int:
    """Rows of the word embedding for a dry run: from --vocab-size alone where that says so, without the tokenizer's files.

    Raises:
        ValueError: no size is known, or a file is missing or of another kind.
    """
    if config.vocab_size is not None and config.tokenizer_type != "NullTokenizer":
        return config.vocab_size
    if config.tokenizer_type is None:
        raise ValueError("the size of the vocabulary is not known: --vocab-size N says it, or --tokenizer-type with its files.")
    return embedding_rows(build_tokenizer(config), config)


def build_tokenizer(config: DataConfig) -> Tokenizer:
    """Make the tokenizer from local files; nothing is downloaded.

    Raises:
        ValueError: no type, a missing flag or file, or a file of another kind.
    """
    kind = config.tokenizer_type
    if kind == "ByteTokenizer":
        return ByteTokenizer()
    if kind == "NullTokenizer":
        if config.vocab_size is None:
            raise ValueError("--tokenizer-type NullTokenizer needs --vocab-size N.")
        return NullTokenizer(config.vocab_size)
    if kind == "GPT2BPETokenizer":
        vocab_file = required_file("--vocab-file", config.vocab_file, kind)
        return _byte_bpe("read_gpt2_bpe", vocab_file, required_file("--merge-file", config.merge_file, kind))
    if kind == "HuggingFaceTokenizer":
        found: Tokenizer = named("megatron_lab.tokenizers.huggingface:HuggingFaceTokenizer")(
            required_tokenizer_json(config.tokenizer_model, kind)
        )
        return found
    if kind == "TikTokenizer":
        return _byte_bpe("read_tiktoken", required_file("--tokenizer-model", config.tokenizer_model, kind), config)
    if kind in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"):
        path = required_file("--tokenizer-model", config.tokenizer_model, kind)
        return SentencePieceTokenizer(path, add_bos=kind == "Llama2Tokenizer")
    raise ValueError(f"--tokenizer-type must be one of {', '.join(get_args(TokenizerType))}, not {kind}.")


def _byte_bpe(reader: str, *source: object) -> Tokenizer:
    """The tokenizer of a vocabulary, which a function of `vocabulary_files.py` reads."""
    vocabulary = named(f"megatron_lab.tokenizers.vocabulary_files:{reader}")(*source)
    found: Tokenizer = named("megatron_lab.tokenizers.byte_bpe:ByteBPETokenizer")(vocabulary)
    return found
