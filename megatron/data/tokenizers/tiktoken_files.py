"""The two kinds of files that hold a vocabulary for tiktoken."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from pathlib import Path

from megatron.data.tokenizers.json_file import read_json


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
