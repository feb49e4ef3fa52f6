"""Finds the files that --input names, in an order that is always the same, and cuts them into shards.

The list of shards depends on the files and the shard size, and never on who works on it.
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

from megatron_lab.data_tools.preprocess import storage
from megatron_lab.data_tools.preprocess.csv_records import check_columns
from megatron_lab.data_tools.preprocess.text_records import InputPiece, Kind, row_groups

_LINES = (".jsonl", ".ndjson", ".json")
_TEXTS = (".txt", ".text", ".md", ".rst", ".tex", ".org", ".adoc")
_SOURCES = tuple(
    ".py .pyi .c .h .cc .cpp .cxx .hpp .cu .cuh .java .kt .scala .cs .go .rs .swift .zig .js .mjs .jsx .ts .tsx .php .rb .pl .lua "
    ".sh .bash .r .jl .m .f90 .sql .hs .ml .ex .exs .erl .clj .lisp .el .dart .vue".split()
)
"""Ends of the names of source code."""
SUFFIXES: dict[str, Kind] = {
    **dict.fromkeys(_LINES, "jsonl"),
    **{f"{suffix}.gz": "jsonl.gz" for suffix in _LINES},
    **{f"{suffix}.zst": "jsonl.zst" for suffix in _LINES},
    ".parquet": "parquet",
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    **dict.fromkeys((*_TEXTS, *_SOURCES), "text"),
}
"""The kind of a file, by the end of its name: JSON lines, parquet, a table, or plain text and source code (each file is one
document)."""

_KNOWN = (
    f"Known: {', '.join(name for name in SUFFIXES if name not in _SOURCES)}, and source code ({', '.join(_SOURCES[:6])} ...)."
    " For files of other names say what they are by --input-format."
)


def kind_of(path: str) -> Kind | None:
    """The kind of a file by its name; None if unknown."""
    name = path.rpartition("/")[2].lower()
    return next((kind for suffix, kind in SUFFIXES.items() if name.endswith(suffix)), None)


def find_sources(inputs: Sequence[str], kind: Kind | None = None, own: Sequence[str] = ()) -> tuple[list[InputPiece], list[str]]:
    """The files of --input: arguments in the order given, the files of a folder or a pattern sorted by path.

    A file that is named itself must be of a known kind; in folders and patterns other files are left out.

    Args:
        inputs: paths, patterns and URLs.
        kind: the kind of all files, whatever their names; None: as their names say.
        own: files that this tool writes, which are left out where a folder holds them.

    Returns:
        The files, each as one piece, and lines for the log about what was left out.

    Raises:
        ValueError: an argument names nothing, or nothing that can be read; a file is named twice.
    """
    sources: dict[str, InputPiece] = {}  # by path, with links followed
    others: Counter[str] = Counter()
    for word in inputs:
        before = len(sources)
        for path in _expand(word):
            if (found_kind := kind or kind_of(path)) is None:
                if path == storage.normal(word):
                    raise ValueError(f"--input {word}: a file of this name is of no known kind.\n  {_KNOWN}")
                others[_suffix(path)] += 1
            elif path not in own and (found := storage.stat(path)) is not None:
                real = path if storage.is_url(path) else os.path.realpath(path)
                if real in sources:
                    raise ValueError(
                        f"--input names {sources[real].path} twice, the second time by {word}"
                        f"{'' if sources[real].path == path else f' as {path}'}.\n  Leave one of them out."
                    )
                size, version = found
                sources[real] = InputPiece(path, found_kind, version, 0, size, size, 0)
        if len(sources) == before:
            raise ValueError(f"--input {word}: no file of a known kind is there.\n  {_KNOWN}")
    notes = [f"left out for no known kind: {number:,} ending with {suffix}" for suffix, number in sorted(others.items())]
    empty = [source.path for source in sources.values() if not source.num_bytes]
    if empty:
        notes.append(f"empty files: {len(empty):,}, for example {empty[0]}")
    return list(sources.values()), notes


def _expand(word: str) -> Iterator[str]:
    path = storage.normal(word)
    if storage.stat(path) is not None:
        yield path
    elif storage.is_folder(path):
        yield from sorted(storage.find(path))
    elif glob.has_magic(word):
        for found in sorted(storage.glob(path)):
            yield from sorted(storage.find(found)) if storage.is_folder(found) else [found]
    else:
        raise ValueError(f"--input {word}: there is no such file or folder.")


def _suffix(path: str) -> str:
    name = path.rpartition("/")[2]
    return name[name.find(".", 1) :] if "." in name[1:] else name


SMALLEST, LARGEST, ABOUT_SHARDS = 1 << 20, 256 << 20, 1024


@dataclass(frozen=True)
class InputShard:
    """Consecutive pieces that one worker makes into one part of each dataset."""

    pieces: tuple[InputPiece, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its input."""
        return sum(piece.num_bytes for piece in self.pieces)

    @cached_property
    def name(self) -> str:
        """A digest of its inputs: another shard, or other content of the files, has another name."""
        return xxhash.xxh3_128_hexdigest(json.dumps([dataclasses.astuple(piece) for piece in self.pieces]).encode())


