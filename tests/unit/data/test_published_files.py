"""Files in the forms in which texts are published: JSON arrays, compressed files, Arrow, nested keys and downloads from the Hub."""

from __future__ import annotations

import bz2
import codecs
import gzip
import json
import lzma
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.tokenizer import ByteTokenizer
from megatron_lab.commands import preprocess_data
from megatron_lab.data_tools.hub_snapshots import resolve_snapshot
from megatron_lab.data_tools.preprocess import json_arrays
from megatron_lab.data_tools.preprocess.engines import Engine
from megatron_lab.data_tools.preprocess.input_shards import find_sources
from megatron_lab.data_tools.preprocess.job import preprocess
from megatron_lab.data_tools.preprocess.shard_work import PreprocessJob
from megatron_lab.data_tools.preprocess.text_encoding import TextEncoding
from megatron_lab.data_tools.tokenizer_training import sample_texts
from megatron_lab.evaluation.texts import read_documents
from tests.support.corpora import BYTES, JOB, SKIP, TEXTS, documents, expected_of, files_of, json_lines, write_csv, write_lines

RECORDS = [{"text": text, "title": str(number)} for number, text in enumerate(TEXTS)]
SKIP_FILES = PreprocessJob(BYTES, ("text",), True, skip_bad_records=True, skip_bad_files=True)


def convert(folder: Path, *sources: Path, job: PreprocessJob = JOB, **settings: Any) -> list[list[int]]:
    """The documents that preprocessing makes of the sources."""
    preprocess([str(source) for source in sources], str(folder / "out"), job, start_mode="restart", **settings)
    return documents(folder / f"out_{job.keys[0]}_document")


def tokens(*texts: str) -> list[list[int]]:
    return [[*text.encode(), 256] for text in texts]


def save(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


# ---- JSON arrays

ARRAYS: dict[str, Callable[[], bytes]] = {
    "one line": lambda: json.dumps(RECORDS).encode(),
    "indented": lambda: json.dumps(RECORDS, indent=2, ensure_ascii=False).encode(),
    "a mark and white space": lambda: codecs.BOM_UTF8 + b" \r\n\t" * 200 + json.dumps(RECORDS).encode() + b"\n\n",
    "utf-16": lambda: json.dumps(RECORDS, indent=1, ensure_ascii=False).encode("utf-16-le"),
    "utf-32 with a mark": lambda: json.dumps(RECORDS, ensure_ascii=False).encode("utf-32"),
}


@pytest.mark.parametrize("name", ["in.json", "in.jsonl", "in.ndjson.gz", "in.json.bz2"])
@pytest.mark.parametrize("form", ARRAYS)
def test_an_array_gives_the_bytes_of_its_lines(tmp_path: Path, form: str, name: str) -> None:
    content, suffix = ARRAYS[form](), name.rpartition(".")[2]
    source = save(tmp_path / name, PACK[suffix](content) if suffix in PACK else content)
    input_format = name.partition(".")[2].replace("ndjson", "jsonl")
    variants: list[dict[str, Any]] = [{}, {"shard_size": 300}, {"engine": Engine(num_workers=2)}, {"input_format": input_format}]
    for settings in variants:
        convert(tmp_path, source, **settings)
        assert files_of(tmp_path / "out_text_document") == expected_of(TEXTS)


VALUES = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.integers(-(10**30), 10**30) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(
    records=st.lists(VALUES, max_size=6), indent=st.sampled_from([None, 0, 3]), ascii_only=st.booleans(), size=st.integers(1, 40)
)
def test_any_array_is_read_in_blocks_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, records: list[Any], indent: int | None, ascii_only: bool, size: int
) -> None:
    content = json.dumps(records, indent=indent, ensure_ascii=ascii_only).encode(errors="replace")
    path = save(tmp_path_factory.mktemp("array") / "in.json", content)
    with path.open("rb") as file:
        buffer = json_arrays._TextBuffer(_Slow(file, size), file.read(size), "utf-8")  # type: ignore[arg-type]
        found = []
        buffer.take("[")
        while buffer.peek() != "]":
            found.append(buffer.read_value())
            if buffer.peek() == ",":
                buffer.take(",")
    assert found == json.loads(content)


class _Slow:
    """File that returns a few bytes of each read."""

    def __init__(self, file: Any, size: int) -> None:
        self._file, self._size = file, size

    def read(self, size: int) -> bytes:
        content: bytes = self._file.read(min(size, self._size))
        return content


