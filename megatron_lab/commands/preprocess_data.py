"""Make an indexed dataset (.bin and .idx) from JSON lines (.jsonl, also .gz and .zst), parquet, tables or folders of plain text.

For example::

    python tools/preprocess_data.py --input 'corpus/*.jsonl.zst' --output-prefix data/corpus --tokenizer-type GPT2BPETokenizer \
        --vocab-file vocab.json --merge-file merges.txt --append-eod --workers 16

writes data/corpus_text_document.bin and .idx, which training reads with --data-path data/corpus_text_document. A job that was ended
goes on with --resume. With --engine ray a cluster does the work.

    python tools/preprocess_data.py --build-index data/corpus_text_document --seq-length 2048

makes the caches of the sample order ahead that training would make at its start.

    python tools/preprocess_data.py --input 'chats/*.jsonl' --output-prefix data/chats --tokenizer-type HuggingFaceTokenizer \
        --tokenizer-model tokenizer --chat-template

writes conversations ({"messages": [{"role": "user", "content": "..."}, ...]}) as the tokenizer's chat template says, and a loss
mask, with which a model learns the answers alone: train with --data-path data/chats_messages_document --data-loss-mask.
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
    add_flags_of_megatron,
    add_input_flags,
    check_column,
    notes_of_megatron,
)
from megatron_lab.data_tools.tokenizer_flags import add_tokenizer_flags, tokenizer_config

if TYPE_CHECKING:
    from megatron_lab.data_tools.preprocess.reports import Summary

_SHOWN_BAD_LINES = 20
_SECONDS_TO_STOP = 5.0
_PREPROCESSING = (
    "input_format",
    "output_prefix",
    "tokenizer_type",
    "json_keys",
    "column",
    "chat_template",
    "append_eod",
    "workers",
    "on_error",
    "shuffle_seed",
    "cut_documents",
    "shard_size",
    "resume",
)
_INDEXING = ("seq_length", "seed", "split", "epochs", "train_samples", "valid_samples", "test_samples", "data_cache_path")


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = ToolParser(description=__doc__)
    add_input_flags(
        flags,
        required=False,
        keys="keys (or columns) of the texts (text), with --chat-template of the conversations (messages); a dataset for each",
    )
    flags.add_argument("--output-prefix", metavar="PREFIX", help="writes PREFIX_<key>_document.bin and .idx; a path or a URL")
    flags.add_argument(
        "--chat-template",
        nargs="?",
        const="",
        metavar="FILE",
        help="write conversations by the chat template of the HuggingFaceTokenizer's folder, or of FILE (jinja, run in a sandbox), "
        "or chatml by its name, and a loss mask PREFIX_<key>_document_loss_mask beside the dataset",
    )
    flags.add_argument(
        "--chat-date", type=_date, metavar="DAY", help="the day (2026-01-31) that a template writes which asks for today's"
    )
    flags.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    flags.add_argument(
        "--shuffle-seed",
        type=int,
        metavar="N",
        help="write the documents in a random order that follows from N, so that --split of training, which takes neighbours in "
        "the file, is a random choice; needs room for the dataset once more (the order of the input)",
    )
    flags.add_argument(
        "--cut-documents",
        type=_count,
        metavar="CHARACTERS",
        help="longer texts become several documents, each cut behind a paragraph, a line or a word (a text is a document)",
    )
    add_tokenizer_flags(flags, required=False)
    work = flags.add_argument_group("work", "None of these changes the result.")
    work.add_argument(
        "--workers", type=_count, metavar="N", help="processes that encode (1); with --engine ray tasks at once (all CPUs it has)"
    )
    work.add_argument("--engine", choices=("processes", "ray"), default="processes", help="who does the work (processes)")
    work.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        help="of the head of a Ray cluster, or auto; without it one is started here. All nodes must see the input files and the "
        "folder of --output-prefix under the same paths (a shared file system or URLs), and have this package",
    )
    work.add_argument(
        "--shard-size", type=_size, metavar="BYTES", help="what is kept of an ended job counts in these, such as 64M (input / 1024)"
    )
    again = work.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="go on with an ended job: finished shards of unchanged files are kept")
    again.add_argument("--restart", action="store_true", help="remove what an ended job left, and start anew")
    index = flags.add_argument_group("index", "The order of samples, made ahead; the flags mean what they mean in training.")
    index.add_argument(
        "--build-index",
        nargs="*",
        metavar="PREFIX",
        help="make the caches of these datasets, or of those just made if none is named",
    )
    index.add_argument("--seq-length", type=_count, metavar="N", help="tokens of a sample")
    index.add_argument("--seed", type=int, metavar="N", help=f"({TrainingConfig.seed})")
    index.add_argument("--split", metavar="SHARES", help=f"of training, validation and test ({DataConfig.split})")
    index.add_argument("--epochs", type=_count, metavar="N", help="with --data-order epoch: how many (1)")
    index.add_argument("--data-order", choices=get_args(DataOrder), help=f"({DataConfig.data_order})")
    for split, name in (("train", "training"), ("valid", "validation"), ("test", "test")):
        index.add_argument(
            f"--{split}-samples", type=_count, metavar="N", help=f"with --data-order megatron: {name} samples of the run (an epoch)"
        )
    index.add_argument("--data-cache-path", metavar="FOLDER", help="where the caches go (the folder cache beside each dataset)")
    add_flags_of_megatron(flags)
    return flags


def main(arguments: list[str] | None = None) -> int:
    """Run the tool; returns the exit code: 0, 1 for an error, 128 and the number of the signal that ended it."""
    flags = parser()
    given = flags.parse_args(arguments)
    _check(flags, given)
    config = tokenizer_config(given, flags)
    notes = notes_of_megatron(given, flags)
    before = {number: signal.signal(number, _stop) for number in (signal.SIGINT, signal.SIGTERM)}
    screen = Screen(sys.stderr)
    for line in notes:
        screen.note(line)
    try:
        try:
            prefixes = tuple(given.build_index or ())
            if given.input:
                prefixes = _preprocess(given, config, screen).prefixes[: len(given.json_keys)]
            if given.build_index is not None:
                _build_index(given, prefixes, screen)
        except (ValueError, OSError) as error:
            screen.note(f"preprocess_data.py: error: {error}")
            return 1
    except _Stopped as stopped:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        kept = "No dataset is written; finished shards are kept: go on with --resume. " if given.input else ""
        print(f"\npreprocess_data.py: stopped by {stopped.number.name}. {kept}".rstrip(), file=sys.stderr)
        return 128 + stopped.number
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def _check(flags: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Flags that contradict each other, or have no effect."""

    def refuse_all(names: Sequence[str], reason: str) -> None:
        for name in names:
            if getattr(given, name) != flags.get_default(name):
                flags.error(f"--{name.replace('_', '-')} has no effect {reason}: leave it out")

    if given.input is None and not given.build_index:
        flags.error("--input PATH ... is missing (or --build-index PREFIX ... for datasets that exist)")
    if given.input is not None:
        for name in ("output_prefix", "tokenizer_type"):
            if getattr(given, name) is None:
                flags.error(f"--{name.replace('_', '-')} is missing")
        if given.build_index:
            flags.error("--build-index takes no PREFIX beside --input: it is that of the datasets made")
    else:
        refuse_all((*_PREPROCESSING, "engine", "ray_address", "restart"), "without --input")
    if given.engine != "ray":
        refuse_all(("ray_address",), "without --engine ray")
    if given.build_index is None:
        refuse_all((*_INDEXING, "data_order"), "without --build-index")
    elif given.seq_length is None:
        flags.error("--build-index needs --seq-length N")
    elif given.data_order == "megatron":
        refuse_all(("epochs",), "with --data-order megatron")
    else:
        refuse_all(("train_samples", "valid_samples", "test_samples"), "without --data-order megatron")
    if given.chat_template is None:
        refuse_all(("chat_date",), "without --chat-template")
    elif given.input is not None and given.tokenizer_type != "HuggingFaceTokenizer":
        flags.error(
            "--chat-template needs --tokenizer-type HuggingFaceTokenizer: the tokens that separate messages are in its folder"
        )
    given.json_keys = given.json_keys or ["text" if given.chat_template is None else "messages"]
    if len(set(given.json_keys)) < len(given.json_keys):
        flags.error(f"--json-keys names a key twice: {' '.join(given.json_keys)}")
    check_column(given, flags, given.json_keys)
    if given.chat_template is not None:
        refuse_all(("cut_documents",), "with --chat-template: a conversation is not cut")
    if given.shuffle_seed is not None and given.shuffle_seed < 0:
        flags.error(f"--shuffle-seed must be 0 or more, not {given.shuffle_seed}")


