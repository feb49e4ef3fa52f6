"""Reads the files of byte-level BPE vocabularies: GPT-2's pair of files, and the two kinds that hold ranks for tiktoken."""

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
    byte_characters,
    bytes_without,
    check_ids,
    read_json,
    token_bytes,
)

END_OF_TEXT = "<|endoftext|>"


def read_gpt2_bpe(vocab_file: Path, merge_file: Path) -> ByteVocabulary:
    """Read and check vocab.json (or encoder.json) and merges.txt (or vocab.bpe); a document ends with ``<|endoftext|>``.

    vocab.json gives each token its id, and merges.txt has pairs of tokens to be merged, the first to be merged first. Tokens are
    written with one printable character a byte (`byte_characters`).

    Raises:
        ValueError: a file is not what it should be, or the two do not belong together.
    """
    source = f"--vocab-file {vocab_file}"
    vocabulary = check_ids(source, read_json(vocab_file, source, "a vocabulary like GPT-2's vocab.json"))
    if END_OF_TEXT not in vocabulary:
        raise ValueError(f"{source} has no token {END_OF_TEXT}, which ends a document.\n  Add it with an id of its own.")
    to_byte = byte_characters()
    ids = {bytes([byte]): vocabulary[character] for character, byte in to_byte.items() if character in vocabulary}
    if (told := bytes_without(source, ids)) is not None:
        raise ValueError(f"{told}\n  Take a byte-level vocabulary like GPT-2's.")
    ranks: dict[Pair, int] = {}
    for number, line in enumerate(_lines(merge_file), start=1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        parts = line.split(" ")
        unknown = [part for part in (*parts, "".join(parts)) if part not in vocabulary]
        pair = tuple(token for part in parts if (token := token_bytes(part, to_byte)) is not None)
        if len(parts) != 2 or len(pair) != 2 or unknown:
            raise ValueError(
                f"--merge-file {merge_file}, line {number}: {line!r} must be two tokens and together make a third, all "
                f"in {vocab_file}{f' (not there: {unknown[-1]!r})' if unknown else ''}.\n  The two files must be of the same "
                "tokenizer."
            )
        ids[pair[0] + pair[1]] = vocabulary["".join(parts)]
        ranks.setdefault(pair, len(ranks))
    return ByteVocabulary(
        source=f"--merge-file {merge_file}",
        pattern=GPT2_PATTERN,
        rules=MergeRules(ranks),
        ids=ids,
        num_ids=max(vocabulary.values()) + 1,
        eod=vocabulary[END_OF_TEXT],
    )


def _lines(path: Path) -> list[str]:
    try:
        return read_text(path).split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"--merge-file {path} is not a text in UTF-8: {error}\n  It should be like GPT-2's merges.txt.") from error


def _read_ranks(path: Path, source: str) -> tuple[dict[bytes, int], bool]:
    """Ranks of tokens, which are also the order of joining; and whether the file is a JSON list as Megatron-LM reads it.

    Raises:
        ValueError: it is neither, or broken.
    """
    with open_regular(path) as file:
        is_list = file.read(64).lstrip()[:1] in (b"[", b"{")
    ranks = _from_list(path, source) if is_list else _from_lines(path, source)
    if (told := bytes_without(source, ranks)) is not None:
        raise ValueError(f"{told}\n  The file is not whole or of another kind: copy it again.")
    return ranks, is_list


def _from_list(path: Path, source: str) -> dict[bytes, int]:
    """Read a list of {"rank": 0, "token_bytes": base64, "token_str": ...} in the order of the ranks."""
    what = 'a JSON list of {"rank", "token_bytes", "token_str"}'
    entries = read_json(path, source, what)
    if not isinstance(entries, list):
        raise ValueError(f"{source} must be {what}; tokenizer.json is read with --tokenizer-type HuggingFaceTokenizer.")
    ranks: dict[bytes, int] = {}
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict) or entry.get("rank") != number or not isinstance(entry.get("token_bytes"), str):
            raise ValueError(f"{source}, entry {number}: {str(entry)[:100]} should have the rank {number} and token_bytes.")
        _add(ranks, entry["token_bytes"], number, f"{source}, entry {number}")
    return ranks


def _from_lines(path: Path, source: str) -> dict[bytes, int]:
    """Read lines of a token in base64, a blank and its rank."""
    ranks: dict[bytes, int] = {}
    taken: set[int] = set()
    for number, line in enumerate(read_regular(path).splitlines(), start=1):
        words = line.split()
        place = f"{source}, line {number}"
        if not words:
            continue
        if len(words) != 2 or not words[1].isdigit():
            raise ValueError(
                f"{place}: {line[:60]!r} should be a token in base64, a blank and its rank.\n"
                "  The file is not whole or of another kind (sentencepiece models are read with --tokenizer-type Llama2Tokenizer)."
            )
        rank = int(words[1])
        if rank in taken:
            raise ValueError(f"{place} gives the rank {rank} a second time.\n  The file is damaged: copy it again.")
        taken.add(rank)
        _add(ranks, words[0], rank, place)
    return ranks


