"""Tokenizer for byte-level BPE vocabularies. It uses the library tiktoken, which is configured from local files and tested against
the BPE rules in these files."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatron.config.optional_packages import import_optional
from megatron.data.tokenizer import Tokenizer
from megatron_lab.tokenizers.bpe_rules import ByteVocabulary, NotExactError, split_into_pretokens

if TYPE_CHECKING:
    from tiktoken import Encoding


class ByteBPETokenizer(Tokenizer):
    """Byte-level BPE tokenizer that uses tiktoken. Special tokens that occur in a text are encoded as ordinary text.

    ``decode`` returns any encoded text exactly (normalized to NFC, if the vocabulary requires it).

    Args:
        vocab: vocabulary with its BPE rules.
        encoder: encoder of the vocabulary. By default it is built and tested at its first use, which takes some tenths of a second
            for 50,000 tokens. Training needs only the vocabulary size, so it does not build the encoder.
    """

    def __init__(self, vocab: ByteVocabulary, encoder: TiktokenEncoder | None = None) -> None:
        self.vocab = vocab
        self._prebuilt_encoder = encoder
        self.vocab_size = vocab.num_ids
        self.eod, self.bos, self.pad = vocab.eod, vocab.bos, vocab.pad

    @cached_property
    def _encoder(self) -> TiktokenEncoder:
        try:
            return self._prebuilt_encoder or TiktokenEncoder(self.vocab)
        except NotExactError as error:
            raise ValueError(f"{self.vocab.source}: {error}.") from error

    @cached_property
    def _bytes_of_id(self) -> dict[int, bytes]:
        """Bytes of the text that each id stands for, by id. Ids without a text, such as those of special tokens, are missing."""
        added = {id: text.encode() for text, id in self.vocab.added.items()}
        return {id: token for token, id in self.vocab.ids.items()} | added

    @cached_property
    def _added_pattern(self) -> re.Pattern[str]:
        """Regular expression that matches any added token. If several added tokens match at a position, the longest is selected."""
        return re.compile(f"({'|'.join(re.escape(token) for token in sorted(self.vocab.added, key=len, reverse=True))})")

    def encode_segment(self, text: str) -> NDArray[np.integer]:
        if any(token in text for token in self.vocab.added):
            return np.concatenate(list(self._encode_with_added(text)))
        return self._encode_ordinary(text)

    def _encode_with_added(self, text: str) -> Iterator[NDArray[np.uint32]]:
        """Yield the ids of a text that contains added tokens: one array for each added token and for each text between them."""
        for segment in self._added_pattern.split(text):
            id = self.vocab.added.get(segment)
            yield self._encode_ordinary(segment) if id is None else np.array([id], np.uint32)

    def _encode_ordinary(self, text: str) -> NDArray[np.uint32]:
        """Return the ids of a text without added tokens."""
        if self.vocab.uses_nfc and not text.isascii():
            text = unicodedata.normalize("NFC", text)
        return self._encoder.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self._bytes_of_id.get(int(id), b"") for id in ids).decode("utf-8", errors="replace")


# Text with letters of several cases and scripts, combining marks, numbers, symbols, whitespace, line ends and control characters.
_PROBE_TEXT = (
    "The quick brown fox isn't 12,345 years old; SHE'LL say I'M here...\n\n  naïve Größe, 東京都 ½ Ⅳ ١٢٣ \U0001f600\u200d\U0001f4bb"
    "\tdef f(x):\r\n    return x**2  # e\u0301 \u01c5 \u02b0\u00a0\u3000b\n \n\r\r\x00\x7f<|x|>a_b/c\\d\u200e..  "
)

_MAX_WHITESPACE = 500_000  # tiktoken fails at one million
_LONG_WHITESPACE = re.compile(rf"(?<!\s)\s{{{_MAX_WHITESPACE}}}")  # matches only at the start of whitespace: linear time

# The pattern for tiktoken contains this pattern twice, so references to groups would break.
_GROUP_REFERENCE = re.compile(r"\\[1-9]|\\k|\(\?P?[<'=]\w")


class TiktokenEncoder:
    """Encoder of a byte-level BPE vocabulary that uses tiktoken.

    tiktoken numbers the tokens by rank (merge priority), which may differ from the id. The encoder therefore maps ranks to ids.

    Raises:
        NotExactError: tiktoken rejects the regular expression that splits texts, or encodes a test text differently than the rules
            in the tokenizer's files.
    """

    def __init__(self, vocab: ByteVocabulary) -> None:
        regex, tiktoken = (import_optional(name, f"a byte-level BPE tokenizer needs {name}") for name in ("regex", "tiktoken"))

        self._pattern = pattern = vocab.pattern
        if _GROUP_REFERENCE.search(pattern):
            raise NotExactError(
                f"the regular expression {pattern!r} that splits texts into pretokens contains a reference to a group, which "
                "tiktoken does not support, so the slower tokenizers library is used instead"
            )
        self._ranks = vocab.rules.build_ranks()
        self._id_of_rank = np.zeros(max(self._ranks.values()) + 1, np.uint32)
        self._id_of_rank[list(self._ranks.values())] = [vocab.ids[token] for token in self._ranks]
        self._ids_are_ranks = all(vocab.ids[token] == rank for token, rank in self._ranks.items())
        try:
            # tiktoken drops the text between two matches, so the pattern must match that text, too.
            self._encoding = self._build_encoding(rf"(?:{pattern})|(?:(?!{pattern})[\s\S])+")
            expected = vocab.encode_reference(_PROBE_TEXT)
        except (regex.error, ValueError) as error:
            raise NotExactError(
                f"tiktoken {tiktoken.__version__} rejects the regular expression {pattern!r} that splits texts: {error}. Install "
                "another version of tiktoken. Until then, a tokenizer.json is encoded with the slower tokenizers library"
            ) from error
        actual = self.encode(_PROBE_TEXT).tolist()
        if actual != expected:
            raise NotExactError(
                f"tiktoken {tiktoken.__version__} encodes a test text to the ids {actual}, but the rules in the tokenizer file "
                f"give {expected}. Install another version of tiktoken. Until then, a tokenizer.json is encoded with the slower "
                "tokenizers library"
            )

    def _build_encoding(self, pattern: str) -> Encoding:
        from tiktoken import Encoding

        # Without special tokens, tiktoken searches for an empty one at each position, at half the speed. This token is never used.
        unused_special = {"<|never|>": max(self._ranks.values()) + 1}
        return Encoding("local", pat_str=pattern, mergeable_ranks=self._ranks, special_tokens=unused_special)

    @cached_property
    def _pretoken_encoding(self) -> Encoding:
        """tiktoken encoder that does not split texts: it treats any text as a single pretoken. It is used for texts with very long
        whitespace, which tiktoken cannot split."""
        return self._build_encoding(r"[\s\S]+")

    def encode(self, text: str) -> NDArray[np.uint32]:
        """Return the ids of a text. Special tokens in the text are encoded as ordinary text.

        Raises:
            UnicodeEncodeError: the text contains half a surrogate pair.
        """
        if len(text) >= _MAX_WHITESPACE and _LONG_WHITESPACE.search(text):
            encoded = [
                self._pretoken_encoding.encode_to_numpy(pretoken, disallowed_special=())
                for pretoken in split_into_pretokens(self._pattern, text)
            ]
            ranks = np.concatenate(encoded)
        else:
            ranks = self._encoding.encode_to_numpy(text, disallowed_special=())
        return ranks if self._ids_are_ranks else self._id_of_rank[ranks]
