r"""Make an indexed dataset (.bin and .idx) from JSON lines or arrays, parquet, Arrow, tables or folders of plain text.

For example::

    python tools/preprocess_data.py --input 'corpus/*.jsonl.zst' --output-prefix data/corpus --tokenizer-type GPT2BPETokenizer \
        --vocab-file vocab.json --merge-file merges.txt --append-eod --workers 16

writes data/corpus_text_document.bin and .idx, which training reads with --data-path data/corpus_text_document. The file
data/corpus_text_document.tokenizer contains a fingerprint of the tokenizer: training refuses a dataset of another tokenizer. An
interrupted job continues with --resume. With --engine ray a cluster does the work.

    python tools/preprocess_data.py --build-index data/corpus_text_document --seq-length 2048

writes the caches of the sample order in advance. Otherwise training writes them when it starts.

    python tools/preprocess_data.py --input 'chats/*.jsonl' --output-prefix data/chats --tokenizer-type HuggingFaceTokenizer \
        --tokenizer-model tokenizer --chat-template

writes conversations ({"messages": [{"role": "user", "content": "..."}, ...]}, or in the form of ShareGPT, Alpaca and others) by the
tokenizer's chat template, with a loss mask, so that a model learns only the answers: train with --data-path
data/chats_messages_document --data-loss-mask.
"""

from __future__ import annotations

import argparse
import datetime
import re
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, TextIO, get_args

from megatron.config.data import DataConfig, DataOrder
from megatron.config.training import TrainingConfig
from megatron_lab.commands.parser import ToolParser
from megatron_lab.data_tools.input_flags import (
    SKIP,
    SKIP_FILES,
    add_input_flags,
    add_megatron_flags,
    check_column,
    check_megatron_flags,
    get_text_encoding,
)
from megatron_lab.data_tools.tokenizer_flags import add_tokenizer_flags, build_tokenizer_config

if TYPE_CHECKING:
    from megatron_lab.data_tools.preprocess.reports import Summary

