"""The token files: bytes by hand, round trips, damaged and foreign files."""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from megatron.data import indexed_dataset
from megatron.data.indexed_dataset import DatasetError, IndexedDataset, get_token_dtype
from megatron.data.indexed_writer import write_dataset


def write(prefix: Path, documents: list[list[int]], dtype: type[np.integer] = np.uint16) -> str:
    """An indexed dataset of these documents."""
    with write_dataset(str(prefix), dtype) as writer:
        for document in documents:
            writer.add_documents(document)
    return str(prefix)


def index_bytes(lengths: list[int], offsets: list[int], entries: list[int], code: int = 8) -> bytes:
    """An index put together by hand."""
    head = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + bytes([code]) + struct.pack("<QQ", len(lengths), len(entries))
    return head + struct.pack(f"<{len(lengths)}i{len(offsets)}q{len(entries)}q", *lengths, *offsets, *entries)


def test_two_documents_make_the_82_bytes_of_the_format(tmp_path: Path) -> None:
    write(tmp_path / "d", [[7, 8, 9], [500]])
    index = (tmp_path / "d.idx").read_bytes()
    assert len(index) == 82
    assert index == index_bytes([3, 1], [0, 6], [0, 1, 2])
    assert (tmp_path / "d.bin").read_bytes() == struct.pack("<4H", 7, 8, 9, 500)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.bin", "d.idx"]


def test_the_type_follows_the_vocabulary_and_is_read_from_the_file(tmp_path: Path) -> None:
    assert [get_token_dtype(size) for size in (257, 65499, 65500, 70000)] == [np.uint16, np.uint16, np.int32, np.int32]
    dataset = IndexedDataset(write(tmp_path / "d", [[70000, 1]], np.int32))
    assert (tmp_path / "d.idx").read_bytes()[17] == 4
    assert dataset.get_document(0).tolist() == [70000, 1]


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16])
def test_every_integer_type_round_trips(tmp_path: Path, dtype: type[np.integer]) -> None:
    top = int(np.iinfo(dtype).max)
    dataset = IndexedDataset(write(tmp_path / "d", [[0, top], [3]], dtype))
    assert [dataset.get_document(number).tolist() for number in range(2)] == [[0, top], [3]]


@given(documents=st.lists(st.lists(st.integers(0, 65535), max_size=9), max_size=12), block=st.integers(1, 5))
def test_documents_round_trip_in_blocks_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], block: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexed_dataset, "_BLOCK", block)
        dataset = IndexedDataset(write(tmp_path_factory.mktemp("d") / "d", documents))
    assert dataset.num_documents == len(documents)
    assert [dataset.get_document(number).tolist() for number in range(len(documents))] == documents
    assert dataset.count_tokens(range(len(documents))) == sum(map(len, documents))


def test_documents_of_several_or_no_sequences_keep_their_sequences_together(tmp_path: Path) -> None:
    (tmp_path / "d.bin").write_bytes(struct.pack("<6H", *range(6)))
    (tmp_path / "d.idx").write_bytes(index_bytes([2, 1, 0, 3], [0, 4, 6, 6], [0, 2, 2, 4]))
    dataset = IndexedDataset(str(tmp_path / "d"))
    assert [dataset.get_document(number).tolist() for number in range(3)] == [[0, 1, 2], [], [3, 4, 5]]
    assert dataset.get_sequences(np.array([2, 1, 0])).tolist() == [2, 3, 0, 1]
    assert [dataset.find_document(sequence) for sequence in range(4)] == [0, 0, 2, 2]
    assert dataset.count_tokens(range(1, 3)) == 3


def test_a_failed_block_leaves_the_old_files_and_no_others(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", [[1, 2]])
    with pytest.raises(RuntimeError), write_dataset(prefix, np.uint16) as writer:
        writer.add_documents([3])
        raise RuntimeError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.bin", "d.idx"]
    assert IndexedDataset(prefix).get_document(0).tolist() == [1, 2]


def test_a_failed_finalise_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "d.idx").mkdir()
    with pytest.raises(OSError, match=r"d\.idx"):
        write(tmp_path / "d", [[1]])
    assert [path.name for path in tmp_path.iterdir()] == ["d.idx"]


