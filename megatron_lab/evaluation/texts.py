"""What is evaluated: text files, each one document, and files of JSON lines and indexed datasets, document by document."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Document:
    """Tokens that follow each other, and the bytes of their text in UTF-8; None where no tokenizer says."""

    ids: list[int]
    num_bytes: int | None


def documents_of(path: str, tokenizer: Tokenizer | None) -> Iterator[Document]:
    """The documents of a text file, or of the indexed dataset with this prefix.

    Raises:
        ValueError: there is neither, the text is not UTF-8, or no tokenizer is known for it.
    """
    if Path(path).is_file() and not path.endswith((".bin", ".idx")):
        if tokenizer is None:
            raise ValueError(f"{path} is text, and no tokenizer is known of the model: name it by --tokenizer-type and its files")
        content = Path(path).read_bytes()
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8: {error}") from error
        for one in _texts(path, text):
            yield Document(tokenizer.encode(one), len(one.encode("utf-8")))
        return
    prefix = path.removesuffix(".bin").removesuffix(".idx")
    if not Path(f"{prefix}.idx").exists():
        raise ValueError(f"{path}: there is no such text file, and no indexed dataset ({prefix}.idx)")
    dataset = IndexedDataset(prefix)
    for number in range(dataset.num_documents):
        ids = dataset.document(number).tolist()
        yield Document(ids, None if tokenizer is None else _num_bytes(ids, tokenizer))


def _texts(path: str, content: str) -> Iterator[str]:
    """The documents in the content of a file."""
    if not path.endswith((".jsonl", ".json")):
        yield content
        return
    for number, line in enumerate(content.splitlines(), start=1):
        if line.strip():
            try:
                text = json.loads(line)["text"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f'{path}, line {number}: no JSON object with a "text"') from error
            yield str(text)


def _num_bytes(ids: list[int], tokenizer: Tokenizer) -> int:
    """Bytes of the text; the token that ends a document has none."""
    return len(tokenizer.decode([id for id in ids if id != tokenizer.eod]).encode("utf-8"))


def begins_with(tokenizer: Tokenizer | None) -> list[int]:
    """What stands before a document's first token: the beginning of a text, else the end of the document before."""
    if tokenizer is None:
        return []
    return [tokenizer.eod if tokenizer.bos is None else tokenizer.bos]