_MAX_PRINTED_BAD_LINES = 20
_STOP_RETRY_SECONDS = 5.0
_PREPROCESSING_FLAGS = (
    "input_format",
    "input_split",
    "output_prefix",
    "tokenizer_type",
    "json_keys",
    "column",
    "chat_template",
    "append_eod",
    "workers",
    "on_error",
    "encoding",
    "errors",
    "shuffle_seed",
    "cut_documents",
    "shard_size",
    "resume",
)
_INDEXING_FLAGS = ("seq_length", "seed", "split", "epochs", "train_samples", "valid_samples", "test_samples", "data_cache_path")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = ToolParser(description=__doc__)
    add_input_flags(
        parser,
        required=False,
        keys_help="keys (or columns) of the texts (text), with --chat-template of the conversations (those of the first record); a "
        "dataset for each, or one for a prompt and an answer such as instruction output",
    )
    parser.add_argument("--output-prefix", metavar="PREFIX", help="Write PREFIX_<key>_document.bin and .idx; a path or a URL.")
    parser.add_argument(
        "--chat-template",
        nargs="?",
        const="",
        metavar="FILE",
        help="Write conversations by the chat template of the HuggingFaceTokenizer's folder, of FILE (jinja, run in a sandbox), "
        "or by the built-in template chatml, and a loss mask PREFIX_<key>_document_loss_mask next to the dataset.",
    )
    parser.add_argument(
        "--chat-date",
        type=_parse_date,
        metavar="DAY",
        help="Set the date (2026-01-31) for a template that asks for the current date.",
    )
    parser.add_argument("--append-eod", action="store_true", help="End each document with the end-of-document token.")
    parser.add_argument(
        "--shuffle-seed",
        type=int,
        metavar="N",
        help="Write the documents in a random order with seed N, so that --split of training, which takes consecutive documents, "
        "is a random selection; needs disk space for a second copy of the dataset (default: the order of the input).",
    )
    parser.add_argument(
        "--cut-documents",
        type=_parse_count,
        metavar="CHARACTERS",
        help="Split longer texts into several documents, each after a paragraph, a line or a word (default: do not split).",
    )
    add_tokenizer_flags(parser, required=False)
    work = parser.add_argument_group("work", "None of these flags changes the result.")
    work.add_argument(
        "--workers",
        type=_parse_count,
        metavar="N",
        help="Encode with N processes (default 1); with --engine ray, run N tasks at once (default: all its CPUs).",
    )
    work.add_argument(
        "--engine",
        choices=("processes", "ray"),
        default="processes",
        help="Do the work in local processes or on a Ray cluster (default processes).",
    )
    work.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        help="Connect to the Ray cluster with this head address, or auto; by default a local one is started. All nodes need this "
        "package, and the input files and the folder of --output-prefix under the same paths (a shared file system or URLs).",
    )
    work.add_argument(
        "--shard-size",
        type=_parse_size,
        metavar="BYTES",
        help="Process the input in shards of this size, such as 64M; --resume keeps complete shards (default: input / 1024).",
    )
    existing = work.add_mutually_exclusive_group()
    existing.add_argument(
        "--resume", action="store_true", help="Continue an interrupted job: complete shards of unchanged files are kept."
    )
    existing.add_argument("--restart", action="store_true", help="Remove the files of an interrupted job and start again.")
    index = parser.add_argument_group(
        "index", "The order of samples, computed in advance; the flags have the same meaning as in training."
    )
    index.add_argument(
        "--build-index",
        nargs="*",
        metavar="PREFIX",
        help="Write the index caches of these datasets, or of those just written if none is named.",
    )
    index.add_argument("--seq-length", type=_parse_count, metavar="N", help="Set the number of tokens of a sample.")
    index.add_argument("--seed", type=int, metavar="N", help=f"Set the seed of the order (default {TrainingConfig.seed}).")
    index.add_argument(
        "--split", metavar="SHARES", help=f"Set the shares of training, validation and test (default {DataConfig.split})."
    )
    index.add_argument("--epochs", type=_parse_count, metavar="N", help="With --data-order epoch, index N epochs (default 1).")
    index.add_argument(
        "--data-order", choices=get_args(DataOrder), help=f"Set the order of samples (default {DataConfig.data_order})."
    )
    for split, name in (("train", "training"), ("valid", "validation"), ("test", "test")):
        index.add_argument(
            f"--{split}-samples",
            type=_parse_count,
            metavar="N",
            help=f"With --data-order megatron, index N {name} samples (default: an epoch).",
        )
    index.add_argument(
        "--data-cache-path", metavar="FOLDER", help="Write the caches to FOLDER (default: the folder 'cache' next to each dataset)."
    )
    add_megatron_flags(parser)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the tool and return the exit status: 0, 1 for an error, or 128 plus the number of the signal that ended it."""
    parser = build_parser()
    args = parser.parse_args(arguments)
    _check_args(parser, args)
    config = build_tokenizer_config(args, parser)
    messages = check_megatron_flags(args, parser)
    old_handlers = {signum: signal.signal(signum, _raise_stopped) for signum in (signal.SIGINT, signal.SIGTERM)}
    screen = Screen(sys.stderr)
    for message in messages:
        screen.log(message)
    try:
        try:
            prefixes = tuple(args.build_index or ())
            if args.input:
                summary = _preprocess(args, config, screen)
                # Each dataset of conversations has a loss mask, whose path follows the paths of the datasets.
                prefixes = summary.prefixes[: len(summary.prefixes) // (1 if args.chat_template is None else 2)]
            if args.build_index is not None:
                _build_index(args, prefixes, screen)
        except (ValueError, OSError) as error:
            screen.log(f"preprocess_data.py: error: {error}")
            return 1
    except _Stopped as stopped:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        resume_hint = "No dataset is written; finished shards are kept: go on with --resume. " if args.input else ""
        print(f"\npreprocess_data.py: stopped by {stopped.signum.name}. {resume_hint}".rstrip(), file=sys.stderr)
        return 128 + stopped.signum
    finally:
        for signum, handler in old_handlers.items():
            signal.signal(signum, handler)
    return 0


def _check_args(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Check that the flags do not contradict each other and all have an effect.

    Otherwise the program ends with a message and status 2.
    """

    def refuse_all(names: Sequence[str], reason: str) -> None:
        for name in names:
            if getattr(args, name) != parser.get_default(name):
                parser.error(f"--{name.replace('_', '-')} has no effect {reason}: leave it out")

    if args.input is None and not args.build_index:
        parser.error("--input PATH ... is missing (or --build-index PREFIX ... for datasets that exist)")
    if args.input is not None:
        for name in ("output_prefix", "tokenizer_type"):
            if getattr(args, name) is None:
                parser.error(f"--{name.replace('_', '-')} is missing")
        if args.build_index:
            parser.error("--build-index takes no PREFIX beside --input: it is that of the datasets made")
    else:
        refuse_all((*_PREPROCESSING_FLAGS, "engine", "ray_address", "restart"), "without --input")
    if args.engine != "ray":
        refuse_all(("ray_address",), "without --engine ray")
    if args.build_index is None:
        refuse_all((*_INDEXING_FLAGS, "data_order"), "without --build-index")
    elif args.seq_length is None:
        parser.error("--build-index needs --seq-length N")
    elif args.data_order == "megatron":
        refuse_all(("epochs",), "with --data-order megatron")
    else:
        refuse_all(("train_samples", "valid_samples", "test_samples"), "without --data-order megatron")
    if args.chat_template is None:
        refuse_all(("chat_date",), "without --chat-template")
    elif args.input is not None and args.tokenizer_type != "HuggingFaceTokenizer":
        parser.error(
            "--chat-template needs --tokenizer-type HuggingFaceTokenizer: the tokens that separate messages are in its folder"
        )
    if args.chat_template is None or args.column is not None:
        args.json_keys = args.json_keys or ["text" if args.chat_template is None else "messages"]
    args.json_keys = args.json_keys or []  # those of the first conversation
    if len(set(args.json_keys)) < len(args.json_keys):
        parser.error(f"--json-keys names a key twice: {' '.join(args.json_keys)}")
    check_column(args, parser, args.json_keys)
    if args.chat_template is not None:
        refuse_all(("cut_documents",), "with --chat-template: a conversation is not cut")
        refuse_all(("add_bos",), "with --chat-template: the template writes the bos token if the model needs it")
    if args.shuffle_seed is not None and args.shuffle_seed < 0:
        parser.error(f"--shuffle-seed must be 0 or more, not {args.shuffle_seed}")


