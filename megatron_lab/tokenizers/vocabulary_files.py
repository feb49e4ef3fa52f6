"""Readers of byte-level BPE vocabulary files: the two files of GPT-2, and two formats for tiktoken that give each token a rank
(merge priority)."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.config.data import DataConfig
from megatron.config.regular_file import open_regular, read_regular, read_text
from megatron_lab.tokenizers.bpe_rules import (
    GPT2_PATTERN,
    ByteVocabulary,
    MergeRules,
    Pair,
    RankRules,
    build_byte_chars,
    check_ids,
    decode_byte_chars,
    describe_missing_bytes,
    read_json,
)

GPT2_EOD_TOKEN = "<|endoftext|>"


def read_gpt2_bpe(vocab_file: Path, merge_file: Path) -> ByteVocabulary:
    """Read and check the two vocabulary files of GPT-2: vocab.json (or encoder.json) and merges.txt (or vocab.bpe).

    vocab.json contains the id of each token. merges.txt contains pairs of tokens in the order in which they are merged. Tokens are
    written with one printable character per byte (`build_byte_chars`). The end-of-document token is ``<|endoftext|>``.

    Raises:
        ValueError: a file is invalid, or the files do not belong to the same tokenizer.
    """
    source = f"--vocab-file {vocab_file}"
    vocab = check_ids(source, read_json(vocab_file, source, "a vocabulary like GPT-2's vocab.json"))
    if GPT2_EOD_TOKEN not in vocab:
        raise ValueError(
            f"{source} has no token {GPT2_EOD_TOKEN}, which ends a document.\n  Add the token to the file, with a new id."
        )
    byte_of_char = build_byte_chars()
    ids = {bytes([byte]): vocab[char] for char, byte in byte_of_char.items() if char in vocab}
    if (problem := describe_missing_bytes(source, ids)) is not None:
        raise ValueError(f"{problem}\n  Use a file with a byte-level vocabulary like GPT-2's.")
    ranks: dict[Pair, int] = {}
    for i, merge in enumerate(_read_merge_lines(merge_file), start=1):
        if not merge or (i == 1 and merge.startswith("#version")):
            continue
        tokens = merge.split(" ")
        unknown = [t for t in (*tokens, "".join(tokens)) if t not in vocab]
        pair = tuple(token for t in tokens if (token := decode_byte_chars(t, byte_of_char)) is not None)
        if len(tokens) != 2 or len(pair) != 2 or unknown:
            raise ValueError(
                f"--merge-file {merge_file}, line {i}: {merge!r} must be two tokens that together form a third, all in "
                f"{vocab_file}{f' (not there: {unknown[-1]!r})' if unknown else ''}.\n"
                "  Use two files of the same tokenizer."
            )
        ids[pair[0] + pair[1]] = vocab["".join(tokens)]
        ranks.setdefault(pair, len(ranks))
    return ByteVocabulary(
        source=f"--merge-file {merge_file}",
        pattern=GPT2_PATTERN,
        rules=MergeRules(ranks),
        ids=ids,
        num_ids=max(vocab.values()) + 1,
        eod=vocab[GPT2_EOD_TOKEN],
    )


def _read_merge_lines(path: Path) -> list[str]:
    """Return all lines of merges.txt."""
    try:
        lines = read_text(path).split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--merge-file {path} is not a text in UTF-8: {error}\n  Use a file in the format of GPT-2's merges.txt."
        ) from error
    if lines == [""]:
        raise ValueError(f"--merge-file {path} is empty.\n  Use a file in the format of GPT-2's merges.txt.")
    return lines


def _read_ranks(path: Path, source: str) -> tuple[dict[bytes, int], bool]:
    """Read a vocabulary file for tiktoken in one of its two formats.

    Args:
        path: path of the file.
        source: flag and file, for error messages.

    Returns:
        The rank (merge priority) of each token, and whether the file is a JSON list as in Megatron-LM (otherwise it has a line per
        token).

    Raises:
        ValueError: the file is in neither format, or damaged.
    """
    with open_regular(path) as file:
        is_list = file.read(64).lstrip()[:1] in (b"[", b"{")
    ranks = _read_rank_list(path, source) if is_list else _read_rank_lines(path, source)
    if (problem := describe_missing_bytes(source, ranks)) is not None:
        raise ValueError(f"{problem}\n  The file is incomplete or has another format: copy it again.")
    return ranks, is_list


def _read_rank_list(path: Path, source: str) -> dict[bytes, int]:
    """Return the rank (merge priority) of each token from a JSON list of {"rank": 0, "token_bytes": base64, "token_str": ...},
    ordered by rank.

    Raises:
        ValueError: the file has another form.
    """
    expected = 'a JSON list of {"rank", "token_bytes", "token_str"}'
    entries = read_json(path, source, expected)
    if not isinstance(entries, list):
        raise ValueError(f"{source} must be {expected}.\n  For a tokenizer.json, use --tokenizer-type HuggingFaceTokenizer.")
    ranks: dict[bytes, int] = {}
    for rank, entry in enumerate(entries):
        if not isinstance(entry, dict) or entry.get("rank") != rank or not isinstance(entry.get("token_bytes"), str):
            raise ValueError(
                f"{source}, entry {rank}: {str(entry)[:100]} should have the token rank (merge priority) {rank} and token_bytes (a "
                "text in base64).\n"
                "  The file is damaged or has another format: copy it again."
            )
        _add_token(ranks, entry["token_bytes"], rank, f"{source}, entry {rank}")
    return ranks


def _read_rank_lines(path: Path, source: str) -> dict[bytes, int]:
    """Return the rank (merge priority) of each token from a text file with one token per line: the token in base64, a blank and its
    rank.

    Raises:
        ValueError: the file has another form.
    """
    ranks: dict[bytes, int] = {}
    used_ranks: set[int] = set()
    for i, line in enumerate(read_regular(path).splitlines(), start=1):
        columns = line.split()
        location = f"{source}, line {i}"
        if not columns:
            continue
        if len(columns) != 2 or not columns[1].isdigit():
            raise ValueError(
                f"{location}: {line[:60]!r} should be a token in base64, a blank and the rank (merge priority) of the token.\n"
                "  The file is incomplete or has another format (for sentencepiece models use --tokenizer-type Llama2Tokenizer)."
            )
        rank = int(columns[1])
        if rank in used_ranks:
            raise ValueError(
                f"{location}: the token rank (merge priority) {rank} occurs a second time.\n  The file is damaged: copy it again."
            )
        used_ranks.add(rank)
        _add_token(ranks, columns[0], rank, location)
    return ranks


def _add_token(ranks: dict[bytes, int], encoded_token: str | bytes, rank: int, location: str) -> None:
    """Decode a token and add its rank (merge priority) to `ranks`.

    Args:
        ranks: ranks read so far, by token.
        encoded_token: token in base64.
        rank: rank of the token.
        location: file and line, for error messages.

    Raises:
        ValueError: the token is not base64, is empty, or occurs twice.
    """
    try:
        token = base64.b64decode(encoded_token, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{location}: {encoded_token!r} is not base64: {error}\n  The file is damaged: copy it again.") from error
    if ranks.setdefault(token, rank) != rank or not token:
        raise ValueError(
            f"{location}: the token {token!r} is {'a duplicate' if token else 'empty'}.\n  The file is damaged: copy it again."
        )


PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
"""Regular expressions of Megatron-LM's --tiktoken-pattern, which split a text into pretokens."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TIKTOKEN_SETTINGS = ("tiktoken_pattern", "tiktoken_num_special_tokens", "tiktoken_special_tokens")
_MEGATRON_VOCAB_SIZE = 2**17  # size in Megatron-LM without --vocab-size


