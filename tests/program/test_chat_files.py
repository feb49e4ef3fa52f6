"""Conversations with tools in every format of input files: the same datasets, with and without --json-keys."""

from __future__ import annotations

import bz2
import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from megatron.data.indexed_dataset import get_loss_mask_prefix
from megatron_lab.commands.preprocess_data import main
from tests.support.chats import PLAIN, write_tokenizer
from tests.support.corpora import files_of

TOOLS = [{"type": "function", "function": {"name": "w", "parameters": {"type": "object", "properties": {"a": {"default": None}}}}}]
MESSAGES: list[dict[str, Any]] = [
    {
        "messages": [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}],
        "tools": TOOLS,
        "system": "sums",
    },
    {"messages": [{"role": "user", "content": "more?"}, {"role": "assistant", "content": "no", "name": "me"}]},
]
PAIRS: list[dict[str, Any]] = [
    {"instruction": "1 + 1", "output": "2", "tools": TOOLS, "system": "sums"},
    {"instruction": "more?", "output": "no"},
]
FORMS = [(MESSAGES, ["messages"]), (PAIRS, ["instruction", "output"])]
TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}" + PLAIN
TABLES = ("parquet", "arrow")


def _as_lines(records: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def _write(folder: Path, file_format: str, records: list[dict[str, Any]]) -> Path:
    """Write records to a file of a format; "nested" puts them into objects."""
    if file_format == "nested":
        records, file_format = [{"data": record, "id": 1} for record in records], "jsonl"
    path = folder / f"records.{file_format}"
    contents = {
        "json": lambda: json.dumps(records, indent=1).encode(),
        "jsonl": lambda: _as_lines(records),
        "jsonl.bz2": lambda: bz2.compress(_as_lines(records)),
        "json.xz": lambda: lzma.compress(json.dumps(records).encode()),
    }
    if file_format not in TABLES:
        path.write_bytes(contents[file_format]())
        return path
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    # As `datasets` writes objects with different fields: tools and messages of the type arrow.json.
    json_type = pyarrow.json_()
    columns = {}
    for name in dict.fromkeys(name for record in records for name in record):
        values = [record.get(name) for record in records]
        if name in ("messages", "tools"):
            texts = [value and [json.dumps(item) for item in value] for value in values]
            columns[name] = pyarrow.array(texts, pyarrow.list_(pyarrow.string())).cast(pyarrow.list_(json_type))
        else:
            columns[name] = pyarrow.array(values)
    table = pyarrow.table(columns)
    if file_format == "parquet":
        parquet.write_table(table, path)
    else:
        with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    return path


def _preprocess(folder: Path, source: Path, prefix: str, *more: str) -> list[bytes]:
    words = ["--input", str(source), "--output-prefix", str(folder / prefix), "--chat-template", "--append-eod", *more]
    tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder / "tokenizer")]
    assert main([*words, *tokenizer]) == 0
    (index,) = folder.glob(f"{prefix}_*_document.idx")
    dataset = str(index.with_suffix(""))
    return [*files_of(dataset), *files_of(get_loss_mask_prefix(dataset))]


@pytest.mark.parametrize(("records", "keys"), FORMS, ids=["messages", "pairs"])
@pytest.mark.parametrize("file_format", ["json", "jsonl.bz2", "json.xz", "parquet", "arrow", "nested"])
def test_every_format_gives_the_same_datasets(
    tmp_path: Path, file_format: str, records: list[dict[str, Any]], keys: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The keys are found without --json-keys, and tools and the system text lie beside them, also in an object."""
    write_tokenizer(tmp_path / "tokenizer", TEMPLATE)
    expected = _preprocess(tmp_path, _write(tmp_path, "jsonl", records), "lines")
    told = capsys.readouterr().err
    assert "_document.tokenizer" in told and "_loss_mask.tokenizer" not in told
    flags = ["--json-keys", *(f"data.{key}" for key in keys)] if file_format == "nested" else []
    assert _preprocess(tmp_path, _write(tmp_path, file_format, records), "again", *flags) == expected
    if not flags:
        assert f"the key{'s' if len(keys) > 1 else ''} {' and '.join(map(repr, keys))}" in capsys.readouterr().err


def test_null_fields_of_struct_columns_are_absent(tmp_path: Path) -> None:
    """Each object of a column has the fields of all of them."""
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    write_tokenizer(tmp_path / "tokenizer", TEMPLATE)
    question = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    records: list[dict[str, Any]] = [
        {"messages": question, "tools": [{"name": name, "parameters": {name: "x"}}]} for name in ("f", "g")
    ]
    expected = _preprocess(tmp_path, _write(tmp_path, "jsonl", records), "lines")
    table = pyarrow.Table.from_pylist([{"data": record} for record in records])
    assert table.column("data").to_pylist()[0]["tools"][0]["parameters"] == {"f": "x", "g": None}
    parquet.write_table(table, tmp_path / "rows.parquet")
    assert _preprocess(tmp_path, tmp_path / "rows.parquet", "rows", "--json-keys", "data.messages") == expected


def test_tools_beside_the_object_of_the_messages_are_read(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer", TEMPLATE)
    expected = _preprocess(tmp_path, _write(tmp_path, "jsonl", MESSAGES), "lines")
    names = ("tools", "system")
    outer = [
        {"data": {"messages": record["messages"]}, **{name: record[name] for name in names if name in record}}
        for record in MESSAGES
    ]
    assert _preprocess(tmp_path, _write(tmp_path, "jsonl", outer), "outer", "--json-keys", "data.messages") == expected
