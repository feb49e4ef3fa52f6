"""Conversion of one shard (part of the input of preprocessing) from texts to dataset files in the job folder.

The module also lists the settings by which a later run recognizes finished shards.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.config.data import TOKENIZER_FILE_SETTINGS, DataConfig, get_tokenizer_settings
from megatron.data.indexed_dataset import MARK_TYPE, get_loss_mask_prefix, get_token_dtype
from megatron.data.indexed_writer import IndexedDatasetWriter, write_dataset
from megatron.data.samples import DOCUMENT_END
from megatron.data.tokenizer import Tokenizer, build_tokenizer, require_tokenizer_json
from megatron_lab.data_tools.preprocess.chat import ChatTemplate, get_encoder
from megatron_lab.data_tools.preprocess.chat_records import Chat, ChatReader
from megatron_lab.data_tools.preprocess.errors import BadRecordError, DamagedFileError, UndecodableRecordError
from megatron_lab.data_tools.preprocess.file_formats import DETECTED_FORMATS, split_format
from megatron_lab.data_tools.preprocess.input_shards import InputShard
from megatron_lab.data_tools.preprocess.part_files import JobFolder, ShardCounts, ShardReport
from megatron_lab.data_tools.preprocess.storage import compute_digest, compute_joint_digest, explain_disk_full
from megatron_lab.data_tools.preprocess.text_encoding import RecordDecoder, TextEncoding
from megatron_lab.data_tools.preprocess.text_records import InputRange, ValueCheck, get_parser, parse_values, read_records
from megatron_lab.tokenizers.file_names import COMPANION_FILES

FORMAT_VERSION = 1
"""Version of part files and reports. Files of another version are not reused."""


@dataclass(frozen=True)
class PreprocessJob:
    """Settings of a preprocessing job that determine how records are converted to tokens. Every worker has a copy."""

    tokenizer: DataConfig
    """Settings of the tokenizer. The other settings of this object, such as paths of datasets, are not used."""
    keys: tuple[str, ...]
    append_eod: bool
    skip_bad_records: bool = False
    """Skip invalid records, instead of stopping at the first invalid record."""
    skip_bad_files: bool = False
    """Also skip files that cannot be opened, and the unread part of a damaged file."""
    column: str | None = None
    """JSON key or table column that contains the texts, if it differs from the key that names the dataset. It is allowed only
    in a job with a single dataset."""
    cut_documents: int | None = None
    """Maximum number of characters of a document. Longer texts are split into several documents. None for no limit."""
    shuffle_seed: int | None = None
    """Seed for shuffling the documents of the datasets; None keeps the order of the input."""
    chat: ChatTemplate | None = None
    """Chat template with which conversations are rendered as text; None if the records are texts."""
    text_encoding: TextEncoding = TextEncoding()  # noqa: RUF009 - a constant
    """Encoding of the input files, and treatment of invalid bytes."""
    chat_keys: tuple[str, ...] | None = None
    """JSON keys or table columns that contain the prompt and the answer of a conversation (`chat_records.PAIR_FORMS`). None if
    a conversation is a list of messages, or if the records are texts."""

    @property
    def dataset_suffixes(self) -> tuple[str, ...]:
        """Suffix of each dataset's path after the output prefix: one dataset per JSON key, then the loss masks if the records are
        conversations."""
        suffixes = tuple(f"_{key}_document" for key in self.keys)
        return suffixes if self.chat is None else suffixes + tuple(map(get_loss_mask_prefix, suffixes))

    @property
    def columns(self) -> tuple[str, ...]:
        """JSON keys, or table columns, that every record must have: one for each dataset, or two for a prompt and an answer."""
        return self.chat_keys or (self.keys if self.column is None else (self.column,))

    @property
    def tokenizer_file(self) -> Path:
        """Path of the tokenizer.json that encodes conversations."""
        return require_tokenizer_json(self.tokenizer.tokenizer_model, self.tokenizer.tokenizer_type or "")


def get_tokenizer(job: PreprocessJob) -> tuple[Tokenizer, type[np.integer]]:
    """Return the tokenizer of a job, and the integer type in which a dataset stores its token ids.

    Each process builds the tokenizer once, and forked processes inherit it.
    """
    return _build_tokenizer(job.tokenizer, compute_file_digests(job.tokenizer))


@functools.lru_cache(maxsize=1)
def _build_tokenizer(config: DataConfig, digests: tuple[tuple[str, str], ...]) -> tuple[Tokenizer, type[np.integer]]:
    tokenizer = build_tokenizer(config)
    tokenizer.encode_array("")  # some tokenizers build their encoder at its first use
    return tokenizer, get_token_dtype(tokenizer.vocab_size)


@functools.lru_cache(maxsize=1)
def compute_file_digests(config: DataConfig) -> tuple[tuple[str, str], ...]:
    """Return (setting, hash of the file's content) for each tokenizer setting that names a file. The hash of a tokenizer.json
    covers the files next to it that add tokens, but no other files of its folder, such as the weights of a model.

    The hashes are cached until `compute_file_digests.cache_clear()` is called.
    """
    if config.tokenizer_type == "HuggingFaceTokenizer":
        file = require_tokenizer_json(config.tokenizer_model, config.tokenizer_type)
        files = [path for name in (file.name, *COMPANION_FILES) if (path := file.parent / name).is_file()]
        return (("tokenizer_model", compute_joint_digest(files)),)
    paths = ((name, getattr(config, name)) for name in TOKENIZER_FILE_SETTINGS)
    return tuple((name, compute_digest(path)) for name, path in paths if path is not None and Path(path).is_file())


def get_document_end(job: PreprocessJob, tokenizer: Tokenizer) -> NDArray[np.integer]:
    """Return the ids that follow the text of each document. A chat template writes the end of a conversation itself, except the
    end-of-document id of --append-eod."""
    if job.chat is not None:
        ids = [tokenizer.eod] if job.append_eod else []
    else:
        ids = tokenizer.get_document_end(append_eod=job.append_eod)
    # The smallest type that holds the ids, so that `concatenate` keeps the type of the other ids.
    return np.array(ids, np.min_scalar_type(max(ids, default=0)))


def get_job_settings(job: PreprocessJob) -> dict[str, object]:
    """Return the settings that affect the output of a shard. If they change, finished shards cannot be reused.

    Tokenizer files are represented by hashes of their content. The treatment of invalid records and bytes is not included, because
    it does not affect shards without them.
    """
    tokenizer, dtype = get_tokenizer(job)
    tokenizer_type = job.tokenizer.tokenizer_type or ""
    digests = dict(compute_file_digests(job.tokenizer))
    return {
        "format": FORMAT_VERSION,
        "json keys": list(job.keys),
        "append eod": job.append_eod,
        **({} if job.column is None else {"column": job.column}),
        **({} if job.text_encoding.name is None else {"encoding": job.text_encoding.name}),
        **({} if job.cut_documents is None else {"cut documents": job.cut_documents}),
        "tokenizer type": tokenizer_type,
        **{
            name.replace("_", " "): digests.get(name, getattr(job.tokenizer, name))
            for name in get_tokenizer_settings(tokenizer_type)
            if name != "add_bos"
        },
        **_get_frame_settings(job, tokenizer),
        "number of token ids": tokenizer.vocab_size,
        "eod id": tokenizer.eod,
        "token type": np.dtype(dtype).name,
        **({} if job.chat is None else _get_chat_settings(job, job.chat)),
    }


_CHAT_VERSION = 2
"""Version of the conversion of conversations. Version 1 did not pass tools to the template, among others."""


def _get_chat_settings(job: PreprocessJob, chat: ChatTemplate) -> dict[str, object]:
    return {
        "chat template": chat.text,
        "chat date": chat.date,
        "version of the conversion of conversations": _CHAT_VERSION,
        **({} if chat.tools_text is None else {"chat template for tools": chat.tools_text}),
        **({} if job.chat_keys is None else {"keys of prompt and answer": list(job.chat_keys)}),
    }


def _get_frame_settings(job: PreprocessJob, tokenizer: Tokenizer) -> dict[str, object]:
    """Return the settings about the ids before and after each text, as far as they differ from those of the tokenizer type: no ids,
    except bos of Llama2Tokenizer. A chat template writes these ids itself."""
    usual = (tokenizer.bos,) if job.tokenizer.tokenizer_type == "Llama2Tokenizer" else ()
    prefix, suffix = tokenizer.prefix_ids, tokenizer.suffix_ids
    if job.chat is not None:
        return {}
    settings: dict[str, object] = {} if prefix == usual else {"ids before a text": list(prefix)}
    return settings | ({"ids after a text": list(suffix)} if suffix else {})


MAX_DOCUMENT_TOKENS = 2**31 - 1
"""Maximum length of a document, because the index stores lengths as int32."""

_MAX_BUFFERED_TOKENS = 1 << 18  # buffered in memory before they are written
_MAX_BUFFERED_DOCUMENTS = 1 << 14
_MAX_REPORTED_RECORDS = 10_000
"""Maximum number of invalid records in the report of a shard."""
_PROGRESS_INTERVAL_S = 0.5
"""Minimum time between two progress reports of a shard, in seconds."""


_SEPARATORS = ("\n\n", "\n", " ")
"""Texts after which `split_text` may split, in order of preference."""


def split_text(text: str, max_characters: int) -> Iterator[str]:
    """Yield consecutive segments of a text, each of at most `max_characters`. A shorter text is yielded unchanged.

    A segment ends after the last blank line in the second half of its `max_characters`. Without a blank line there, it ends after
    the last line break there, or else after the last space. Otherwise it has exactly `max_characters`.
    """
    start = 0
    while len(text) - start > max_characters:
        middle, limit = start + max_characters // 2, start + max_characters
        split_points = (
            text.rfind(separator, middle, limit) + len(separator) for separator in _SEPARATORS if separator in text[middle:limit]
        )
        start, previous = next(split_points, limit), start
        yield text[previous:start]
    yield text[start:]


class BadShardError(ValueError):
    """Raised for the first invalid record of a shard, if the job does not skip invalid records.

    Args:
        shard: name of the shard.
        range_index: index of the record's file range in the shard.
        record_index: index of the record in the range, from 0.
        reason: problem of the record.
    """

    def __init__(self, shard: str, range_index: int, record_index: int, reason: str) -> None:
        super().__init__(shard, range_index, record_index, reason)
        self.shard, self.range_index, self.record_index, self.reason = shard, range_index, record_index, reason


def run_shard(
    job: PreprocessJob, shard: InputShard, folder: str, on_progress: Callable[[ShardCounts], None] = lambda counts: None
) -> ShardReport:
    """Convert a shard (part of the input) to one part of each dataset, and write these parts to the job folder.

    If an earlier run has finished the shard, return the report of that run. The output depends only on the arguments and the files
    that they name, so the call can be repeated after any failure.

    Args:
        folder: path or URL of the job folder.
        on_progress: called repeatedly with the counts so far.

    Raises:
        BadShardError: a record is invalid, and the job does not skip invalid records.
        ValueError: a file is damaged or was changed, or the disk is full.
    """
    job_folder = JobFolder(folder, len(job.dataset_suffixes))
    finished = job_folder.find_finished(shard.name)
    if finished is not None and _can_reuse(finished, shard, job):
        return dataclasses.replace(finished, new=False)
    remedy = "Make room and continue with --resume: finished shards are kept."
    with job_folder.open_workspace() as workspace, explain_disk_full(workspace, remedy):
        with ExitStack() as stack:
            _, dtype = get_tokenizer(job)
            writers = [
                stack.enter_context(write_dataset(f"{workspace}/{shard.name}_{dataset_index}", part_dtype, sync=False))
                for dataset_index in range(len(job.dataset_suffixes))
                for part_dtype in [dtype if dataset_index < len(job.keys) else MARK_TYPE]
            ]
            builder = _ShardBuilder(job, shard, writers, on_progress)
            for range_index, input_range in enumerate(shard.ranges):
                try:
                    builder.add(range_index, input_range)
                except MemoryError as error:
                    raise ValueError(
                        f"{input_range.path}: not enough memory for a record of this file.\n"
                        "  Split its longest documents, or continue with --resume and fewer --workers: finished shards are kept."
                    ) from error
            report = builder.finish()
        job_folder.finish_shard(shard.name, workspace, report)
    return report


def _can_reuse(report: ShardReport, shard: InputShard, job: PreprocessJob) -> bool:
    """Return whether a finished shard is what this job would write, although --on-error, --errors or the version of the tool may
    have changed.

    Earlier versions did not detect encodings: they read text files and tables of other encodings differently, or not at all. JSON
    lines and parquet files have the same content in all versions if all their records are valid.
    """
    if report.num_bad and not job.skip_bad_records:
        return False
    if report.errors is None:
        return not report.num_bad and all(
            split_format(shard_range.file_format)[0] not in DETECTED_FORMATS for shard_range in shard.ranges
        )
    return report.errors == job.text_encoding.errors or not report.num_bad + report.num_replaced_records


class _ShardBuilder:
    """Converter of one shard (part of the input): it encodes the records and passes the token ids to the dataset writers.

    Args:
        writers: one writer per dataset, in the order of `PreprocessJob.dataset_suffixes`.
        on_progress: called with the counts so far, at most every half second.
    """

    def __init__(
        self,
        job: PreprocessJob,
        shard: InputShard,
        writers: Sequence[IndexedDatasetWriter],
        on_progress: Callable[[ShardCounts], None],
    ) -> None:
        self._job, self._shard, self._writers, self._on_progress = job, shard, writers, on_progress
        self._tokenizer, _ = get_tokenizer(job)
        self._end = get_document_end(job, self._tokenizer)
        self._token_writers = writers[: len(job.keys)]
        self._tokens: list[list[NDArray[np.integer]]] = [[] for _ in writers]
        self._lengths: list[list[int]] = [[] for _ in writers]
        self._num_buffered = 0
        self._report = ShardReport([], 0, 0, 0, [], 0, [], errors=job.text_encoding.errors)
        self._last_progress = time.monotonic()

    def add(self, range_index: int, input_range: InputRange) -> None:
        """Encode all records of a file range.

        Args:
            range_index: index of the range in the shard, for messages about invalid records.
        """
        parse, columns, count = get_parser(input_range.file_format), self._job.columns, 0
        check, optional_columns = self._select_check()
        decoder = RecordDecoder(self._job.text_encoding)
        try:
            with closing(read_records(input_range, columns, self._report_progress, decoder, optional_columns)) as range_records:
                for count, record in enumerate(range_records, start=1):
                    try:
                        values = parse(record, columns, check, decoder, optional_columns)
                        if values is None:
                            self._report.num_empty += 1
                        else:
                            self._encode(values)
                        if decoder.replaced is not None:
                            self._add_replaced(range_index, count - 1, decoder)
                    except (ValueError, RecursionError) as error:
                        decoder.take_replaced()
                        self._report.num_undecodable += isinstance(error, UndecodableRecordError)
                        advice = "" if self._job.skip_bad_records else decoder.suggest_encoding(record)
                        self._skip_record(range_index, count - 1, str(error).replace("\n", " ") + advice)
        except DamagedFileError as error:
            if not self._job.skip_bad_files:
                raise
            self._skip_record(range_index, count, f"the rest of the file is skipped: {' '.join(str(error).split())}")
        if not input_range.is_unchanged():
            raise DamagedFileError(f"{input_range.path} was changed while this job read it.\n  Continue the job with --resume.")
        self._report.num_records.append(count)
        if decoder.note is not None:
            self._report.num_encodings += 1
            self._report.encodings.append((range_index, decoder.note))
        self._report.num_bytes += input_range.num_bytes
        self._report_progress(0)

    def _select_check(self) -> tuple[ValueCheck, tuple[str, ...]]:
        """Return the function that checks the values of a record, and the keys that it needs besides `PreprocessJob.columns`."""
        if self._job.chat is None:
            return parse_values, ()
        reader = ChatReader(self._job.columns, get_encoder(self._job.chat, self._job.tokenizer_file).variables)
        return reader.read, reader.optional_keys

    def finish(self) -> ShardReport:
        """Write the documents that are still in memory to the datasets, and return the report of the shard."""
        self._write()
        self._report.num_documents = [writer.num_documents for writer in self._token_writers]
        self._report.num_tokens = sum(writer.num_tokens for writer in self._token_writers)
        return self._report

    def _encode(self, values: Sequence[Any]) -> None:
        """Encode a record and add its documents to the datasets.

        A long text gives several documents if `cut_documents` is set, and a conversation if its template changes earlier answers.

        Args:
            values: text or conversation of each JSON key.
        """
        job = self._job
        if job.chat is not None:
            for i, encoded in enumerate(self._encode_conversations(values)):
                self._add_documents(encoded, first=not i)
            return
        limit = job.cut_documents
        text_segments = [[text] if limit is None else list(split_text(text, limit)) for text in values]
        for i in range(max(map(len, text_segments))):
            texts = [segments[i] if i < len(segments) else "" for segments in text_segments]
            self._add_documents([self._tokenizer.encode_array(text) for text in texts], first=not i)

    def _add_documents(self, encoded: Sequence[NDArray[np.integer]], *, first: bool) -> None:
        """Add one document for each JSON key to the datasets.

        Args:
            encoded: token ids for each JSON key, then the loss masks if the records are conversations.
            first: whether these are the first documents of their record. Only then do documents without tokens count as empty.
        """
        job = self._job
        for key, ids in zip(job.keys, encoded, strict=False):
            if len(ids) + len(self._end) > MAX_DOCUMENT_TOKENS:
                raise BadRecordError(
                    f"the text of key {key!r} has {len(ids) + len(self._end):,} tokens, but an indexed dataset supports at most "
                    f"{MAX_DOCUMENT_TOKENS:,} per document: split the document"
                )
        self._report.num_empty += first * sum(not len(ids) for ids in encoded[: len(job.keys)])
        for dataset_index, (ids, tokens, lengths) in enumerate(zip(encoded, self._tokens, self._lengths, strict=True)):
            if not len(ids):
                continue
            arrays = [ids]
            if dataset_index < len(job.keys):
                arrays += [self._end] if len(self._end) else []
            else:
                # The eod token gets the mark of the last token: after a final answer the model learns to stop.
                arrays += [ids[-1:].copy()] if job.append_eod else []
                self._report.num_learned += sum(int(marks.sum()) for marks in arrays)
                arrays[-1][-1] |= DOCUMENT_END
            tokens += arrays
            lengths.append(len(ids) + len(self._end))
            self._num_buffered += len(ids)
        if self._num_buffered > _MAX_BUFFERED_TOKENS or len(self._lengths[0]) > _MAX_BUFFERED_DOCUMENTS:
            self._write()

    def _encode_conversations(self, chats: Sequence[Chat]) -> Iterator[list[NDArray[np.integer]]]:
        """Yield the token ids of one document of each conversation, followed by their loss masks, until no document is left.

        Args:
            chats: conversation of each JSON key.
        """
        assert self._job.chat is not None
        encoder = get_encoder(self._job.chat, self._job.tokenizer_file)
        encoded = [encoder.encode(chat) for chat in chats]
        for chat in encoded:
            for note, count in chat.notes.items():
                self._report.chat_notes[note] = self._report.chat_notes.get(note, 0) + count
        none = (np.empty(0, np.uint32), np.empty(0, MARK_TYPE))
        for documents in itertools.zip_longest(*(chat.documents for chat in encoded), fillvalue=none):
            yield [*(ids for ids, _ in documents), *(marks for _, marks in documents)]

    def _write(self) -> None:
        for writer, tokens, lengths in zip(self._writers, self._tokens, self._lengths, strict=True):
            if lengths:
                writer.add_documents(np.concatenate(tokens), lengths)
                tokens.clear()
                lengths.clear()
        self._num_buffered = 0

    def _skip_record(self, range_index: int, record_index: int, reason: str) -> None:
        if not self._job.skip_bad_records:
            raise BadShardError(self._shard.name, range_index, record_index, reason)
        self._report.num_bad += 1
        if len(self._report.bad) < _MAX_REPORTED_RECORDS:
            self._report.bad.append((range_index, record_index, reason))

    def _add_replaced(self, range_index: int, record_index: int, decoder: RecordDecoder) -> None:
        """Add the record whose invalid bytes the decoder has replaced to the report."""
        replaced = decoder.take_replaced()
        assert replaced is not None
        self._report.num_replaced_records += 1
        self._report.num_replaced_bytes += replaced[0]
        if len(self._report.replaced) < _MAX_REPORTED_RECORDS:
            self._report.replaced.append((range_index, record_index, *replaced))

    def _report_progress(self, num_bytes: int) -> None:
        """Call `on_progress` with the counts so far, at most every half second.

        Args:
            num_bytes: bytes of the current input range that have been read.
        """
        now = time.monotonic()
        if now - self._last_progress > _PROGRESS_INTERVAL_S:
            self._last_progress = now
            num_documents = sum(writer.num_documents for writer in self._token_writers)
            num_tokens = sum(writer.num_tokens for writer in self._token_writers)
            self._on_progress(ShardCounts(self._report.num_bytes + num_bytes, num_documents, num_tokens))
