"""Bad input and full disks: told with file, place and remedy, and never a half-written dataset under its final name."""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import resource
import shutil
import signal
import sys
import tomllib
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from megatron.config.data import DataConfig
from megatron.data import indexed_writer
from megatron.data.indexed_writer import write_dataset
from megatron_lab.data_tools.preprocess import reports, shard_work
from megatron_lab.data_tools.preprocess.engines import Engine
from megatron_lab.data_tools.preprocess.job import preprocess
from megatron_lab.data_tools.preprocess.shard_work import PreprocessJob
from tests.support.cli import ROOT, spawn_cli
from tests.support.corpora import (
    BYTES,
    JOB,
    SKIP,
    TEXTS,
    documents,
    expected_of,
    files_of,
    json_lines,
    write_lines,
    write_parquet,
    write_zst,
    written,
)

BAD_LINES = {
    b'{"text": "x"': "not JSON: .* at column",
    b'{"text": "x': "not JSON: Unterminated string starting at column 10. Correct this line of the input$",
    b"[1]": "not a JSON object",
    b'{"title": "x"}': r"no key 'text' \(--json-keys, --column\); the keys of the line are: 'title'",
    b'{"text": 5}': "not a string but 5",
    b'{"text": null}': "not a string but null",
    b'{"text": "\xff"}': "byte 0xff at offset 28 is not valid UTF-8. Name the encoding",
    b'{"text": "\\ud800"}': "surrogate",
    b"[" * 100_000: "recursion",
    b'{"text": ' + b"9" * 5000 + b"}": "digit",
}


