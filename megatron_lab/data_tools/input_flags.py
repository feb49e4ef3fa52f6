"""The flags that say which texts a tool reads, the same for all tools; beside them those of Megatron-LM's preprocess_data.py."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

SKIP, SKIP_FILES = "skip", "skip-files"

NOTES = {
    "keep-newlines": (0, "texts are kept as they are, with their line ends"),
    "lang": (1, "it chooses how --split-sentences cuts"),
    "partitions": (1, "one process cuts the input into shards, which --workers processes make"),
    "log-interval": (1, "a line of progress comes every few seconds"),
    "keep-sequential-samples": (0, "the documents lie in the order of the input, unless --shuffle-seed is given"),
    "make-vocab-size-divisible-by": (1, "padding of the vocabulary is no part of a dataset"),
    "tokenizer-hf-use-fast": (0, "a HuggingFaceTokenizer is always read from tokenizer.json"),
    "tokenizer-hf-no-use-fast": (0, "a HuggingFaceTokenizer is always read from tokenizer.json"),
    "trust-remote-code": (0, "a HuggingFaceTokenizer is read from tokenizer.json, and no code of others is run"),
}
"""Flags of Megatron-LM's that change nothing: how many values each takes, and why."""
REFUSED = {
    "split-sentences": (0, "it makes sequences of sentences, for BERT. GPT reads whole documents: leave it out"),
    "vocab": (1, "use --vocab-file"),
    "merges": (1, "use --merge-file"),
    "tokenizer-name-or-path": (1, "use --tokenizer-type HuggingFaceTokenizer --tokenizer-model FOLDER"),
    "find-optimal-num-workers": (0, "choose --workers, as many as there are cores"),
    "workers-to-check": ("+", "choose --workers, as many as there are cores"),
    "max-documents": (1, "give fewer files"),
}
_FORMATS = ("lazy", "cached", "infer")


def add_input_flags(flags: argparse.ArgumentParser, *, required: bool, keys: str) -> None:
    """Add --input and what says how its files are read.

    Args:
        keys: help text of --json-keys.
    """
    flags.add_argument(
        "--input",
        nargs="+",
        required=required,
        metavar="PATH",
        help="files, folders, patterns or URLs, read in this order; those of a folder or pattern sorted. By the end of the name: "
        ".jsonl .ndjson .json (JSON lines, also with .gz or .zst), .parquet, .csv .tsv (tables), .txt .md .rst .tex and source "
        "code such as .py (a file is a document)",
    )
    flags.add_argument(
        "--input-format",
        choices=("jsonl", "jsonl.gz", "jsonl.zst", "parquet", "csv", "text"),
        help="what all files of --input are (what their names say)",
    )
    flags.add_argument("--json-keys", "--json-key", nargs="+", metavar="KEY", help=keys)
    flags.add_argument(
        "--column", metavar="NAME", help="column or key that holds the text, where it is not named as --json-keys says"
    )
    flags.add_argument(
        "--on-error",
        choices=("stop", SKIP, SKIP_FILES),
        default="stop",
        help="at a record that cannot be used: stop, or leave it out and count it; skip-files also leaves out files, or the rest "
        "of files, that cannot be read (stop)",
    )


def add_flags_of_megatron(flags: argparse.ArgumentParser) -> None:
    """Accept those flags of Megatron-LM's preprocess_data.py that are not needed here; see `notes_of_megatron`."""
    group = flags.add_argument_group("of Megatron-LM", "Accepted, or refused with what to use instead; none has an effect.")
    for name, (values, why) in {**NOTES, **REFUSED}.items():
        settings = {"action": "store_true"} if values == 0 else {"nargs": None if values == 1 else values, "metavar": "VALUE"}
        group.add_argument(f"--{name}", help=why, **settings)  # type: ignore[arg-type]
    group.add_argument("--dataset-impl", choices=("mmap", *_FORMATS), help="mmap is the only format")


def notes_of_megatron(given: argparse.Namespace, flags: argparse.ArgumentParser) -> list[str]:
    """A line for each that was given and changes nothing; exits with status 2 where one is refused."""
    asked = {name for name in (*NOTES, *REFUSED) if getattr(given, name.replace("-", "_")) not in (None, False)}
    problems = [f"--{name} is refused: {why}" for name, (_, why) in REFUSED.items() if name in asked]
    if given.dataset_impl in _FORMATS:
        problems.append(f"--dataset-impl {given.dataset_impl} is refused: files are written as mmap, which all readers know")
    if "keep-sequential-samples" in asked and given.shuffle_seed is not None:
        problems.append("--keep-sequential-samples contradicts --shuffle-seed: leave one of them out")
    if problems:
        flags.error("; ".join(problems))
    notes = [f"--{name} has no effect: {why}" for name, (_, why) in NOTES.items() if name in asked]
    return notes + (["--dataset-impl mmap has no effect: it is the only format"] if given.dataset_impl else [])


def check_column(given: argparse.Namespace, flags: argparse.ArgumentParser, keys: Sequence[str]) -> None:
    """Exit with status 2 where --column is given beside several keys."""
    if given.column is not None and len(keys) > 1:
        flags.error(
            f"--column {given.column} says where one text is found, but --json-keys names {len(keys)}: leave one of them out"
        )