@pytest.mark.parametrize("tokens", [[65536], [-1], [0.5]])
def test_the_writer_refuses_what_does_not_fit(tmp_path: Path, tokens: list[float]) -> None:
    with pytest.raises(ValueError, match="do not fit into uint16"):
        write(tmp_path / "d", [tokens])  # type: ignore[list-item]
    assert not list(tmp_path.iterdir())


GOOD = index_bytes([3, 1], [0, 6], [0, 1, 2])

DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda _: b"", "not the index"),
    "header cut": (lambda index: index[:33], "not the index"),
    "magic": (lambda index: b"PK" + index[2:], "not the index"),
    "version": (lambda index: index[:9] + struct.pack("<Q", 2) + index[17:], "version 2"),
    "type unknown": (lambda index: index[:17] + b"\x09" + index[18:], "token type 9"),
    "type float": (lambda index: index[:17] + b"\x06" + index[18:], "token type 6"),
    "last byte cut": (lambda index: index[:-1], r"81 bytes.*requires 82"),
    "a byte more": (lambda index: index + b"\0", r"83 bytes.*requires 82"),
    "absurd count": (lambda index: index[:18] + b"\xff" * 8 + index[26:], "requires"),
    "no documents at all": (lambda _: index_bytes([], [], []), "document index"),
    "documents do not start at 0": (lambda _: index_bytes([3, 1], [0, 6], [1, 1, 2]), "document index"),
    "documents fall": (lambda _: index_bytes([3, 1], [0, 6], [0, 2, 1, 2]), "document index"),
    "documents do not end at S": (lambda _: index_bytes([3, 1], [0, 6], [0, 1, 1]), "document index"),
    "length negative": (lambda _: index_bytes([3, -1], [0, 6], [0, 1, 2]), r"sequence 1 \(-1"),
    "offset negative": (lambda _: index_bytes([3, 1], [-2, 6], [0, 1, 2]), "sequence 0"),
    "offset inside a token": (lambda _: index_bytes([3, 1], [0, 5], [0, 1, 2]), "sequence 1 .* at byte 5"),
    "document index that overflows": (lambda _: index_bytes([3, 1], [0, 6], [0, 2**62, -(2**62), 2]), "document index"),
    "offset that overflows": (lambda _: index_bytes([3, 1], [0, 2**63 - 2], [0, 1, 2]), "sequence 1"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_index_is_refused_by_name(tmp_path: Path, name: str) -> None:
    damage, message = DAMAGE[name]
    (tmp_path / "d.bin").write_bytes(struct.pack("<4H", 7, 8, 9, 500))
    (tmp_path / "d.idx").write_bytes(damage(GOOD))
    with pytest.raises(DatasetError, match=message) as error:
        IndexedDataset(str(tmp_path / "d"))
    assert str(tmp_path / "d.idx") in str(error.value)
    assert "make" in str(error.value).lower()


def test_the_index_of_another_dataset_is_refused_unless_the_tokens_suffice(tmp_path: Path) -> None:
    write(tmp_path / "long", [[1, 2, 3], [4, 5]])
    write(tmp_path / "short", [[1, 2]])
    (tmp_path / "short.idx").write_bytes((tmp_path / "long.idx").read_bytes())
    with pytest.raises(DatasetError, match=r"short\.bin has 4 bytes.*sequence 0 \(3 tokens of 2 bytes\).*at byte 0") as error:
        IndexedDataset(str(tmp_path / "short"))
    assert "belongs to another .idx" in str(error.value)


def test_an_object_store_is_refused_with_what_to_do() -> None:
    with pytest.raises(DatasetError, match=r"s3://bucket/corpus: .*\n  Copy s3://bucket/corpus\.bin and .*\.idx to a local disk"):
        IndexedDataset("s3://bucket/corpus")


def test_a_dataset_without_documents_can_be_opened(tmp_path: Path) -> None:
    dataset = IndexedDataset(write(tmp_path / "d", []))
    assert (dataset.num_documents, dataset.count_tokens(range(0))) == (0, 0)


def test_the_digest_is_that_of_the_index_wherever_it_lies(tmp_path: Path) -> None:
    first = IndexedDataset(write(tmp_path / "a", [[1, 2], [3]]))
    moved = IndexedDataset(write(tmp_path / "b", [[4, 5], [6]]))
    other = IndexedDataset(write(tmp_path / "c", [[1], [2, 3]]))
    assert first.digest == moved.digest != other.digest
    assert first.digest == xxhash.xxh3_128_hexdigest((tmp_path / "a.idx").read_bytes())
    assert first.lengths.tolist() == [2, 1]  # still there after the pages were given back


def resident_bytes(path: Path) -> int:
    """Bytes of a mapped file that count as memory of this process."""
    with Path("/proc/self/smaps").open() as lines:
        next(line for line in lines if line.endswith(f" {path}\n"))
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such list")
def test_pages_of_an_index_are_given_back(tmp_path: Path) -> None:
    """To check and to hash an index reads all of it, but leaves none of it in the memory of the process."""
    dataset = IndexedDataset(write(tmp_path / "d", [[1]] * 1000))
    assert resident_bytes(tmp_path / "d.idx") == 0
    assert dataset.lengths.sum() == 1000 and resident_bytes(tmp_path / "d.idx") > 0
    assert dataset.digest and resident_bytes(tmp_path / "d.idx") == 0


@pytest.mark.parametrize("size", [0, 7])
def test_a_truncated_bin_is_refused_by_name(tmp_path: Path, size: int) -> None:
    (tmp_path / "d.idx").write_bytes(GOOD)
    (tmp_path / "d.bin").write_bytes(bytes(size))
    with pytest.raises(DatasetError, match=rf"d\.bin has {size} bytes.*truncated"):
        IndexedDataset(str(tmp_path / "d"))


def test_a_missing_file_names_the_nearest_dataset(tmp_path: Path) -> None:
    prefix = write(tmp_path / "corpus_text_document", [[1]])
    with pytest.raises(DatasetError, match=r"corpus_text\.idx does not exist") as error:
        IndexedDataset(str(tmp_path / "corpus_text"))
    assert prefix in str(error.value)
    (tmp_path / "corpus_text_document.bin").unlink()
    with pytest.raises(DatasetError, match=r"corpus_text_document\.bin does not exist"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_file_that_is_cut_while_it_is_read_is_named(tmp_path: Path, suffix: str) -> None:
    """To read what is no more there would end the process without a word (SIGBUS)."""
    prefix = str(tmp_path / "d")
    with write_dataset(prefix, np.uint16) as writer:
        for _ in range(100):
            writer.add_documents(np.arange(1000, dtype=np.uint16))
    dataset = IndexedDataset(prefix)
    assert dataset.read(99, 0, 3).tolist() == [0, 1, 2]
    os.truncate(prefix + suffix, 50)
    with pytest.raises(DatasetError, match=rf"d\{suffix} was cut from [0-9,]+ to 50 bytes while it was in use"):
        dataset.read(99, 0, 3)


def test_an_index_that_does_not_cover_its_tokens_is_refused_by_a_run(tmp_path: Path) -> None:
    prefix = str(tmp_path / "d")
    with write_dataset(prefix, np.uint16) as writer:
        writer.add_documents(np.arange(10, dtype=np.uint16))
    IndexedDataset(prefix).check_covered()
    with open(f"{prefix}.bin", "ab") as file:
        file.write(bytes(4))
    with pytest.raises(DatasetError, match=r"d\.bin has 24 bytes, but the sequences in .*d\.idx cover only 20 of them"):
        IndexedDataset(prefix).check_covered()
