"""Makes one shard, from text to part files, for every engine; and the settings by which a later run recognises the result."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.config.data import TOKENIZER_FILES, DataConfig, tokenizer_settings
from megatron.data.indexed_dataset import MARK_TYPE, loss_mask_prefix, token_dtype
from megatron.data.indexed_writer import IndexedDatasetWriter, write_dataset
from megatron.data.samples import ENDS
from megatron.data.tokenizer import Tokenizer, build_tokenizer, required_tokenizer_json
from megatron_lab.data_tools.preprocess.chat import ChatTemplate, Messages, check_messages, encoder_of
from megatron_lab.data_tools.preprocess.errors import BadRecordError, DamagedFileError
from megatron_lab.data_tools.preprocess.input_shards import InputShard
from megatron_lab.data_tools.preprocess.part_files import PartFolder, ShardCounts, ShardReport
from megatron_lab.data_tools.preprocess.storage import digest, told_where_no_room
from megatron_lab.data_tools.preprocess.text_records import PARSERS, InputPiece, parse_values, records

FORMAT = 1
"""Version of part files and reports; those of another version are not used again."""


@dataclass(frozen=True)
class PreprocessJob:
    """What to do with each record. Every worker has a copy."""

    tokenizer: DataConfig
    """Only its tokenizer settings are read."""
    keys: tuple[str, ...]
    append_eod: bool
    skip_bad_lines: bool = False
    """Leave out records that cannot be used, instead of stopping at the first."""
    skip_bad_files: bool = False
    """Leave out the rest of a file that is damaged too, and files that cannot be opened."""
    column: str | None = None
    """Where the texts of the only key are found in JSON lines and tables; None: under its own name."""
    cut_documents: int | None = None
    """Characters above which a text becomes several documents; None: a text is a document."""
    shuffle_seed: int | None = None
    """Write the documents in a random order that follows from this; None: in the order of the input."""
    chat: ChatTemplate | None = None
    """Writes the text of the records' values, which are conversations; None where they are texts."""

    @property
    def datasets(self) -> tuple[str, ...]:
        """Names of the datasets that are made, to be added to the prefix: one for each key, then their loss masks."""
        made = tuple(f"_{key}_document" for key in self.keys)
        return made if self.chat is None else made + tuple(map(loss_mask_prefix, made))

    @property
    def fields(self) -> tuple[str, ...]:
        """Keys or columns that are read for the keys."""
        return self.keys if self.column is None else (self.column,)

    @property
    def tokenizer_file(self) -> Path:
        """The tokenizer.json that encodes conversations."""
        return required_tokenizer_json(self.tokenizer.tokenizer_model, self.tokenizer.tokenizer_type or "")


def tokenizer_of(job: PreprocessJob) -> tuple[Tokenizer, type[np.integer]]:
    """The tokenizer, and the integer type in which its ids are written. Made once in a process, and inherited by forked ones."""
    return _make(job.tokenizer, file_digests(job.tokenizer))


@functools.lru_cache(maxsize=1)
def _make(config: DataConfig, digests: tuple[tuple[str, str], ...]) -> tuple[Tokenizer, type[np.integer]]:
    tokenizer = build_tokenizer(config)
    tokenizer.encode_array("")  # some encoders are made at their first use
    return tokenizer, token_dtype(tokenizer.vocab_size)


@functools.lru_cache(maxsize=1)
def file_digests(config: DataConfig) -> tuple[tuple[str, str], ...]:
    """Name and content digest of each setting that is a file of the tokenizer; read again after `file_digests.cache_clear()`."""
    given = ((name, getattr(config, name)) for name in TOKENIZER_FILES)
    return tuple((name, digest(path)) for name, path in given if path is not None and Path(path).exists())


def settings(job: PreprocessJob) -> dict[str, object]:
    """All that decides the result of a shard beside its inputs; files by their content.

    How bad lines are treated is not among them: a shard without any is the same either way.
    """
    tokenizer, dtype = tokenizer_of(job)
    kind = job.tokenizer.tokenizer_type or ""
    contents = dict(file_digests(job.tokenizer))
    return {
        "format": FORMAT,
        "json keys": list(job.keys),
        "append eod": job.append_eod,
        **({} if job.column is None else {"column": job.column}),
        **({} if job.cut_documents is None else {"cut documents": job.cut_documents}),
        "tokenizer type": kind,
        **{name.replace("_", " "): contents.get(name, getattr(job.tokenizer, name)) for name in tokenizer_settings(kind)},
        "number of token ids": tokenizer.vocab_size,
        "eod id": tokenizer.eod,
        "token type": np.dtype(dtype).name,
        **({} if job.chat is None else {"chat template": job.chat.text, "chat date": job.chat.date}),
    }


