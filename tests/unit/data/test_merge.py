"""Joined datasets: the same bytes as if written at once, whatever they were divided into."""

from __future__ import annotations

import errno
import shutil
import struct
from pathlib import Path
from typing import BinaryIO, NoReturn

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data import indexed_dataset, indexed_writer
from megatron.data.indexed_dataset import DatasetError, IndexedDataset
from megatron.data.indexed_writer import write_dataset
from megatron_lab.commands import merge_data
from tests.support.cli import spawn_cli
from tests.support.corpora import documents, expected_files, files_of

TOOL = "tools/merge_data.py"


def write(prefix: Path, given: list[list[int]], dtype: type[np.integer] = np.uint16) -> str:
    """A dataset of these documents."""
    with write_dataset(str(prefix), dtype) as writer:
        for document in given:
            writer.add_documents(document)
    return str(prefix)


@given(
    parts=st.lists(st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=5), min_size=1, max_size=5),
    block=st.sampled_from([1, 2, 1 << 20]),
    dtype=st.sampled_from([np.uint16, np.int32]),
)
def test_any_division_gives_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, parts: list[list[list[int]]], block: int, dtype: type[np.integer]
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexed_dataset, "_BLOCK", block)
        joined = indexed_writer.join_datasets(
            [write(folder / str(n), part, dtype) for n, part in enumerate(parts)], str(folder / "out")
        )
    whole = [document for part in parts for document in part]
    assert files_of(folder / "out") == expected_files(whole, 8 if dtype == np.uint16 else 4)
    assert (joined.num_documents, joined.num_sequences) == (len(whole), len(whole))
    assert joined.num_tokens == sum(map(len, whole))
    assert joined.bin_bytes == len(files_of(folder / "out")[0])
    assert not list(folder.glob("*.partial-*"))


def hand_made(prefix: Path, lengths: list[int], offsets: list[int], entries: list[int], tokens: list[int]) -> str:
    """A dataset as another tool may write it."""
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(lengths), len(entries))
    body = struct.pack(f"<{len(lengths)}i{len(offsets)}q{len(entries)}q", *lengths, *offsets, *entries)
    Path(f"{prefix}.idx").write_bytes(head + body)
    Path(f"{prefix}.bin").write_bytes(struct.pack(f"<{len(tokens)}H", *tokens))
    return str(prefix)


def test_documents_of_several_or_no_sequences_stay_what_they_are(tmp_path: Path) -> None:
    """Also sequences that lie in another order, and tokens that no sequence holds."""
    first = hand_made(tmp_path / "a", [2, 1, 3], [0, 4, 6], [0, 2, 2, 3], [1, 2, 3, 4, 5, 6])
    second = hand_made(tmp_path / "b", [2, 1], [4, 0], [0, 1, 2], [9, 0, 7, 8])
    indexed_writer.join_datasets([second, first, second], str(tmp_path / "out"))
    assert documents(tmp_path / "out") == [[7, 8], [9], [1, 2, 3], [], [4, 5, 6], [7, 8], [9]]
    dataset = IndexedDataset(str(tmp_path / "out"))
    assert dataset.lengths.tolist() == [2, 1, 2, 1, 3, 2, 1]
    assert dataset.document_index.tolist() == [0, 1, 2, 4, 4, 5, 6, 7]


def test_a_file_that_grows_while_it_is_copied_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [write(tmp_path / name, [[1, 2, 3]]) for name in "ab"]
    copy = shutil.copyfileobj

    def grow_and_copy(source: BinaryIO, target: BinaryIO, length: int) -> None:
        with open(f"{parts[0]}.bin", "ab") as file:
            file.write(b"xx")
        copy(source, target, length)

    monkeypatch.setattr(shutil, "copyfileobj", grow_and_copy)
    with pytest.raises(OSError, match="was changed while it was copied"):
        indexed_writer.join_datasets(parts, str(tmp_path / "out"))
    assert {path.name for path in tmp_path.iterdir()} == {"a.bin", "a.idx", "b.bin", "b.idx"}


def test_types_that_differ_are_refused(tmp_path: Path) -> None:
    parts = [write(tmp_path / "a", [[1]]), write(tmp_path / "b", [[1]], np.int32)]
    with pytest.raises(DatasetError, match="b holds tokens of type int32, but .*a holds tokens of type uint16"):
        indexed_writer.join_datasets(parts, str(tmp_path / "out"))


def test_a_half_token_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1]])
    with (tmp_path / "a.bin").open("ab") as file:
        file.write(b"x")
    with pytest.raises(DatasetError, match=r"a\.bin has 3 bytes, which is not a multiple of the token size"):
        indexed_writer.join_datasets([str(tmp_path / "a")], str(tmp_path / "out"))


def test_a_failure_leaves_the_dataset_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = write(tmp_path / "out", [[5]])

    def fail(*args: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(indexed_writer, "_write_index", fail)
    with pytest.raises(OSError, match="full"):
        indexed_writer.join_datasets([write(tmp_path / "a", [[1]])], before)
    assert documents(before) == [[5]]
    assert not list(tmp_path.glob("*.partial-*"))


# ---- the tool


def test_the_tool_joins_prefixes_folders_and_patterns(tmp_path: Path) -> None:
    for number, name in enumerate(("z", "parts/b", "parts/a", "p10", "p2")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, [[number], [7, 7]])
    words = [str(tmp_path / word) for word in ("z", "parts", "p[0-9]*")]
    done = spawn_cli([TOOL, "--input", *words, "--output-prefix", str(tmp_path / "out")], None)
    assert done.returncode == 0, done.stderr
    assert documents(tmp_path / "out") == [[n] if first else [7, 7] for n in (0, 2, 1, 3, 4) for first in (True, False)]
    assert "10 documents in 10 sequences, 15 tokens from 5 datasets" in done.stderr


@pytest.mark.parametrize(
    ("words", "output", "told"),
    [
        (["a", "none"], "out", "none.idx does not exist"),
        (["a", "n*"], "out", "n*: there is no dataset"),
        (["a", "*"], "out", "a twice"),
        (["a", "a/../a"], "out", "a twice"),
        (["a"], "a", "is one of the inputs"),
        (["a"], "no/out", "does not exist.\n  Make it first"),
        (["a", "cut"], "out", "cut.bin has 0 bytes"),
    ],
)
def test_the_tool_refuses(tmp_path: Path, words: list[str], output: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "cut"):
        write(tmp_path / name, [[1]])
    (tmp_path / "cut.bin").write_bytes(b"")
    (tmp_path / "a").mkdir()
    before = sorted(tmp_path.iterdir())
    argv = ["--input", *(str(tmp_path) + "/" + word for word in words), "--output-prefix", str(tmp_path / output)]
    assert merge_data.main(argv) == 1
    assert told in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before
