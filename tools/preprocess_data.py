"""Make an indexed dataset (.bin and .idx) from JSON lines.

For example::

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus --tokenizer-type GPTSentencePieceTokenizer \
        --tokenizer-model vocab.model --append-eod --workers 8

writes data/corpus_text_document.bin and .idx, which training reads with --data-path data/corpus_text_document.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from megatron.config.checks.data import TOKENIZER_NEEDS
from megatron.config.data import DataConfig, TokenizerType

if TYPE_CHECKING:
    from megatron.data.preprocess import Summary

_SECONDS_BETWEEN_REPORTS = 5.0


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = argparse.ArgumentParser(description="Make an indexed dataset (.bin and .idx) from JSON lines.", allow_abbrev=False)
    flags.add_argument("--input", nargs="+", required=True, metavar="FILE", help="JSON-lines files, read in this order")
    flags.add_argument("--output-prefix", required=True, metavar="PREFIX", help="writes PREFIX_<key>_document.bin and .idx")
    flags.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys of the texts (text); a dataset for each"
    )
    flags.add_argument("--tokenizer-type", required=True, choices=get_args(TokenizerType), help="kind of tokenizer")
    flags.add_argument("--tokenizer-model", metavar="FILE", help="file of a sentencepiece tokenizer")
    flags.add_argument("--vocab-file", metavar="FILE", help="vocab.json of GPT2BPETokenizer")
    flags.add_argument("--merge-file", metavar="FILE", help="merges.txt of GPT2BPETokenizer")
    flags.add_argument("--vocab-size", type=int, metavar="N", help="size of the vocabulary of NullTokenizer")
    flags.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    flags.add_argument("--workers", type=int, default=1, metavar="N", help="processes that encode (1); the result is the same")
    flags.add_argument("--on-error", choices=("stop", "skip"), default="stop", help="at a line that cannot be used (stop)")
    return flags


def main(arguments: list[str] | None = None) -> int:
    """Run the tool; returns the exit code: 0, or 1 if nothing was written."""
    flags = parser()
    given = flags.parse_args(arguments)
    if given.workers < 1:
        flags.error(f"--workers must be at least 1, not {given.workers}")
    if len(set(given.json_keys)) < len(given.json_keys):
        flags.error(f"--json-keys names a key twice: {' '.join(given.json_keys)}")
    needed = TOKENIZER_NEEDS[given.tokenizer_type]
    for field in ("tokenizer_model", "vocab_file", "merge_file", "vocab_size"):
        if getattr(given, field) is not None and field not in needed:
            flags.error(f"--{field.replace('_', '-')} has no effect with --tokenizer-type {given.tokenizer_type}: leave it out")
    from megatron.data.preprocess import Job, preprocess  # numpy and tokenizers only after --help

    tokenizer = DataConfig(
        tokenizer_type=given.tokenizer_type,
        tokenizer_model=given.tokenizer_model,
        vocab_file=given.vocab_file,
        merge_file=given.merge_file,
        vocab_size=given.vocab_size,
    )
    start = time.monotonic()
    try:
        summary = preprocess(
            given.input,
            given.output_prefix,
            Job(tokenizer, tuple(given.json_keys), given.append_eod),
            num_workers=given.workers,
            skip_bad_lines=given.on_error == "skip",
            progress=_reporter(given.input, start),
        )
    except (ValueError, OSError) as error:
        print(f"preprocess_data.py: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("preprocess_data.py: interrupted. Nothing is written.", file=sys.stderr)
        return 130
    _report(summary, time.monotonic() - start)
    return 0


def _reporter(inputs: list[str], start: float) -> Callable[[Summary], None]:
    """A function that shows the progress now and then."""
    last = start

    def report(summary: Summary) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < _SECONDS_BETWEEN_REPORTS:
            return
        last = now
        share = summary.num_bytes / max(sum(Path(path).stat().st_size for path in inputs), 1)
        print(
            f"{share:6.1%}  {summary.num_documents:,} documents, {summary.num_tokens:,} tokens, "
            f"{summary.num_bytes / 1e6 / (now - start):.1f} MB/s",
            file=sys.stderr,
        )

    return report


def _report(summary: Summary, seconds: float) -> None:
    for line in summary.bad_lines:
        print(f"left out: {line}", file=sys.stderr)
    if summary.num_bad_lines > len(summary.bad_lines):
        print(f"left out: {summary.num_bad_lines - len(summary.bad_lines):,} more bad lines", file=sys.stderr)
    print(
        f"{summary.num_documents:,} documents, {summary.num_tokens:,} tokens from {summary.num_bytes / 1e6:.1f} MB in "
        f"{seconds:.1f} s; left out: {summary.num_empty:,} empty, {summary.num_bad_lines:,} bad lines",
        file=sys.stderr,
    )
    for prefix in summary.prefixes:
        print(f"wrote {prefix}.bin and {prefix}.idx", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
