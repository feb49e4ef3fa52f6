"""The streaming check of a whole dataset, and the histogram of its lengths."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.indexed_writer import write_dataset
from megatron_lab.data_tools import dataset_check
from megatron_lab.data_tools.dataset_check import LengthBin, compute_length_histogram, find_problems
from tests.unit.data.test_data_indexed import index_bytes


@given(
    documents=st.lists(st.lists(st.integers(-3, 12), max_size=6), min_size=1, max_size=8),
    at_once=st.integers(1, 9),
    dtype=st.sampled_from([np.int8, np.int32, np.int64]),
)
def test_every_document_with_a_bad_id_is_named_once(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], at_once: int, dtype: type[np.integer]
) -> None:
    prefix = str(tmp_path_factory.mktemp("d") / "d")
    with write_dataset(prefix, dtype) as writer:
        for document in documents:
            writer.add_documents(np.array(document, dtype=np.int64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset_check, "_BYTES_PER_READ", at_once * np.dtype(dtype).itemsize)
        found = [(problem.document_index, problem.position) for problem in find_problems(IndexedDataset(prefix), 10)]
    bad = [[at for at, token in enumerate(document) if not 0 <= token < 10] for document in documents]
    assert found == [(number, places[0]) for number, places in enumerate(bad) if places]


def test_a_problem_says_file_document_token_and_sizes(tmp_path: Path) -> None:
    prefix = str(tmp_path / "d")
    with write_dataset(prefix, np.uint16) as writer:
        writer.add_documents(np.array([1, 2, 3, 4, 500, 600]), [3, 3])
    (problem,) = find_problems(IndexedDataset(prefix), 500)
    assert problem.message.startswith(f"{prefix}: document 1 has token id 500 at token 1 (and 1 more in this document)")
    assert "500 ids (0 to 499)" in problem.message
    assert not [*find_problems(IndexedDataset(prefix), 601)]


def test_documents_of_several_sequences_are_counted_through(tmp_path: Path) -> None:
    (tmp_path / "d.bin").write_bytes(struct.pack("<6H", 0, 1, 2, 3, 99, 5))
    (tmp_path / "d.idx").write_bytes(index_bytes([2, 1, 0, 3], [0, 4, 6, 6], [0, 2, 2, 4]))
    dataset = IndexedDataset(str(tmp_path / "d"))
    (problem,) = find_problems(dataset, 99)
    assert (problem.document_index, problem.position) == (2, 1)
    assert compute_length_histogram(dataset) == [LengthBin(0, 0, 1, 0), LengthBin(1, 1, 0, 0), LengthBin(2, 3, 2, 6)]


def test_gaps_overlaps_and_bytes_without_a_sequence_are_named(tmp_path: Path) -> None:
    """They can be read, but no tool writes such files on purpose."""
    (tmp_path / "d.bin").write_bytes(bytes(20))
    (tmp_path / "d.idx").write_bytes(index_bytes([2, 2, 2], [0, 6, 8], [0, 1, 2, 3]))
    gap, overlap, rest = find_problems(IndexedDataset(str(tmp_path / "d")), 10)
    assert gap.document_index == 1
    assert "ends at byte 4, and this one starts at byte 6" in gap.message
    assert overlap.document_index == 2
    assert "ends at byte 10, and this one starts at byte 8" in overlap.message
    assert "d.bin has 20 bytes, and the last sequence ends at byte 12" in rest.message


@given(lengths=st.lists(st.integers(0, 300), min_size=1, max_size=40), block=st.integers(1, 50))
def test_the_histogram_counts_documents_and_tokens_by_powers_of_two(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], block: int
) -> None:
    prefix = str(tmp_path_factory.mktemp("d") / "d")
    with write_dataset(prefix, np.uint8) as writer:
        writer.add_documents(np.zeros(sum(lengths), np.uint8), lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron.data.indexed_dataset._BLOCK", block)
        bins = compute_length_histogram(IndexedDataset(prefix))
    every = [(0, 0), *((1 << at, (2 << at) - 1) for at in range(40))]
    first = every.index((bins[0].low, bins[0].high)) if bins else 0
    assert [(each.low, each.high) for each in bins] == every[first : first + len(bins)]
    for each in bins:
        inside = [length for length in lengths if each.low <= length <= each.high]
        assert (each.num_documents, each.num_tokens) == (len(inside), sum(inside))
    assert sum(each.num_documents for each in bins) == len(lengths)
    assert bins[0].num_documents and bins[-1].num_documents, "no empty half"
