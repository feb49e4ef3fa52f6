"""Train a tokenizer's vocabulary on a sample of texts.

For example::

    python tools/train_tokenizer.py --input corpus.jsonl --kind sentencepiece-bpe --vocab-size 32000 --output vocabulary.model

The input is what tools/preprocess_data.py reads, with the same flags: JSON lines (also packed by gzip or zstd), parquet, tables,
plain text and source code, folders and patterns. The same input and settings give the same files.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_lab.commands.parser import ToolParser
from megatron_lab.data_tools.input_flags import add_input_flags, check_column

if TYPE_CHECKING:
    from megatron.config.data import DataConfig
    from megatron_lab.data_tools.tokenizer_training import TextSample

_KINDS = ("sentencepiece-bpe", "sentencepiece-unigram", "byte-bpe")


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = ToolParser(description="Train a tokenizer's vocabulary on a sample of texts.")
    add_input_flags(flags, required=True, keys="keys or columns of the texts (text)")
    flags.add_argument("--kind", choices=_KINDS, required=True, help="byte-bpe is like GPT-2's and needs the tokenizers library")
    flags.add_argument("--vocab-size", type=int, required=True, metavar="N", help="number of all ids, special ones included")
    flags.add_argument("--output", type=Path, required=True, metavar="PATH", help="model file; for byte-bpe a folder")
    flags.add_argument(
        "--special-tokens", nargs="+", default=[], metavar="NAME", help="tokens that no text gives, beside the end of a document"
    )
    flags.add_argument(
        "--max-bytes", type=int, default=100_000_000, metavar="N", help="of text to train on, spread over the input (100,000,000)"
    )
    flags.add_argument("--overwrite", action="store_true", help="replace files that are there")
    return flags


def main(arguments: list[str] | None = None) -> int:
    """Run the tool; returns the exit code: 0, or 1 if nothing was written."""
    flags = parser()
    given = flags.parse_args(arguments)
    for name in ("vocab_size", "max_bytes"):
        if getattr(given, name) < 1:
            flags.error(f"--{name.replace('_', '-')} must be at least 1, not {getattr(given, name)}")
    given.json_keys = given.json_keys or ["text"]
    check_column(given, flags, given.json_keys)
    if len(set(given.special_tokens)) < len(given.special_tokens):
        flags.error(f"--special-tokens names a token twice: {' '.join(given.special_tokens)}")
    try:
        _run(given)
    except (ValueError, OSError) as error:
        print(f"train_tokenizer.py: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("train_tokenizer.py: interrupted. Nothing is written.", file=sys.stderr)
        return 130
    return 0


def _run(given: argparse.Namespace) -> None:
    from megatron_lab.data_tools.tokenizer_training import (  # numpy and tokenizers only after --help
        output_files,
        take_sample,
        train,
    )

    files = output_files(given.kind, given.output)
    there = [str(file) for file in files if file.exists()]
    if there and not given.overwrite:
        raise ValueError(f"{' and '.join(there)}: there already.\n  Choose another --output, or replace with --overwrite.")
    if given.kind != "byte-bpe" and not given.output.parent.is_dir():
        raise ValueError(f"--output {given.output}: the folder {given.output.parent} does not exist.\n  Make it first.")
    sample = take_sample(
        given.input,
        given.json_keys if given.column is None else [given.column],
        given.max_bytes,
        kind=given.input_format,
        on_error=given.on_error,
    )
    taken = f"{len(sample.training):,} of {sample.num_documents:,} documents, {sample.num_bytes / 1e6:.1f} MB"
    print(f"training on {taken}; {len(sample.held_out):,} more are held out", file=sys.stderr)
    if sample.num_left_out:
        print(f"left out: {sample.num_left_out:,} bad records and files, the first: {sample.first_left_out}", file=sys.stderr)
    train(given.kind, sample.training, given.vocab_size, given.special_tokens, given.output)
    _report(given, files, sample)


def _report(given: argparse.Namespace, files: list[Path], sample: TextSample) -> None:
    """How well the vocabulary does, and the flags that use it."""
    from megatron.config.data import DataConfig
    from megatron.data.tokenizer import build_tokenizer

    config: DataConfig
    if given.kind == "byte-bpe":
        config = DataConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=str(files[0]), merge_file=str(files[1]))
        same = f"\nor, the same: --tokenizer-type HuggingFaceTokenizer --tokenizer-model {files[2]}"
        words = f"--vocab-file {files[0]} --merge-file {files[1]}"
    else:
        config = DataConfig(tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model=str(files[0]))
        same, words = "", f"--tokenizer-model {files[0]}"
    tokenizer = build_tokenizer(config)
    texts = sample.held_out or sample.training
    num_bytes = sum(len(text.encode()) for text in texts)
    num_tokens = sum(tokenizer.encode_array(text).size for text in texts)
    print(f"wrote {' '.join(map(str, files))}: {tokenizer.vocab_size:,} ids, a document ends with {tokenizer.eod}")
    whose = "texts held out" if sample.held_out else "the text that it was trained on, for want of others"
    print(f"{num_bytes / num_tokens:.2f} bytes per token on {num_bytes / 1e6:.2f} MB of {whose}")
    print(f"use it with: --tokenizer-type {config.tokenizer_type} {words}{same}")
