"""Small corpora in every form that preprocessing reads, and the files that must come of them, put together by hand."""

from __future__ import annotations

import csv
import gzip
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megatron.config.data import DataConfig
from megatron.data.indexed_dataset import IndexedDataset
from megatron_lab.data_tools.preprocess.shard_work import PreprocessJob

BYTES = DataConfig(tokenizer_type="ByteTokenizer")
EOD = 256
JOB = PreprocessJob(BYTES, ("text",), append_eod=True)
SKIP = PreprocessJob(BYTES, ("text",), append_eod=True, skip_bad_records=True)

TEXTS = [f"Document {number}: the größte 東京 of {number * number}\n\ttabs \u2028 and lines" for number in range(40)]


def json_lines(texts: Sequence[str]) -> bytes:
    """JSON lines with the keys text and title; the escapes of json and raw UTF-8 alternate."""
    lines = [json.dumps({"text": text, "title": str(n)}, ensure_ascii=bool(n % 2)) for n, text in enumerate(texts)]
    return "".join(line + "\n" for line in lines).encode()


def write_lines(path: Path, texts: Sequence[str] = TEXTS) -> str:
    path.write_bytes(json_lines(texts))
    return str(path)


def write_gz(path: Path, texts: Sequence[str]) -> str:
    """A gzip file of two members, as `cat` makes of two files."""
    lines = json_lines(texts)
    path.write_bytes(gzip.compress(lines[:100]) + gzip.compress(lines[100:]))
    return str(path)


def write_zst(path: Path, texts: Sequence[str]) -> str:
    """A zstd file of two frames."""
    zstandard = pytest.importorskip("zstandard")
    lines = json_lines(texts)
    path.write_bytes(b"".join(zstandard.ZstdCompressor().compress(part) for part in (lines[:100], lines[100:])))
    return str(path)


def write_parquet(path: Path, texts: Sequence[str | None], rows: int = 7) -> str:
    """A parquet file with row groups of a few rows, and columns that nobody asks for."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"id": list(range(len(texts))), "text": list(texts), "title": [str(n) for n in range(len(texts))]})
    parquet.write_table(table, path, row_group_size=rows)
    return str(path)


def write_folder(path: Path, texts: Sequence[str]) -> str:
    """A folder of text files, in two folders and of two kinds."""
    for number, text in enumerate(texts):
        file = path / f"{number // 10:03d}" / f"{number:05d}.{'md' if number % 3 else 'txt'}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode())
    return str(path)


def write_csv(path: Path, texts: Sequence[str]) -> str:
    """A table with columns that nobody asks for."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("id", "text", "title"), *((number, text, number) for number, text in enumerate(texts))])
    return str(path)


FORMS: dict[str, Callable[[Path, Sequence[str]], str]] = {
    "in.jsonl": write_lines,
    "in.json.gz": write_gz,
    "in.jsonl.zst": write_zst,
    "in.parquet": write_parquet,
    "in.csv": write_csv,
    "folder": write_folder,
}
"""How to write a corpus under a name."""


def expected_files(documents: Sequence[Sequence[int]], code: int = 8) -> tuple[bytes, bytes]:
    """The bytes of .bin and .idx; code 8 is uint16, code 4 int32."""
    letter, width = {8: ("H", 2), 4: ("i", 4)}[code]
    tokens = [token for document in documents for token in document]
    lengths = [len(document) for document in documents]
    offsets = [width * sum(lengths[:n]) for n in range(len(lengths))]
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1)
    index = struct.pack(f"<{len(lengths)}i{len(lengths)}q{len(lengths) + 1}q", *lengths, *offsets, *range(len(lengths) + 1))
    return struct.pack(f"<{len(tokens)}{letter}", *tokens), head + index


def expected_of(texts: Sequence[str]) -> tuple[bytes, bytes]:
    """What `JOB` makes of these texts."""
    return expected_files([[*text.encode(), EOD] for text in texts if text])


def files_of(prefix: str | Path) -> tuple[bytes, bytes]:
    """The bytes of .bin and .idx."""
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def documents(prefix: str | Path) -> list[list[int]]:
    dataset = IndexedDataset(str(prefix))
    return [dataset.get_document(number).tolist() for number in range(dataset.num_documents)]


def written(folder: Path) -> set[str]:
    """Names of what lies in a folder beside inputs and tokenizers."""
    inputs = (".jsonl", ".gz", ".zst", ".parquet", ".model", ".vocab", ".json")
    return {path.name for path in folder.iterdir() if not path.name.endswith((*inputs, "merges.txt"))}