@pytest.mark.parametrize("bad", BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_line_is_named_and_no_dataset_is_written(tmp_path: Path, bad: bytes) -> None:
    good = json.dumps({"text": "fine"}).encode()
    (tmp_path / "in.jsonl").write_bytes(b"\n".join([good, b"", bad, good]))
    where = rf"(?m){re.escape(str(tmp_path))}/in\.jsonl:3: .*{BAD_LINES[bad]}(.|\n)*--on-error skip(.|\n)*--resume"
    with pytest.raises(ValueError, match=where):
        preprocess([str(tmp_path / "in.jsonl")], str(tmp_path / "out"), JOB)
    assert not written(tmp_path), "no shard was finished, so nothing is kept either"
    summary = preprocess([str(tmp_path / "in.jsonl")], str(tmp_path / "out"), SKIP)
    assert documents(tmp_path / "out_text_document") == [[*b"fine", 256]] * 2
    assert (summary.num_bad_records, summary.num_empty) == (1, 1)
    assert summary.bad_records[0].startswith(f"{tmp_path / 'in.jsonl'}:3: ")
    assert (tmp_path / "out_bad_lines.txt").read_text().splitlines() == summary.bad_records


@pytest.mark.parametrize("workers", [1, 3])
def test_lines_are_counted_through_shards_and_files(tmp_path: Path, workers: int) -> None:
    lines = [b'{"text": "%d"}' % n for n in range(30)]
    for at in (4, 17, 29):
        lines[at] = b"{}"
    sources = [str(tmp_path / f"{name}.jsonl") for name in "ab"]
    for source in sources:
        Path(source).write_bytes(b"\n".join(lines))
    (tmp_path / "out_bad_lines.txt").write_text("of an earlier job")
    summary = preprocess(sources, str(tmp_path / "out"), SKIP, engine=Engine(num_workers=workers), shard_size=50)
    assert [line.partition(": ")[0] for line in summary.bad_records] == [f"{s}:{n}" for s in sources for n in (5, 18, 30)]
    assert summary.num_bad_records == 6 and summary.num_documents == 54
    assert summary.bad_records_file == str(tmp_path / "out_bad_lines.txt")
    for source in sources:
        Path(source).write_bytes(b"\n".join(lines).replace(b"{}", b'{"text": ""}'))
    assert preprocess(sources, str(tmp_path / "out"), SKIP).bad_records_file is None
    assert not (tmp_path / "out_bad_lines.txt").exists()


def test_the_line_where_it_stops_is_counted_over_shards_that_are_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards are begun from the last to the first."""
    (tmp_path / "in.jsonl").write_bytes(b'{"text": "x"}\n' * 20 + b"\n\n[]\n")

    def backwards(self: Engine, job: PreprocessJob, shards: list[object], folder: str, listen: object) -> None:
        for number in (len(shards) // 2, len(shards) - 1):
            listen(number, shard_work.run_shard(job, shards[number], folder))  # type: ignore[arg-type, operator]

    monkeypatch.setattr(Engine, "run", backwards)
    with pytest.raises(ValueError, match=r"in\.jsonl:23: the line is not a JSON object"):
        preprocess([str(tmp_path / "in.jsonl")], str(tmp_path / "out"), JOB, shard_size=30)


def test_names_that_are_no_text_can_be_told(tmp_path: Path) -> None:
    source = os.fsdecode(os.fsencode(tmp_path) + b"/in\xff.jsonl")
    Path(source).write_bytes(json_lines(["x"]) + b'{"\\ud800": 1}\n')
    summary = preprocess([source], str(tmp_path / "out"), SKIP)
    assert summary.num_bad_records == 1
    assert (tmp_path / "out_bad_lines.txt").read_text().startswith(f"{tmp_path}/in\\udcff.jsonl:2: the line has no key 'text'")


def test_a_reason_of_two_lines_is_one_in_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = shard_work._ShardBuilder._encode

    def refuse(self: shard_work._ShardBuilder, texts: list[str]) -> None:
        if texts[0] == "bad":
            raise ValueError("not this.\n  Another one.")
        encode(self, texts)

    monkeypatch.setattr(shard_work._ShardBuilder, "_encode", refuse)
    source = write_lines(tmp_path / "in.jsonl", ["good", "bad", "bad"])
    preprocess([source], str(tmp_path / "out"), SKIP)
    told = [f"{source}:{number}: not this.   Another one." for number in (2, 3)]
    assert (tmp_path / "out_bad_lines.txt").read_text().splitlines() == told


def test_a_job_of_bad_lines_alone_shows_one(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"content": "x"}\n' * 3)
    with pytest.raises(
        ValueError, match=r"no document .*\n  3 invalid records were skipped, the first: .*in\.jsonl:1: the line has no key 'text'"
    ):
        preprocess([str(tmp_path / "in.jsonl")], str(tmp_path / "out"), SKIP)


def test_many_bad_lines_are_counted_and_the_first_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_work, "_MAX_REPORTED_RECORDS", 3)
    (tmp_path / "in.jsonl").write_text('{}\n{}\n{"text": "x"}\n{}\n{}\n{}\n')
    summary = preprocess([str(tmp_path / "in.jsonl")], str(tmp_path / "out"), SKIP)
    assert summary.num_bad_records == 5
    assert [line.split(":")[1] for line in summary.bad_records] == ["1", "2", "4", " 2 more invalid records up to here"]


def test_a_line_bad_for_one_key_gives_no_document_for_any(tmp_path: Path) -> None:
    lines = [{"a": "x", "b": "y"}, {"a": "z"}, {"a": "u", "b": ""}]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    job = PreprocessJob(BYTES, ("a", "b"), False, skip_bad_records=True)
    summary = preprocess([str(tmp_path / "in.jsonl")], str(tmp_path / "out"), job)
    assert documents(tmp_path / "out_a_document") == [[*b"x"], [*b"u"]]
    assert documents(tmp_path / "out_b_document") == [[*b"y"]]
    assert (summary.num_documents, summary.num_empty, summary.num_bad_records) == (3, 1, 1)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_document_that_the_index_cannot_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    monkeypatch.setattr(shard_work, "MAX_DOCUMENT_TOKENS", 10)
    source = write_lines(tmp_path / "in.jsonl", ["123456789", "1234567890"])
    with pytest.raises(
        ValueError, match=r"in\.jsonl:2: the text of key 'text' has 11 tokens, but .* at most 10 per document: split the document"
    ):
        preprocess([source], str(tmp_path / "out"), JOB, engine=Engine(num_workers=workers), shard_size=40)
    summary = preprocess([source], str(tmp_path / "out"), SKIP, shard_size=40, start_mode="resume")
    assert (summary.num_documents, summary.num_bad_records) == (1, 1)


def test_bad_rows_and_bad_text_files(tmp_path: Path) -> None:
    source = write_parquet(tmp_path / "in.parquet", ["a", "b", None, "c"], rows=2)
    with pytest.raises(ValueError, match=r"in\.parquet: row 2: the value of key 'text' is not a string but null"):
        preprocess([source], str(tmp_path / "out"), JOB)
    assert preprocess([source], str(tmp_path / "out"), SKIP, shard_size=1).bad_records[0].startswith(f"{source}: row 2: ")
    (tmp_path / "a.txt").write_bytes("größer\n".encode() + b"two \xe4")
    with pytest.raises(
        ValueError, match=r"a\.txt: byte 0xe4 at offset 13 in line 2 is not valid UTF-8\. Name the encoding(.|\n)*skip"
    ):
        preprocess([str(tmp_path / "a.txt")], str(tmp_path / "new"), JOB)


@pytest.mark.parametrize("workers", ["1", "3"])
def test_the_tool_fails_with_file_and_line(tmp_path: Path, workers: str) -> None:
    source = write_lines(tmp_path / "in.jsonl")
    with Path(source).open("ab") as file:
        file.write(b'{"text": oops}\n')
    argv = ["tools/preprocess_data.py", "--input", source, "--output-prefix", str(tmp_path / "out"), "--workers", workers]
    argv += ["--tokenizer-type", "ByteTokenizer", "--append-eod", "--shard-size", "1K"]
    done = spawn_cli(argv, None)
    assert done.returncode == 1
    assert f"error: {source}:41: the line is not JSON" in done.stderr
    assert "--on-error skip" in done.stderr
    assert "Traceback" not in done.stderr
    assert written(tmp_path) <= {"out.parts"}
    done = spawn_cli([*argv, "--resume", "--on-error", "skip"], None)
    assert done.returncode == 0, done.stderr
    assert f"left out: {source}:41: the line is not JSON" in done.stderr
    assert f"all records left out: {tmp_path / 'out_bad_lines.txt'}" in done.stderr
    assert files_of(tmp_path / "out_text_document") == expected_of(TEXTS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": ["/none.jsonl"]}, "--input /none.jsonl: there is no such file or folder"),
        ({"inputs": ["/none/*.jsonl"]}, "--input /none/\\*.jsonl: there is no file of a known format.\n  Known formats: .jsonl"),
        ({"inputs": ["{folder}/model.bin"]}, "the format of this file is unknown.\n  Known formats: .jsonl"),
        ({"inputs": ["{folder}/in.jsonl", "{folder}/*.jsonl"]}, "names .*in.jsonl twice, the second time by .*jsonl"),
        ({"inputs": ["nope://a/b.jsonl"]}, "nope://a/b.jsonl: .*nope"),
        ({"inputs": ["{folder}/empty.jsonl"]}, "no document with a token"),
        ({"inputs": ["{folder}/notes.txt"], "job": PreprocessJob(BYTES, ("title",), True)}, "plain text, whose only key is 'text'"),
        ({"inputs": ["{folder}/no.parquet"]}, "no.parquet is not a parquet file, or is damaged"),
        ({"output_prefix": "/none/out"}, "the folder /none does not exist"),
        ({"output_prefix": "/tmp/"}, "/tmp/ is a folder"),
        ({"job": PreprocessJob(DataConfig(tokenizer_type="NullTokenizer"), ("text",), False)}, "needs --vocab-size"),
        (
            {"job": PreprocessJob(DataConfig(tokenizer_type="NullTokenizer", vocab_size=9), ("text",), False)},
            "in.jsonl:1: 'ab' is not an id",
        ),
        ({"job": PreprocessJob(BYTES, ("a/b",), True)}, "--json-keys a/b: .* must not contain '/'"),
        ({"job": PreprocessJob(BYTES, ("empty",), True)}, "no document with a token for .*out_empty_document"),
    ],
)
def test_what_cannot_work_is_refused_and_leaves_nothing(tmp_path: Path, change: dict[str, object], message: str) -> None:
    if "nope" in message:
        pytest.importorskip("fsspec")
    if "parquet" in message:
        pytest.importorskip("pyarrow")
    (tmp_path / "in.jsonl").write_text('{"text": "ab", "empty": ""}\n')
    (tmp_path / "empty.jsonl").touch()
    for name in ("model.bin", "notes.txt", "no.parquet"):
        (tmp_path / name).write_text("anything")
    before = {path.name for path in tmp_path.iterdir()}
    settings = {"inputs": [str(tmp_path / "in.jsonl")], "output_prefix": str(tmp_path / "out"), "job": JOB, **change}
    settings["inputs"] = [word.format(folder=tmp_path) for word in settings["inputs"]]  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=message):
        preprocess(**settings)  # type: ignore[arg-type]
    assert {path.name for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("names", "values", "told"),
    [
        (["other"], [["x"]], "no column 'text'.*columns of the file are: 'other'"),
        (["text", "text"], [["x"], ["y"]], "more than one column 'text'"),
        (["text"], [[1]], "the column 'text'.* has the type int64, not string"),
        (["text"], [[["x"]]], "the column 'text'.* has the type list<.*>, not string"),
    ],
)
def test_columns_are_looked_at_before_the_work_begins(tmp_path: Path, names: list[str], values: list[object], told: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(values, names=names), tmp_path / "in.parquet")
    with pytest.raises(ValueError, match=rf"in\.parquet(?:| has|:) {told}"):
        preprocess([str(tmp_path / "in.parquet")], str(tmp_path / "out"), SKIP)


@pytest.mark.parametrize("kind", ["string", "large_string"])
def test_a_string_of_a_column_that_is_not_utf8(tmp_path: Path, kind: str) -> None:
    """pyarrow does not look; the other rows are good."""
    pyarrow = pytest.importorskip("pyarrow")
    column = pyarrow.array([b"one", b"\xff", None, b"two"])
    column = pyarrow.Array.from_buffers(pyarrow.string(), 4, column.buffers(), column.null_count)
    if kind == "large_string":
        column = column.cast(pyarrow.large_binary()).view(pyarrow.large_string())
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({"text": column}), tmp_path / "in.parquet")
    summary = preprocess([str(tmp_path / "in.parquet")], str(tmp_path / "out"), SKIP)
    assert documents(tmp_path / "out_text_document") == [[*b"one", 256], [*b"two", 256]]
    assert [line.rpartition("/")[2] for line in summary.bad_records] == [
        "in.parquet: row 1: byte 0xff at offset 0 of column 'text' is not valid UTF-8. Name the encoding with --encoding, or set "
        "--errors replace to keep the text with U+FFFD for these bytes",
        "in.parquet: row 2: the value of key 'text' is not a string but null. Correct the value",
    ]


@pytest.mark.parametrize("checked", [False, True])
def test_damage_in_a_row_group(tmp_path: Path, checked: bool) -> None:
    """Of a page's head; and of a text in it, where the file has checksums of its pages."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "in.parquet"
    table = pyarrow.table({"text": [f"{n} {text}" for n in range(9) for text in TEXTS]})
    parquet.write_table(table, path, row_group_size=180, write_page_checksum=checked, compression="none", use_dictionary=False)
    page = parquet.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    at = page + (500 if checked else 0)
    content[at : at + 20] = b"\x41" * 20 if checked else b"\xff" * 20
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"in\.parquet: row group 1 is damaged: .*\n.*copy the file again"):
        preprocess([str(path)], str(tmp_path / "out"), SKIP)