def _preprocess(args: argparse.Namespace, config: DataConfig, screen: Screen) -> Summary:
    """Write a dataset for each key of the input (--json-keys), print a summary and return it."""
    from megatron.data.indexed_dataset import get_tokenizer_file
    from megatron.data.tokenizer import require_tokenizer_json
    from megatron_lab.data_tools.preprocess.chat import ChatTemplate, describe_named_template
    from megatron_lab.data_tools.preprocess.engines import Engine
    from megatron_lab.data_tools.preprocess.job import preprocess
    from megatron_lab.data_tools.preprocess.reports import format_chat_notes
    from megatron_lab.data_tools.preprocess.shard_work import PreprocessJob, get_tokenizer
    from megatron_lab.data_tools.preprocess.text_encoding import format_count

    start = time.monotonic()
    chat = None
    if args.chat_template is not None:
        folder = require_tokenizer_json(config.tokenizer_model, config.tokenizer_type or "")
        chat = ChatTemplate.load(folder, args.chat_template or None, args.chat_date)
        for message in describe_named_template(chat, folder):
            screen.log(message)
    job = PreprocessJob(
        config,
        tuple(args.json_keys),
        args.append_eod,
        skip_bad_records=args.on_error in (SKIP, SKIP_FILES),
        skip_bad_files=args.on_error == SKIP_FILES,
        column=args.column,
        cut_documents=args.cut_documents,
        shuffle_seed=args.shuffle_seed,
        chat=chat,
        text_encoding=get_text_encoding(args),
    )
    tokenizer, _ = get_tokenizer(job)
    for message in (*tokenizer.notes, *(tokenizer.text_notes if chat is None else ())):
        screen.log(message)
    summary = preprocess(
        args.input,
        args.output_prefix,
        job,
        input_format=args.input_format,
        input_split=args.input_split,
        engine=Engine(args.engine, args.workers, args.ray_address),
        shard_size=args.shard_size,
        start_mode="resume" if args.resume else "restart" if args.restart else "new",
        log=screen.log,
        log_progress=screen.show_progress,
    )
    for message in summary.bad_records[:_MAX_PRINTED_BAD_LINES]:
        screen.log(f"left out: {message}")
    if summary.bad_records_file:
        screen.log(f"all records left out: {summary.bad_records_file}")
    if summary.num_bad_records <= _MAX_PRINTED_BAD_LINES:
        summary.encoding_notes.num_undecodable = 0  # the lines above have reported each of them with the same advice
    for line in summary.encoding_notes.format_lines(args.errors, summary.encodings_file):
        screen.log(line)
    for line in format_chat_notes(summary.chat_notes):
        screen.log(f"NOTE: {line}")
    if summary.chat_notes_file:
        screen.log(f"these notes are in {summary.chat_notes_file}")
    screen.log(
        f"{format_count(summary.num_documents, 'document')}, {format_count(summary.num_tokens, 'token')} from "
        f"{summary.num_bytes / 1e6:.1f} MB in {time.monotonic() - start:.1f} s; left out: {summary.num_empty:,} empty, "
        f"{format_count(summary.num_bad_records, 'bad line')}"
        + (f", {format_count(summary.num_bad_files, 'file')} that cannot be read" if summary.num_bad_files else "")
    )
    if chat is not None:
        answer_share = summary.num_loss_tokens / max(summary.num_tokens, 1)
        screen.log(
            f"{summary.num_loss_tokens:,} tokens ({answer_share:.1%}) are answers, which count in the loss with --data-loss-mask"
        )
    # --json-keys may be empty, or name a prompt and an answer; each dataset of conversations has a loss mask.
    num_datasets = len(summary.prefixes) // (1 if chat is None else 2)
    if summary.num_documents == num_datasets:
        screen.log(
            "NOTE: the dataset is a single document, which --split of training cannot divide into training and validation data."
            + (" --cut-documents 20000 splits it into documents of at most 20,000 characters." if chat is None else "")
        )
    for dataset_index, prefix in enumerate(summary.prefixes):
        is_mask = dataset_index >= num_datasets
        screen.log(f"wrote {prefix}.bin and {prefix}.idx" + ("" if is_mask else f", and {get_tokenizer_file(prefix)}"))
    return summary


