"""Builds the tokenizer that the flags ask for, and says how many rows the word embedding has."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from megatron.config.data import DataConfig, TokenizerType
from megatron.config.imports import named
from megatron.data.tokenizers.simple_tokenizers import ByteTokenizer, NullTokenizer, SentencePieceTokenizer, Tokenizer


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