def test_memory_is_that_of_a_record_and_not_of_the_array(tmp_path: Path) -> None:
    """The buffer never holds much more than a block; a record longer than many blocks is read too."""
    record = json.dumps({"text": "word " * 1000})
    path = save(tmp_path / "in.json", f"[{','.join([record] * 2000)}, {json.dumps({'text': 'x' * 5_000_000})}]".encode())
    sizes = []
    with path.open("rb") as file:
        read = json_arrays._TextBuffer._read

        class Watched(json_arrays._TextBuffer):
            def _read(self) -> bool:
                result = read(self)
                sizes.append(len(self._text))
                return result

        buffer = Watched(file, file.read(100), "utf-8")
        buffer.take("[")
        num_records = 0
        while buffer.peek() != "]":
            buffer.read_value()
            num_records += 1
            if num_records == 2000:
                assert max(sizes) < 3 << 20
            if buffer.peek() == ",":
                buffer.take(",")
    assert num_records == 2001


DAMAGED = {
    b'[{"text": "a"}, {"text": "b"}': r"after record 2: the array is not closed",
    b'[{"text": "a"}, {"text": "b': r"after record 1: Unterminated string starting at character 26",
    b'[{"text": "a"}, {"text" "b"}]': r"after record 1: Expecting ':' delimiter at character 25",
    b'[{"text": "a"} {"text": "b"}]': r"after record 1: '{' stands in place of ']' at character 16",
    b'[{"text": "a"},]': r"after record 1: ",
    b'[{"text": "a"}]\n[{"text": "b"}]': r"after record 1: the array ends, but the file continues",
    b'[{"text": "a"}, ' + b"[" * 200_000: r"after record 1: .*nested too deeply",
    b"[": "after record 0: the array is not closed",
}


