"""A small real dataset for runs: text as bytes, some documents of a line and some of a word, so that loss masks are unequal."""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.indexed_writer import write_dataset
from megatron.data.tokenizer import ByteTokenizer

FLAGS: dict[str, Any] = {
    "mock_data": None,
    "tokenizer_type": "ByteTokenizer",
    "vocab_size": None,
    "eod_mask_loss": True,
    "split": "80,20,0",
}
"""What a run needs beside `data_path` (see `tests.support.runs.arguments`)."""


def write_bytes(prefix: Path) -> str:
    """Write a module's source (20 kB) as documents, each ended by the end of document: lines, and every other line word by word.

    Returns the prefix.
    """
    tokenizer = ByteTokenizer()
    with write_dataset(str(prefix), np.uint16) as writer:
        for number, line in enumerate(inspect.getsource(textwrap).splitlines()):
            for document in line.split() if number % 2 else [line]:
                writer.add_documents([*tokenizer.encode(document), tokenizer.eod])
    return str(prefix)