def default_shard_size(sources: Sequence[InputPiece]) -> int:
    """Bytes for about a thousand shards, each of 1 to 256 MiB: small enough to lose little, large enough to cost little."""
    return min(max(sum(source.num_bytes for source in sources) // ABOUT_SHARDS, SMALLEST), LARGEST)


def cut(
    sources: Iterable[InputPiece],
    shard_size: int,
    keys: Sequence[str],
    *,
    fields: Sequence[str] | None = None,
    of_text: bool = True,
    pass_over: Callable[[str], None] | None = None,
) -> list[InputShard]:
    """Cut the inputs into shards, in their order.

    Files above the shard size are cut where that is possible, and share no shard with others. Smaller consecutive ones are joined.

    Args:
        sources: files, in order.
        shard_size: in bytes of the files.
        keys: those of the datasets, of which plain text has "text" alone.
        fields: columns that parquet and csv files must have; None: those of the keys.
        of_text: these must hold strings.
        pass_over: leaves files out that cannot be read, and is called with "FILE: what is wrong" for each; None: they are errors.

    Raises:
        ValueError: a file cannot be read, is damaged or lacks a column; plain text with keys other than "text".
    """
    shards: list[InputShard] = []
    together: list[InputPiece] = []
    size = 0
    for source in sources:
        if source.kind == "text" and tuple(keys) != ("text",):
            raise ValueError(
                f"{source.path} is plain text, whose only key is 'text', but --json-keys is {' '.join(keys)}.\n"
                "  Preprocess such files apart."
            )
        try:
            if pass_over is not None:
                storage.open_binary(source.path).close()
            pieces = list(_pieces(source, shard_size, keys if fields is None else fields, of_text))
        except (ValueError, OSError) as error:
            if pass_over is None:
                raise
            what = f"{source.path}: {error.strerror}" if isinstance(error, OSError) else str(error)
            pass_over(" ".join(what.split()))
            continue
        if together and size + source.num_bytes > shard_size:
            shards.append(InputShard(tuple(together)))
            together, size = [], 0
        if source.num_bytes > shard_size:
            shards += [InputShard((piece,)) for piece in pieces]
        else:
            together += pieces
            size += source.num_bytes
    return [*shards, InputShard(tuple(together))] if together else shards


def _pieces(source: InputPiece, shard_size: int, keys: Sequence[str], of_text: bool) -> Iterator[InputPiece]:
    """A file, cut where that is possible."""
    if source.kind == "csv" and source.num_bytes:
        check_columns(source.path, keys)
    if source.kind == "jsonl":
        for begin in range(0, source.num_bytes, shard_size):
            end = min(begin + shard_size, source.num_bytes)
            before = None if begin else 0
            yield dataclasses.replace(source, begin=begin, end=end, num_bytes=end - begin, records_before=before)
    elif source.kind == "parquet":
        begin = num_bytes = first_row = num_rows = 0
        sizes = row_groups(source.path, keys, of_text=of_text)
        for number, (size, rows) in enumerate(sizes):
            num_bytes, num_rows = num_bytes + size, num_rows + rows
            if number + 1 == len(sizes) or num_bytes + sizes[number + 1][0] > shard_size:
                yield dataclasses.replace(source, begin=begin, end=number + 1, num_bytes=num_bytes, records_before=first_row)
                begin, first_row = number + 1, first_row + num_rows
                num_bytes = num_rows = 0
    else:
        yield source
