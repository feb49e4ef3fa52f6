"""Search for the files of --input in a reproducible order, and the division of these files into shards.

A shard is the part of the input that one worker converts at a time. The list of shards depends only on the files and the shard
size, not on the backend or the number of workers.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import xxhash

from megatron_lab.data_tools.hub_names import suggest_texts_download
from megatron_lab.data_tools.hub_snapshots import resolve_snapshot
from megatron_lab.data_tools.preprocess import storage
from megatron_lab.data_tools.preprocess.arrow_records import check_columns as check_arrow_columns
from megatron_lab.data_tools.preprocess.compression import read_start
from megatron_lab.data_tools.preprocess.csv_records import check_columns as check_csv_columns
from megatron_lab.data_tools.preprocess.file_formats import KNOWN_FORMATS, FileFormat, detect_format, join_format, split_format
from megatron_lab.data_tools.preprocess.folder_files import FileSelection
from megatron_lab.data_tools.preprocess.json_arrays import DETECTION_BYTES, starts_array
from megatron_lab.data_tools.preprocess.text_encoding import RecordDecoder, TextEncoding, has_one_byte_newlines
from megatron_lab.data_tools.preprocess.text_records import InputRange, list_row_groups


def find_sources(
    inputs: Sequence[str],
    file_format: FileFormat | None = None,
    output_files: Sequence[str] = (),
    *,
    split: str | None = None,
) -> tuple[list[InputRange], list[str]]:
    """Find the input files that the arguments of --input name.

    The order of the arguments is kept; the files of a folder or pattern (such as data/*.jsonl) are sorted by path.

    A file that is named directly must have a known format. Files of unknown formats in folders and patterns are skipped.

    Args:
        inputs: paths, patterns and URLs.
        file_format: format of all files; None to detect it from their names.
        output_files: files that this tool writes. They are skipped if an input folder contains them.
        split: split to read of each folder that `DatasetDict.save_to_disk` wrote (--input-split).

    Returns:
        The files, each as a range that covers the complete file, and messages about skipped and empty files.

    Raises:
        ValueError: an argument matches no usable file, a file is listed twice or is a link to a missing file, or a folder contains
            several splits and `split` names none of them.
    """
    sources: dict[str, InputRange] = {}  # by real path, with links resolved
    unknown_suffixes: Counter[str] = Counter()
    selection = FileSelection(split)
    for argument in inputs:
        num_previous = len(sources)
        for path in selection.select(_expand_argument(argument, selection.hidden.append), storage.normalize_path(argument)):
            if (detected := file_format or detect_format(path)) is None:
                if path == storage.normalize_path(argument):
                    raise ValueError(f"--input {argument}: the format of this file is unknown.\n  {KNOWN_FORMATS}")
                unknown_suffixes[_get_suffix(path)] += 1
            elif path not in output_files and (file_stat := _stat_file(path)) is not None:
                real_path = path if storage.is_url(path) else os.path.realpath(path)
                if real_path in sources:
                    raise ValueError(
                        f"--input names {sources[real_path].path} twice, the second time by {argument}"
                        f"{'' if sources[real_path].path == path else f' as {path}'}.\n  Leave one of them out."
                    )
                size, version = file_stat
                sources[real_path] = InputRange(path, detected, version, 0, size, size, 0)
        if len(sources) == num_previous:
            raise ValueError(f"--input {argument}: there is no file of a known format.\n  {KNOWN_FORMATS}")
    messages = [f"skipped, unknown format: {count:,} ending with {suffix}" for suffix, count in sorted(unknown_suffixes.items())]
    messages += selection.finish()
    empty_files = [source.path for source in sources.values() if not source.num_bytes]
    if empty_files:
        messages.append(f"empty files: {len(empty_files):,}, for example {empty_files[0]}")
    return list(sources.values()), messages


def _expand_argument(argument: str, on_hidden: Callable[[str], None]) -> Iterator[str]:
    """Yield the paths of all files that an argument of --input names: a file, or the files of a folder or pattern.

    Args:
        on_hidden: called with the path of each file or folder that is skipped because its name starts with a dot.
    """
    path = storage.normalize_path(argument)
    if storage.stat(path) is not None:
        yield path
    elif storage.is_folder(path):
        yield from sorted(storage.list_files(resolve_snapshot(path), on_hidden))
    elif glob.has_magic(argument):
        for match in sorted(storage.glob(path)):
            yield from sorted(storage.list_files(resolve_snapshot(match), on_hidden)) if storage.is_folder(match) else [match]
    else:
        advice = suggest_texts_download(argument)
        raise ValueError(f"--input {argument}: there is no such file or folder. Check the path.{advice}")


def _stat_file(path: str) -> tuple[int, str] | None:
    """Return the result of `storage.stat`.

    Raises:
        ValueError: the file is a link to a file that does not exist.
    """
    if (file_stat := storage.stat(path)) is None and not storage.is_url(path) and os.path.islink(path) and not os.path.exists(path):
        raise ValueError(
            f"{path} is a link to {os.readlink(path)}, which does not exist.\n  Copy the file again, or remove the link."
        )
    return file_stat


def _get_suffix(path: str) -> str:
    name = path.rpartition("/")[2]
    return name[name.find(".", 1) :] if "." in name[1:] else name


MIN_SHARD_SIZE, MAX_SHARD_SIZE, TARGET_NUM_SHARDS = 1 << 20, 256 << 20, 1024


@dataclass(frozen=True)
class InputShard:
    """Part of the input that one worker converts at a time: consecutive ranges of input files. It gives one part of each
    dataset."""

    ranges: tuple[InputRange, ...]

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the input files that must be read for the shard."""
        return sum(input_range.num_bytes for input_range in self.ranges)

    @cached_property
    def name(self) -> str:
        """Name of the shard in the job folder: a hash of its file ranges and of the versions of these files.

        If a range or a file changes, the shard gets another name, so the old result is not reused.
        """
        return xxhash.xxh3_128_hexdigest(json.dumps([dataclasses.astuple(input_range) for input_range in self.ranges]).encode())


def select_shard_size(sources: Sequence[InputRange]) -> int:
    """Return the shard size in bytes of the input, so that the input gives about a thousand shards of 1 MiB to 256 MiB.

    With small shards, an interrupted job loses little work; with large shards, there is little overhead.
    """
    return min(max(sum(source.num_bytes for source in sources) // TARGET_NUM_SHARDS, MIN_SHARD_SIZE), MAX_SHARD_SIZE)


def split_into_shards(
    sources: Iterable[InputRange],
    shard_size: int,
    keys: Sequence[str],
    *,
    columns: Sequence[str] | None = None,
    requires_strings: bool = True,
    text_encoding: TextEncoding = TextEncoding(),  # noqa: B008 - a constant
    on_skipped_file: Callable[[str], None] | None = None,
) -> list[InputShard]:
    """Divide the input files, in their order, into shards (parts that one worker converts at a time).

    A file larger than `shard_size` is split if its format allows, and shares no shard with other files. Smaller consecutive files
    are combined in a shard.

    Args:
        sources: files, in order.
        shard_size: size of a shard in bytes of the input files.
        keys: JSON keys (--json-keys), each of which gives one dataset. Plain text has only the key "text".
        columns: columns that parquet and csv files must have; None for `keys`.
        requires_strings: whether the parquet columns must have a string type.
        text_encoding: settings that select the encoding of the files.
        on_skipped_file: called with "FILE: problem" for each unusable file, which is skipped; None to raise the error.

    Raises:
        ValueError: a file cannot be read, is damaged or lacks a column, or plain text is combined with keys other than "text".
    """
    shards: list[InputShard] = []
    small_files: list[InputRange] = []
    num_bytes = 0
    for source in sources:
        if split_format(source.file_format)[0] == "text" and tuple(keys) != ("text",):
            raise ValueError(
                f"{source.path} is plain text, whose only key is 'text', but --json-keys is {' '.join(keys)}.\n"
                "  Preprocess plain text files in a separate job."
            )
        try:
            if on_skipped_file is not None:
                storage.open_binary(source.path).close()
            ranges = list(_split_file(source, shard_size, keys if columns is None else columns, requires_strings, text_encoding))
        except (ValueError, OSError) as error:
            if on_skipped_file is None:
                raise
            message = f"{source.path}: {error.strerror}" if isinstance(error, OSError) else str(error)
            on_skipped_file(" ".join(message.split()))
            continue
        if small_files and num_bytes + source.num_bytes > shard_size:
            shards.append(InputShard(tuple(small_files)))
            small_files, num_bytes = [], 0
        if source.num_bytes > shard_size:
            shards += [InputShard((input_range,)) for input_range in ranges]
        else:
            small_files += ranges
            num_bytes += source.num_bytes
    return [*shards, InputShard(tuple(small_files))] if small_files else shards


def detect_array(source: InputRange, decoder: RecordDecoder) -> InputRange:
    """Return a file with the format json if its content is a JSON array, and jsonl if it is JSON lines. Other files, and empty
    ones, are returned unchanged.

    Args:
        source: complete file.
        decoder: decoder whose encoding is set to that of a JSON file.
    """
    content_format, compression = split_format(source.file_format)
    if content_format not in ("jsonl", "json") or not source.num_bytes:
        return source
    is_array = starts_array(read_start(source.path, compression, DETECTION_BYTES), decoder)
    return dataclasses.replace(source, file_format=join_format("json" if is_array else "jsonl", compression))


def _split_file(
    source: InputRange, shard_size: int, columns: Sequence[str], requires_strings: bool, text_encoding: TextEncoding
) -> Iterator[InputRange]:
    """Yield the ranges into which a file is split.

    They are byte ranges of JSON lines, row groups of parquet, or the complete file for other formats. The content of a JSON file
    tells whether it consists of lines or of an array.
    """
    decoder = RecordDecoder(text_encoding)
    source = detect_array(source, decoder)
    content_format, compression = split_format(source.file_format)
    # From a byte on, lines cannot be found in UTF-16, for example.
    can_split = source.num_bytes <= shard_size or has_one_byte_newlines(decoder.encoding)
    has_lines = source.file_format == "jsonl" and can_split and source.num_bytes
    if content_format == "csv":
        check_csv_columns(source.path, compression, columns, text_encoding)
    elif content_format == "arrow":
        check_arrow_columns(source.path, columns, requires_strings=requires_strings)
    if has_lines:
        for start in range(0, source.num_bytes, shard_size):
            end = min(start + shard_size, source.num_bytes)
            num_preceding = None if start else 0
            yield dataclasses.replace(source, start=start, end=end, num_bytes=end - start, num_preceding_records=num_preceding)
    elif source.file_format == "parquet":
        start = num_bytes = first_row = num_rows = 0
        group_sizes = list_row_groups(source.path, columns, requires_strings=requires_strings)
        for group_index, (size, rows) in enumerate(group_sizes):
            num_bytes, num_rows = num_bytes + size, num_rows + rows
            if group_index + 1 == len(group_sizes) or num_bytes + group_sizes[group_index + 1][0] > shard_size:
                yield dataclasses.replace(
                    source, start=start, end=group_index + 1, num_bytes=num_bytes, num_preceding_records=first_row
                )
                start, first_row = group_index + 1, first_row + num_rows
                num_bytes = num_rows = 0
    else:
        yield source
