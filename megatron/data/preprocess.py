"""From JSON lines to indexed datasets: in chunks, by several processes, in the order of the input."""

from __future__ import annotations

import json
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.config.data import DataConfig
from megatron.data.indexed_dataset import IndexedDatasetWriter, token_dtype
from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.protocol import Tokenizer

_CHUNK_BYTES = 1 << 20
_CHUNKS_AHEAD = 2  # for each worker: bounds the memory
_KEPT_BAD_LINES = 1000


@dataclass(frozen=True)
class Job:
    """What to do with each line; every worker has a copy."""

    tokenizer: DataConfig
    """Only its tokenizer settings are read."""
    keys: tuple[str, ...]
    append_eod: bool


@dataclass
class Chunk:
    """Lines made into tokens. Documents without a token are left out."""

    num_bytes: int
    tokens: list[NDArray[np.integer]]
    """One array for each key."""
    lengths: list[list[int]]
    """Of the documents, for each key."""
    num_empty: int
    bad_lines: list[str]
    """FILE:LINE: what is wrong."""


@dataclass
class Summary:
    """What was done so far; documents and tokens are counted over all keys."""

    prefixes: tuple[str, ...]
    num_bytes: int = 0
    num_documents: int = 0
    num_tokens: int = 0
    num_empty: int = 0
    num_bad_lines: int = 0
    bad_lines: list[str] = field(default_factory=list)
    """FILE:LINE: what is wrong, of the first thousand."""


class BadLineError(ValueError):
    """A line that holds no text to encode."""


