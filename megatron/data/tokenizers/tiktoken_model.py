"""The two kinds of files that hold a vocabulary for tiktoken."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.data.tokenizers.bpe_rules import ByteVocabulary, RankRules, read_json
from megatron.data.tokenizers.byte_bpe import ByteBPETokenizer


@dataclass(frozen=True)
class TiktokenFile:
    """Ranks of tokens, which are also the order of joining."""

    ranks: dict[bytes, int]
    is_list: bool
    """A JSON list as Megatron-LM reads it, not lines of a token in base64 and its rank."""


def read_tiktoken_file(path: Path) -> TiktokenFile:
    """Read and check either kind.

    Raises:
        ValueError: it is neither, or broken.
    """
    source = f"--tokenizer-model {path}"
    with path.open("rb") as file:
        first = file.read(64).lstrip()[:1]
    ranks = _from_list(path, source) if first in (b"[", b"{") else _from_lines(path, source)
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(
            f"{source} has no token for {len(missing)} of the 256 bytes ({', '.join(f'{b:#04x}' for b in missing[:8])}), so not "
            "every text could be encoded.\n  The file is not whole or of another kind: copy it again."
        )
    return TiktokenFile(ranks, first in (b"[", b"{"))


def _from_list(path: Path, source: str) -> dict[bytes, int]:
    """A list of {"rank": 0, "token_bytes": base64, "token_str": ...} in the order of the ranks."""
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
    """Lines of a token in base64, a blank and its rank."""
    ranks: dict[bytes, int] = {}
    taken: set[int] = set()
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
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
"""How Megatron-LM's --tiktoken-pattern splits texts."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_MEGATRON_SIZE = 2**17  # what Megatron-LM takes without --vocab-size


@dataclass(frozen=True)
class KnownFile:
    """A published file: the number of its tokens tells which it is, since only ranks are in it."""

    name: str
    pattern: str
    vocab_size: int
    eod: int
    bos: int | None = None


KNOWN_FILES = {
    128_000: KnownFile("Llama 3", _LLAMA3, 128_256, eod=128_001, bos=128_000),
    100_256: KnownFile("cl100k_base", _LLAMA3, 100_277, eod=100_257),
}
"""Llama 3: llama3/tokenizer.py of Meta; cl100k_base: tiktoken_ext/openai_public.py, whose pattern splits as Llama 3's does."""


class TikTokenizer(ByteBPETokenizer):
    """A vocabulary for tiktoken, in one of two kinds of files.

    A JSON list of ranks has ids as in Megatron-LM: first come `num_special_tokens` special ones, of which the first are named
    (the others are fillers), then the tokens by rank, as many as `vocab_size` leaves room for (of 131,072 without it).

    A file of lines, each a token in base64 and its rank, has its ranks as ids. If it is of one of the sizes in `KNOWN_FILES`,
    pattern and special tokens are those of that file, as long as no setting says otherwise; if not, the special tokens come after
    the last rank.

    The end of a document is ``</s>`` (or what the known file has), bos is ``<s>`` and pad is ``<pad>`` if they are among the names.

    Args:
        path: The file.
        vocab_size: Number of all ids, if it is given.
        pattern: How texts are split: v1 or v2.
        num_special_tokens: Number of special tokens, named or not.
        special_tokens: Their names, in the order of the ids.
        as_default: Whether pattern, number and names are the defaults, so that a known file may decide.

    Raises:
        ValueError: the file is not what it should be, or the settings do not fit it.
    """

    def __init__(
        self,
        path: Path,
        *,
        vocab_size: int | None,
        pattern: str,
        num_special_tokens: int,
        special_tokens: Sequence[str],
        as_default: bool,
    ) -> None:
        file = read_tiktoken_file(path)
        source = f"--tokenizer-model {path}"
        known = KNOWN_FILES.get(len(file.ranks)) if as_default and not file.is_list else None
        if known:
            super().__init__(_of_known_file(file, known, vocab_size, source))
            return
        _check_names(num_special_tokens, special_tokens)
        ranks, first_special, size = _layout(file, vocab_size, num_special_tokens, source)
        shift = num_special_tokens if file.is_list else 0
        ids = {name: first_special + number for number, name in enumerate(special_tokens)}
        super().__init__(
            ByteVocabulary(
                source=source,
                pattern=PATTERNS[pattern],
                rules=RankRules(ranks),
                ids={token: rank + shift for token, rank in ranks.items()},
                num_ids=size,
                eod=ids["</s>"],
                bos=ids.get("<s>"),
                pad=ids.get("<pad>"),
            )
        )


def _layout(file: TiktokenFile, vocab_size: int | None, num_special_tokens: int, source: str) -> tuple[dict[bytes, int], int, int]:
    """The ranks that are taken, the first id of a special token, and the number of ids."""
    whole = max(file.ranks.values()) + 1 + num_special_tokens
    if file.is_list:
        size = min(_MEGATRON_SIZE, whole) if vocab_size is None else vocab_size
        if not num_special_tokens + 256 <= size <= whole:
            raise ValueError(
                f"--vocab-size {size:,} does not fit {source}: with --tiktoken-num-special-tokens {num_special_tokens:,} it may be "
                f"from {num_special_tokens + 256:,} to {whole:,}."
            )
        ranks = {token: rank for token, rank in file.ranks.items() if rank < size - num_special_tokens}
        if any(bytes([byte]) not in ranks for byte in range(256)):
            raise ValueError(
                f"{source}: the first {size - num_special_tokens:,} tokens lack some of the 256 bytes.\n  Raise --vocab-size."
            )
        return ranks, 0, size
    if vocab_size not in (None, whole):
        raise ValueError(
            f"--vocab-size {vocab_size:,} does not fit {source}: its {whole - num_special_tokens:,} ranks and "
            f"--tiktoken-num-special-tokens {num_special_tokens:,} make {whole:,}.\n  Leave --vocab-size out."
        )
    return file.ranks, whole - num_special_tokens, whole


def _of_known_file(file: TiktokenFile, known: KnownFile, vocab_size: int | None, source: str) -> ByteVocabulary:
    if vocab_size not in (None, known.vocab_size):
        raise ValueError(
            f"--vocab-size {vocab_size:,} does not fit {source}: with {len(file.ranks):,} tokens it is {known.name}'s file, whose "
            f"special tokens make it {known.vocab_size:,}.\n  Leave --vocab-size out."
        )
    return ByteVocabulary(
        source=source,
        pattern=known.pattern,
        rules=RankRules(file.ranks),
        ids=file.ranks,
        num_ids=known.vocab_size,
        eod=known.eod,
        bos=known.bos,
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
