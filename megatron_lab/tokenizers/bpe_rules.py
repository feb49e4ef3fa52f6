"""Reference implementation of byte-level BPE, independent of the file format of the vocabulary.

A regular expression splits a text into pretokens (words, numbers and so on). Within a pretoken, adjacent tokens are merged
repeatedly, starting with single bytes. The order of the merges is defined by a list of token pairs (GPT-2, Hugging Face), or by the
merge priority of the token that a pair forms (tiktoken). The files of tiktoken call the merge priority of a token its rank; the
pair with the lowest rank is merged first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.config.regular_file import parse_json, read_text

# Splits a text into pretokens (Radford et al. 2019): contractions, words with the preceding blank, numbers, other characters, and
# whitespace except the last blank before a word.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""

Pair = tuple[bytes, bytes]


class NotExactError(ValueError):
    """Raised if tiktoken cannot reproduce exactly the tokenization that a tokenizer's files define. The caller adds the file name
    to the message, or uses another library."""


@dataclass(frozen=True)
class MergeRules:
    """BPE rules defined by a list of merges (pairs of tokens). Of all merges that are possible in a text, the one that comes first
    in the list is applied, until none is possible (Sennrich et al. 2016)."""

    ranks: Mapping[Pair, int]
    """Merge priority of each pair of tokens: its index in the list of merges. The lowest is merged first."""
    direct_pretokens: frozenset[bytes] = frozenset()
    """Pretokens (words, numbers and so on) that become one token even if the merges would not form it (``ignore_merges`` in
    tokenizer.json)."""

    def split(self, pretoken: bytes) -> list[bytes]:
        """Split a pretoken (a word, a number and so on) into its tokens."""
        return [pretoken] if pretoken in self.direct_pretokens else self.merge(pretoken)[0]

    def merge(self, pretoken: bytes) -> tuple[list[bytes], int]:
        """Apply the merges to a pretoken (a word, a number and so on).

        Returns:
            The tokens, and the rank (merge priority) of the last applied merge; -1 if no merge applies.
        """
        no_rank = len(self.ranks)
        return _merge_pairs(pretoken, lambda pair: self.ranks.get(pair, no_rank), no_rank)

    def build_ranks(self) -> dict[bytes, int]:
        """Return a rank (merge priority) for each token, for an encoder that merges by token rank (like tiktoken) instead of by
        token pair.

        An encoder of this type repeatedly merges the two neighbors that form the token of lowest rank. The rank of a token is the
        rank of the merge that completes the token when only its own bytes are merged. A token that the merges do not form from its
        own bytes gets no rank.

        The encoder then forms exactly the tokens that the merges form. Reason: within a longer text, the bytes of a token go
        through the same merges as when they are the full text, until a merge crosses their boundary.

        Raises:
            NotExactError: there are no ranks with this property.
        """
        ranks = {bytes([byte]): byte for byte in range(256)}
        for token in dict.fromkeys(left + right for left, right in self.ranks):
            tokens, rank = self.merge(token)
            if tokens == [token]:
                ranks[token] = 256 + rank
        first_rank = 256 + len(self.ranks)
        for rank, token in enumerate(sorted(self.direct_pretokens - ranks.keys()), start=first_rank):
            # The merges split this token into several tokens. If there are three or more, no two adjacent tokens form it, so its
            # rank has an effect only if it is the complete pretoken.
            if len(self.merge(token)[0]) == 2:
                raise NotExactError(
                    f"the token {token!r} may stand only for a complete pretoken (ignore_merges), but tiktoken would also form it "
                    "within longer pretokens, so the slower tokenizers library is used instead"
                )
            ranks[token] = rank
        return ranks


@dataclass(frozen=True)
class RankRules:
    """BPE rules defined by token ranks (merge priorities): repeatedly merge the adjacent pair that forms the token of lowest rank.

    A pretoken (a word, a number and so on) that is itself a token is not split.
    """

    ranks: dict[bytes, int]

    def split(self, pretoken: bytes) -> list[bytes]:
        """Split a pretoken (a word, a number and so on) into its tokens."""
        if pretoken in self.ranks:
            return [pretoken]
        no_rank = max(self.ranks.values()) + 1
        return _merge_pairs(pretoken, lambda pair: self.ranks.get(pair[0] + pair[1], no_rank), no_rank)[0]

    def build_ranks(self) -> dict[bytes, int]:
        """Return the rank (merge priority) of each token."""
        return self.ranks


@dataclass(frozen=True)
class ByteVocabulary:
    """Byte-level BPE vocabulary with its rules, as read from a file of any format."""

    source: str
    """Flag and file of the vocabulary, for messages."""
    pattern: str
    """Regular expression that splits a text into pretokens (words, numbers and so on). The text between two matches is a
    pretoken too."""
    rules: MergeRules | RankRules
    ids: dict[bytes, int]
    """Id of each token that the BPE rules can form."""
    num_ids: int
    """Vocabulary size. All ids, including those of special tokens, are below this number."""
    eod: int
    bos: int | None = None
    pad: int | None = None
    added: dict[str, int] = field(default_factory=dict)
    """Tokens such as ``<think>``, with their ids, that are matched in a text before the text is split into pretokens. Special
    tokens are not included."""
    uses_nfc: bool = False
    """Whether texts are normalized to Unicode NFC before they are encoded."""

    def __post_init__(self) -> None:
        if self.eod in (*self.ids.values(), *self.added.values()):
            raise ValueError(
                f"{self.source}: ordinary text could be encoded to the id {self.eod}, which ends a document.\n"
                "  Use a tokenizer with a separate end-of-document token, which no merge forms."
            )

    def encode_reference(self, text: str) -> list[int]:
        """Return the ids of a text without added tokens, by direct application of the BPE rules. The function is slow: it is the
        reference with which faster encoders are tested."""
        return [
            self.ids[token]
            for pretoken in split_into_pretokens(self.pattern, text)
            for token in self.rules.split(pretoken.encode())
        ]


def build_byte_chars() -> dict[str, int]:
    """Return the byte that each printable character represents in the files of GPT-2, which write one character per byte.

    A byte that is visible in Latin-1 is represented by its own character, all other bytes by characters from U+0100 on.
    """
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


def decode_byte_chars(token: str, byte_of_char: Mapping[str, int]) -> bytes | None:
    """Return the bytes of a token that is written with one character per byte; None if a character represents no byte.

    Args:
        token: text of the token.
        byte_of_char: byte that each character represents, from `build_byte_chars`.
    """
    values = [byte_of_char.get(char, -1) for char in token]
    return None if -1 in values else bytes(values)


def describe_missing_bytes(source: str, ids: Mapping[bytes, int]) -> str | None:
    """Return an error message if some of the 256 bytes have no id, otherwise None."""
    missing = [byte for byte in range(256) if bytes([byte]) not in ids]
    if not missing:
        return None
    examples = ", ".join(f"{byte:#04x}" for byte in missing[:8])
    return f"{source} has no token for {len(missing)} of the 256 bytes ({examples}), so not every text can be encoded."


def split_into_pretokens(pattern: str, text: str) -> Iterator[str]:
    """Split a text into pretokens (words, numbers and so on): the matches of the regular expression `pattern`, and the texts
    between these matches."""
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


def _merge_pairs(pretoken: bytes, get_rank: Callable[[Pair], int], no_rank: int) -> tuple[list[bytes], int]:
    """Split a pretoken into bytes, and merge the adjacent pair of lowest rank repeatedly. Of several pairs with this rank, the
    first is merged.

    Args:
        pretoken: text to split, as bytes.
        get_rank: returns the rank (merge priority) of a pair of adjacent tokens.
        no_rank: rank of pairs that must not be merged.

    Returns:
        The tokens, and the rank of the last merge; -1 if there was none.
    """
    tokens, last_rank = [pretoken[index : index + 1] for index in range(len(pretoken))], -1
    ranks = [get_rank(pair) for pair in itertools.pairwise(tokens)]
    while ranks and (rank := min(ranks)) != no_rank:
        last_rank, at = rank, ranks.index(rank)
        tokens[at : at + 2] = [tokens[at] + tokens[at + 1]]
        del ranks[at]
        for i in range(max(at - 1, 0), min(at + 1, len(ranks))):
            ranks[i] = get_rank((tokens[i], tokens[i + 1]))
    return tokens, last_rank


def read_json(path: Path, source: str, expected: str) -> Any:
    """Return the content of a JSON file.

    Args:
        path: path of the file.
        source: flag and file, for the error message.
        expected: description of the expected content, for the error message.

    Raises:
        ValueError: the file is not valid JSON.
    """
    try:
        return parse_json(read_text(path, encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{source} is not JSON: {error}\n  It should be {expected}. The file may be truncated: copy it again."
        ) from error


def check_ids(source: str, vocab: object) -> dict[str, int]:
    """Check that a vocabulary maps each token to a unique id, and return the vocabulary.

    Args:
        source: flag and file of the vocabulary, for error messages.
        vocab: value to check.

    Raises:
        ValueError: the vocabulary is not a dictionary of integer ids, or two tokens have the same id.
    """
    if not isinstance(vocab, dict) or not all(type(id) is int and 0 <= id < 2**31 for id in vocab.values()):
        raise ValueError(
            f"{source} must be a JSON object that gives each token its id (below 2**31), like GPT-2's vocab.json.\n"
            "  The file is damaged or has another format: use the original file."
        )
    if len(set(vocab.values())) != len(vocab):
        token_of_id: dict[int, str] = {}
        for token, id in vocab.items():
            if token_of_id.setdefault(id, token) != token:
                raise ValueError(
                    f"{source} gives the same id, {id}, to several tokens: {token_of_id[id]!r} and {token!r}.\n"
                    "  The file is damaged or was edited: use the original file."
                )
    return vocab
