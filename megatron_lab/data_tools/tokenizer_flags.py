"""Flags that select the tokenizer in all command-line tools. They have the names and meanings of the training flags."""

from __future__ import annotations

import argparse
from typing import get_args

from megatron.config.data import TOKENIZER_SETTINGS, DataConfig, TiktokenPattern, TokenizerType, get_tokenizer_settings
from megatron_lab.data_tools.hub_snapshots import resolve_snapshot


def add_tokenizer_flags(parser: argparse.ArgumentParser, *, required: bool = True, encodes: bool = True) -> None:
    """Add --tokenizer-type and the flags of all tokenizer types. The value of a flag is None if the user does not set it.

    Args:
        required: whether the user must set --tokenizer-type.
        encodes: whether the tool encodes texts, or copies the tokenizer for programs that do. Otherwise --add-bos is not added.
    """
    group = parser.add_argument_group("tokenizer")
    group.add_argument("--tokenizer-type", required=required, choices=get_args(TokenizerType), help="type of tokenizer")
    group.add_argument(
        "--tokenizer-model",
        metavar="FILE",
        help="file of a sentencepiece or tiktoken tokenizer; tokenizer.json, or its folder, of HuggingFaceTokenizer",
    )
    group.add_argument("--vocab-file", metavar="FILE", help="vocab.json (or encoder.json) of GPT2BPETokenizer")
    group.add_argument("--merge-file", metavar="FILE", help="merges.txt (or vocab.bpe) of GPT2BPETokenizer")
    group.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="size of NullTokenizer's vocabulary, or number of ids that TikTokenizer uses of its file",
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
    if encodes:
        group.add_argument(
            "--add-bos",
            action=argparse.BooleanOptionalAction,
            help="put the bos token before each text, or not (as the tokenizer's files ask; Llama2Tokenizer: put it)",
        )


def build_tokenizer_config(args: argparse.Namespace, parser: argparse.ArgumentParser) -> DataConfig:
    """Build the tokenizer settings from the flags that `add_tokenizer_flags` added.

    If the user set a flag that has no effect on the selected tokenizer type, end the program with status 2.
    """
    values = {name: value for name in TOKENIZER_SETTINGS if (value := getattr(args, name, None)) is not None}
    applicable = get_tokenizer_settings(args.tokenizer_type) if args.tokenizer_type else ()
    for name in values:
        if name not in applicable:
            condition = f"with --tokenizer-type {args.tokenizer_type}" if args.tokenizer_type else "without --tokenizer-type"
            parser.error(f"--{name.replace('_', '-')} has no effect {condition}: leave it out")
    if "tokenizer_model" in values:
        try:
            values["tokenizer_model"] = resolve_snapshot(values["tokenizer_model"])
        except ValueError as error:
            parser.error(f"--tokenizer-model {error}")
    if "tiktoken_special_tokens" in values:
        values["tiktoken_special_tokens"] = tuple(values["tiktoken_special_tokens"])
    return DataConfig(tokenizer_type=args.tokenizer_type, **values)