def _add(ranks: dict[bytes, int], coded: str | bytes, rank: int, place: str) -> None:
    try:
        token = base64.b64decode(coded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{place}: {coded!r} is not base64: {error}\n  The file is damaged: copy it again.") from error
    if ranks.setdefault(token, rank) != rank or not token:
        raise ValueError(
            f"{place}: the token {token!r} is {'there before' if token else 'empty'}.\n  The file is damaged: copy it again."
        )


PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
"""The patterns of Megatron-LM's --tiktoken-pattern, which split texts."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_OWN_SETTINGS = ("tiktoken_pattern", "tiktoken_num_special_tokens", "tiktoken_special_tokens")
_MEGATRON_SIZE = 2**17  # Megatron-LM's size without --vocab-size


@dataclass(frozen=True)
class KnownFile:
    """A published file. It holds only ranks; the number of its tokens tells which file it is."""

    name: str
    pattern: str
    vocab_size: int
    eod: int
    bos: int | None = None


KNOWN_FILES = {
    128_000: KnownFile("Llama 3", _LLAMA3, 128_256, eod=128_001, bos=128_000),
    100_256: KnownFile("cl100k_base", _LLAMA3, 100_277, eod=100_257),
}
"""Sources: for Llama 3, llama3/tokenizer.py of Meta; for cl100k_base, tiktoken_ext/openai_public.py (splits like Llama 3's)."""


def read_tiktoken(path: Path, config: DataConfig) -> ByteVocabulary:
    """Read a vocabulary for tiktoken, in one of two kinds of files.

    A JSON list of ranks has ids as in Megatron-LM. First come --tiktoken-num-special-tokens special ones, of which the first are
    named (the others are fillers). Then come the tokens by rank, as many as --vocab-size leaves room for (of 131,072 without it).

    A file of lines, each a token in base64 and its rank, has its ranks as ids. If its size is one of those in `KNOWN_FILES`,
    pattern and special tokens are those of that file, unless a setting differs. If not, special tokens come after the last rank.

    The end of a document is ``</s>`` (or that of the known file); bos is ``<s>`` and pad is ``<pad>`` if they are among the names.

    Raises:
        ValueError: the file is not what it should be, or the settings do not fit it.
    """
    source, vocab_size, num_special = f"--tokenizer-model {path}", config.vocab_size, config.tiktoken_num_special_tokens
    ranks, is_list = _read_ranks(path, source)
    as_default = all(getattr(config, name) == getattr(DataConfig, name) for name in _OWN_SETTINGS)
    known = KNOWN_FILES.get(len(ranks)) if as_default and not is_list else None
    if known:
        if vocab_size not in (None, known.vocab_size):
            raise ValueError(
                f"--vocab-size {vocab_size:,} does not fit {source}: with {len(ranks):,} tokens it is {known.name}'s file, whose "
                f"special tokens make it {known.vocab_size:,}.\n  Leave --vocab-size out."
            )
        return ByteVocabulary(source, known.pattern, RankRules(ranks), ranks, known.vocab_size, known.eod, known.bos)
    _check_names(num_special, config.tiktoken_special_tokens)
    whole = max(ranks.values()) + 1 + num_special
    if is_list:
        size = min(_MEGATRON_SIZE, whole) if vocab_size is None else vocab_size
        if not num_special + 256 <= size <= whole:
            raise ValueError(
                f"--vocab-size {size:,} does not fit {source}: with --tiktoken-num-special-tokens {num_special:,} it may be "
                f"from {num_special + 256:,} to {whole:,}."
            )
        ranks = {token: rank for token, rank in ranks.items() if rank < size - num_special}
        if bytes_without(source, ranks) is not None:
            raise ValueError(
                f"{source}: the first {size - num_special:,} tokens lack some of the 256 bytes.\n  Raise --vocab-size."
            )
    elif vocab_size not in (None, whole):
        raise ValueError(
            f"--vocab-size {vocab_size:,} does not fit {source}: its {whole - num_special:,} ranks and "
            f"--tiktoken-num-special-tokens {num_special:,} make {whole:,}.\n  Leave --vocab-size out."
        )
    first_special, shift, size = (0, num_special, size) if is_list else (whole - num_special, 0, whole)
    special = {name: first_special + number for number, name in enumerate(config.tiktoken_special_tokens)}
    return ByteVocabulary(
        source=source,
        pattern=PATTERNS[config.tiktoken_pattern],
        rules=RankRules(ranks),
        ids={token: rank + shift for token, rank in ranks.items()},
        num_ids=size,
        eod=special["</s>"],
        bos=special.get("<s>"),
        pad=special.get("<pad>"),
    )


def _check_names(num_special_tokens: int, special_tokens: Sequence[str]) -> None:
    names = " ".join(special_tokens)
    if len(set(special_tokens)) < len(special_tokens):
        raise ValueError(f"--tiktoken-special-tokens {names} names a token twice.")
    if "</s>" not in special_tokens:
        raise ValueError(f"--tiktoken-special-tokens {names} must name </s>, which ends a document.")
    if len(special_tokens) > num_special_tokens:
        raise ValueError(
            f"--tiktoken-special-tokens {names} are {len(special_tokens)} tokens, more than --tiktoken-num-special-tokens "
            f"{num_special_tokens}."
        )
