"""Flags with which all data tools select their input texts.

The module also defines the flags of Megatron-LM's preprocess_data.py that the tools accept without effect or refuse.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron_lab.data_tools.preprocess.file_formats import COMPRESSIBLE_FORMATS, COMPRESSIONS, CONTENT_FORMATS, FILE_FORMATS
from megatron_lab.data_tools.preprocess.text_encoding import ERROR_HANDLINGS, TextEncoding, normalize_encoding

SKIP, SKIP_FILES = "skip", "skip-files"

IGNORED_FLAGS = {
    "keep-newlines": (0, "texts are always kept unchanged, with their line breaks"),
    "lang": (1, "it affects only --split-sentences"),
    "partitions": (1, "one process splits the input into shards, which --workers processes encode"),
    "log-interval": (1, "a progress line is printed every few seconds"),
    "keep-sequential-samples": (0, "documents stay in the order of the input unless --shuffle-seed is set"),
    "make-vocab-size-divisible-by": (1, "a dataset does not depend on the padding of the vocabulary"),
    "tokenizer-hf-use-fast": (0, "a HuggingFaceTokenizer is always read from tokenizer.json"),
    "tokenizer-hf-no-use-fast": (0, "a HuggingFaceTokenizer is always read from tokenizer.json"),
    "trust-remote-code": (0, "a HuggingFaceTokenizer is read from tokenizer.json, and no remote code is run"),
}
"""Flags of Megatron-LM's preprocess_data.py that are accepted without effect: number of values and reason."""
REFUSED_FLAGS = {
    "split-sentences": (0, "it writes one sequence per sentence, for BERT. GPT reads complete documents: leave it out"),
    "vocab": (1, "use --vocab-file"),
    "merges": (1, "use --merge-file"),
    "tokenizer-name-or-path": (1, "use --tokenizer-type HuggingFaceTokenizer --tokenizer-model FOLDER"),
    "find-optimal-num-workers": (0, "set --workers to the number of cores"),
    "workers-to-check": ("+", "set --workers to the number of cores"),
    "max-documents": (1, "pass fewer files"),
}
"""Flags of Megatron-LM's preprocess_data.py that are refused: number of values and what to use instead."""
_OTHER_DATASET_IMPLS = ("lazy", "cached", "infer")


def add_input_flags(parser: argparse.ArgumentParser, *, required: bool, keys_help: str) -> None:
    """Add --input and the flags that control how the input files are read, such as --json-keys and --on-error.

    Args:
        required: whether the user must set --input.
        keys_help: help text of --json-keys.
    """
    parser.add_argument(
        "--input",
        nargs="+",
        required=required,
        metavar="PATH",
        help="files, folders, patterns or URLs, read in this order; those of a folder or pattern are sorted. Formats by suffix: "
        ".jsonl .ndjson .json (JSON lines, or an array of records), .csv .tsv (tables), .txt .md .rst .tex and source code such as "
        ".py (a file is a document), all also with .gz .zst .bz2 .xz; .parquet, .arrow .feather; folders of save_to_disk",
    )
    parser.add_argument(
        "--input-format",
        choices=FILE_FORMATS,
        metavar="FORMAT",
        help=f"format of all files of --input: {' '.join(CONTENT_FORMATS)}, where {' '.join(COMPRESSIBLE_FORMATS)} may be followed "
        f"by {' '.join(f'.{compression}' for compression in COMPRESSIONS)} (by their suffixes)",
    )
    parser.add_argument(
        "--input-split", metavar="NAME", help="split to read of folders with several splits, written by DatasetDict.save_to_disk"
    )
    parser.add_argument(
        "--json-keys", "--json-key", nargs="+", metavar="KEY", help=f"{keys_help}; data.text is the key text inside of data"
    )
    parser.add_argument(
        "--column", metavar="NAME", help="column or key that contains the text, if its name differs from --json-keys"
    )
    add_encoding_flags(parser)
    parser.add_argument(
        "--on-error",
        choices=("stop", SKIP, SKIP_FILES),
        default="stop",
        help="at an invalid record: stop, or skip and count it; skip-files also skips files, or the rest "
        "of files, that cannot be read (stop)",
    )


