"""Which files --input names: files, folders, patterns and URLs, in an order that is always the same."""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron.data.preprocess import storage

Kind = Literal["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "text"]

_LINES = (".jsonl", ".ndjson", ".json")
SUFFIXES: dict[str, Kind] = {
    **dict.fromkeys(_LINES, "jsonl"),
    **{f"{suffix}.gz": "jsonl.gz" for suffix in _LINES},
    **{f"{suffix}.zst": "jsonl.zst" for suffix in _LINES},
    ".parquet": "parquet",
    **dict.fromkeys((".txt", ".text", ".md", ".rst"), "text"),
}
"""What a file is, by the end of its name: JSON lines, parquet, or plain text, of which each file is a document."""


@dataclass(frozen=True)
class Source:
    """A file to read."""

    path: str
    """Absolute, or a URL."""
    kind: Kind
    size: int
    """In bytes, as it lies there."""
    version: str
    """Changes with the content."""


def kind_of(path: str) -> Kind | None:
    """What a file is by its name; None if unknown."""
    name = path.rpartition("/")[2].lower()
    return next((kind for suffix, kind in SUFFIXES.items() if name.endswith(suffix)), None)


def find_sources(inputs: Sequence[str]) -> tuple[list[Source], list[str]]:
    """The files of --input: words in the order given, the files of a folder or a pattern sorted by path.

    A file named itself must be of a known kind; in folders and patterns others are left out.

    Returns:
        The files, and lines for the log about what was left out.

    Raises:
        ValueError: a word names nothing, or nothing that can be read; a file is named twice.
    """
    sources: dict[str, Source] = {}
    others: Counter[str] = Counter()
    for word in inputs:
        before = len(sources)
        for path in _expand(word):
            if (kind := kind_of(path)) is None:
                others[_suffix(path)] += 1
            elif (found := storage.stat(path)) is not None:
                if path in sources:
                    raise ValueError(f"--input names {path} twice, the second time by {word}.\n  Leave one of them out.")
                sources[path] = Source(path, kind, *found)
        if len(sources) == before:
            raise ValueError(f"--input {word}: no file of a known kind is there.\n  Known: {', '.join(SUFFIXES)}.")
    notes = [f"left out {number:,} files that end with {suffix}: no known kind" for suffix, number in sorted(others.items())]
    empty = [source.path for source in sources.values() if not source.size]
    if empty:
        notes.append(f"{len(empty):,} files are empty, for example {empty[0]}")
    return list(sources.values()), notes


def _expand(word: str) -> Iterator[str]:
    path = storage.normal(word)
    if storage.stat(path) is not None:
        if kind_of(path) is None:
            raise ValueError(f"--input {word}: a file of this name is of no known kind.\n  Known: {', '.join(SUFFIXES)}.")
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