class Encoder:
    """Encodes chunks of lines: the work of a worker.

    Raises:
        ValueError: the tokenizer cannot be built.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._tokenizer: Tokenizer = build_tokenizer(job.tokenizer)
        self._tokenizer.encode("0")  # what a tokenizer builds at its first use belongs here
        self.dtype = np.dtype(token_dtype(self._tokenizer.vocab_size))

    def encode(self, path: str, first_line: int, lines: bytes) -> Chunk:
        """Encode whole lines of a file, of which the first is line `first_line`."""
        parts: list[list[NDArray[np.integer]]] = [[] for _ in self._job.keys]
        chunk = Chunk(len(lines), [], [[] for _ in self._job.keys], 0, [])
        for number, line in enumerate(lines.removesuffix(b"\n").split(b"\n"), start=first_line):
            if not line.strip():
                chunk.num_empty += 1
                continue
            try:
                documents = [self._tokenizer.encode(text) for text in self._texts(line)]
            except (ValueError, RecursionError) as error:
                chunk.bad_lines.append(f"{path}:{number}: {error}")
                continue
            for ids, done, lengths in zip(documents, parts, chunk.lengths, strict=True):
                if not ids:
                    chunk.num_empty += 1
                    continue
                if self._job.append_eod:
                    ids.append(self._tokenizer.eod)
                done.append(np.array(ids, dtype=self.dtype))
                lengths.append(len(ids))
        chunk.tokens = [np.concatenate(done) if done else np.empty(0, self.dtype) for done in parts]
        return chunk

    def _texts(self, line: bytes) -> list[str]:
        """The texts of a line, one for each key."""
        try:
            record = json.loads(line.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise BadLineError(f"not UTF-8: byte {line[error.start]:#04x} at column {error.start + 1}") from error
        except json.JSONDecodeError as error:
            raise BadLineError(f"not JSON: {error.msg} at column {error.colno}") from error
        if not isinstance(record, dict):
            raise BadLineError(f'not a JSON object like {{"{self._job.keys[0]}": "..."}}')
        for key in self._job.keys:
            if key not in record:
                raise BadLineError(f"no key {key!r} (--json-keys); the line has: {', '.join(map(repr, [*record][:8])) or 'none'}")
            if not isinstance(record[key], str):
                raise BadLineError(f"the value of key {key!r} is not a string but {json.dumps(record[key])[:40]}")
            try:
                record[key].encode()
            except UnicodeEncodeError as error:
                raise BadLineError(
                    f"key {key!r} holds half of a surrogate pair, which is no character: {error.object[error.start]!a}"
                ) from error
        return [record[key] for key in self._job.keys]


def preprocess(
    inputs: list[str],
    output_prefix: str,
    job: Job,
    *,
    num_workers: int = 1,
    skip_bad_lines: bool = False,
    progress: Callable[[Summary], None] = lambda _: None,
) -> Summary:
    """Write ``<output_prefix>_<key>_document.bin`` and ``.idx`` for each key; the same bytes for any number of workers.

    Memory is bounded by the longest line and the number of workers. If anything fails, nothing is written.

    Args:
        inputs: JSON-lines files, read in this order.
        output_prefix: Its folder must exist.
        job: Keys and tokenizer.
        num_workers: Processes; 1 works in this one.
        skip_bad_lines: Leave out lines that cannot be used, instead of stopping at the first.
        progress: Called after each chunk.

    Raises:
        ValueError: a missing file or folder, a tokenizer that cannot be built, a bad line, or no document at all.
    """
    for path in inputs:
        if not Path(path).is_file():
            raise ValueError(f"--input {path}: there is no such file.")
    if not Path(output_prefix).parent.is_dir():
        raise ValueError(
            f"--output-prefix {output_prefix}: the folder {Path(output_prefix).parent} does not exist.\n  Make it first."
        )
    encoder = Encoder(job)
    summary = Summary(tuple(f"{output_prefix}_{key}_document" for key in job.keys))
    with ExitStack() as stack:
        writers = [stack.enter_context(IndexedDatasetWriter(prefix, encoder.dtype)) for prefix in summary.prefixes]
        chunks = _encode_here(inputs, encoder) if num_workers <= 1 else _encode_in_processes(inputs, job, num_workers)
        stack.enter_context(closing(chunks))
        for chunk in chunks:
            if chunk.bad_lines and not skip_bad_lines:
                raise ValueError(
                    f"{chunk.bad_lines[0]}\n  Mend the line, or leave such lines out with --on-error skip. Nothing is written."
                )
            for writer, tokens, lengths in zip(writers, chunk.tokens, chunk.lengths, strict=True):
                writer.add_documents(tokens, lengths)
                summary.num_documents += len(lengths)
                summary.num_tokens += tokens.size
            summary.num_bytes += chunk.num_bytes
            summary.num_empty += chunk.num_empty
            summary.num_bad_lines += len(chunk.bad_lines)
            summary.bad_lines += chunk.bad_lines[: _KEPT_BAD_LINES - len(summary.bad_lines)]
            progress(summary)
        for writer in writers:
            if not writer.num_documents:
                raise ValueError(f"no document with a token for {writer.prefix} in {', '.join(inputs)}. Nothing is written.")
    return summary


def _chunks(inputs: list[str]) -> Iterator[tuple[str, int, bytes]]:
    """Whole lines, about a megabyte at a time: file, number of the first line, the lines."""
    for path in inputs:
        first_line = 1
        with Path(path).open("rb") as file:
            while lines := file.read(_CHUNK_BYTES) + file.readline():
                yield path, first_line, lines
                first_line += lines.count(b"\n")


def _encode_here(inputs: list[str], encoder: Encoder) -> Generator[Chunk, None, None]:
    for chunk in _chunks(inputs):
        yield encoder.encode(*chunk)


def _encode_in_processes(inputs: list[str], job: Job, num_workers: int) -> Generator[Chunk, None, None]:
    """Chunks in the order of the input, with a bounded number of them under way."""
    executor = ProcessPoolExecutor(num_workers, initializer=_start_worker, initargs=(job,))
    under_way: deque[Future[Chunk]] = deque()
    try:
        for chunk in _chunks(inputs):
            under_way.append(executor.submit(_encode_in_worker, *chunk))
            if len(under_way) >= _CHUNKS_AHEAD * num_workers:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    except BrokenProcessPool as error:
        raise ValueError(
            f"a worker process ended before its work was done ({error}); the system may have killed it for want of memory.\n"
            f"  Try fewer than --workers {num_workers}. Nothing is written."
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


_worker: Encoder | None = None  # of a worker process


def _start_worker(job: Job) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, and that ends the workers in order
    _worker = Encoder(job)


def _encode_in_worker(path: str, first_line: int, lines: bytes) -> Chunk:
    assert _worker is not None
    return _worker.encode(path, first_line, lines)
