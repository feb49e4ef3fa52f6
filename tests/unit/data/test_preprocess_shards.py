"""Shards: what decides them, that they hold every record once, and that nobody can tell from the bytes who made them."""

from __future__ import annotations

import io
import json
import os
import random
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lab.commands.preprocess_data import build_parser
from megatron_lab.data_tools.preprocess import job, storage
from megatron_lab.data_tools.preprocess.engines import Engine
from megatron_lab.data_tools.preprocess.file_formats import FILE_FORMATS, detect_format, split_suffix
from megatron_lab.data_tools.preprocess.input_shards import (
    MAX_SHARD_SIZE,
    MIN_SHARD_SIZE,
    InputShard,
    find_sources,
    select_shard_size,
    split_into_shards,
)
from megatron_lab.data_tools.preprocess.job import preprocess
from megatron_lab.data_tools.preprocess.reports import count_lines
from megatron_lab.data_tools.preprocess.shard_work import PreprocessJob
from megatron_lab.data_tools.preprocess.text_encoding import RecordDecoder, TextEncoding
from megatron_lab.data_tools.preprocess.text_records import InputRange, read_records
from tests.support.corpora import BYTES, FORMS, JOB, SKIP, TEXTS, expected_of, files_of, write_lines, write_parquet

DECODER = RecordDecoder(TextEncoding())


def read(shards: list[InputShard]) -> list[object]:
    """All records of all shards."""
    pieces = [piece for shard in shards for piece in shard.ranges]
    return [record for piece in pieces for record in read_records(piece, ("text",), lambda at: None, DECODER)]


@given(content=st.lists(st.sampled_from([b"a", b"\n", b"bcd", b"\r\n", b"\x0b"]), max_size=30), size=st.integers(1, 12))
def test_every_line_is_in_one_shard_at_any_size(tmp_path_factory: pytest.TempPathFactory, content: list[bytes], size: int) -> None:
    path = tmp_path_factory.mktemp("lines") / "in.jsonl"
    path.write_bytes(b"".join(content))
    sources, _ = find_sources([str(path)])
    shards = split_into_shards(sources, size, ("text",))
    assert read(shards) == [line + b"\n" for line in path.read_bytes().split(b"\n")[:-1]] + [
        line for line in path.read_bytes().split(b"\n")[-1:] if line
    ]
    assert sum(shard.num_bytes for shard in shards) == path.stat().st_size
    assert max((shard.num_bytes for shard in shards), default=0) <= size
    for piece in (piece for shard in shards for piece in shard.ranges):
        owned = len(list(read_records(piece, ("text",), lambda at: None, DECODER)))
        if piece.start or owned:  # an empty file has no line, though one would begin there
            assert count_lines(piece) == owned


def test_a_line_longer_than_the_buffer_is_skipped_by_the_shards_in_its_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "BUFFER_BYTES", 16)
    (tmp_path / "in.jsonl").write_bytes(b"x" * 100 + b"\n" + b"y\n")
    shards = split_into_shards(find_sources([str(tmp_path / "in.jsonl")])[0], 10, ("text",))
    taken = []
    readline = io.BufferedReader.readline

    class Counting(io.BufferedReader):
        def readline(self, size: int | None = -1, /) -> bytes:
            line = readline(self, size)
            taken.append(len(line))
            return line

    monkeypatch.setattr(storage, "open_binary", lambda path: Counting(open(path, "rb", buffering=0)))  # noqa: SIM115
    assert [read([shard]) for shard in shards] == [[b"x" * 100 + b"\n"], *[[]] * 9, [b"y\n"]]
    assert sum(taken) < 103 + 11 * 17, "no shard reads to the end of the line only to find that it has none"


def test_row_groups_are_put_together_up_to_the_size(tmp_path: Path) -> None:
    source = write_parquet(tmp_path / "in.parquet", TEXTS, rows=4)
    (found,) = find_sources([source])[0]
    one_by_one = split_into_shards([found], 1, ("text",))
    assert [(piece.start, piece.end, piece.num_preceding_records) for shard in one_by_one for piece in shard.ranges] == [
        (n, n + 1, 4 * n) for n in range(10)
    ]
    size = one_by_one[0].num_bytes + one_by_one[1].num_bytes
    pairs = split_into_shards([found], size, ("text",))
    assert read(pairs) == [(text,) for text in TEXTS]
    assert 5 <= len(pairs) < 10 and all(shard.num_bytes <= size for shard in pairs)
    assert pairs[1].ranges[0].num_preceding_records == 8
    (whole,) = split_into_shards([found], 10**6, ("text",))
    assert whole.num_bytes == sum(shard.num_bytes for shard in one_by_one)


