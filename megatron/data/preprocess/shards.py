"""The inputs cut into shards: a list that depends on the inputs and the shard size, and never on who works on it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import xxhash

from megatron.data.preprocess import storage
from megatron.data.preprocess.inputs import Kind, Source
from megatron.data.preprocess.parquet import row_groups

SMALLEST, LARGEST, ABOUT_SHARDS = 1 << 20, 256 << 20, 1024


@dataclass(frozen=True)
class Piece:
    """Records of one file: the lines that begin in a range of bytes, the rows of some row groups, or all of it."""

    path: str
    kind: Kind
    version: str
    """Size and version of the whole file."""
    begin: int
    end: int
    """Range of bytes, or of row groups."""
    num_bytes: int
    """Of the file that are read for it."""
    records_before: int | None
    """Records of the file before this piece; None where it takes reading."""

    def unchanged(self) -> bool:
        """Whether the file is still the one that was cut."""
        return _version(storage.stat(self.path)) == self.version


@dataclass(frozen=True)
class Shard:
    """Neighbouring pieces that one worker makes into one part of each dataset."""

    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        """Of the input."""
        return sum(piece.num_bytes for piece in self.pieces)

    @cached_property
    def name(self) -> str:
        """A digest of its inputs: another shard, or another content of the files, has another name."""
        return xxhash.xxh3_128_hexdigest(json.dumps([dataclasses.astuple(piece) for piece in self.pieces]).encode())


def default_shard_size(sources: Sequence[Source]) -> int:
    """About a thousand shards, each of 1 to 256 MiB: small enough to lose little, large enough to cost little."""
    return min(max(sum(source.size for source in sources) // ABOUT_SHARDS, SMALLEST), LARGEST)


def cut(sources: Iterable[Source], shard_size: int, keys: Sequence[str]) -> list[Shard]:
    """All shards, in the order of the inputs.

    Files above the shard size are cut where that is possible, and share no shard with others; smaller ones that are neighbours
    are put together.

    Args:
        sources: files, in order.
        shard_size: in bytes of the files.
        keys: columns that parquet files must have.

    Raises:
        ValueError: a parquet file is damaged or lacks a column; plain text with keys other than "text".
    """
    shards: list[Shard] = []
    together: list[Piece] = []
    size = 0
    for source in sources:
        if source.kind == "text" and tuple(keys) != ("text",):
            raise ValueError(
                f"{source.path} is plain text, whose only key is 'text', but --json-keys is {' '.join(keys)}.\n"
                "  Preprocess such files apart."
            )
        pieces = list(_pieces(source, shard_size, keys))
        if together and size + source.size > shard_size:
            shards.append(Shard(tuple(together)))
            together, size = [], 0
        if source.size > shard_size:
            shards += [Shard((piece,)) for piece in pieces]
        else:
            together += pieces
            size += source.size
    return [*shards, Shard(tuple(together))] if together else shards


def _pieces(source: Source, shard_size: int, keys: Sequence[str]) -> Iterator[Piece]:
    whole = Piece(source.path, source.kind, _version((source.size, source.version)), 0, source.size, source.size, 0)
    if source.kind == "jsonl":
        for begin in range(0, source.size, shard_size):
            end = min(begin + shard_size, source.size)
            before = None if begin else 0
            yield dataclasses.replace(whole, begin=begin, end=end, num_bytes=end - begin, records_before=before)
    elif source.kind == "parquet":
        begin = num_bytes = first_row = num_rows = 0
        sizes = row_groups(source.path, keys)
        for number, (size, rows) in enumerate(sizes):
            num_bytes, num_rows = num_bytes + size, num_rows + rows
            if number + 1 == len(sizes) or num_bytes + sizes[number + 1][0] > shard_size:
                yield dataclasses.replace(whole, begin=begin, end=number + 1, num_bytes=num_bytes, records_before=first_row)
                begin, first_row = number + 1, first_row + num_rows
                num_bytes = num_rows = 0
    else:
        yield whole


def _version(found: tuple[int, str] | None) -> str:
    return "gone" if found is None else f"{found[0]} {found[1]}"
