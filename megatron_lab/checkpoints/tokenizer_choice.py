"""Selection of the tokenizer for a model that is converted to another format."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.config.data import TOKENIZER_FILE_SETTINGS, DataConfig
from megatron_lab.data_tools.tokenizer_flags import add_tokenizer_flags, build_tokenizer_config

if TYPE_CHECKING:
    from megatron_lab.foreign.source import WeightSource


def parse_local_folder(text: str) -> Path:
    """Parse a flag whose value is an output folder. URLs are refused, because tokenizer files are not copied to object stores."""
    if "://" in text:
        raise argparse.ArgumentTypeError(
            f"{text!r} is a URL, but the output must be a local folder. Write to a local folder, and copy it"
        )
    return Path(text)


def add_tokenizer_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the tokenizer flags and --no-tokenizer to a parser."""
    add_tokenizer_flags(parser, required=False)
    parser.add_argument("--no-tokenizer", action="store_true", help="convert only the weights")
    parser.set_defaults(flags=parser)


def select_tokenizer(args: argparse.Namespace, source: WeightSource) -> DataConfig | None:
    """Return the settings of the tokenizer that the flags select, or else of the source's tokenizer. Returns None with
    --no-tokenizer.

    The flags may also replace single files of the source's tokenizer.

    Raises:
        ValueError: neither the flags nor the source name a tokenizer.
    """
    if args.no_tokenizer:
        return None
    tokenizer = find_tokenizer(args, source)
    if tokenizer is None:
        raise ValueError(
            f"{source.name} has no known tokenizer.\n  Set --tokenizer-type and its files, or convert only the weights with "
            "--no-tokenizer."
        )
    return tokenizer


def find_tokenizer(args: argparse.Namespace, source: WeightSource) -> DataConfig | None:
    """Return the settings of the tokenizer that the flags select, or else of the source's tokenizer. Returns None if neither
    exists.

    The flags may also replace single files of the source's tokenizer, and say whether bos begins each text.

    Raises:
        ValueError: a flag names a file that this type of tokenizer does not have.
    """
    if args.tokenizer_type is not None:
        return build_tokenizer_config(args, args.flags)
    source_tokenizer = source.tokenizer
    if source_tokenizer is None or source_tokenizer.tokenizer_type is None:
        return None
    replaced_paths = {name: getattr(args, name) for name in TOKENIZER_FILE_SETTINGS if getattr(args, name) is not None}
    if invalid_names := [name for name in replaced_paths if getattr(source_tokenizer, name) is None]:
        raise ValueError(
            f"--{invalid_names[0].replace('_', '-')} does not belong to the tokenizer of {source.name}, which is a "
            f"{source_tokenizer.tokenizer_type}. Remove the flag, or select another tokenizer by --tokenizer-type"
        )
    add_bos = source_tokenizer.add_bos if getattr(args, "add_bos", None) is None else args.add_bos
    return dataclasses.replace(source_tokenizer, **replaced_paths, add_bos=add_bos)
