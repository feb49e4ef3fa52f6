"""Train a tokenizer's vocabulary on a sample of texts.

For example::

    python tools/train_tokenizer.py --input corpus.jsonl --kind sentencepiece-bpe --vocab-size 32000 --output vocabulary.model

The tool reads the same inputs as tools/preprocess_data.py, with the same flags: JSON lines (also compressed with gzip or zstd),
parquet, tables, plain text and source code, folders and patterns. Equal inputs and settings give equal files.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_lab.commands.parser import ToolParser
from megatron_lab.data_tools.input_flags import add_input_flags, check_column, get_text_encoding

if TYPE_CHECKING:
    from megatron.config.data import DataConfig
    from megatron_lab.data_tools.tokenizer_training import TextSample

_VOCABULARY_TYPES = ("sentencepiece-bpe", "sentencepiece-unigram", "byte-bpe")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = ToolParser(description="Train a tokenizer's vocabulary on a sample of texts.")
    add_input_flags(parser, required=True, keys_help="keys or columns of the texts (text)")
    parser.add_argument(
        "--kind",
        choices=_VOCABULARY_TYPES,
        required=True,
        help="Select the type of vocabulary; byte-bpe is that of GPT-2 and needs the tokenizers library.",
    )
    parser.add_argument(
        "--vocab-size", type=int, required=True, metavar="N", help="Set the number of ids, including special tokens."
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="PATH", help="Write the model file, or for byte-bpe a folder, to PATH."
    )
    parser.add_argument(
        "--special-tokens",
        nargs="+",
        default=[],
        metavar="NAME",
        help="Add special tokens, which no text is encoded to, in addition to the end-of-document token.",
    )
    parser.add_argument(
        "--max-bytes",
        type=int,
        default=100_000_000,
        metavar="N",
        help="Train on at most N bytes of text, sampled from the whole input (default 100,000,000).",
    )
    parser.add_argument("--overwrite", action="store_true", help="Replace existing files.")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the tool and return the exit status: 0, or 1 if nothing was written."""
    parser = build_parser()
    args = parser.parse_args(arguments)
    for name in ("vocab_size", "max_bytes"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    args.json_keys = args.json_keys or ["text"]
    check_column(args, parser, args.json_keys)
    if len(set(args.special_tokens)) < len(args.special_tokens):
        parser.error(f"--special-tokens names a token twice: {' '.join(args.special_tokens)}")
    try:
        _run(args)
    except (ValueError, OSError) as error:
        print(f"train_tokenizer.py: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("train_tokenizer.py: interrupted. Nothing is written.", file=sys.stderr)
        return 130
    return 0


def _run(args: argparse.Namespace) -> None:
    """Take a sample of the input, train the vocabulary on it and print a report."""
    from megatron_lab.data_tools.tokenizer_training import (  # imports numpy and tokenizers, which --help does not need
        list_output_files,
        sample_texts,
        train_tokenizer,
    )

    paths = list_output_files(args.kind, args.output)
    existing = [str(file) for file in paths if file.exists()]
    if existing and not args.overwrite:
        raise ValueError(
            f"--output {args.output} would overwrite {' and '.join(existing)}.\n"
            "  Give another --output, or set --overwrite to replace existing files."
        )
    if args.kind != "byte-bpe" and not args.output.parent.is_dir():
        raise ValueError(f"--output {args.output}: the folder {args.output.parent} does not exist.\n  Make it first.")
    sample = sample_texts(
        args.input,
        args.json_keys if args.column is None else [args.column],
        args.max_bytes,
        file_format=args.input_format,
        split=args.input_split,
        on_error=args.on_error,
        text_encoding=get_text_encoding(args),
    )
    sample_text = f"{len(sample.training_texts):,} of {sample.num_documents:,} documents, {sample.num_bytes / 1e6:.1f} MB"
    print(f"training on {sample_text}; {len(sample.held_out_texts):,} more are held out", file=sys.stderr)
    if sample.num_skipped:
        print(f"left out: {sample.num_skipped:,} bad records and files, the first: {sample.first_skipped}", file=sys.stderr)
    for line in sample.encoding_notes.format_lines(args.errors):
        print(line, file=sys.stderr)
    train_tokenizer(args.kind, sample.training_texts, args.vocab_size, args.special_tokens, args.output)
    _print_report(args, paths, sample)


def _print_report(args: argparse.Namespace, paths: list[Path], sample: TextSample) -> None:
    """Print the bytes per token of the new vocabulary, and the flags that select it.

    Args:
        paths: files of the vocabulary.
        sample: texts of the training, and texts held out (if any), on which the bytes per token are measured.
    """
    from megatron.config.data import DataConfig
    from megatron.data.tokenizer import build_tokenizer

    config: DataConfig
    if args.kind == "byte-bpe":
        config = DataConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=str(paths[0]), merge_file=str(paths[1]))
        alternative = f"\nor, the same: --tokenizer-type HuggingFaceTokenizer --tokenizer-model {paths[2]}"
        file_flags = f"--vocab-file {paths[0]} --merge-file {paths[1]}"
    else:
        config = DataConfig(tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model=str(paths[0]))
        alternative, file_flags = "", f"--tokenizer-model {paths[0]}"
    tokenizer = build_tokenizer(config)
    texts = sample.held_out_texts or sample.training_texts
    num_bytes = sum(len(text.encode()) for text in texts)
    num_tokens = sum(tokenizer.encode_array(text).size for text in texts)
    print(f"wrote {' '.join(map(str, paths))}: {tokenizer.vocab_size:,} ids, a document ends with {tokenizer.eod}")
    text_source = "texts held out" if sample.held_out_texts else "the text that it was trained on, for want of others"
    print(f"{num_bytes / num_tokens:.2f} bytes per token on {num_bytes / 1e6:.2f} MB of {text_source}")
    print(f"use it with: --tokenizer-type {config.tokenizer_type} {file_flags}{alternative}")
