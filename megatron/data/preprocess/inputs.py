"""Which files --input names: files, folders, patterns and URLs, in an order that is always the same."""

from __future__ import annotations

import glob
import os
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

_KNOWN = f"Known: {', '.join(SUFFIXES)}. For files of other names say what they are by --input-format."


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


def find_sources(inputs: Sequence[str], kind: Kind | None = None, own: Sequence[str] = ()) -> tuple[list[Source], list[str]]:
    """The files of --input: words in the order given, the files of a folder or a pattern sorted by path.

    A file named itself must be of a known kind; in folders and patterns others are left out.

    Args:
        inputs: paths, patterns and URLs.
        kind: what all files are, whatever their names; None: what their names say.
        own: files that this tool writes, which are left out where a folder holds them.

    Returns:
        The files, and lines for the log about what was left out.

    Raises:
        ValueError: a word names nothing, or nothing that can be read; a file is named twice.
    """
    sources: dict[str, Source] = {}  # by path, with links followed
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
                sources[real] = Source(path, found_kind, *found)
        if len(sources) == before:
            raise ValueError(f"--input {word}: no file of a known kind is there.\n  {_KNOWN}")
    notes = [f"left out for no known kind: {number:,} ending with {suffix}" for suffix, number in sorted(others.items())]
    empty = [source.path for source in sources.values() if not source.size]
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