def _build_index(args: argparse.Namespace, prefixes: Sequence[str], screen: Screen) -> None:
    """Compute the order of samples of each dataset and write it to the cache, for --build-index."""
    from megatron_lab.data_tools.index_builder import build_index

    for prefix in prefixes:
        messages = build_index(
            prefix,
            split=DataConfig.split if args.split is None else args.split,
            seed=TrainingConfig.seed if args.seed is None else args.seed,
            seq_length=args.seq_length,
            epochs=args.epochs or 1,
            order=args.data_order or DataConfig.data_order,
            num_samples=(args.train_samples, args.valid_samples, args.test_samples),
            data_cache_path=args.data_cache_path,
        )
        for message in messages:
            screen.log(message)


class Screen:
    """Writer of log lines and of a progress line. On a terminal each progress line replaces the previous one."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._progress_line = ""

    def log(self, text: str) -> None:
        """Write a log line, which stays on the terminal."""
        self._stream.write(f"{self._erase_progress()}{text}\n")
        self._stream.flush()

    def show_progress(self, text: str) -> None:
        """Write a progress line in place of the previous one, or a log line if the stream is not a terminal."""
        if not self._stream.isatty():
            self.log(text)
            return
        self._stream.write(f"{self._erase_progress()}{text}")
        self._stream.flush()
        self._progress_line = text

    def _erase_progress(self) -> str:
        escape = f"\r{' ' * len(self._progress_line)}\r" if self._progress_line else ""
        self._progress_line = ""
        return escape


class _Stopped(BaseException):
    """Raised when a signal such as Ctrl-C asks the program to stop, so that the job ends in a consistent state."""

    signum = signal.SIGTERM


def _raise_stopped(signum: int, frame: FrameType | None) -> NoReturn:
    """Handle a signal: raise `_Stopped`, and again every few seconds until the program ends.

    Python ignores an exception that is raised in a destructor or in a hook, so raising it once is not reliable.
    """
    if signum != signal.SIGALRM:
        _Stopped.signum = signal.Signals(signum)
    signal.signal(signal.SIGALRM, _raise_stopped)
    signal.setitimer(signal.ITIMER_REAL, _STOP_RETRY_SECONDS)
    raise _Stopped


def _parse_count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, not {text!r}")
    return int(text)


def _parse_date(text: str) -> str:
    try:
        return datetime.date.fromisoformat(text).isoformat()
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a day such as 2026-01-31, not {text!r}") from error


def _parse_size(text: str) -> int:
    """Parse a number of bytes such as 67108864 or 64M."""
    match = re.fullmatch(r"(\d+)([KMG]?)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"must be a number of bytes such as 67108864 or 64M, not {text!r}")
    size = int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]
    if size < 1024:
        raise argparse.ArgumentTypeError(f"must be at least 1K, not {text}")
    return size
