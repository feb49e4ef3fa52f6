"""What the rest of the project needs of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Tokenizer(Protocol):
    """Text to token ids and back."""

    vocab_size: int
    """Every id, special ones included, is below it."""
    eod: int
    """Id that ends a document."""
    bos: int | None
    """Id that begins a text, where there is one. Only Llama2Tokenizer puts it there."""
    pad: int | None
    """Id that fills, where there is one."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Ordinary text never gives `eod`.

        Raises:
            ValueError: the text cannot be encoded.
        """

    def encode_array(self, text: str) -> NDArray[np.integer]:
        """The same ids as an array of some integer type, perhaps read-only: the fast way, without a list where the library can."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; `eod` has none."""


def required_tokenizer_json(path: str | None, tokenizer_type: str) -> Path:
    """The tokenizer.json that --tokenizer-model names, itself or by its folder.

    Raises:
        ValueError: the flag is missing, or the file.
    """
    if path is not None and Path(path).is_dir():
        path = str(Path(path) / "tokenizer.json")
    elif path is not None and not Path(path).exists():
        raise ValueError(
            f"--tokenizer-model {path}: there is no such file or folder, and nothing is downloaded.\n"
            f"  --tokenizer-type {tokenizer_type} reads a tokenizer.json, or a folder that holds one; save the tokenizer there."
        )
    return required_file("--tokenizer-model", path, tokenizer_type)


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
