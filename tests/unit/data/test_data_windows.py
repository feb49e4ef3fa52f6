"""Reading windows: tokens, lineage, checks of ids, and many threads."""

from __future__ import annotations

import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron.data import gpt_dataset
from megatron.data.gpt_dataset import GPTDataset, PassCache
from megatron.data.indexed_dataset import DatasetError, IndexedDataset
from megatron.data.indexed_writer import write_dataset
from megatron.data.windows import PassIndex
from tests.unit.data.test_data_indexed import index_bytes


def write(prefix: Path, documents: list[list[int]]) -> IndexedDataset:
    """A dataset of documents whose sequences have these lengths; all tokens are different."""
    lengths = [length for document in documents for length in document]
    ends = np.cumsum([0, *lengths]).tolist()
    prefix.with_suffix(".bin").write_bytes(struct.pack(f"<{ends[-1]}H", *range(ends[-1])))
    entries = np.cumsum([0, *map(len, documents)]).tolist()
    prefix.with_suffix(".idx").write_bytes(index_bytes(lengths, [2 * end for end in ends[:-1]], entries))
    return IndexedDataset(str(prefix))


@given(
    documents=st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=1, max_size=9),
    seq_length=st.integers(1, 9),
    at_once=st.integers(1, 40),
)
def test_lineage_names_the_documents_and_tokens_that_are_read(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], seq_length: int, at_once: int
) -> None:
    """Documents of several sequences, and of none, stay together; whatever part is read at once."""
    assume(sum(map(sum, documents)) > seq_length)
    dataset = write(tmp_path_factory.mktemp("d") / "d", documents)
    everything = range(len(documents))
    source = GPTDataset(dataset, everything, split=0, seed=4, seq_length=seq_length, vocab_size=65536)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt_dataset, "_MAX_BATCH_TOKENS", at_once)
        found = source.get_samples(0, source.samples_per_epoch)
    predicted = found[:, 1:].ravel().tolist()
    assert len(set(predicted)) == len(predicted)
    for number, window in enumerate(found.tolist()):
        pieces = source.get_lineage(number)
        told: list[int] = []
        for piece in pieces:
            told += dataset.get_document(piece.document)[piece.first_token : piece.first_token + piece.num_tokens].tolist()
        assert told == window
        assert all(piece.prefix == dataset.prefix and piece.num_tokens for piece in pieces)
        assert len(pieces) == len({piece.document for piece in pieces})


def test_megatrons_order_refuses_documents_of_several_sequences(tmp_path: Path) -> None:
    """There it is the sequences that are split and shuffled."""
    dataset = write(tmp_path / "d", [[5, 4], [3]])
    with pytest.raises(DatasetError, match="3 sequences in 2 documents") as error:
        GPTDataset(dataset, range(2), split=0, seed=4, seq_length=3, vocab_size=65536, order="megatron")
    assert "--data-order epoch" in str(error.value)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16])
def test_every_token_type_is_read_and_checked(tmp_path: Path, dtype: type[np.integer]) -> None:
    prefix, top = str(tmp_path / "d"), min(int(np.iinfo(dtype).max), 10**6)
    with write_dataset(prefix, dtype) as writer:
        writer.add_documents(np.array([0, 5, top, 1]), [2, 2])
    settings: dict[str, Any] = {"split": 0, "seed": 0, "seq_length": 3}
    read = GPTDataset(IndexedDataset(prefix), range(2), vocab_size=top + 1, **settings).get_samples(0, 1)
    assert read.dtype == np.int64
    assert sorted(read[0].tolist()) == sorted([0, 5, top, 1])
    with pytest.raises(DatasetError, match=f"document 1 has token id {top:,}, but the tokenizer has {top:,} ids"):
        GPTDataset(IndexedDataset(prefix), range(2), vocab_size=top, **settings).get_samples(0, 1)


def test_threads_read_the_same_samples_across_epochs(tmp_path: Path) -> None:
    dataset = write(tmp_path / "d", [[5], [9], [3], [14], [2]])
    settings: dict[str, Any] = {"split": 0, "seed": 0, "seq_length": 4, "vocab_size": 65536}
    expected = GPTDataset(dataset, range(5), **settings).get_samples(0, 200)
    shared = GPTDataset(dataset, range(5), **settings)
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda first: shared.get_samples(first, 5), [*range(0, 200, 5)] * 3))
    assert np.array_equal(np.concatenate(found), np.concatenate([expected] * 3))


def test_a_pass_is_built_once_and_readers_of_another_do_not_wait_for_it() -> None:
    building, go_on, built = threading.Event(), threading.Event(), []

    def build(number: int) -> PassIndex:
        built.append(number)
        if number == 1:
            building.set()
            assert go_on.wait(30)
        return number, number  # type: ignore[return-value]

    passes = PassCache(build)
    with ThreadPoolExecutor(3) as threads:
        ahead = [threads.submit(passes.get, 1) for _ in range(2)]
        assert building.wait(30)
        assert threads.submit(passes.get, 0).result(30) == (0, 0)  # type: ignore[comparison-overlap]
        go_on.set()
        assert ahead[0].result(30) is ahead[1].result(30)
    assert sorted(built) == [0, 1]
    for number in (0, 1, 2, 2, 0):
        passes.get(number)
    assert built[2:] == [2, 0]  # two are kept
