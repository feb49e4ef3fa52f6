"""Files of datatrove's Megatron writer are read as they are."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from megatron.data import indexed_writer
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.indexed_dataset import IndexedDataset
from tests.support.corpora import expected_files

DOCUMENTS = [[5, 6, 7, 1], [8, 1], [9, 9, 9, 1]]


def as_datatrove_writes(prefix: Path, given: list[list[int]], token_size: int) -> str:
    """The bytes that its MegatronTokenizedFile leaves: NAME_00000_tokens.bin and .idx, one sequence a document."""
    letter, code = {2: ("H", 8), 4: ("i", 4)}[token_size]
    lengths, pointers, entries, place = [], [], [0], 0
    with Path(f"{prefix}.bin").open("wb") as file:
        for document in given:
            file.write(struct.pack(f"<{len(document)}{letter}", *document))
            lengths.append(len(document))
            pointers.append(place)
            entries.append(len(lengths))
            place += token_size * len(document)
    with Path(f"{prefix}.idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code))
        file.write(struct.pack("<QQ", len(lengths), len(entries)))
        file.write(struct.pack(f"<{len(lengths)}i", *lengths))
        file.write(struct.pack(f"<{len(pointers)}q", *pointers))
        file.write(struct.pack(f"<{len(entries)}q", *entries))
    return str(prefix)


def check(prefix: str, given: list[list[int]], dtype: type[np.integer]) -> None:
    """They are read, sampled and joined without a conversion."""
    dataset = IndexedDataset(prefix)
    assert dataset.dtype == dtype
    assert [dataset.get_document(number).tolist() for number in range(dataset.num_documents)] == given
    data = GPTDataset(dataset, range(dataset.num_documents), split=0, seed=1, seq_length=3, vocab_size=10)
    assert data.get_samples(0, 3).shape == (3, 4)
    indexed_writer.join_datasets([prefix, prefix], f"{prefix}_twice")
    code = {2: 8, 4: 4}[np.dtype(dtype).itemsize]
    assert (Path(f"{prefix}_twice.bin").read_bytes(), Path(f"{prefix}_twice.idx").read_bytes()) == expected_files(given * 2, code)


@pytest.mark.parametrize(("token_size", "dtype"), [(2, np.uint16), (4, np.int32)])
def test_its_bytes(tmp_path: Path, token_size: int, dtype: type[np.integer]) -> None:
    check(as_datatrove_writes(tmp_path / "00000_tokens", DOCUMENTS, token_size), DOCUMENTS, dtype)


def test_a_writer_that_saw_no_document(tmp_path: Path) -> None:
    """It leaves an empty .bin behind; joined to others it adds nothing."""
    empty = as_datatrove_writes(tmp_path / "00000_tokens", [], 2)
    assert IndexedDataset(empty).num_documents == 0
    other = as_datatrove_writes(tmp_path / "00001_tokens", DOCUMENTS, 2)
    indexed_writer.join_datasets([empty, other], str(tmp_path / "out"))
    assert (tmp_path / "out.bin").read_bytes() == Path(f"{other}.bin").read_bytes()
    assert (tmp_path / "out.idx").read_bytes() == Path(f"{other}.idx").read_bytes()


@pytest.mark.parametrize(("token_size", "dtype"), [(2, np.uint16), (4, np.int32)])
def test_its_own_writer(tmp_path: Path, token_size: int, dtype: type[np.integer]) -> None:
    writer = pytest.importorskip("datatrove.pipeline.tokens.megatron_tokenizer")
    file = writer.MegatronTokenizedFile(str(tmp_path), "00000_tokens", token_size=token_size)
    for document in DOCUMENTS:
        file.write(document)
    file.close()
    by_hand = as_datatrove_writes(tmp_path / "by_hand", DOCUMENTS, token_size)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"00000_tokens{suffix}").read_bytes() == Path(by_hand + suffix).read_bytes()
    check(str(tmp_path / "00000_tokens"), DOCUMENTS, dtype)
