"""The rules of a byte-level BPE tokenizer, in the plainest form, whatever files they come from.

A pattern splits a text into pieces. Within a piece, neighbouring tokens are joined again and again, beginning with its bytes. The
order is given in one of two ways: by a list of merges (pairs of tokens; GPT-2, Hugging Face), or by the rank of the token that a
pair makes (the files of tiktoken).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.config.regular_file import read_text

# Splits a text into pieces (Radford et al. 2019): contractions, words with the blank before them, numbers, other signs, and blanks
# but for the last one before a word.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""

Pair = tuple[bytes, bytes]


class NotExactError(ValueError):
    """tiktoken cannot do exactly what the files say. The message says why, without the name of a file."""


@dataclass(frozen=True)
class MergeRules:
    """Rules by merges: as long as there is one, make the earliest merge (Sennrich et al. 2016)."""

    ranks: Mapping[Pair, int]
    """Place of each merge in the order of merging."""
    whole: frozenset[bytes] = frozenset()
    """Pieces that become one token at once, before any merge (``ignore_merges`` in tokenizer.json)."""

    def split(self, piece: bytes) -> list[bytes]:
        """The tokens of a piece."""
        return [piece] if piece in self.whole else self.merge(piece)[0]

    def merge(self, piece: bytes) -> tuple[list[bytes], int]:
        """The tokens of a piece by merges alone, and the rank of the last merge that was made (-1 if none)."""
        none = len(self.ranks)
        return _join(piece, lambda pair: self.ranks.get(pair, none), none)

    def priorities(self) -> dict[bytes, int]:
        """A rank for each token, such that an encoder that joins the neighbours of lowest rank does the same as the merges.

        It is the rank of the merge that completes the token; a token that the merges never make has none. A text in which such a
        token seems to stand is merged otherwise: the same bytes inside a longer text go through the same merges as alone, until
        one of them crosses the edge. So an encoder that joins any two neighbours whose bytes make a token (as tiktoken does) gives
        exactly the result of the merges, if it has these tokens and their ranks.

        Raises:
            NotExactError: there are no such ranks.
        """
        ranks = {bytes([byte]): byte for byte in range(256)}
        for token in dict.fromkeys(left + right for left, right in self.ranks):
            parts, rank = self.merge(token)
            if parts == [token]:
                ranks[token] = 256 + rank
        first = 256 + len(self.ranks)
        for rank, token in enumerate(sorted(self.whole - ranks.keys()), start=first):
            # By itself such a token ends as several. If they are three or more, no two neighbours ever spell it, so that its rank
            # does nothing but to the piece as a whole.
            if len(self.merge(token)[0]) == 2:
                raise NotExactError(f"the token {token!r} stands for whole pieces only, but tiktoken would join its two parts")
            ranks[token] = rank
        return ranks


@dataclass(frozen=True)
class RankRules:
    """Rules by rank: join the pair that makes the token of lowest rank, again and again. A piece that is a token stays."""

    ranks: dict[bytes, int]

    def split(self, piece: bytes) -> list[bytes]:
        """The tokens of a piece."""
        if piece in self.ranks:
            return [piece]
        none = max(self.ranks.values()) + 1
        return _join(piece, lambda pair: self.ranks.get(pair[0] + pair[1], none), none)[0]

    def priorities(self) -> dict[bytes, int]:
        """The ranks."""
        return self.ranks


@dataclass(frozen=True)
class ByteVocabulary:
    """A byte-level BPE vocabulary, whatever files it came from."""

    source: str
    """The flag and the file that it was read from, for messages."""
    pattern: str
    """Splits a text into pieces; what lies between two matches is a piece too."""
    rules: MergeRules | RankRules
    ids: dict[bytes, int]
    """Id of each token that the rules make."""
    num_ids: int
    """Every id, special ones included, is below it."""
    eod: int
    bos: int | None = None
    pad: int | None = None
    added: dict[str, int] = field(default_factory=dict)
    """Tokens that are found in a text before it is split, such as ``<think>``; never special ones."""
    normalise: bool = False
    """Whether texts are first brought to Unicode's form NFC."""

    def __post_init__(self) -> None:
        if self.eod in (*self.ids.values(), *self.added.values()):
            raise ValueError(
                f"{self.source}: ordinary text would give the id {self.eod}, which ends a document.\n"
                "  Give the end of a document a token of its own, which no merge makes."
            )

    def encode_plainly(self, text: str) -> list[int]:
        """Ids of a text without added tokens, by the rules themselves. Slow: faster ways are tested against it."""
        return [self.ids[token] for piece in pieces(self.pattern, text) for token in self.rules.split(piece.encode())]


def byte_characters() -> dict[str, int]:
    """The character that stands for each byte: itself if it is visible in Latin-1, otherwise one from U+0100 on."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


def token_bytes(token: str, to_byte: Mapping[str, int]) -> bytes | None:
    """The bytes of a token that is written with one character a byte; None if a character stands for no byte."""
    values = [to_byte.get(character, -1) for character in token]
    return None if -1 in values else bytes(values)


def bytes_without(source: str, ids: Mapping[bytes, int]) -> str | None:
    """A message that names the bytes (of 256) that have no id; None if all have one."""
    missing = [byte for byte in range(256) if bytes([byte]) not in ids]
    if not missing:
        return None
    named = ", ".join(f"{byte:#04x}" for byte in missing[:8])
    return f"{source} has no token for {len(missing)} of the 256 bytes ({named}), so not every text could be encoded."


def pieces(pattern: str, text: str) -> Iterator[str]:
    """The matches of the pattern, and the texts between them."""
    import regex

    end = 0
    for match in regex.finditer(pattern, text):
        if match.start() > end:
            yield text[end : match.start()]
        if match.end() > match.start():
            yield match[0]
        end = match.end()
    if end < len(text):
        yield text[end:]


def _join(piece: bytes, rank_of: Callable[[Pair], int], none: int) -> tuple[list[bytes], int]:
    """Join the neighbours of lowest rank (the first of several), again and again, until the lowest rank is `none`."""
    tokens, last = [piece[at : at + 1] for at in range(len(piece))], -1
    ranks = [rank_of(pair) for pair in itertools.pairwise(tokens)]
    while ranks and (rank := min(ranks)) != none:
        last, at = rank, ranks.index(rank)
        tokens[at : at + 2] = [tokens[at] + tokens[at + 1]]
        del ranks[at]
        for pair in range(max(at - 1, 0), min(at + 1, len(ranks))):
            ranks[pair] = rank_of((tokens[pair], tokens[pair + 1]))
    return tokens, last


def read_json(path: Path, source: str, what: str) -> Any:
    """The content of a JSON file. If it is not JSON, the message says so of `source`, and that it should be `what`.

    Raises:
        ValueError: not JSON.
    """
    try:
        return json.loads(read_text(path, encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{source} is not JSON: {error}\n  It should be {what}; perhaps it was cut short: copy it again."
        ) from error


def check_ids(source: str, vocabulary: object) -> dict[str, int]:
    """Check that a vocabulary gives each token an id of its own.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(vocabulary, dict) or not all(type(id) is int and 0 <= id < 2**31 for id in vocabulary.values()):
        raise ValueError(f"{source} must be a JSON object that gives each token its id (below 2**31), like GPT-2's vocab.json.")
    if len(set(vocabulary.values())) != len(vocabulary):
        taken: dict[int, str] = {}
        for token, id in vocabulary.items():
            if taken.setdefault(id, token) != token:
                raise ValueError(f"{source} gives the same id, {id}, to several tokens: {taken[id]!r} and {token!r}.")
    return vocabulary
