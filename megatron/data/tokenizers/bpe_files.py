"""The two files of a GPT-2 BPE tokenizer, and what they mean in the plainest form.

vocab.json gives each token its id; merges.txt lists pairs of tokens, the first to be merged first. Tokens are written with one
printable character a byte (`byte_characters`).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# Splits a text into pieces that are merged apart (Radford et al. 2019): contractions, words with the blank before them, numbers,
# other signs, and blanks but for the last one before a word.
PIECE_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
END_OF_TEXT = "<|endoftext|>"

Pair = tuple[bytes, bytes]


@dataclass(frozen=True)
class BpeFiles:
    """What the files say. Ids of tokens that no merge makes (special ones) are only in `num_ids`."""

    ids: dict[bytes, int]
    """Id of each single byte and each product of a merge."""
    ranks: dict[Pair, int]
    """Place of each merge in the order of merging."""
    end_of_text: int
    num_ids: int


def byte_characters() -> dict[str, int]:
    """The character that stands for each byte: itself if it is visible in Latin-1, otherwise one from U+0100 on."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


def read_bpe_files(vocab_file: Path, merge_file: Path) -> BpeFiles:
    """Read and check vocab.json and merges.txt.

    Raises:
        ValueError: a file is not what it should be, or the two do not belong together.
    """
    try:
        vocabulary = json.loads(vocab_file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"--vocab-file {vocab_file} is not JSON: {error}") from error
    if not isinstance(vocabulary, dict) or not all(type(id) is int and id >= 0 for id in vocabulary.values()):
        raise ValueError(f"--vocab-file {vocab_file} must be a JSON object that gives each token its id, like GPT-2's vocab.json.")
    if len(set(vocabulary.values())) != len(vocabulary):
        raise ValueError(f"--vocab-file {vocab_file} gives the same id to several tokens.")
    if END_OF_TEXT not in vocabulary:
        raise ValueError(
            f"--vocab-file {vocab_file} has no token {END_OF_TEXT}, which ends a document.\n  Add it with an id of its own."
        )

    to_byte = byte_characters()
    missing = [byte for character, byte in to_byte.items() if character not in vocabulary]
    if missing:
        raise ValueError(
            f"--vocab-file {vocab_file} has no token for {len(missing)} of the 256 bytes "
            f"({', '.join(f'{b:#04x}' for b in missing[:8])}), so not every text could be encoded.\n"
            "  Take a byte-level vocabulary like GPT-2's."
        )
    ids = {bytes([byte]): vocabulary[character] for character, byte in to_byte.items()}
    ranks: dict[Pair, int] = {}
    for number, line in enumerate(merge_file.read_text(encoding="utf-8").split("\n"), start=1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        parts = line.split(" ")
        unknown = [part for part in (*parts, "".join(parts)) if part not in vocabulary]
        if len(parts) != 2 or unknown:
            raise ValueError(
                f"--merge-file {merge_file}, line {number}: {line!r} must be two tokens and together make a third, all "
                f"in {vocab_file}{f' (not there: {unknown[-1]!r})' if unknown else ''}.\n  The two files must be of the same "
                "tokenizer."
            )
        left, right = (bytes(to_byte[character] for character in part) for part in parts)
        ids[left + right] = vocabulary["".join(parts)]
        ranks.setdefault((left, right), len(ranks))
    return BpeFiles(ids, ranks, vocabulary[END_OF_TEXT], max(vocabulary.values()) + 1)


def merge(piece: bytes, ranks: dict[Pair, int]) -> tuple[list[bytes], int]:
    """Plain BPE of one piece: while there is one, make the earliest merge (Sennrich et al. 2016).

    Returns:
        The tokens, and the rank of the last merge that was made (-1 if none).
    """
    tokens, last = [piece[at : at + 1] for at in range(len(piece))], -1
    while len(tokens) > 1:
        rank, at = min((ranks.get(pair, len(ranks)), at) for at, pair in enumerate(itertools.pairwise(tokens)))
        if rank == len(ranks):
            break
        tokens[at : at + 2] = [tokens[at] + tokens[at + 1]]
        last = rank
    return tokens, last


def last_merges(tokens: Iterable[bytes], ranks: dict[Pair, int]) -> dict[bytes, int]:
    """Rank of the merge that completes each token; a token that the merges never make is left out.

    A text in which such a token seems to stand is merged otherwise: the same bytes inside a longer text go through the same merges
    as alone, until one of them crosses the edge. So these tokens and their ranks are all that an encoder needs that joins any two
    neighbours whose bytes make a token (as tiktoken does) to give exactly the result of the merges.
    """
    completed = ((token, *merge(token, ranks)) for token in tokens if len(token) > 1)
    return {token: rank for token, parts, rank in completed if parts == [token]}