MAX_DOCUMENT_TOKENS = 2**31 - 1
"""The index holds lengths as int32, so no document may be longer."""

_TOKENS_AT_ONCE = 1 << 18  # kept in memory until they are written
_DOCUMENTS_AT_ONCE = 1 << 14
_KEPT_BAD_RECORDS = 10_000
_SECONDS_BETWEEN_COUNTS = 0.5


_ENDS = ("\n\n", "\n", " ")


def parts_of(text: str, most: int) -> Iterator[str]:
    """A text in parts of at most so many characters: each ends behind a blank line, else behind a line, else behind a blank, if
    there is one in its second half. Together they are the text; one that is short enough is its only part."""
    begin = 0
    while len(text) - begin > most:
        half, last = begin + most // 2, begin + most
        ends = (text.rfind(end, half, last) + len(end) for end in _ENDS if end in text[half:last])
        begin, before = next(ends, last), begin
        yield text[before:begin]
    yield text[begin:]


class BadShardError(ValueError):
    """The first bad record of a shard, where bad ones stop the job.

    Args:
        shard: Name of the shard.
        piece: Index of the piece of the shard that holds it.
        record: Number of the record in the piece, from 0.
        reason: What is wrong with it.
    """

    def __init__(self, shard: str, piece: int, record: int, reason: str) -> None:
        super().__init__(shard, piece, record, reason)
        self.shard, self.piece, self.record, self.reason = shard, piece, record, reason


def run_shard(
    job: PreprocessJob, shard: InputShard, folder: str, listen: Callable[[ShardCounts], None] = lambda counts: None
) -> ShardReport:
    """Make a shard into a part of each dataset in the folder, unless an earlier run has.

    The result depends on nothing but the arguments and the files that they name. It may be run again after any failure.

    Args:
        folder: for the parts; a path or a URL.
        listen: called now and then with the progress.

    Raises:
        BadShardError: the first bad record, unless they are skipped.
        ValueError: a damaged or changed file, a full disk.
    """
    parts = PartFolder(folder, len(job.datasets))
    done = parts.finished(shard.name)
    if done is not None and (job.skip_bad_lines or not done.num_bad):
        return dataclasses.replace(done, new=False)
    remedy = "Make room and go on with --resume: finished shards are kept."
    with parts.workspace() as workspace, told_where_no_room(workspace, remedy):
        with ExitStack() as stack:
            _, dtype = tokenizer_of(job)
            writers = [
                stack.enter_context(write_dataset(f"{workspace}/{shard.name}_{number}", dtype_of, sync=False))
                for number in range(len(job.datasets))
                for dtype_of in [dtype if number < len(job.keys) else MARK_TYPE]
            ]
            work = _Work(job, shard, writers, listen)
            for number, piece in enumerate(shard.pieces):
                try:
                    work.add(number, piece)
                except MemoryError as error:
                    raise ValueError(
                        f"{piece.path}: not enough memory for a record of it.\n"
                        "  Divide its longest documents, or go on with --resume and fewer --workers: finished shards are kept."
                    ) from error
            report = work.report()
        parts.finish(shard.name, workspace, report)
    return report


