"""Reader of the documents on which a model is evaluated: text files (one document each), files of JSON lines, and indexed
datasets."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.config.regular_file import parse_json, read_regular
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.tokenizer import Tokenizer
from megatron_lab.data_tools.preprocess.text_encoding import RecordDecoder, TextEncoding, format_replaced

_JSON_LINES_SUFFIXES = (".jsonl", ".json")


@dataclass(frozen=True)
class Document:
    """Document to score, as token ids.

    Args:
        ids: token ids.
        num_bytes: UTF-8 bytes of the text; None if it is unknown, because the ids come from a dataset and there is no tokenizer.
    """

    ids: list[int]
    num_bytes: int | None


def read_documents(
    path: str,
    tokenizer: Tokenizer | None,
    text_encoding: TextEncoding = TextEncoding(),  # noqa: B008 - a constant
    log: Callable[[str], None] = lambda line: None,
) -> Iterator[Document]:
    """Yield the documents of a text file, of a file of JSON lines, or of an indexed dataset.

    Args:
        path: path of a file, or of a dataset with or without .bin or .idx.
        tokenizer: tokenizer of the model; None if it is unknown, which only a dataset allows.
        text_encoding: encoding of a file, and treatment of invalid bytes.
        log: called with a line for the user if a file is not UTF-8 or has invalid bytes.

    Raises:
        ValueError: there is neither a file nor a dataset, the text has invalid bytes, or a text file has no tokenizer.
    """
    if Path(path).is_file() and not path.endswith((".bin", ".idx")):
        if tokenizer is None:
            raise ValueError(
                f"{path} contains text, not token ids, and the tokenizer of the model is unknown: set --tokenizer-type and the "
                "flag of its file, such as --tokenizer-model"
            )
        content = read_regular(path, sys.maxsize)
        decoder = RecordDecoder(text_encoding)
        (decoder.set_encoding_of_json if path.endswith(_JSON_LINES_SUFFIXES) else decoder.set_encoding)(content)
        try:
            decoded = decoder.decode(content)
        except ValueError as error:
            raise ValueError(f"{path}: {error}{decoder.suggest_encoding(content)}") from error
        if decoder.note is not None:
            log(f"{path}: {decoder.note}")
        if (replaced := decoder.take_replaced()) is not None:
            log(format_replaced(path, *replaced))
        for document_text in _split_documents(path, decoded):
            yield Document(tokenizer.encode(document_text), len(document_text.encode("utf-8")))
        return
    prefix = path.removesuffix(".bin").removesuffix(".idx")
    if not Path(f"{prefix}.idx").exists():
        raise ValueError(f"{path}: there is no text file of this name, and no indexed dataset ({prefix}.idx). Check the path")
    dataset = IndexedDataset(prefix)
    for document_index in range(dataset.num_documents):
        ids = dataset.get_document(document_index).tolist()
        yield Document(ids, None if tokenizer is None else _count_bytes(ids, tokenizer))


def _split_documents(path: str, content: str) -> Iterator[str]:
    """Yield the documents in the content of a file: the value of "text" in each JSON line, or the complete content as one
    document."""
    if not path.endswith(_JSON_LINES_SUFFIXES):
        yield content
        return
    for line_number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            try:
                text = parse_json(line)["text"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f'{path}, line {line_number}: the line is not a JSON object with a field "text". Correct the line'
                ) from error
            yield str(text)


def _count_bytes(ids: list[int], tokenizer: Tokenizer) -> int:
    """Return the number of UTF-8 bytes of the text of these token ids. The end-of-document token counts as empty text."""
    return len(tokenizer.decode([id for id in ids if id != tokenizer.eod]).encode("utf-8"))


def get_document_prefix(tokenizer: Tokenizer | None) -> list[int]:
    """Return the token ids that start each document (`Tokenizer.document_start`). Without a tokenizer, the list is empty."""
    return [] if tokenizer is None else tokenizer.document_start