def test_too_little_memory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*args: object) -> NoReturn:
        raise MemoryError

    source = write_lines(tmp_path / "in.jsonl")
    monkeypatch.setattr(shard_work._ShardBuilder, "_encode", too_large)
    for workers in (1, 2):
        with pytest.raises(ValueError, match=r"in\.jsonl: not enough memory for a record of this file"):
            preprocess([source], str(tmp_path / "out"), SKIP, engine=Engine(num_workers=workers))


@pytest.mark.parametrize("cut", [1, 20, 300])
@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_packed_file_that_is_cut_off_is_never_taken_for_whole(tmp_path: Path, suffix: str, cut: int) -> None:
    """Also where bad lines are skipped: nobody knows how many are missing."""
    lines = json_lines(TEXTS)
    path = tmp_path / f"in.jsonl.{suffix}"
    path.write_bytes(gzip.compress(lines) if suffix == "gz" else Path(write_zst(path, TEXTS)).read_bytes())
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(
        ValueError, match=rf"in\.jsonl\.{suffix} is truncated or damaged, after line \d+ or later: .*\n.*copy the file again"
    ):
        preprocess([str(path)], str(tmp_path / "out"), SKIP)
    assert not written(tmp_path)


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_packed_file_that_is_none(tmp_path: Path, suffix: str) -> None:
    if suffix == "zst":
        pytest.importorskip("zstandard")
    write_lines(tmp_path / f"in.jsonl.{suffix}")
    with pytest.raises(ValueError, match=r"is truncated or damaged, after line 0 or later: "):
        preprocess([str(tmp_path / f"in.jsonl.{suffix}")], str(tmp_path / "out"), JOB)


