"""GPT-2's byte-level BPE from local files, run by tiktoken."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.data.tokenizers.bpe_files import PIECE_PATTERN, last_merges, merge, read_bpe_files

if TYPE_CHECKING:
    from tiktoken import Encoding

_PROBE = "The quick brown fox isn't 12,345 years old;\n\n  naïve Größe, 東京 \U0001f600\tdef f(x):\r\n    return x**2  "

_LONGEST_BLANK = 500_000  # tiktoken panics at a million
_TOO_LONG_BLANK = re.compile(rf"(?<!\s)\s{{{_LONGEST_BLANK}}}")  # from the start of a run only: linear in the text


class GPT2BPETokenizer:
    """Byte-level BPE with GPT-2's splitting into pieces; the end of a document is ``<|endoftext|>``.

    The files are read at once; the encoder is made at its first use (half a second for 50,000 tokens), since a training run only
    needs the sizes. In it a token's number is the rank of its merge, which need not be its id, so ids are looked up after.

    Args:
        vocab_file: vocab.json.
        merge_file: merges.txt.

    Raises:
        ValueError: a file is not what it should be, or the two do not belong together.
    """

    def __init__(self, vocab_file: Path, merge_file: Path) -> None:
        self._files = read_bpe_files(vocab_file, merge_file)
        self.vocab_size = self._files.num_ids
        self.eod = self._files.end_of_text
        self._bytes = {id: token for token, id in self._files.ids.items()}

    @cached_property
    def _encoder(self) -> tuple[Encoding, dict[int, int]]:
        """The encoder, and the id of each rank unless they are the same."""
        import regex
        import tiktoken

        files = self._files
        ranks = {token: rank for rank, token in enumerate(token for token in files.ids if len(token) == 1)}
        ranks |= {token: 256 + rank for token, rank in last_merges(files.ids, files.ranks).items()}
        encoding = tiktoken.Encoding("local", pat_str=PIECE_PATTERN, mergeable_ranks=ranks, special_tokens={})
        ids = {rank: files.ids[token] for token, rank in ranks.items()}
        pieces = [merge(piece.encode(), files.ranks)[0] for piece in regex.findall(PIECE_PATTERN, _PROBE)]
        expected = [files.ids[token] for token in itertools.chain.from_iterable(pieces)]
        found = [ids[rank] for rank in encoding.encode_ordinary(_PROBE)]
        if found != expected:
            raise ValueError(
                f"tiktoken {tiktoken.__version__} does not follow the merges of --merge-file: it gives {found} for a probe text, "
                f"the merges give {expected}.\n  Install another version of tiktoken."
            )
        return encoding, {} if all(rank == id for rank, id in ids.items()) else ids

    def encode(self, text: str) -> list[int]:
        """Ids of a text; ``<|endoftext|>`` in it is ordinary text.

        Raises:
            ValueError: a run of blanks so long that tiktoken would fail.
        """
        if len(text) >= _LONGEST_BLANK and _TOO_LONG_BLANK.search(text):
            raise ValueError(f"a run of {_LONGEST_BLANK:,} blanks or more is too long for tiktoken")
        encoding, ids = self._encoder
        ranks = encoding.encode_ordinary(text)
        return [ids[rank] for rank in ranks] if ids else ranks

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; bytes that are not UTF-8 (a cut character) show as U+FFFD, ids without a text are left out."""
        return b"".join(self._bytes.get(int(id), b"") for id in ids).decode("utf-8", errors="replace")
