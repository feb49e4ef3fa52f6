"""A sample of texts to train a vocabulary on: bounded in memory, and always the same for the same input."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from megatron.data.preprocess.inputs import Kind, find_sources
from megatron.data.preprocess.records import PARSERS, place, records
from megatron.data.preprocess.shards import cut

_LONGEST = 1 << 20  # characters of a document that are taken
_FIBONACCI = 0x9E3779B97F4A7C15  # multiples of it, modulo 2**64, are spread evenly (Knuth, The Art of Computer Programming, 6.4)
_HELD_OUT = 20


@dataclass(frozen=True)
class Sample:
    """Texts of some of the documents."""

    training: list[str]
    held_out: list[str]
    """Every 20th text of the sample; none if there is only one."""
    num_documents: int
    """That were read."""

    @property
    def num_bytes(self) -> int:
        """Of the training texts."""
        return sum(len(text.encode()) for text in self.training)


def take_sample(inputs: Sequence[str], key: str, max_bytes: int) -> Sample:
    """Read all documents and keep some, spread evenly over all: the share is halved each time there are too many bytes.

    Args:
        inputs: Files and folders of any kind that tools/preprocess_data.py reads.
        key: Of the text in JSON lines, or its column in parquet.
        max_bytes: Of texts in memory (at least one text is kept). Of a document the first million characters count.

    Raises:
        ValueError: an input that is missing or damaged, a bad record, or no text at all.
    """
    kept: list[tuple[int, int, str]] = []
    size = least = num_documents = 0
    for number, (kind, where, record) in enumerate(_records(inputs, key)):
        height = 64 - (number * _FIBONACCI % 2**64).bit_length()  # reaches k for one number in 2**k
        num_documents += 1
        if height < least:
            continue
        text = _text(kind, where, record, key)
        if not text:
            continue
        kept.append((height, len(text.encode()), text))
        size += kept[-1][1]
        while size > max_bytes and len(kept) > 1 and least < 64:
            least += 1
            kept = [entry for entry in kept if entry[0] >= least]
            size = sum(entry[1] for entry in kept)
    texts = [text for _, _, text in kept]
    if not texts:
        raise ValueError(f"--input {' '.join(inputs)}: there is no text in it.")
    training = [text for number, text in enumerate(texts) if number % _HELD_OUT != _HELD_OUT - 1]
    held_out = texts[_HELD_OUT - 1 :: _HELD_OUT]
    if not held_out and len(training) > 1:
        held_out = [training.pop()]
    return Sample(training, held_out, num_documents)


def _records(inputs: Sequence[str], key: str) -> Iterator[tuple[Kind, tuple[str, int], Any]]:
    """Kind of the file, its path and the number of the record in it, the record."""
    sources, _ = find_sources(inputs)
    for source in sources:
        keys = ("text",) if source.kind == "text" else (key,)
        number = 0
        for shard in cut([source], sys.maxsize, keys):
            for piece in shard.pieces:
                with closing(records(piece, keys, lambda _: None)) as found:
                    for record in found:
                        yield source.kind, (source.path, number), record
                        number += 1


def _text(kind: Kind, where: tuple[str, int], record: Any, key: str) -> str:
    try:
        texts = PARSERS[kind](record, (key,))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place(where[0], kind, where[1])}: {error}\n  Mend or remove it.") from error
    return texts[0][:_LONGEST] if texts else ""