@pytest.mark.parametrize("content", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_array_is_never_taken_for_whole(tmp_path: Path, content: bytes) -> None:
    source = save(tmp_path / "in.json", content)
    for job in (JOB, SKIP):
        with pytest.raises(ValueError, match=rf"in\.json is truncated or damaged, in or {DAMAGED[content]}"):
            convert(tmp_path, source, job=job)
    good = write_lines(tmp_path / "good.jsonl", ["good"])
    found = convert(tmp_path, source, Path(good), job=SKIP_FILES)
    assert found[-1] == tokens("good")[0] and found[:-1] in ([], tokens("a"), tokens("a", "b"))
    assert "in.json: record " in (tmp_path / "out_bad_lines.txt").read_text()


def test_bad_records_of_an_array_are_named_and_skipped(tmp_path: Path) -> None:
    bad = {
        b'"a string"': 'not a JSON object like {"text": "..."}. Correct this record of the input. To read strings as texts',
        b"[1]": "not a JSON object",
        b'{"title": 1}': "the record has no key 'text'",
        b'{"text": 5}': "not a string but 5",
        b'{"text": "\xff"}': "byte 0xff at character 10 of the record is not valid UTF-8",
        b'{"text": "\\ud800"}': "surrogate",
        b'{"text": "x", "n": ' + b"9" * 5000 + b"}": "digit",
    }
    source = save(tmp_path / "in.json", b'[{"text": "good"}, ' + b",\n".join(bad) + b', {"text": "gr\xc3\xb6\xc3\x9fe"}]')
    with pytest.raises(ValueError, match=r"in\.json: record 2: the record is not a JSON object(.|\n)*--on-error skip"):
        convert(tmp_path, source)
    assert convert(tmp_path, source, job=SKIP) == tokens("good", "größe")
    lines = (tmp_path / "out_bad_lines.txt").read_text().splitlines()
    for number, (line, problem) in enumerate(zip(lines, bad.values(), strict=True), start=2):
        assert line.startswith(f"{source}: record {number}: ") and problem in line
    replacing = PreprocessJob(BYTES, ("text",), True, text_encoding=TextEncoding(errors="replace"))
    save(source, b'[{"text": "a\xff\xffb"}, {"text": "\xc3\xa9"}]')
    assert convert(tmp_path, source, job=replacing) == tokens("a\ufffd\ufffdb", "é")
    assert "in.json: record 1: byte 0xff at character 11 of the record" in (tmp_path / "out_encodings.txt").read_text()
    latin = PreprocessJob(BYTES, ("text",), True, text_encoding=TextEncoding("latin-1"))
    assert convert(tmp_path, save(source, b'[{"text": "gr\xf6\xdfe"}]'), job=latin) == tokens("größe")


def test_an_empty_array_has_no_document(tmp_path: Path) -> None:
    write_lines(tmp_path / "more.jsonl", ["more"])
    assert convert(tmp_path, save(tmp_path / "in.json", b" [ ] "), tmp_path / "more.jsonl") == tokens("more")
    with pytest.raises(ValueError, match="no document with a token"):
        convert(tmp_path, tmp_path / "in.json")


def test_an_object_around_the_records_is_refused_with_what_to_do(tmp_path: Path) -> None:
    content = {"version": 1, "data": [{"text": "a"}, {"text": "b"}]}
    source = save(tmp_path / "in.json", json.dumps(content).encode())
    with pytest.raises(
        ValueError, match=r"the 2 objects under the key 'data', write them one per line, .*jq -c '\.\[\"data\"\]\[\]'"
    ):
        convert(tmp_path, source)
    conversation = {"messages": [{"role": "user", "content": "a"}]}
    with pytest.raises(ValueError, match=r"no key 'text' .*, or correct the record$|correct the record\n"):
        convert(tmp_path, save(source, json.dumps([conversation]).encode()))
    save(source, json.dumps(content, indent=1).encode())
    with pytest.raises(ValueError, match=r"in\.json:1: the line is only '{', .*jq -c \. FILE"):
        convert(tmp_path, source)


# ---- compressed files


def pack_zst(content: bytes) -> bytes:
    packed: bytes = pytest.importorskip("zstandard").ZstdCompressor().compress(content)
    return packed


PACK: dict[str, Callable[[bytes], bytes]] = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": pack_zst}


@pytest.mark.parametrize("suffix", PACK)
def test_compressed_files_of_several_members_and_each_content(tmp_path: Path, suffix: str) -> None:
    pack = PACK[suffix]
    lines = json_lines(TEXTS)
    padding = b"\0" * 8 if suffix in ("xz", "gz") else b""
    convert(tmp_path, save(tmp_path / f"in.jsonl.{suffix}", pack(lines[:100]) + padding + pack(lines[100:])))
    assert files_of(tmp_path / "out_text_document") == expected_of(TEXTS)
    convert(tmp_path, save(tmp_path / f"in.json.{suffix}", pack(json.dumps(RECORDS, indent=1).encode())))
    assert files_of(tmp_path / "out_text_document") == expected_of(TEXTS)
    table = Path(write_csv(tmp_path / "in.csv", TEXTS)).read_bytes()
    for content in (table, codecs.BOM_UTF8 + table):
        convert(tmp_path, save(tmp_path / f"in.csv.{suffix}", pack(content)))
        assert files_of(tmp_path / "out_text_document") == expected_of(TEXTS)
    text = save(tmp_path / f"in.txt.{suffix}", pack(TEXTS[1].encode()))
    assert convert(tmp_path, text) == tokens(TEXTS[1])
    empty = [save(tmp_path / f"empty{kind}.{suffix}", pack(b"")) for kind in (".jsonl", ".csv")]
    assert convert(tmp_path, *empty, save(tmp_path / f"no.jsonl.{suffix}", b""), text) == tokens(TEXTS[1])


def test_a_large_compressed_text_that_repeats_is_read(tmp_path: Path) -> None:
    """A few bytes of bz2 and xz become many."""
    text = "word " * 2_000_000
    for suffix in ("bz2", "xz"):
        source = save(tmp_path / f"in.jsonl.{suffix}", PACK[suffix](json.dumps({"text": text}).encode()))
        assert convert(tmp_path, source) == tokens(text)


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "txt"])
@pytest.mark.parametrize("damage", ["cut by 1", "cut by 20", "second member", "middle"])
def test_a_damaged_compressed_file_is_never_taken_for_whole(tmp_path: Path, suffix: str, kind: str, damage: str) -> None:
    chance = random.Random(1)
    records = [{"text": "".join(chance.choices("abcdefgh ", k=300))} for _ in range(300)]
    content = {
        "jsonl": "".join(json.dumps(record) + "\n" for record in records),
        "json": json.dumps(records),
        "csv": "text\n" + "".join(f"{record['text']}\n" for record in records),
        "txt": "\n".join(record["text"] for record in records),
    }[kind].encode()
    half = len(content) // 2
    packed = PACK[suffix](content[:half]) + PACK[suffix](content[half:])
    if damage.startswith("cut"):
        packed = packed[: -int(damage.split()[-1])]
    else:
        place = len(PACK[suffix](content[:half])) if damage == "second member" else len(packed) // 4
        packed = packed[:place] + b"\xa5\x5a\xa5\x5a" * 3 + packed[place + 12 :]
    source = save(tmp_path / f"in.{kind}.{suffix}", packed)
    with pytest.raises(ValueError, match=rf"in\.{kind}\.{suffix} is truncated or damaged, (after|in) [^:]*: .*\n.*copy"):
        convert(tmp_path, source, job=SKIP)