def _preprocess(given: argparse.Namespace, config: DataConfig, screen: Screen) -> Summary:
    from megatron.data.tokenizer import required_tokenizer_json
    from megatron_lab.data_tools.preprocess.chat import ChatTemplate, told_of_named
    from megatron_lab.data_tools.preprocess.engines import Engine
    from megatron_lab.data_tools.preprocess.job import preprocess
    from megatron_lab.data_tools.preprocess.shard_work import PreprocessJob

    start = time.monotonic()
    chat = None
    if given.chat_template is not None:
        folder = required_tokenizer_json(config.tokenizer_model, config.tokenizer_type or "")
        chat = ChatTemplate.read(folder, given.chat_template or None, given.chat_date)
        for line in told_of_named(chat, folder):
            screen.note(line)
    summary = preprocess(
        given.input,
        given.output_prefix,
        PreprocessJob(
            config,
            tuple(given.json_keys),
            given.append_eod,
            skip_bad_lines=given.on_error in (SKIP, SKIP_FILES),
            skip_bad_files=given.on_error == SKIP_FILES,
            column=given.column,
            cut_documents=given.cut_documents,
            shuffle_seed=given.shuffle_seed,
            chat=chat,
        ),
        input_format=given.input_format,
        engine=Engine(given.engine, given.workers, given.ray_address),
        shard_size=given.shard_size,
        start="resume" if given.resume else "restart" if given.restart else "new",
        note=screen.note,
        progress=screen.progress,
    )
    for line in summary.bad_lines[:_SHOWN_BAD_LINES]:
        screen.note(f"left out: {line}")
    if summary.bad_lines_file:
        screen.note(f"all records left out: {summary.bad_lines_file}")
    screen.note(
        f"{summary.num_documents:,} documents, {summary.num_tokens:,} tokens from {summary.num_bytes / 1e6:.1f} MB in "
        f"{time.monotonic() - start:.1f} s; left out: {summary.num_empty:,} empty, {summary.num_bad_lines:,} bad lines"
        + (f", {summary.num_bad_files:,} files that cannot be read" if summary.num_bad_files else "")
    )
    if chat is not None:
        screen.note(
            f"{summary.num_learned:,} tokens ({summary.num_learned / max(summary.num_tokens, 1):.1%}) are answers, which count in "
            "the loss with --data-loss-mask"
        )
    for prefix in summary.prefixes:
        screen.note(f"wrote {prefix}.bin and {prefix}.idx")
    return summary


