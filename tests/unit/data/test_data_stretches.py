"""Runs that change their sequence length on the way: nothing is read twice in an epoch, and what is dropped is said."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron.data.gpt_dataset import GPTDataset
from megatron.data.history import LengthPeriod, merge_periods
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.indexed_writer import write_dataset
from megatron.data.samples import compute_permutation
from megatron.data.windows import Intervals, cut_windows

SEED, SPLIT = 11, 1
Run = list[tuple[int, int]]
"""Sequence length and samples of each stretch."""


def write(prefix: Path, lengths: list[int]) -> IndexedDataset:
    """Documents of these lengths, in which all tokens are different."""
    with write_dataset(str(prefix), np.uint16) as writer:
        writer.add_documents(np.arange(sum(lengths)), lengths)
    return IndexedDataset(str(prefix))


def samples(dataset: IndexedDataset, run: Run, at: int) -> GPTDataset:
    """The dataset of a stretch of the run."""
    earlier = [LengthPeriod(*stretch) for stretch in run[:at]]
    documents = range(dataset.num_documents)
    return GPTDataset(dataset, documents, split=SPLIT, seed=SEED, seq_length=run[at][0], vocab_size=65536, earlier=earlier)


def plain(lengths: list[int], run: Run) -> tuple[list[list[tuple[int, list[int]]]], list[int]]:
    """What each stretch reads, one window after another: epochs and windows; and the tokens that are dropped in each epoch."""
    tokens = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
    read: list[list[tuple[int, list[int]]]] = []
    dropped: dict[int, int] = defaultdict(int)
    epoch = 0
    left: list[tuple[int, int]] | None = None  # intervals of an epoch that is read in part
    for number, (seq_length, count) in enumerate(run):
        found: list[tuple[int, list[int]]] = []
        while len(found) < count:
            laid = np.concatenate([tokens[at] for at in compute_permutation(len(lengths), (1, SEED, SPLIT, epoch))]).tolist()
            key = (2, SEED, SPLIT, epoch) if left is None else (5, SEED, SPLIT, epoch, number)
            intervals = [(0, len(laid))] if left is None else left
            windows = [start for begin, end in intervals for start in range(begin, end - seq_length, seq_length)]
            dropped[epoch] += sum(end - begin - 1 for begin, end in intervals) - len(windows) * seq_length
            order = compute_permutation(len(windows), key).tolist()[: count - len(found)]
            found += [(epoch, laid[windows[at] : windows[at] + seq_length + 1]) for at in order]
            if len(order) == len(windows):
                epoch, left = epoch + 1, None
                continue
            left = []
            for at, start in enumerate(windows):
                if at in order:
                    continue
                if left and left[-1][1] == start + 1:
                    left[-1] = (left[-1][0], start + seq_length + 1)
                else:
                    left.append((start, start + seq_length + 1))
        read.append(found)
    return read, [dropped[number] for number in range(epoch)]


lengths_of_documents = st.lists(st.integers(0, 15), min_size=1, max_size=15)
runs = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40)), min_size=1, max_size=4)


def joined(run: Run) -> Run:
    """Without neighbours of one length, which are one stretch."""
    return [(stretch.seq_length, stretch.num_samples) for stretch in merge_periods([LengthPeriod(*stretch) for stretch in run])]


@given(lengths=lengths_of_documents, run=runs)
def test_every_stretch_reads_what_those_before_left(tmp_path_factory: pytest.TempPathFactory, lengths: list[int], run: Run) -> None:
    run = joined(run)
    assume(sum(lengths) > max(seq_length for seq_length, _ in run))
    dataset = write(tmp_path_factory.mktemp("d") / "d", lengths)
    expected, dropped = plain(lengths, run)
    predicted: dict[int, list[int]] = defaultdict(list)
    for at, windows in enumerate(expected):
        found = samples(dataset, run, at).get_samples(0, run[at][1])
        assert found.tolist() == [window for _, window in windows]
        for epoch, window in windows:
            predicted[epoch] += window[1:]
    assert all(len(set(tokens)) == len(tokens) for tokens in predicted.values())
    for epoch, count in enumerate(dropped):  # all epochs that were finished
        assert len(predicted[epoch]) + count == sum(lengths) - 1


@given(lengths=lengths_of_documents, run=runs, cuts=st.lists(st.integers(0, 40), max_size=3))
def test_stretches_of_one_length_are_one_stretch(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], run: Run, cuts: list[int]
) -> None:
    """A run may be stopped anywhere, and an empty stretch leaves no trace."""
    assume(sum(lengths) > max(9, *(seq_length for seq_length, _ in run)))
    dataset = write(tmp_path_factory.mktemp("d") / "d", lengths)
    last, count = run[-1]
    expected = samples(dataset, run, len(run) - 1).get_samples(0, count)
    for stop in cuts:
        stop = min(stop, count)
        stopped = [*run[:-1], (last, stop // 2), (7, 0), (last, stop - stop // 2), (last, 0)]
        assert np.array_equal(samples(dataset, stopped, len(stopped) - 1).get_samples(0, count - stop), expected[stop:])


def test_the_report_says_what_is_read_what_is_left_and_what_is_dropped(tmp_path: Path) -> None:
    dataset = write(tmp_path / "d", [101])
    run = [(10, 4), (7, 0)]
    kept = Intervals(np.array([0]), np.array([101]))
    left = cut_windows(kept, 10, (2, SEED, SPLIT, 0)).compute_unread_intervals(4)
    fits = int(((left.ends - left.starts - 1) // 7).sum())
    first, second, third = samples(dataset, run, 1).describe(fits + 7)
    assert "101 tokens; epochs 0.40 to 1.50 of 14 samples (2 tokens of each left out" in first
    assert f"epoch 0: 4 samples of 10 tokens were read; {fits} samples of 7 tokens remain" in second
    assert f"{60 - 7 * fits} tokens ({(60 - 7 * fits) / 101:.2%}) in ranges shorter than a sample" in second
    assert f"WARNING: these are {(60 - 7 * fits) / 60:.0%} of the unread tokens" in third
    within, *_ = samples(dataset, run, 1).describe(2)
    assert f"epochs 0.40 to {(40 + 14) / 101:.2f} of" in within
    assert len(samples(dataset, [(10, 4), (5, 0)], 1).describe(2)) == 2, "a half as long loses nothing: no warning"


def test_the_report_goes_on_where_samples_of_the_same_length_were_read(tmp_path: Path) -> None:
    dataset = write(tmp_path / "d", [101])
    (line,) = samples(dataset, [(10, 14), (10, 0)], 1).describe(3)
    assert "epochs 1.40 to 1.70 of 10 samples" in line


def test_the_windows_of_version_one_never_change(tmp_path: Path) -> None:
    dataset = write(tmp_path / "d", [5, 1, 0, 17, 3, 40, 2, 2, 11, 6])
    run = [(6, 17), (4, 3), (3, 0)]
    assert samples(dataset, run, 1).get_samples(0, 10)[:, 0].tolist() == [77, 35, 65, 14, 69, 18, 73, 57, 61, 22]
    assert samples(dataset, run, 2).get_samples(0, 10)[:, 0].tolist() == [42, 5, 62, 83, 22, 26, 13, 19, 10, 86]


@given(
    count=st.integers(1, 60),
    seq_length=st.integers(1, 8),
    num_read=st.integers(0, 60),
    seed=st.integers(0, 99),
)
def test_what_is_left_of_a_pass_is_the_complement_of_what_is_read(count: int, seq_length: int, num_read: int, seed: int) -> None:
    windows = cut_windows(Intervals(np.array([5]), np.array([6 + count])), seq_length, (2, seed, 0, 0))
    num_read = min(num_read, len(windows.order))
    left = windows.compute_unread_intervals(num_read)
    read = {start + at for start in windows.starts(windows.order[:num_read]).tolist() for at in range(1, seq_length + 1)}
    rest = [at for begin, end in zip(left.starts.tolist(), left.ends.tolist(), strict=True) for at in range(begin + 1, end)]
    assert sorted([*read, *rest]) == list(range(6, 6 + len(windows.order) * seq_length))
    assert left.num_predicted == len(rest)
    assert (left.starts[1:] >= left.ends[:-1]).all()
