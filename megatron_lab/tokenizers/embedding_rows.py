"""The tokenizer of a model whose word embedding may have fewer rows than the tokenizer has ids."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from megatron.config.data import DataConfig

if TYPE_CHECKING:
    from megatron.data.tokenizer import Tokenizer


def fit_tokenizer(config: DataConfig, num_rows: int, owner: str) -> tuple[DataConfig, Tokenizer]:
    """Build the tokenizer of a model, without special tokens that have no row in its word embedding.

    Args:
        num_rows: number of rows of the word embedding.
        owner: folder of the model, for the error message.

    Returns:
        The settings, with the number of rows if the tokenizer has more ids, and the tokenizer.

    Raises:
        ValueError: the tokenizer cannot be built, or a token without a row is not special.
    """
    from megatron.data.tokenizer import build_tokenizer

    tokenizer = build_tokenizer(config)
    if tokenizer.vocab_size > num_rows and config.tokenizer_type == "HuggingFaceTokenizer":
        config = dataclasses.replace(config, vocab_size=num_rows)
        tokenizer = build_tokenizer(config)
    if tokenizer.vocab_size > num_rows:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size:,} ids, but {owner} only {num_rows:,} rows in its embedding, and tokens "
            "that are not special have no row: the tokenizer belongs to another model. Choose the tokenizer of this model, or "
            "convert only the weights with --no-tokenizer"
        )
    return config, tokenizer