@dataclass(frozen=True)
class PublishedFile:
    """Vocabulary file of a well-known model, whose settings are known. The file contains only ranks (merge priorities); it is
    recognized by its number of tokens."""

    name: str
    pattern: str
    vocab_size: int
    eod: int
    bos: int | None = None


PUBLISHED_FILES = {
    128_000: PublishedFile("Llama 3", _LLAMA3, 128_256, eod=128_001, bos=128_000),
    100_256: PublishedFile("cl100k_base", _LLAMA3, 100_277, eod=100_257),
}
"""Published files by number of tokens. Sources: llama3/tokenizer.py of Meta for Llama 3, and tiktoken_ext/openai_public.py for
cl100k_base, which splits texts like Llama 3."""


def read_tiktoken(path: Path, config: DataConfig) -> ByteVocabulary:
    """Read a vocabulary for tiktoken from a file in one of two formats. Each token has a rank (merge priority).

    The tokens of a JSON list get the ids that Megatron-LM assigns. The first ids are --tiktoken-num-special-tokens special tokens:
    those named by --tiktoken-special-tokens, then fillers. The next ids are the tokens by rank, until there are --vocab-size ids
    (131,072 by default).

    In a text file, each line is a token in base64 and its rank, which is also its id. If the number of tokens is in
    `PUBLISHED_FILES` and the flags --tiktoken-... have their defaults, the pattern and the special tokens are those of the
    published file. Otherwise the special tokens follow the last rank.

    The end-of-document token is ``</s>`` (or that of the published file). bos is ``<s>`` and pad is ``<pad>``, if these names are
    special tokens.

    Args:
        path: path of the file.
        config: settings of the tokenizer.

    Raises:
        ValueError: the file is invalid, or the settings do not fit the file.
    """
    source, vocab_size, num_special = f"--tokenizer-model {path}", config.vocab_size, config.tiktoken_num_special_tokens
    ranks, is_list = _read_ranks(path, source)
    has_default_settings = all(getattr(config, name) == getattr(DataConfig, name) for name in _TIKTOKEN_SETTINGS)
    published = PUBLISHED_FILES.get(len(ranks)) if has_default_settings and not is_list else None
    if published:
        if vocab_size not in (None, published.vocab_size):
            raise ValueError(
                f"--vocab-size {vocab_size:,} does not fit {source}: its {len(ranks):,} tokens are the vocabulary of "
                f"{published.name}, which has {published.vocab_size:,} ids with its special tokens.\n  Leave --vocab-size out."
            )
        return ByteVocabulary(
            source, published.pattern, RankRules(ranks), ranks, published.vocab_size, published.eod, published.bos
        )
    _check_special_tokens(num_special, config.tiktoken_special_tokens)
    total_size = max(ranks.values()) + 1 + num_special
    if is_list:
        size = min(_MEGATRON_VOCAB_SIZE, total_size) if vocab_size is None else vocab_size
        if not num_special + 256 <= size <= total_size:
            raise ValueError(
                f"--vocab-size {size:,} does not fit {source}: with --tiktoken-num-special-tokens {num_special:,}, set "
                f"--vocab-size from {num_special + 256:,} to {total_size:,}."
            )
        ranks = {token: rank for token, rank in ranks.items() if rank < size - num_special}
        if describe_missing_bytes(source, ranks) is not None:
            raise ValueError(
                f"{source}: its first {size - num_special:,} tokens, which fit into --vocab-size {size:,}, lack some of the 256 "
                "bytes.\n"
                "  Raise --vocab-size."
            )
    elif vocab_size not in (None, total_size):
        raise ValueError(
            f"--vocab-size {vocab_size:,} does not fit {source}: its {total_size - num_special:,} tokens and "
            f"--tiktoken-num-special-tokens {num_special:,} make {total_size:,} token ids.\n"
            "  Leave --vocab-size out."
        )
    first_special, rank_offset, size = (0, num_special, size) if is_list else (total_size - num_special, 0, total_size)
    special_ids = {name: first_special + i for i, name in enumerate(config.tiktoken_special_tokens)}
    return ByteVocabulary(
        source=source,
        pattern=PATTERNS[config.tiktoken_pattern],
        rules=RankRules(ranks),
        ids={token: rank + rank_offset for token, rank in ranks.items()},
        num_ids=size,
        eod=special_ids["</s>"],
        bos=special_ids.get("<s>"),
        pad=special_ids.get("<pad>"),
    )


def _check_special_tokens(num_special_tokens: int, special_tokens: Sequence[str]) -> None:
    """Check that the names of the special tokens are unique, contain ``</s>``, and fit into the number of special tokens.

    Args:
        num_special_tokens: number of ids that are reserved for special tokens (--tiktoken-num-special-tokens).
        special_tokens: names of the special tokens (--tiktoken-special-tokens).

    Raises:
        ValueError: the names do not meet these conditions.
    """
    listing = " ".join(special_tokens)
    if len(set(special_tokens)) < len(special_tokens):
        raise ValueError(f"--tiktoken-special-tokens {listing} names a token twice. Remove the repetition.")
    if "</s>" not in special_tokens:
        raise ValueError(f"--tiktoken-special-tokens {listing} must include </s>, the token that ends a document. Add it.")
    if len(special_tokens) > num_special_tokens:
        raise ValueError(
            f"--tiktoken-special-tokens {listing} has {len(special_tokens)} tokens, more than --tiktoken-num-special-tokens "
            f"{num_special_tokens}. Raise that number, or remove tokens."
        )
