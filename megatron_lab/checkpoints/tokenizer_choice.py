"""Chooses the tokenizer that goes with a model to another format."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.config.data import TOKENIZER_FILES, DataConfig
from megatron_lab.data_tools.tokenizer_flags import add_tokenizer_flags, tokenizer_config

if TYPE_CHECKING:
    from megatron_lab.foreign.source import WeightSource


def local_folder(text: str) -> Path:
    """Of a flag: where a tokenizer's files are copied to, which is not done to object stores."""
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is a URL: write to a local folder, and copy it")
    return Path(text)


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a tokenizer, and --no-tokenizer."""
    add_tokenizer_flags(parser, required=False)
    parser.add_argument("--no-tokenizer", action="store_true", help="carry over the weights alone")
    parser.set_defaults(flags=parser)


def chosen_tokenizer(args: argparse.Namespace, source: WeightSource) -> DataConfig | None:
    """The tokenizer that the flags name, or the source's own, of which they may name other files; None with --no-tokenizer.

    Raises:
        ValueError: there is none.
    """
    if args.no_tokenizer:
        return None
    named = named_tokenizer(args, source)
    if named is None:
        raise ValueError(
            f"no tokenizer is known of {source.name}.\n  Name it by --tokenizer-type and its files, or carry over the weights "
            "alone by --no-tokenizer."
        )
    return named


def named_tokenizer(args: argparse.Namespace, source: WeightSource) -> DataConfig | None:
    """The tokenizer that the flags name, or the source's own, of which they may name other files; None if it is not known.

    Raises:
        ValueError: a file is named that this kind of tokenizer has not.
    """
    if args.tokenizer_type is not None:
        return tokenizer_config(args, args.flags)
    own = source.tokenizer
    if own is None or own.tokenizer_type is None:
        return None
    elsewhere = {name: getattr(args, name) for name in TOKENIZER_FILES if getattr(args, name) is not None}
    if odd := [name for name in elsewhere if getattr(own, name) is None]:
        raise ValueError(f"--{odd[0].replace('_', '-')} does not belong to the tokenizer of {source.name}, {own.tokenizer_type}")
    return dataclasses.replace(own, **elsewhere)
