"""Formats of input files, by the suffixes of their names.

A format is the format of the content, such as jsonl, followed by the suffix of the compression if there is one: jsonl.gz.
"""

from __future__ import annotations

FileFormat = str
"""One of `FILE_FORMATS`."""
CONTENT_FORMATS = ("jsonl", "json", "parquet", "arrow", "csv", "text")
"""JSON lines, a JSON array of records, parquet, Arrow IPC, a table of text, and plain text (each file is one document)."""
COMPRESSIONS = ("gz", "zst", "bz2", "xz")
COMPRESSIBLE_FORMATS = ("jsonl", "json", "csv", "text")
"""Formats that are read from their start to their end. Parquet and Arrow compress their columns themselves."""
DETECTED_FORMATS = ("csv", "text")
"""Formats of files whose encoding is detected from their content."""
FILE_FORMATS: tuple[FileFormat, ...] = (
    *CONTENT_FORMATS,
    *(f"{content_format}.{compression}" for content_format in COMPRESSIBLE_FORMATS for compression in COMPRESSIONS),
)
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
"""Suffixes of files of JSON lines or a JSON array; the content of a file tells which of them it is."""
_TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".tex", ".org", ".adoc")
_SOURCE_CODE_SUFFIXES = tuple(
    ".py .pyi .c .h .cc .cpp .cxx .hpp .cu .cuh .java .kt .scala .cs .go .rs .swift .zig .js .mjs .jsx .ts .tsx .php .rb .pl .lua "
    ".sh .bash .r .jl .m .f90 .sql .hs .ml .ex .exs .erl .clj .lisp .el .dart .vue".split()
)
"""Suffixes of source code files."""
_FORMAT_BY_SUFFIX: dict[str, FileFormat] = {
    **dict.fromkeys(JSON_SUFFIXES, "jsonl"),
    ".parquet": "parquet",
    **dict.fromkeys((".arrow", ".feather"), "arrow"),
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    **dict.fromkeys((*_TEXT_SUFFIXES, *_SOURCE_CODE_SUFFIXES), "text"),
}
KNOWN_FORMATS = (
    f"Known formats: {', '.join(name for name in _FORMAT_BY_SUFFIX if name not in _SOURCE_CODE_SUFFIXES)}, and source code "
    f"({', '.join(_SOURCE_CODE_SUFFIXES[:6])} ...); all but .parquet, .arrow and .feather also with "
    f"{', '.join(f'.{compression}' for compression in COMPRESSIONS[:-1])} or .{COMPRESSIONS[-1]}."
    " For files with other names, set --input-format."
)


def split_format(file_format: FileFormat) -> tuple[str, str | None]:
    """Return the format of the content and the compression (None for uncompressed files) of a file format such as jsonl.gz."""
    content_format, _, compression = file_format.partition(".")
    return content_format, compression or None


def join_format(content_format: str, compression: str | None) -> FileFormat:
    """Return the file format of a content format and a compression (None for uncompressed files)."""
    return content_format if compression is None else f"{content_format}.{compression}"


def detect_format(path: str) -> FileFormat | None:
    """Return the format of a file, determined from its suffix; None if the suffix is unknown."""
    return split_suffix(path)[1]


def split_suffix(path: str) -> tuple[str, FileFormat | None]:
    """Return a path without its suffix, and the format of files with this suffix.

    If the suffix is unknown, the path is unchanged and the format is None.
    """
    name = path.rpartition("/")[2].lower()
    compression = next((compression for compression in COMPRESSIONS if name.endswith(f".{compression}")), None)
    content_name = name if compression is None else name[: -len(compression) - 1]
    for suffix, content_format in _FORMAT_BY_SUFFIX.items():
        if content_name.endswith(suffix) and (compression is None or content_format in COMPRESSIBLE_FORMATS):
            return path[: len(path) - len(name) + len(content_name) - len(suffix)], join_format(content_format, compression)
    return path, None