def _build_index(given: argparse.Namespace, prefixes: Sequence[str], screen: Screen) -> None:
    from megatron_lab.data_tools.index_making import build_index

    for prefix in prefixes:
        lines = build_index(
            prefix,
            split=DataConfig.split if given.split is None else given.split,
            seed=TrainingConfig.seed if given.seed is None else given.seed,
            seq_length=given.seq_length,
            epochs=given.epochs or 1,
            order=given.data_order or DataConfig.data_order,
            num_samples=(given.train_samples, given.valid_samples, given.test_samples),
            data_cache_path=given.data_cache_path,
        )
        for line in lines:
            screen.note(line)


class Screen:
    """Writes lines to a stream; on a terminal a line of progress replaces the one before."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._open = ""

    def note(self, text: str) -> None:
        """Write a line that stays."""
        self._stream.write(f"{self._erase()}{text}\n")
        self._stream.flush()

    def progress(self, text: str) -> None:
        """Write a line of progress."""
        if not self._stream.isatty():
            self.note(text)
            return
        self._stream.write(f"{self._erase()}{text}")
        self._stream.flush()
        self._open = text

    def _erase(self) -> str:
        erased = f"\r{' ' * len(self._open)}\r" if self._open else ""
        self._open = ""
        return erased


class _Stopped(BaseException):
    """A signal: everything is left in order."""

    number = signal.SIGTERM


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    """Raise, and again after a while: Python drops an exception that comes up in a destructor or in a hook."""
    if number != signal.SIGALRM:
        _Stopped.number = signal.Signals(number)
    signal.signal(signal.SIGALRM, _stop)
    signal.setitimer(signal.ITIMER_REAL, _SECONDS_TO_STOP)
    raise _Stopped


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, not {text!r}")
    return int(text)


def _date(text: str) -> str:
    try:
        return datetime.date.fromisoformat(text).isoformat()
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a day such as 2026-01-31, not {text!r}") from error


def _size(text: str) -> int:
    """Bytes, also as 64M."""
    found = re.fullmatch(r"(\d+)([KMG]?)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"must be a number of bytes such as 67108864 or 64M, not {text!r}")
    size = int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[found[2]]
    if size < 1024:
        raise argparse.ArgumentTypeError(f"must be at least 1K, not {text}")
    return size
