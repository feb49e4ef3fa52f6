"""Rows of the word embedding of a run whose tokenizer's files need not be at hand."""

from __future__ import annotations

from pathlib import Path

from megatron.config.data import TOKENIZER_FILES, DataConfig, tokenizer_settings
from megatron.data.tokenizers.build import build_tokenizer, embedding_rows


def vocabulary_of(data: DataConfig) -> int:
    """By --vocab-size, else by the tokenizer, whose files are then needed.

    Raises:
        ValueError: neither is known, or a file is damaged; with what to give.
    """
    assert data.tokenizer_type is not None, "a rule asks for it"
    files = [name for name in tokenizer_settings(data.tokenizer_type) if name in TOKENIZER_FILES]
    if files and data.vocab_size is not None:
        return data.vocab_size  # with files it is the number of rows
    missing = [name for name in files if not Path(getattr(data, name) or "").exists()]
    if not missing:
        return embedding_rows(build_tokenizer(data), data)
    told = ", ".join(f"--{name.replace('_', '-')} {getattr(data, name)}" for name in missing)
    raise ValueError(
        f"the size of the vocabulary is not known: there is no {told}.\n"
        "  Give --vocab-size N (the rows of the word embedding), or the file."
    )
