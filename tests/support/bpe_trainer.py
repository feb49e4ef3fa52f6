"""A small byte-level BPE vocabulary made from a text, in the files of GPT-2."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import regex

# GPT-2's own pattern and characters, written anew so that a slip in the library shows.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class Bpe(NamedTuple):
    """A trained vocabulary."""

    vocabulary: dict[str, int]
    merges: list[tuple[str, str]]


def visible(token: bytes) -> str:
    """The token in the characters of vocab.json."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = {byte: chr(256 + n) for n, byte in enumerate(byte for byte in range(256) if byte not in plain)}
    return "".join(hidden.get(byte, chr(byte)) for byte in token)


def train_bpe(text: str, num_merges: int) -> Bpe:
    """Join the most frequent pair (ties to the smaller), over and over."""
    words = Counter(tuple(visible(bytes([byte])) for byte in piece.encode()) for piece in regex.findall(GPT2_PATTERN, text))
    vocabulary = {visible(bytes([byte])): byte for byte in range(256)}
    merges: list[tuple[str, str]] = []
    for _ in range(num_merges):
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for pair in pairwise(word):
                pairs[pair] += count
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        vocabulary.setdefault("".join(best), len(vocabulary))
        words = Counter({_join(word, best): count for word, count in words.items()})
    vocabulary["<|endoftext|>"] = len(vocabulary)
    return Bpe(vocabulary, merges)


def write_bpe(bpe: Bpe, folder: Path) -> tuple[Path, Path]:
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    vocab.write_text(json.dumps(bpe.vocabulary), encoding="utf-8")
    merges.write_text("#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in bpe.merges), encoding="utf-8")
    return vocab, merges


def encode_plainly(text: str, bpe: Bpe) -> list[int]:
    """Every merge in its turn over every piece."""
    ids: list[int] = []
    for piece in regex.findall(GPT2_PATTERN, text):
        word = tuple(visible(bytes([byte])) for byte in piece.encode())
        for pair in bpe.merges:
            word = _join(word, pair)
        ids += [bpe.vocabulary[token] for token in word]
    return ids


def _join(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    joined: list[str] = []
    for token in word:
        if joined and (joined[-1], token) == pair:
            joined[-1] += token
        else:
            joined.append(token)
    return tuple(joined)