def test_small_files_share_a_shard_and_large_ones_do_not(tmp_path: Path) -> None:
    for index, size in enumerate([3, 4, 4, 25, 5, 5, 1]):
        (tmp_path / f"{index}.jsonl").write_bytes(b"x" * size)
    shards = split_into_shards(find_sources([str(tmp_path)])[0], 10, ("text",))
    assert [[(Path(piece.path).stem, piece.start, piece.end) for piece in shard.ranges] for shard in shards] == [
        [("0", 0, 3), ("1", 0, 4)],
        [("2", 0, 4)],
        [("3", 0, 10)],
        [("3", 10, 20)],
        [("3", 20, 25)],
        [("4", 0, 5), ("5", 0, 5)],
        [("6", 0, 1)],
    ]


def test_the_size_of_shards_follows_the_input() -> None:
    def size(gigabytes: float) -> int:
        num_bytes = int(gigabytes * 2**30)
        return select_shard_size([InputRange("/a.jsonl", "jsonl", "", 0, num_bytes, num_bytes, 0)])

    assert [size(g) for g in (0.001, 10, 10_000)] == [MIN_SHARD_SIZE, 10 * 2**20, MAX_SHARD_SIZE]


def test_a_shard_is_named_by_its_inputs(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl")

    def names(size: int) -> list[str]:
        return [shard.name for shard in split_into_shards(find_sources([source])[0], size, ("text",))]

    first = names(1000)
    assert first == names(1000)
    assert len(set(first)) == len(first)
    assert not {*first} & {*names(999)}
    os.utime(source, ns=(1, 1))
    assert not {*first} & {*names(1000)}
    other = write_lines(tmp_path / "z.jsonl", TEXTS[:1])
    (together,) = split_into_shards(find_sources([source, other])[0], 10**6, ("text",))
    os.utime(other, ns=(1, 1))
    assert together.name != split_into_shards(find_sources([source, other])[0], 10**6, ("text",))[0].name


# ---- which files


def test_folders_and_patterns_are_sorted_and_words_are_not(tmp_path: Path) -> None:
    names = ["b/2.jsonl", "b/10.jsonl", "b/sub/1.txt", "a.jsonl", "c.parquet", ".hidden.jsonl", "b/.cache/x.jsonl", "b/picture.png"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")

    def found(*words: str) -> list[str]:
        return [
            str(Path(source.path).relative_to(tmp_path)) for source in find_sources([str(tmp_path / word) for word in words])[0]
        ]

    assert found("c.parquet", "b", "a.jsonl") == ["c.parquet", "b/10.jsonl", "b/2.jsonl", "b/sub/1.txt", "a.jsonl"]
    assert found("b/*") == ["b/10.jsonl", "b/2.jsonl", "b/sub/1.txt"]
    assert found("**/*.jsonl") == ["a.jsonl", "b/10.jsonl", "b/2.jsonl"]
    assert find_sources([str(tmp_path / "b")])[1] == [
        "skipped, unknown format: 1 ending with .png",
        f"skipped, hidden: 1: {tmp_path / 'b' / '.cache'}",
    ]


def test_what_the_tool_wrote_itself_is_no_input(tmp_path: Path) -> None:
    """The output lies in the folder of the input, and a job is under way."""
    write_lines(tmp_path / "in.jsonl", [*TEXTS, "bad"])
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write("{}\n")
    preprocess([str(tmp_path)], str(tmp_path / "out"), SKIP)
    first = files_of(tmp_path / "out_text_document")
    for folder in ("out.parts", "other.parts", "out.parts.removed-1"):
        (tmp_path / folder).mkdir()
        for name in ("job.json", "0123.json"):
            (tmp_path / folder / name).write_text("{}")
    (tmp_path / "more.parts").mkdir()
    write_lines(tmp_path / "more.parts" / "in.jsonl", ["more"])
    for word in (tmp_path, tmp_path / "*", tmp_path / "**" / "*[lnt]"):
        (tmp_path / "out.parts").mkdir(exist_ok=True)
        assert preprocess([str(word)], str(tmp_path / "out"), SKIP, start_mode="restart").num_bad_records == 1
        assert files_of(tmp_path / "out_text_document") == expected_of([*TEXTS, "bad", "more"]) != first


def test_links_are_followed_and_nothing_is_read_twice(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    write_lines(tmp_path / "a" / "in.jsonl")
    (tmp_path / "b" / "to_a").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "back").symlink_to(tmp_path / "b")
    (tmp_path / "a" / "self").symlink_to(tmp_path / "a")
    assert [source.path for source in find_sources([str(tmp_path / "b")])[0]] == [str(tmp_path / "b" / "to_a" / "in.jsonl")]
    assert [source.path for source in find_sources([str(tmp_path)])[0]] == [str(tmp_path / "a" / "in.jsonl")]
    (tmp_path / "b" / "link.jsonl").symlink_to(tmp_path / "a" / "in.jsonl")
    with pytest.raises(ValueError, match=r"names .*/a/back/link\.jsonl twice, the second time by .* as .*/a/in\.jsonl"):
        find_sources([str(tmp_path)])


def test_paths_are_the_same_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_lines(tmp_path / "in.jsonl")
    monkeypatch.chdir(tmp_path)
    assert [find_sources([word])[0][0].path for word in ("in.jsonl", f"file://{source}")] == [source, source]


def test_a_kind_that_names_do_not_say(tmp_path: Path) -> None:
    write_lines(tmp_path / "part-00000")
    for word in (tmp_path / "part-00000", tmp_path, tmp_path / "part*"):
        preprocess([str(word)], str(tmp_path.parent / "out"), JOB, input_format="jsonl")
        assert files_of(tmp_path.parent / "out_text_document") == expected_of(TEXTS)
        with pytest.raises(ValueError, match=r"the format of this file is unknown|no file of a known format(.|\n)*--input-format"):
            preprocess([str(word)], str(tmp_path.parent / "out"), JOB)


def test_the_tool_knows_all_kinds() -> None:
    (choices,) = [action.choices for action in build_parser()._actions if action.dest == "input_format"]
    assert tuple(choices or ()) == FILE_FORMATS


def test_kinds_by_name() -> None:
    kinds = {
        "a.jsonl": "jsonl",
        "A.JSON": "jsonl",
        "a.ndjson.gz": "jsonl.gz",
        "s3://b/a.json.zst": "jsonl.zst",
        "a.json.BZ2": "jsonl.bz2",
        "a.md": "text",
        "a.txt.gz": "text.gz",
        "a.tsv.xz": "csv.xz",
        "a.feather": "arrow",
        "a.parquet.gz": None,
        "a.gz": None,
        "jsonl": None,
    }
    assert {name: detect_format(name) for name in kinds} == kinds
    assert [split_suffix(name)[0] for name in ("b/a.v1.json.BZ2", "A.JSON", "jsonl")] == ["b/a.v1", "A", "jsonl"]


# ---- the same bytes


def test_workers_and_shard_sizes_do_not_show(tmp_path: Path) -> None:
    """Several files of every form, in one job."""
    texts = [text * random.Random(number).randint(0, 3) for number, text in enumerate(TEXTS * 2)]
    sources = [write(tmp_path / form, texts[7 * n :]) for n, (form, write) in enumerate(FORMS.items())]
    expected = expected_of([text for n in range(len(FORMS)) for text in texts[7 * n :]])
    for workers, size in [(1, None), (2, 1000), (3, 300), (3, 5000)]:
        prefix = tmp_path / f"out{workers}{size}"
        summary = preprocess(sources, str(prefix), JOB, engine=Engine(num_workers=workers), shard_size=size)
        assert files_of(f"{prefix}_text_document") == expected
        assert not Path(f"{prefix}.parts").exists()
        assert summary.num_documents + summary.num_empty == sum(len(texts) - 7 * n for n in range(len(FORMS)))


def refuse(*args: object) -> NoReturn:
    """In place of joining."""
    raise ValueError("not today")


def test_files_behind_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In and out of an object store; the folder for parts is there too, and is taken up again."""
    fsspec = pytest.importorskip("fsspec")
    memory, upload = fsspec.filesystem("memory"), storage.upload
    for number in range(2):
        memory.pipe_file(f"/corpus/{number}.jsonl", Path(write_lines(tmp_path / "in.jsonl", TEXTS[number::2])).read_bytes())
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="not today"):
        patch.setattr(job, "_join_parts", refuse)
        preprocess(["memory://corpus/*.jsonl"], "memory://made/out", JOB, shard_size=700)
    part = sorted(memory.glob("/made/out.parts/*.bin"))[0]
    memory.pipe_file(part, memory.cat_file(part)[:-2])
    summary = preprocess(["memory://corpus/*.jsonl"], "memory://made/out", JOB, start_mode="resume")
    assert summary.num_resumed_shards == 5, "all but the one that was cut off"
    found = tuple(memory.cat_file(f"/made/out_text_document{suffix}") for suffix in (".bin", ".idx"))
    assert found == expected_of([*TEXTS[0::2], *TEXTS[1::2]])
    assert [name for name in memory.find("/made") if "_text_document." not in name] == []
    assert json.loads(memory.cat_file("/made/out_text_document.tokenizer"))["tokenizer_type"] == "ByteTokenizer"
    assert summary.num_documents == 40
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="not today"):
        patch.setattr(storage, "upload", lambda local, path: refuse() if path.endswith("document.bin") else upload(local, path))
        preprocess(["memory://corpus"], "memory://made/out", JOB)
    assert not memory.exists("/made/out_text_document.idx"), "an index never lies beside the .bin of another dataset"
    assert not memory.exists("/made/out_text_document.tokenizer"), "nor the fingerprint of another tokenizer"
    preprocess(["memory://corpus"], f"file://{tmp_path}/out", PreprocessJob(BYTES, ("title",), True))
    assert len(files_of(tmp_path / "out_title_document")[0]) == 2 * sum(len(str(n)) + 1 for n in range(20)) * 2
    memory.rm("/corpus", recursive=True)
    memory.rm("/made", recursive=True)