def test_a_file_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_lines(tmp_path / "in.jsonl")
    write = shard_work._ShardBuilder._write

    def and_touch(self: shard_work._ShardBuilder) -> None:
        os.utime(source, ns=(5, 5))
        write(self)

    monkeypatch.setattr(shard_work, "_MAX_BUFFERED_TOKENS", 100)
    monkeypatch.setattr(shard_work._ShardBuilder, "_write", and_touch)
    with pytest.raises(ValueError, match=r"in\.jsonl was changed while this job read it"):
        preprocess([source], str(tmp_path / "out"), JOB)


# ---- no room


@pytest.mark.parametrize("place", ["part", "report", "join"])
def test_a_full_disk_is_told_and_the_job_goes_on_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    source = write_lines(tmp_path / "in.jsonl")
    calls = 0

    def full(*args: object, **kwargs: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 3 or place == "join":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*args, **kwargs)  # type: ignore[no-any-return, operator]

    owner, name = {
        "part": (shard_work.IndexedDatasetWriter, "finish"),
        "report": (shard_work.JobFolder, "finish_shard"),
        "join": (shutil, "copyfileobj"),
    }[place]
    original = getattr(owner, name)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full)
        with pytest.raises(ValueError, match=r"out\.parts: the disk is full .*\n.*[Mm]ake room.* --resume"):
            preprocess([source], str(tmp_path / "out"), JOB, shard_size=500)
    assert written(tmp_path) == {"out.parts"}
    assert not list(tmp_path.rglob("*.partial-*"))
    summary = preprocess([source], str(tmp_path / "out"), JOB, start_mode="resume")
    assert summary.num_resumed_shards == (2 if place != "join" else 8)
    assert files_of(tmp_path / "out_text_document") == expected_of(TEXTS)