def add_encoding_flags(parser: argparse.ArgumentParser, strict_effect: str = "makes the record invalid (see --on-error)") -> None:
    """Add --encoding and --errors.

    Args:
        strict_effect: effect of --errors strict on a text with invalid bytes, for the help text.
    """
    parser.add_argument(
        "--encoding",
        type=_parse_encoding,
        metavar="NAME",
        help="encoding of all files of text, by any name that Python knows, such as latin-1, cp1252 or utf-16; by default that "
        "of text files and tables is detected and printed, and JSON lines are UTF-8, UTF-16 or UTF-32",
    )
    parser.add_argument(
        "--errors",
        choices=ERROR_HANDLINGS,
        default=TextEncoding.errors,
        help=f"at bytes that are invalid in the encoding: strict {strict_effect}; replace keeps the text with U+FFFD (a question "
        "mark) for these bytes, ignore without them, backslashreplace with their hexadecimal values (strict)",
    )


def _parse_encoding(name: str) -> str:
    try:
        return normalize_encoding(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def get_text_encoding(args: argparse.Namespace) -> TextEncoding:
    """Return the values of the flags that `add_encoding_flags` added."""
    return TextEncoding(args.encoding, args.errors)


def add_megatron_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of Megatron-LM's preprocess_data.py that this tool does not need.

    An old command line then works, or gets an error message that names the alternative. `check_megatron_flags` decides which.
    """
    group = parser.add_argument_group("of Megatron-LM", "Accepted without effect, or refused with an alternative.")
    for name, (num_values, reason) in {**IGNORED_FLAGS, **REFUSED_FLAGS}.items():
        options = (
            {"action": "store_true"} if num_values == 0 else {"nargs": None if num_values == 1 else num_values, "metavar": "VALUE"}
        )
        group.add_argument(f"--{name}", help=reason, **options)  # type: ignore[arg-type]
    group.add_argument("--dataset-impl", choices=("mmap", *_OTHER_DATASET_IMPLS), help="mmap is the only format")


def check_megatron_flags(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """Check the flags of Megatron-LM's preprocess_data.py that the user has set. If one is refused, end the program with status 2.

    Returns:
        A message for each flag that is accepted but has no effect.
    """
    used_flags = {name for name in (*IGNORED_FLAGS, *REFUSED_FLAGS) if getattr(args, name.replace("-", "_")) not in (None, False)}
    problems = [f"--{name} is refused: {reason}" for name, (_, reason) in REFUSED_FLAGS.items() if name in used_flags]
    if args.dataset_impl in _OTHER_DATASET_IMPLS:
        problems.append(
            f"--dataset-impl {args.dataset_impl} is refused: datasets are always written as mmap, which all readers support"
        )
    if "keep-sequential-samples" in used_flags and args.shuffle_seed is not None:
        problems.append("--keep-sequential-samples contradicts --shuffle-seed: leave one of them out")
    if problems:
        parser.error("; ".join(problems))
    messages = [f"--{name} has no effect: {reason}" for name, (_, reason) in IGNORED_FLAGS.items() if name in used_flags]
    return messages + (["--dataset-impl mmap has no effect: it is the only format"] if args.dataset_impl else [])


def check_column(args: argparse.Namespace, parser: argparse.ArgumentParser, keys: Sequence[str]) -> None:
    """End the program with status 2 if --column is combined with several JSON keys, because --column names the column of one text.

    Args:
        keys: values of --json-keys.
    """
    if args.column is not None and len(keys) > 1:
        parser.error(
            f"--column {args.column} selects the column of one text, but --json-keys has {len(keys)} keys: leave one of "
            "the flags out"
        )
