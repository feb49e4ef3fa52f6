"""The tokenizer's flags for tools, with the same names and meanings as in training."""

from __future__ import annotations

import argparse
from typing import get_args

from megatron.config.data import TOKENIZER_SETTINGS, DataConfig, TiktokenPattern, TokenizerType, tokenizer_settings


def add_tokenizer_flags(flags: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add --tokenizer-type and the settings of all kinds; what was not given is None."""
    group = flags.add_argument_group("tokenizer")
    group.add_argument("--tokenizer-type", required=required, choices=get_args(TokenizerType), help="kind of tokenizer")
    group.add_argument(
        "--tokenizer-model",
        metavar="FILE",
        help="file of a sentencepiece or tiktoken tokenizer; tokenizer.json, or its folder, of HuggingFaceTokenizer",
    )
    group.add_argument("--vocab-file", metavar="FILE", help="vocab.json (or encoder.json) of GPT2BPETokenizer")
    group.add_argument("--merge-file", metavar="FILE", help="merges.txt (or vocab.bpe) of GPT2BPETokenizer")
    group.add_argument(
        "--vocab-size", type=int, metavar="N", help="size of NullTokenizer's vocabulary, or to which TikTokenizer cuts its file"
    )
    group.add_argument(
        "--tiktoken-pattern",
        choices=get_args(TiktokenPattern),
        help=f"how TikTokenizer splits text ({DataConfig.tiktoken_pattern})",
    )
    group.add_argument(
        "--tiktoken-num-special-tokens",
        type=int,
        metavar="N",
        help=f"ids below N are special tokens of TikTokenizer ({DataConfig.tiktoken_num_special_tokens})",
    )
    group.add_argument(
        "--tiktoken-special-tokens",
        nargs="+",
        metavar="NAME",
        help=f"names of TikTokenizer's first special tokens ({' '.join(DataConfig.tiktoken_special_tokens)})",
    )


def tokenizer_config(given: argparse.Namespace, flags: argparse.ArgumentParser) -> DataConfig:
    """The settings that `add_tokenizer_flags` read; exits with status 2 where one has no effect on the kind of tokenizer."""
    settings = {name: getattr(given, name) for name in TOKENIZER_SETTINGS if getattr(given, name) is not None}
    acting = tokenizer_settings(given.tokenizer_type) if given.tokenizer_type else ()
    for name in settings:
        if name not in acting:
            kind = f"with --tokenizer-type {given.tokenizer_type}" if given.tokenizer_type else "without --tokenizer-type"
            flags.error(f"--{name.replace('_', '-')} has no effect {kind}: leave it out")
    if "tiktoken_special_tokens" in settings:
        settings["tiktoken_special_tokens"] = tuple(settings["tiktoken_special_tokens"])
    return DataConfig(tokenizer_type=given.tokenizer_type, **settings)