# ---- Arrow files and nested keys


def write_arrow(path: Path, table: Any, *, stream: bool, rows: int = 7) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    with (pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file)(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


@pytest.mark.parametrize("stream", [True, False])
def test_arrow_files_give_the_same_bytes(tmp_path: Path, stream: bool) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"id": list(range(len(TEXTS))), "text": TEXTS})
    source = write_arrow(tmp_path / "in.arrow", table, stream=stream)
    convert(tmp_path, source)
    assert files_of(tmp_path / "out_text_document") == expected_of(TEXTS)
    content = source.read_bytes()
    for cut in (1, 8, 100, len(content) // 2):
        source.write_bytes(content[:-cut])
        with pytest.raises(ValueError, match=r"in\.arrow is (truncated or|not an Arrow file, or is) damaged"):
            convert(tmp_path, source, job=SKIP)
    if stream:  # at the end of a record batch, where pyarrow sees no damage
        reader = pyarrow.ipc.open_stream(content)
        part = pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(part, reader.schema) as writer:
            writer.write_batch(next(iter(reader)))
        source.write_bytes(part.getvalue().to_pybytes()[:-8])
        with pytest.raises(ValueError, match="damaged, after row 7 or later: the end of the stream is missing"):
            convert(tmp_path, source, job=SKIP)


def test_feather_and_columns_of_arrow(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    feather = pytest.importorskip("pyarrow.feather")
    table = pyarrow.table({"text": TEXTS, "n": list(range(len(TEXTS)))})
    feather.write_feather(table, str(tmp_path / "in.feather"), compression="zstd")
    convert(tmp_path, tmp_path / "in.feather")
    assert files_of(tmp_path / "out_text_document") == expected_of(TEXTS)
    for key, problem in {"title": "has no column 'title'.*are: 'text', 'n'", "n": "the column 'n' .* type int64"}.items():
        with pytest.raises(ValueError, match=problem):
            convert(tmp_path, tmp_path / "in.feather", job=PreprocessJob(BYTES, (key,), True))
    write_arrow(tmp_path / "null.arrow", pyarrow.table({"text": ["a", None, "b"]}), stream=True)
    assert convert(tmp_path, tmp_path / "null.arrow", job=SKIP) == tokens("a", "b")
    assert (tmp_path / "out_bad_lines.txt").read_text().startswith(f"{tmp_path}/null.arrow: row 1: the value of key 'text'")
    save(tmp_path / "old.feather", b"FEA1anything")
    with pytest.raises(ValueError, match="Feather version 1, which is not read"):
        convert(tmp_path, tmp_path / "old.feather")


NESTED: list[dict[str, Any]] = [
    {"data": {"text": "inner 1", "n": {"t": "x"}}},
    {"data": {"text": "inner 2", "n": {"t": "y"}}, "data.text": "outer"},
]


def test_nested_keys_of_every_kind_of_record(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    job = PreprocessJob(BYTES, ("data.text",), True)
    save(tmp_path / "in.jsonl", "\n".join(map(json.dumps, NESTED)).encode())
    save(tmp_path / "in.json", json.dumps(NESTED).encode())
    for name in ("in.jsonl", "in.json"):
        assert convert(tmp_path, tmp_path / name, job=job) == tokens("inner 1", "outer")
        deep = PreprocessJob(BYTES, ("text",), True, column="data.n.t")
        assert convert(tmp_path, tmp_path / name, job=deep) == tokens("x", "y")
        with pytest.raises(ValueError, match="has no key 'data.none'"):
            convert(tmp_path, tmp_path / name, job=PreprocessJob(BYTES, ("data.none",), True))
    inner = pyarrow.table({"data": pyarrow.array([record["data"] for record in NESTED] + [None])})
    both = inner.append_column("data.text", [["outer 1", "outer 2", "outer 3"]])
    for table, expected in ((inner, tokens("inner 1", "inner 2")), (both, tokens("outer 1", "outer 2", "outer 3"))):
        parquet.write_table(table, tmp_path / "in.parquet")
        write_arrow(tmp_path / "in.arrow", table, stream=True)
        for name in ("in.parquet", "in.arrow"):
            skipping = PreprocessJob(BYTES, ("data.text",), True, skip_bad_records=True)
            assert convert(tmp_path, tmp_path / name, job=skipping) == expected
            with pytest.raises(ValueError, match="has no column 'data.none'"):
                convert(tmp_path, tmp_path / name, job=PreprocessJob(BYTES, ("data.none",), True))
    assert documents(tmp_path / "out_data.text_document") == expected


# ---- folders of datasets


def save_to_disk(folder: Path, texts: list[str]) -> None:
    """Two data files and the descriptions, as Dataset.save_to_disk writes them."""
    pyarrow = pytest.importorskip("pyarrow")
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-00002.arrow" for number in range(2)]
    half = len(texts) // 2
    for name, part in zip(names, (texts[:half], texts[half:]), strict=True):
        write_arrow(folder / name, pyarrow.table({"text": part}), stream=True)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}, indent=2))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}, indent=2))


