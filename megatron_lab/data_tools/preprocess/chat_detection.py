"""Detection of the keys under which the input files of a preprocessing job contain conversations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

from megatron_lab.data_tools.preprocess.chat_records import FORM_KEYS, find_form
from megatron_lab.data_tools.preprocess.file_formats import split_format
from megatron_lab.data_tools.preprocess.input_shards import detect_array
from megatron_lab.data_tools.preprocess.text_encoding import RecordDecoder, TextEncoding
from megatron_lab.data_tools.preprocess.text_records import InputRange, get_parser, read_records

_MAX_EXAMINED_RECORDS = 100
"""Maximum number of records of a file that are examined if invalid records are skipped."""


def find_first_form(
    sources: Sequence[InputRange], text_encoding: TextEncoding, *, skips_bad_records: bool
) -> tuple[str, tuple[str, ...]] | None:
    """Find the keys of the conversation in the first record of the input.

    Args:
        sources: input files, in order.
        text_encoding: settings that select the encoding of the files.
        skips_bad_records: whether to continue with the next records if a record contains no conversation under a known key.

    Returns:
        Location of the record, and the keys as `chat_records.find_form` returns them; None if there is no such record.

    Raises:
        ValueError: the record contains several conversations.
    """
    for untested_source in sources:
        try:
            source = detect_array(untested_source, RecordDecoder(text_encoding))
        except (ValueError, OSError):
            continue  # the conversion of the file reports the problem
        try:
            for record_index, record in _iter_first_records(source, text_encoding):
                location = source.format_location(record_index)
                keys = find_form(record, location)
                if keys is not None:
                    return location, keys
                if not skips_bad_records:
                    return None
        except OSError:
            continue
    return None


def _iter_first_records(source: InputRange, text_encoding: TextEncoding) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the index and the values of `FORM_KEYS` of the first records of a file, without invalid records.

    If the file cannot be read, nothing is yielded: its conversion reports the problem.
    """
    if split_format(source.file_format)[0] == "text" or not source.num_bytes:
        return
    decoder, parse = RecordDecoder(text_encoding), get_parser(source.file_format)
    # The range of a parquet file is counted in row groups.
    first_range = dataclasses.replace(source, end=1) if source.file_format == "parquet" else source
    try:
        with closing(read_records(first_range, (), lambda _: None, decoder, FORM_KEYS)) as records:
            for record_index, raw_record in zip(range(_MAX_EXAMINED_RECORDS), records, strict=False):
                try:
                    values = parse(raw_record, (), lambda values, keys: list(values), decoder, FORM_KEYS)
                except (ValueError, RecursionError):
                    continue
                if values is not None:
                    yield record_index, dict(zip(FORM_KEYS, values, strict=True))
    except ValueError:
        return
