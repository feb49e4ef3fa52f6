"""What the rest of the project needs of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol


class Tokenizer(Protocol):
    """Text to token ids and back."""

    vocab_size: int
    """Every id, special ones included, is below it."""
    eod: int
    """Id that ends a document."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Ordinary text never gives `eod`.

        Raises:
            ValueError: the text cannot be encoded.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; `eod` has none."""


def required_file(flag: str, path: str | None, tokenizer_type: str) -> Path:
    """The file that a flag names.

    Raises:
        ValueError: the flag is missing, or the file.
    """
    if path is None:
        raise ValueError(f"--tokenizer-type {tokenizer_type} needs {flag} FILE.")
    if not Path(path).is_file():
        raise ValueError(f"{flag} {path}: there is no such file.\n  --tokenizer-type {tokenizer_type} reads it; check the path.")
    return Path(path)
