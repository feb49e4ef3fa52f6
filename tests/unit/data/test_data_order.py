"""The split and the order of samples: every window once an epoch, nothing reordered by a longer run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron.config.data import parse_split
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.indexed_dataset import DatasetError, IndexedDataset
from megatron.data.indexed_writer import write_dataset
from megatron.data.samples import DocumentSpan, MockDataset, compute_permutation
from megatron.data.windows import split_document_ranges

LENGTHS = [5, 1, 0, 17, 3, 40, 2, 2, 11, 6]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    """Documents whose tokens are all different: the token tells where it stands."""
    prefix = str(tmp_path_factory.mktemp("order") / "d")
    with write_dataset(prefix, np.uint16) as writer:
        for start, length in zip(np.cumsum([0, *LENGTHS]), LENGTHS, strict=False):
            writer.add_documents(np.arange(start, start + length))
    return IndexedDataset(prefix)


def gpt(dataset: IndexedDataset, *, seq_length: int = 4, seed: int = 1, split: int = 0, documents: range = range(10)) -> GPTDataset:
    """Samples of these documents."""
    return GPTDataset(dataset, documents, split=split, seed=seed, seq_length=seq_length, vocab_size=100)


def epoch(samples: GPTDataset, number: int) -> list[list[int]]:
    """The windows of an epoch."""
    count = samples.samples_per_epoch
    return [window.tolist() for window in samples.get_samples(number * count, count)]


@given(count=st.integers(0, 300), seed=st.integers(0, 2**64), stream=st.integers(1, 4))
def test_a_permutation_holds_each_number_once(count: int, seed: int, stream: int) -> None:
    order = compute_permutation(count, (stream, seed, 0, 0))
    assert sorted(order.tolist()) == list(range(count))
    assert np.array_equal(order, compute_permutation(count, (stream, seed, 0, 0)))


def test_permutations_of_other_keys_differ() -> None:
    keys = [(1, 5, 0, 0), (2, 5, 0, 0), (1, 6, 0, 0), (1, 5, 1, 0), (1, 5, 0, 1)]
    assert len({tuple(compute_permutation(50, key).tolist()) for key in keys}) == len(keys)


def test_the_order_of_version_one_never_changes() -> None:
    """A resumed run must go on in the order in which it began, whatever was released in between."""
    assert compute_permutation(10, (1, 1234, 0, 0)).tolist() == [4, 8, 6, 0, 3, 1, 9, 5, 2, 7]


def test_a_permutation_favours_no_place() -> None:
    firsts = np.bincount([compute_permutation(4, (1, seed, 0, 0))[0] for seed in range(2000)], minlength=4)
    assert (abs(firsts - 500) < 100).all()  # five standard deviations


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12), seq_length=st.integers(1, 7), number=st.integers(0, 3))
def test_an_epoch_is_the_windows_of_the_permuted_documents(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_length: int, number: int
) -> None:
    total = sum(lengths)
    assume(total > seq_length)
    prefix = str(tmp_path_factory.mktemp("windows") / "d")
    tokens = np.arange(total)
    with write_dataset(prefix, np.uint16) as writer:
        writer.add_documents(tokens, lengths)
    documents = np.split(tokens, np.cumsum(lengths)[:-1])
    samples = GPTDataset(IndexedDataset(prefix), range(len(lengths)), split=1, seed=7, seq_length=seq_length, vocab_size=total)

    laid = np.concatenate([documents[at] for at in compute_permutation(len(lengths), (1, 7, 1, number))]).tolist()
    windows = [laid[at : at + seq_length + 1] for at in range(0, total - seq_length, seq_length)]
    assert sorted(epoch(samples, number)) == sorted(windows)
    order = compute_permutation(len(windows), (2, 7, 1, number))
    assert epoch(samples, number) == [windows[at] for at in order]


def test_the_samples_of_version_one_never_change(dataset: IndexedDataset) -> None:
    """The first tokens of windows in epochs 0 and 1: documents and windows in their order."""
    assert gpt(dataset, seq_length=6).get_samples(0, 28)[:, 0].tolist() == [
        *(74, 81, 49, 14, 80, 37, 61, 31, 66, 55, 1, 43, 20, 8),
        *(3, 33, 18, 12, 74, 51, 80, 57, 45, 63, 6, 66, 27, 39),
    ]


def test_made_up_samples_never_change() -> None:
    source = MockDataset(split=1, seed=3, seq_length=11, vocab_size=50, eod=49)
    assert source.get_samples(6, 3)[1].tolist() == [31, 2, 43, 23, 9, 17, 26, 49, 49, 25, 36, 14]
    assert source.get_samples(6, 0).shape == (0, 12)
    assert source.get_lineage(7) == [DocumentSpan("made-up tokens", 7, 0, 12)]


def test_epochs_seeds_and_splits_have_other_orders(dataset: IndexedDataset) -> None:
    orders = [epoch(gpt(dataset), 0), epoch(gpt(dataset), 1), epoch(gpt(dataset, seed=2), 0), epoch(gpt(dataset, split=1), 0)]
    assert all(first != second for at, first in enumerate(orders) for second in orders[:at])


def test_reading_in_any_order_gives_the_same_samples(dataset: IndexedDataset) -> None:
    """So a longer run, a resumed run and one that jumps between epochs (and drops their indexes) read the same."""
    forward = gpt(dataset)
    total = 4 * forward.samples_per_epoch
    expected = forward.get_samples(0, total)
    assert expected.shape == (total, 5)
    assert forward.get_samples(3, 0).shape == (0, 5)
    mixed = gpt(dataset)
    for number in compute_permutation(total, (3, 0, 0, 0)).tolist():
        count = min(1 + number % 7, total - number)
        assert np.array_equal(mixed.get_samples(number, count), expected[number : number + count])


def test_a_sample_stays_inside_its_split(dataset: IndexedDataset) -> None:
    inside = {int(token) for number in range(3, 6) for token in dataset.get_document(number)}
    samples = gpt(dataset, documents=range(3, 6))
    read = {token for window in epoch(samples, 0) for token in window}
    assert read <= inside
    assert len(inside) - len(read) == (len(inside) - 1) % 4


def test_the_report_names_documents_tokens_samples_and_what_is_left_out(dataset: IndexedDataset) -> None:
    samples = gpt(dataset, seq_length=10)
    assert samples.describe(20) == [
        f"training: {dataset.prefix}: 10 of 10 documents, 87 tokens; epochs 0.00 to 2.50 of 8 samples "
        "(6 tokens of each left out: less than a sample)"
    ]


def test_a_token_beyond_the_vocabulary_names_document_and_sizes(tmp_path: Path) -> None:
    for bad, dtype in ((300, np.uint16), (-1, np.int32)):
        with write_dataset(str(tmp_path / "d"), dtype) as writer:
            for document in ([1, 2, 3], [4, bad, 6]):
                writer.add_documents(document)
        samples = GPTDataset(IndexedDataset(str(tmp_path / "d")), range(2), split=0, seed=0, seq_length=5, vocab_size=300)
        with pytest.raises(DatasetError, match=f"document 1 has token id {bad}.*300 ids") as error:
            samples.get_samples(0, 1)
        assert str(tmp_path / "d") in str(error.value)
        assert "--tokenizer-type" in str(error.value)


@pytest.mark.parametrize(
    ("text", "documents", "sizes"),
    [
        ("969, 30, 1", 37, (36, 1, 0)),
        ("969,30,1", 1000, (969, 30, 1)),
        ("90,10", 10, (9, 1, 0)),
        ("1", 10, (10, 0, 0)),
        ("0.5,0.25,0.25", 8, (4, 2, 2)),
        ("0,1,0", 5, (0, 5, 0)),
        ("1,1,1", 2, (1, 0, 1)),
        ("50,50", 5, (2, 3, 0)),  # 2.5 rounds to even
    ],
)
def test_a_split_is_neighbouring_rounded_fractions(text: str, documents: int, sizes: tuple[int, ...]) -> None:
    ranges = split_document_ranges(text, documents)
    assert tuple(len(part) for part in ranges) == sizes
    assert [number for part in ranges for number in part] == list(range(documents))


@pytest.mark.parametrize("text", ["", "a,b", "1,2,3,4", "-1,2", "0,0,0", "nan", "inf,1", "1;2"])
def test_a_senseless_split_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--split"):
        parse_split(text)


def test_a_split_without_a_window_is_an_error_before_anything_is_read(dataset: IndexedDataset) -> None:
    with pytest.raises(DatasetError, match="validation split .* 0 of 10 documents and 0 tokens.*needs 5") as error:
        gpt(dataset, split=1, documents=range(0))
    assert "--split" in str(error.value)
    assert "--valid-data-path" in str(error.value)
    assert "--eval-iters 0" in str(error.value)
    with pytest.raises(DatasetError, match="test split .* 1 of 10 documents and 6 tokens.*needs 7"):
        gpt(dataset, split=2, documents=range(9, 10), seq_length=6)
