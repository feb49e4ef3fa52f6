"""The tokenizer of any byte-level BPE vocabulary: tiktoken, built from local files and tested against their rules."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatron.config.extras import optional
from megatron.data.tokenizer import Tokenizer
from megatron_lab.tokenizers.bpe_rules import ByteVocabulary, NotExactError, pieces

if TYPE_CHECKING:
    from tiktoken import Encoding


class ByteBPETokenizer(Tokenizer):
    """Byte-level BPE run by tiktoken. Special tokens written out in a text are ordinary text.

    ``decode`` gives back any text exactly (brought to NFC first, where the vocabulary asks for it).

    The encoder, if none is given, is made and tested at its first use (tenths of a second for 50,000 tokens): training needs only
    the sizes.
    """

    def __init__(self, vocabulary: ByteVocabulary, encoder: TiktokenEncoder | None = None) -> None:
        self.vocabulary = vocabulary
        self._made_encoder = encoder
        self.vocab_size = vocabulary.num_ids
        self.eod, self.bos, self.pad = vocabulary.eod, vocabulary.bos, vocabulary.pad

    @cached_property
    def _encoder(self) -> TiktokenEncoder:
        try:
            return self._made_encoder or TiktokenEncoder(self.vocabulary)
        except NotExactError as error:
            raise ValueError(f"{self.vocabulary.source}: {error}.\n  Install another version of tiktoken.") from error

    @cached_property
    def _bytes(self) -> dict[int, bytes]:
        """The bytes of each id that has a text."""
        added = {id: text.encode() for text, id in self.vocabulary.added.items()}
        return {id: token for token, id in self.vocabulary.ids.items()} | added

    @cached_property
    def _added_pattern(self) -> re.Pattern[str]:
        """Matches any added token, the longest first."""
        return re.compile(f"({'|'.join(re.escape(token) for token in sorted(self.vocabulary.added, key=len, reverse=True))})")

    def encode_array(self, text: str) -> NDArray[np.integer]:
        if any(token in text for token in self.vocabulary.added):
            return np.concatenate(list(self._encode_around_added(text)))
        return self._encode_ordinary(text)

    def _encode_around_added(self, text: str) -> Iterator[NDArray[np.uint32]]:
        for part in self._added_pattern.split(text):
            id = self.vocabulary.added.get(part)
            yield self._encode_ordinary(part) if id is None else np.array([id], np.uint32)

    def _encode_ordinary(self, text: str) -> NDArray[np.uint32]:
        if self.vocabulary.normalise and not text.isascii():
            text = unicodedata.normalize("NFC", text)
        return self._encoder.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self._bytes.get(int(id), b"") for id in ids).decode("utf-8", errors="replace")


# Letters of all cases and scripts, marks, numbers, signs, blanks, line ends and control characters.
_PROBE = (
    "The quick brown fox isn't 12,345 years old; SHE'LL say I'M here...\n\n  naïve Größe, 東京都 ½ Ⅳ ١٢٣ \U0001f600\u200d\U0001f4bb"
    "\tdef f(x):\r\n    return x**2  # e\u0301 \u01c5 \u02b0\u00a0\u3000b\n \n\r\r\x00\x7f<|x|>a_b/c\\d\u200e..  "
)

_LONGEST_BLANK = 500_000  # tiktoken gives up at a million
_TOO_LONG_BLANK = re.compile(rf"(?<!\s)\s{{{_LONGEST_BLANK}}}")  # from the start of a run only: linear in the text

_GROUP_REFERENCE = re.compile(r"\\[1-9]|\\k|\(\?P?[<'=]\w")  # the pattern stands twice in tiktoken's


class TiktokenEncoder:
    """Encodes texts by tiktoken.

    Within tiktoken the number of a token is its rank in joining, which need not be its id. So ids are looked up afterwards.

    Raises:
        NotExactError: tiktoken refuses the pattern, or encodes a probe text otherwise than the files say.
    """

    def __init__(self, vocabulary: ByteVocabulary) -> None:
        regex, tiktoken = (optional(name, f"a tokenizer of byte-level BPE needs {name}") for name in ("regex", "tiktoken"))

        self._pattern = pattern = vocabulary.pattern
        if _GROUP_REFERENCE.search(pattern):
            raise NotExactError(f"the pattern {pattern!r} names a group")
        self._ranks = vocabulary.rules.priorities()
        self._table = np.zeros(max(self._ranks.values()) + 1, np.uint32)
        self._table[list(self._ranks.values())] = [vocabulary.ids[token] for token in self._ranks]
        self._ids_are_ranks = all(vocabulary.ids[token] == rank for token, rank in self._ranks.items())
        try:
            # Tiktoken drops what lies between two matches, so that is matched too.
            self._encoding = self._encoding_of(rf"(?:{pattern})|(?:(?!{pattern})[\s\S])+")
            expected = vocabulary.encode_plainly(_PROBE)
        except (regex.error, ValueError) as error:
            raise NotExactError(f"the pattern {pattern!r} is refused: {error}") from error
        found = self.encode(_PROBE).tolist()
        if found != expected:
            raise NotExactError(f"tiktoken {tiktoken.__version__} gives {found} for a probe text, the file's own rules {expected}")

    def _encoding_of(self, pattern: str) -> Encoding:
        from tiktoken import Encoding

        # Without any special token tiktoken looks for an empty one at each place: half the speed. This one is never allowed.
        never = {"<|never|>": max(self._ranks.values()) + 1}
        return Encoding("local", pat_str=pattern, mergeable_ranks=self._ranks, special_tokens=never)

    @cached_property
    def _whole(self) -> Encoding:
        """An encoder that takes any text as one piece."""
        return self._encoding_of(r"[\s\S]+")

    def encode(self, text: str) -> NDArray[np.uint32]:
        """Ids of a text in which nothing is special.

        Raises:
            UnicodeEncodeError: half a surrogate pair in the text.
        """
        if len(text) >= _LONGEST_BLANK and _TOO_LONG_BLANK.search(text):
            encoded = [self._whole.encode_to_numpy(piece, disallowed_special=()) for piece in pieces(self._pattern, text)]
            ranks = np.concatenate(encoded)
        else:
            ranks = self._encoding.encode_to_numpy(text, disallowed_special=())
        return ranks if self._ids_are_ranks else self._table[ranks]