def test_a_write_that_fails_in_a_worker_leaves_no_half_file(tmp_path: Path) -> None:
    """By a limit on the size of files that the system keeps, in processes of their own."""
    source = write_lines(tmp_path / "in.jsonl", TEXTS * 40)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
    try:
        with pytest.raises(ValueError, match=r"out\.parts: the file is larger than the system allows"):
            preprocess([source], str(tmp_path / "out"), JOB, engine=Engine(num_workers=2))
        assert not written(tmp_path)
        with pytest.raises(ValueError, match=r"out\.parts: the file is larger than the system allows"):
            preprocess([source], str(tmp_path / "out"), JOB, engine=Engine(num_workers=2), shard_size=20_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert written(tmp_path) == {"out.parts"}
    assert not list(tmp_path.rglob("*.partial-*"))
    summary = preprocess([source], str(tmp_path / "out"), JOB, start_mode="resume")
    assert summary.num_resumed_shards == 8, "only joining them failed"
    assert files_of(tmp_path / "out_text_document") == expected_of(TEXTS * 40)


def test_a_writer_leaves_nothing_though_its_buffers_do_not_fit(tmp_path: Path) -> None:
    """Closing a file writes what is still in memory."""
    with pytest.raises(OSError, match="No space left"), write_dataset(str(tmp_path / "d"), np.uint16) as writer:
        writer.add_documents([1, 2, 3])
        os.dup2(os.open("/dev/full", os.O_WRONLY), writer._tokens.fileno())
        writer.add_documents([4, 5])
    assert not list(tmp_path.iterdir())


def test_too_little_room_is_seen_before_the_parts_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_lines(tmp_path / "in.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(indexed_writer.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 5000})())
        with pytest.raises(ValueError, match=r"the disk has 0\.0 MB free, but .* takes 0\.0 MB\.\n.*--resume"):
            preprocess([source], str(tmp_path / "out"), JOB)
    assert written(tmp_path) == {"out.parts"}
    assert preprocess([source], str(tmp_path / "out"), JOB, start_mode="resume").num_resumed_shards == 1


def test_too_little_room_is_told_long_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_lines(tmp_path / "in.jsonl", TEXTS)
    told: dict[int, list[str]] = {}
    done = preprocess([source], str(tmp_path / "out"), JOB)
    size = sum(map(len, files_of(tmp_path / "out_text_document")))
    for free in (2 * size, size):
        told[free] = []
        with monkeypatch.context() as patch:
            patch.setattr(reports.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": free})())  # noqa: B023
            preprocess([source], str(tmp_path / "out"), JOB, shard_size=done.num_bytes // 3, log=told[free].append)
    assert not [line for line in told[2 * size] if "WARNING" in line]
    (warning,) = [line for line in told[size] if "WARNING" in line]
    assert re.search(r"out\.parts: the disk has 0\.0 MB free, but about 0\.0 MB more are needed", warning)


# ---- what is not installed


@pytest.mark.parametrize(
    ("library", "source", "settings"),
    [
        ("zstandard", "in.jsonl.zst", {}),
        ("pyarrow", "in.parquet", {}),
        ("fsspec", "s3://bucket/in.jsonl", {}),
        ("ray", "in.jsonl", {"engine": Engine("ray")}),
    ],
)
def test_a_library_that_is_missing_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, source: str, settings: dict[str, Any]
) -> None:
    for module in [library, *(name for name in sys.modules if name.startswith(f"{library}."))]:
        monkeypatch.setitem(sys.modules, module, None)
    path = source if "://" in source else write_lines(tmp_path / source)
    with pytest.raises(ValueError, match=re.escape(f"not installed: pip install -e '{ROOT}[{library}]'")) as caught:
        preprocess([path], str(tmp_path / "out"), JOB, **settings)
    assert path in str(caught.value) or "--engine ray" in str(caught.value)
    with (ROOT / "pyproject.toml").open("rb") as file:
        assert library in tomllib.load(file)["project"]["optional-dependencies"]
    assert not written(tmp_path)
