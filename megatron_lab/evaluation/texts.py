"""Reader of the documents on which a model is evaluated: files of the formats that preprocessing reads, and indexed datasets."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.tokenizer import Tokenizer
from megatron_lab.data_tools.preprocess.file_formats import detect_format
from megatron_lab.data_tools.preprocess.input_shards import InputShard, find_sources, split_into_shards
from megatron_lab.data_tools.preprocess.text_encoding import RecordDecoder, TextEncoding, format_replaced
from megatron_lab.data_tools.preprocess.text_records import get_parser, parse_values, read_records

_KEYS = ("text",)


@dataclass(frozen=True)
class Document:
    """Document to score, as token ids.

    Args:
        ids: token ids.
        num_bytes: UTF-8 bytes of the text; None if it is unknown, because the ids come from a dataset and there is no tokenizer.
    """

    ids: list[int]
    num_bytes: int | None


def get_dataset_prefix(path: str) -> str | None:
    """Return the path without .bin and .idx of the dataset that a path names; None for the path of a file or folder of texts."""
    if Path(path).exists() and not path.endswith((".bin", ".idx")):
        return None
    return path.removesuffix(".bin").removesuffix(".idx")


def read_documents(
    path: str,
    tokenizer: Tokenizer | None,
    text_encoding: TextEncoding = TextEncoding(),  # noqa: B008 - a constant
    log: Callable[[str], None] = lambda line: None,
) -> Iterator[Document]:
    """Yield the documents of a file or folder of texts, or of an indexed dataset. A file whose suffix is unknown is plain text.

    Args:
        path: path of a file or folder, or of a dataset with or without .bin or .idx.
        tokenizer: tokenizer of the model; None if it is unknown, which only a dataset allows.
        text_encoding: encoding of a file, and treatment of invalid bytes.
        log: called with a line for the user if a file is not UTF-8 or has invalid bytes.

    Raises:
        ValueError: there is neither a file nor a dataset, a file is damaged, a record is invalid, or a text has no tokenizer.
    """
    prefix = get_dataset_prefix(path)
    if prefix is None:
        if tokenizer is None:
            raise ValueError(
                f"{path} contains text, not token ids, and the tokenizer of the model is unknown: set --tokenizer-type and the "
                "flag of its file, such as --tokenizer-model"
            )
        file_format = None if Path(path).is_dir() else detect_format(path) or "text"
        sources, messages = find_sources([path], file_format)
        for message in messages:
            log(f"{path}: {message}")
        for source in sources:
            for shard in split_into_shards([source], sys.maxsize, _KEYS, text_encoding=text_encoding):
                for text in _read_texts(shard, text_encoding, log):
                    yield Document(tokenizer.encode(text), len(text.encode("utf-8")))
        return
    if not Path(f"{prefix}.idx").exists():
        raise ValueError(f"{path}: there is no text file of this name, and no indexed dataset ({prefix}.idx). Check the path")
    dataset = IndexedDataset(prefix)
    for document_index in range(dataset.num_documents):
        ids = dataset.get_document(document_index).tolist()
        yield Document(ids, None if tokenizer is None else _count_bytes(ids, tokenizer))


def _read_texts(shard: InputShard, text_encoding: TextEncoding, log: Callable[[str], None]) -> Iterator[str]:
    """Yield the texts of the records of a complete file.

    Args:
        shard: the file.
        text_encoding: encoding of the file, and treatment of invalid bytes.
        log: called with a line for the user if the file is not UTF-8 or has invalid bytes.
    """
    for input_range in shard.ranges:
        decoder, parse, is_noted = RecordDecoder(text_encoding), get_parser(input_range.file_format), False
        with closing(read_records(input_range, _KEYS, lambda num_bytes: None, decoder)) as records:
            for record_index, record in enumerate(records):
                location = input_range.format_location(record_index)
                try:
                    values = parse(record, _KEYS, parse_values, decoder)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{location}: {error}{decoder.suggest_encoding(record)}") from error
                if decoder.note is not None and not is_noted:
                    log(f"{input_range.path}: {decoder.note}")
                    is_noted = True
                if (replaced := decoder.take_replaced()) is not None:
                    log(format_replaced(location, *replaced))
                if values is not None:
                    yield from values


def _count_bytes(ids: list[int], tokenizer: Tokenizer) -> int:
    """Return the number of UTF-8 bytes of the text of these token ids. The end-of-document token counts as empty text."""
    return len(tokenizer.decode([id for id in ids if id != tokenizer.eod]).encode("utf-8"))


def get_document_prefix(tokenizer: Tokenizer | None) -> list[int]:
    """Return the token ids that start each document (`Tokenizer.document_start`). Without a tokenizer, the list is empty."""
    return [] if tokenizer is None else tokenizer.document_start
