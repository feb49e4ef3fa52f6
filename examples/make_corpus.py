"""Build a small corpus of real text from the source code of Python's standard library, with one document per file."""

from __future__ import annotations

import argparse
import json
import random
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

# Folders and files without ordinary source code: tests, installed packages and tables.
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
_SKIPPED_FILES = {"html/entities.py"}


def list_source_files(folder: Path) -> list[Path]:
    """Return the Python files of a folder in a reproducible random order, without tests, installed packages and tables.

    The corpus keeps this order, and training takes consecutive documents as its training and its validation split. Without the
    shuffle, a split would consist of complete packages.
    """
    paths = sorted(path for path in folder.rglob("*.py") if _is_source_file(path.relative_to(folder)))
    random.Random(0).shuffle(paths)
    return paths


def _is_source_file(path: Path) -> bool:
    return not _SKIPPED_FOLDERS.intersection(path.parts) and path.as_posix() not in _SKIPPED_FILES


def read_documents(paths: list[Path]) -> Iterator[str]:
    """Yield the texts of the files that are not empty."""
    for path in paths:
        with tokenize.open(path) as file:  # honours a file's own encoding
            text = file.read()
        if text.strip():
            yield text


def write_corpus(folder: Path, output: Path) -> tuple[int, int]:
    """Write the Python files of a folder as JSON lines with the key "text", one file per line. The output file appears only when it
    is complete.

    Returns:
        number of documents, and number of characters.

    Raises:
        ValueError: the folder contains no Python source.
    """
    num_documents = num_characters = 0
    temporary = output.with_name(output.name + ".unfinished")
    with temporary.open("w", encoding="utf-8") as file:
        for text in read_documents(list_source_files(folder)):
            file.write(json.dumps({"text": text}) + "\n")
            num_documents += 1
            num_characters += len(text)
    if num_documents == 0:
        temporary.unlink()
        raise ValueError(f"there is no Python source in {folder}. Set --source to a folder with Python files")
    temporary.replace(output)
    return num_documents, num_characters


def main(argv: list[str] | None = None) -> int:
    """Write the corpus that the command line requests. Returns the exit status: 0, or 1 if the corpus could not be written."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON-lines file to write")
    stdlib = Path(sysconfig.get_path("stdlib"))
    parser.add_argument("--source", type=Path, default=stdlib, metavar="FOLDER", help="folder of sources (this Python's library)")
    args = parser.parse_args(argv)
    try:
        num_documents, num_characters = write_corpus(args.source, args.output)
    except (ValueError, OSError, SyntaxError) as error:
        print(f"make_corpus.py: error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {args.output}: {num_documents:,} documents, {num_characters / 1e6:.1f} million characters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