def test_folders_of_save_to_disk(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "one", TEXTS)
    convert(tmp_path, tmp_path / "one")
    assert files_of(tmp_path / "out_text_document") == expected_of(TEXTS)
    assert find_sources([str(tmp_path / "one")])[1] == [
        f"skipped, description of a dataset: 2: {tmp_path}/one/dataset_info.json, {tmp_path}/one/state.json"
    ]
    with pytest.raises(ValueError, match="--input-split train: no folder of --input contains splits"):
        convert(tmp_path, tmp_path / "one", input_split="train")
    (tmp_path / "one" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(
        ValueError, match=r"one lacks 1 of the 2 files that its state\.json lists, such as data-00001-of-00002\.arrow"
    ):
        convert(tmp_path, tmp_path / "one")


def test_a_split_of_several_is_chosen(tmp_path: Path) -> None:
    for name, texts in {"train": TEXTS, "test": TEXTS[:4]}.items():
        save_to_disk(tmp_path / "all" / name, texts)
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for split, problem in {
        None: "contains several splits: it has train, test",
        "dev": "has no split dev: it has train, test",
    }.items():
        with pytest.raises(ValueError, match=rf"all {problem}\.\n.*--input-split NAME"):
            convert(tmp_path, tmp_path / "all", input_split=split)
    assert convert(tmp_path, tmp_path / "all", input_split="test") == tokens(*TEXTS[:4])
    assert convert(tmp_path, tmp_path / "all" / "test", tmp_path / "all" / "train") == tokens(*TEXTS[:4], *TEXTS)
    sample = sample_texts([str(tmp_path / "all")], ("text",), 10**6, split="test")
    assert sample.num_documents == 4


def test_a_real_dataset_of_the_library(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": TEXTS})}).save_to_disk(str(tmp_path / "saved"))
    convert(tmp_path, tmp_path / "saved")
    assert files_of(tmp_path / "out_text_document") == expected_of(TEXTS)


def make_repository(folder: Path, files: dict[str, bytes], name: str = "abc", *, main: bool = True) -> Path:
    """A snapshot in the cache of the Hub: links to files without suffixes."""
    for number, (path, content) in enumerate(files.items()):
        blob = save(folder / "blobs" / f"{name}{number}", content)
        link = folder / "snapshots" / name / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    if main:
        save(folder / "refs" / "main", name.encode())
    return folder


def test_the_cache_of_the_hub(tmp_path: Path) -> None:
    files = {
        "README.md": b"about",
        ".gitattributes": b"*",
        "dataset_infos.json": b"{}",
        "data/a.jsonl": json_lines(["one"]),
        "data/b.json": json.dumps([{"text": "two"}]).encode(),
        "notes/README.md": b"a text of the data",
    }
    folder = make_repository(tmp_path / "datasets--org--name", files)
    make_repository(folder, {"data/a.jsonl": json_lines(["old"])}, "old", main=False)
    assert convert(tmp_path, folder) == tokens("one", "two", "a text of the data")
    messages = find_sources([str(folder)])[1]
    snapshot = folder / "snapshots" / "abc"
    assert messages == [
        f"skipped, hidden: 1: {snapshot}/.gitattributes",
        f"skipped, description of a dataset: 2: {snapshot}/README.md, {snapshot}/dataset_infos.json",
    ]
    assert convert(tmp_path, folder / "snapshots" / "old") == tokens("old")
    (folder / "refs" / "main").unlink()
    with pytest.raises(ValueError, match=rf"no refs/main that selects a snapshot\.\n.*{snapshot}, .*old"):
        convert(tmp_path, folder)
    save(folder / "refs" / "main", b"gone")
    with pytest.raises(ValueError, match="refs/main names the snapshot gone, which is missing"):
        convert(tmp_path, folder)
    save(folder / "refs" / "main", b"abc")
    (snapshot / "data" / "a.jsonl").resolve().unlink()
    with pytest.raises(ValueError, match=r"a\.jsonl is a link to .*, which does not exist"):
        convert(tmp_path, folder)


def test_a_download_to_a_folder(tmp_path: Path) -> None:
    for name, content in {".cache/huggingface/x.jsonl": b"{}", "README.md": b"about", "train.jsonl": json_lines(["one"])}.items():
        save(tmp_path / "download" / name, content)
    assert convert(tmp_path, tmp_path / "download") == tokens("one")


def test_a_tokenizer_of_the_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tokenizers")
    write_lines(tmp_path / "in.jsonl", ["low lower lowest"] * 9)
    from megatron_lab.data_tools.tokenizer_training import train_tokenizer

    train_tokenizer("byte-bpe", ["low lower lowest"], 263, [], tmp_path / "plain")
    files = {path.name: path.read_bytes() for path in (tmp_path / "plain").iterdir()}
    folder = make_repository(tmp_path / "models--org--name", files)
    assert resolve_snapshot(str(folder)) == str(folder / "snapshots" / "abc")
    common = ["--input", str(tmp_path / "in.jsonl"), "--tokenizer-type", "HuggingFaceTokenizer"]
    for name, tokenizer in {"a": tmp_path / "plain", "b": folder}.items():
        flags = ["--output-prefix", str(tmp_path / name), "--tokenizer-model", str(tokenizer)]
        assert preprocess_data.main([*common, *flags]) == 0, capsys.readouterr().err
    assert files_of(tmp_path / "a_text_document") == files_of(tmp_path / "b_text_document")
    make_repository(folder, files, "other", main=False)
    (folder / "refs" / "main").unlink()
    with pytest.raises(SystemExit):
        preprocess_data.main([*common, "--output-prefix", str(tmp_path / "c"), "--tokenizer-model", str(folder)])
    assert "there is no refs/main that selects a snapshot" in capsys.readouterr().err


# ---- all tools


def test_mixed_kinds_in_all_tools(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    folder = tmp_path / "in"
    save(folder / "a.json", b'[{"text": "a"}]')
    save(folder / "b.jsonl.xz", lzma.compress(b'{"text": "b"}\n'))
    write_arrow(folder / "c.arrow", pyarrow.table({"text": ["c"]}), stream=False)
    save(folder / "d.csv.bz2", bz2.compress(b"text,n\nd,1\n"))
    save(folder / "e.txt.gz", gzip.compress(b"e"))
    assert convert(tmp_path, folder) == tokens(*"abcde")
    sample = sample_texts([str(folder)], ("text",), 10**6)
    assert sorted(sample.training_texts + sample.held_out_texts) == [*"abcde"]
    assert [bytes(document.ids).decode() for document in read_documents(str(folder), ByteTokenizer())] == [*"abcde"]
    with pytest.raises(ValueError, match=r"bad\.json: record 1: the record has no key 'text'"):
        list(read_documents(str(save(tmp_path / "bad.json", b"[{}]")), ByteTokenizer()))


def test_a_single_document_is_announced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "book.txt", b"A long text. " * 500)
    common = ["--input", str(tmp_path / "book.txt"), "--output-prefix", str(tmp_path / "out"), "--tokenizer-type", "ByteTokenizer"]
    assert preprocess_data.main(common) == 0
    assert "the dataset is a single document, which --split" in (shown := capsys.readouterr().err) and "--cut-documents" in shown
    assert preprocess_data.main([*common, "--cut-documents", "100"]) == 0
    assert "single document" not in capsys.readouterr().err
