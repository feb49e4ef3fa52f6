"""Make a small corpus of real text from what every Python has: the source of its standard library, one file a document."""

from __future__ import annotations

import argparse
import json
import random
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

# Tests and installed packages are another kind of text; the rest is tables.
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
_TABLES = {"html/entities.py"}


def source_files(folder: Path) -> list[Path]:
    """The files to read, in an order that is the same every time and mixes the packages.

    Documents are divided into training and validation by their place, so neighbours should not be alike.
    """
    found = sorted(path for path in folder.rglob("*.py") if _is_wanted(path.relative_to(folder)))
    random.Random(0).shuffle(found)
    return found


def _is_wanted(path: Path) -> bool:
    return not _LEFT_OUT.intersection(path.parts) and path.as_posix() not in _TABLES


def documents(files: list[Path]) -> Iterator[str]:
    """Texts of the files that are not empty."""
    for path in files:
        with tokenize.open(path) as file:  # honours a file's own encoding
            text = file.read()
        if text.strip():
            yield text


def write_corpus(folder: Path, output: Path) -> tuple[int, int]:
    """Write JSON lines with the key "text"; a file that exists is complete.

    Returns:
        Numbers of documents and of characters.

    Raises:
        ValueError: the folder holds no Python source.
    """
    num_documents = num_characters = 0
    unfinished = output.with_name(output.name + ".unfinished")
    with unfinished.open("w", encoding="utf-8") as file:
        for text in documents(source_files(folder)):
            file.write(json.dumps({"text": text}) + "\n")
            num_documents += 1
            num_characters += len(text)
    if num_documents == 0:
        unfinished.unlink()
        raise ValueError(f"there is no Python source in {folder}; name the folder of a standard library with --source")
    unfinished.replace(output)
    return num_documents, num_characters


def main(arguments: list[str] | None = None) -> int:
    """Run the tool; returns the exit code."""
    flags = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    flags.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON-lines file to write")
    default = Path(sysconfig.get_path("stdlib"))
    flags.add_argument("--source", type=Path, default=default, metavar="FOLDER", help="folder of sources (this Python's library)")
    given = flags.parse_args(arguments)
    try:
        num_documents, num_characters = write_corpus(given.source, given.output)
    except (ValueError, OSError, SyntaxError) as error:
        print(f"make_corpus.py: error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {given.output}: {num_documents:,} documents, {num_characters / 1e6:.1f} million characters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