class _Work:
    """The shard that is being made."""

    def __init__(
        self,
        job: PreprocessJob,
        shard: InputShard,
        writers: Sequence[IndexedDatasetWriter],
        listen: Callable[[ShardCounts], None],
    ) -> None:
        self._job, self._shard, self._writers, self._listen = job, shard, writers, listen
        self._tokenizer, _ = tokenizer_of(job)
        # Of the smallest type, so that the ids beside it keep theirs.
        self._eod = np.array([self._tokenizer.eod], np.min_scalar_type(self._tokenizer.eod))
        self._of_keys = writers[: len(job.keys)]
        self._tokens: list[list[NDArray[np.integer]]] = [[] for _ in writers]
        self._lengths: list[list[int]] = [[] for _ in writers]
        self._waiting = 0
        self._report = ShardReport([], 0, 0, 0, [], 0, [])
        self._told = time.monotonic()

    def add(self, number: int, piece: InputPiece) -> None:
        """Add all records of a piece."""
        parse, keys, count = PARSERS[piece.kind], self._job.fields, 0
        check = parse_values if self._job.chat is None else check_messages
        try:
            with closing(records(piece, keys, self._at)) as found:
                for count, record in enumerate(found, start=1):
                    try:
                        values = parse(record, keys, check)
                        if values is None:
                            self._report.num_empty += 1
                        else:
                            self._encode(values)
                    except (ValueError, RecursionError) as error:
                        self._refuse(number, count - 1, str(error).replace("\n", " "))
        except DamagedFileError as error:
            if not self._job.skip_bad_files:
                raise
            self._refuse(number, count, f"the rest of the file is left out: {' '.join(str(error).split())}")
        if not piece.unchanged():
            raise DamagedFileError(f"{piece.path} was changed while it was read.\n  Start again with --resume.")
        self._report.num_records.append(count)
        self._report.num_bytes += piece.num_bytes
        self._at(0)

    def report(self) -> ShardReport:
        """The report of the shard, once everything is handed to the writers."""
        self._write()
        self._report.num_documents = [writer.num_documents for writer in self._of_keys]
        self._report.num_tokens = sum(writer.num_tokens for writer in self._of_keys)
        return self._report

    def _encode(self, values: Sequence[Any]) -> None:
        """Encode and add the documents of a record, all of them or none."""
        job = self._job
        if job.cut_documents is not None and job.chat is None:
            parts = [list(parts_of(text, job.cut_documents)) for text in values]
            for place in range(max(map(len, parts))):
                self._add([part[place] if place < len(part) else "" for part in parts], first=not place)
        else:
            self._add(values)

    def _add(self, values: Sequence[Any], *, first: bool = True) -> None:
        """Encode and add a document for each key.

        Args:
            first: they are the first of a record, which count where they are empty.
        """
        job = self._job
        documents = [self._tokenizer.encode_array(text) for text in values] if job.chat is None else self._conversations(values)
        for key, ids in zip(job.keys, documents, strict=False):
            if len(ids) + job.append_eod > MAX_DOCUMENT_TOKENS:
                raise BadRecordError(
                    f"key {key!r} has {len(ids) + job.append_eod:,} tokens; a document has at most {MAX_DOCUMENT_TOKENS:,} "
                    "(2**31 - 1 is what the index can hold): divide it"
                )
        self._report.num_empty += first * sum(not len(ids) for ids in documents[: len(job.keys)])
        for number, (ids, tokens, lengths) in enumerate(zip(documents, self._tokens, self._lengths, strict=True)):
            if not len(ids):
                continue
            added = [ids]
            if number < len(job.keys):
                added += [self._eod] if job.append_eod else []
            else:
                # To stop belongs to the answer, where that is the last.
                added += [ids[-1:].copy()] if job.append_eod else []
                self._report.num_learned += sum(int(marks.sum()) for marks in added)
                added[-1][-1] |= ENDS
            tokens += added
            lengths.append(len(ids) + job.append_eod)
            self._waiting += len(ids)
        if self._waiting > _TOKENS_AT_ONCE or len(self._lengths[0]) > _DOCUMENTS_AT_ONCE:
            self._write()

    def _conversations(self, values: Sequence[Messages]) -> list[NDArray[np.integer]]:
        """Ids of each conversation, then marks of each."""
        assert self._job.chat is not None
        encoder = encoder_of(self._job.chat, self._job.tokenizer_file)
        encoded = [encoder.encode(messages) for messages in values]
        return [*(ids for ids, _ in encoded), *(marks for _, marks in encoded)]

    def _write(self) -> None:
        for writer, tokens, lengths in zip(self._writers, self._tokens, self._lengths, strict=True):
            if lengths:
                writer.add_documents(np.concatenate(tokens), lengths)
                tokens.clear()
                lengths.clear()
        self._waiting = 0

    def _refuse(self, piece: int, record: int, reason: str) -> None:
        if not self._job.skip_bad_lines:
            raise BadShardError(self._shard.name, piece, record, reason)
        self._report.num_bad += 1
        if len(self._report.bad) < _KEPT_BAD_RECORDS:
            self._report.bad.append((piece, record, reason))

    def _at(self, num_bytes: int) -> None:
        """Report the progress, now and then, at so many bytes of a piece."""
        now = time.monotonic()
        if now - self._told > _SECONDS_BETWEEN_COUNTS:
            self._told = now
            documents = sum(writer.num_documents for writer in self._of_keys)
            tokens = sum(writer.num_tokens for writer in self._of_keys)
            self._listen(ShardCounts(self._report.num_bytes + num_bytes, documents, tokens))
