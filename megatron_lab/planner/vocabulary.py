"""Size of the vocabulary in a plan or proof whose tokenizer's files are missing."""

from __future__ import annotations

import os
from dataclasses import replace

from megatron.config.checks.finding import format_setting, get_value
from megatron.config.config import Config
from megatron.config.data import TOKENIZER_FILE_SETTINGS, TOKENIZER_REQUIRED

DEFAULT_VOCAB_SIZES = {
    "GPT2BPETokenizer": 50_257,  # GPT-2
    "HuggingFaceTokenizer": 128_256,  # Llama 3
    "TikTokenizer": 131_072,  # Mistral's Tekken, as truncated by Megatron-LM
    "SentencePieceTokenizer": 32_000,  # Llama 2
    "GPTSentencePieceTokenizer": 32_000,
    "Llama2Tokenizer": 32_000,
}
"""Rows of the word embedding that a plan assumes if neither --vocab-size nor the tokenizer's files determine them."""


def assume_vocab_size(config: Config) -> tuple[Config, list[str]]:
    """Return the settings of a job that is only planned or verified, with a typical vocabulary size if the tokenizer's files are
    missing, and a note about the assumption."""
    data = config.data
    files = [field for field in TOKENIZER_REQUIRED.get(data.tokenizer_type or "", ()) if field in TOKENIZER_FILE_SETTINGS]
    missing = [field for field in files if (path := get_value(config, field)) is not None and not os.path.exists(path)]
    if data.vocab_size is not None or not missing:
        return config, []
    assert data.tokenizer_type is not None
    vocab_size = DEFAULT_VOCAB_SIZES[data.tokenizer_type]
    missing_text = " and ".join(format_setting(config, field) for field in missing)
    verb = "is" if len(missing) == 1 else "are"
    note = (
        f"{missing_text} {verb} missing: a vocabulary of {vocab_size:,} is assumed, as is usual for {data.tokenizer_type} "
        "(--vocab-size)."
    )
    return replace(config, data=replace(data, vocab_size=vocab_size)), [note]
