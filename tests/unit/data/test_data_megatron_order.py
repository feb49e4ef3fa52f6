"""`--data-order megatron` equals a plain reimplementation of Megatron-LM's order, sample by sample."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron.data.gpt_dataset import GPTDataset
from megatron.data.history import LengthPeriod
from megatron.data.indexed_dataset import DatasetError, IndexedDataset
from megatron.data.indexed_writer import write_dataset
from megatron_lab.data_tools import megatron_order
from megatron_lab.data_tools.megatron_order import GreedyBlend, MegatronPlan, count_requested_samples

LENGTHS = [5, 1, 0, 17, 3, 40, 2, 2, 11, 6]


def reference_samples(documents: list[list[int]], seq_length: int, num_samples: int | None, seed: int) -> list[list[int]]:
    """All samples that are made for so many samples asked for, in their order."""
    stream = np.random.RandomState(seed)
    tokens = sum(len(document) for document in documents)
    num_epochs = 1
    while num_samples is not None and num_epochs * tokens < num_samples * seq_length + 1:
        num_epochs += 1
    in_one_epoch = (tokens - 1) // seq_length
    before_last = ((num_epochs - 1) * tokens - 1) // seq_length
    apart = num_samples is not None and num_epochs > 1 and num_samples - before_last < int(0.80 * in_one_epoch)

    order: list[int] = []
    for epochs in (num_epochs - 1, 1) if apart else (num_epochs,):
        numbers = np.array([*range(len(documents))] * epochs, dtype=np.int32)
        stream.shuffle(numbers)
        order += numbers.tolist()

    laid = [token for document in order for token in documents[document]]
    windows = []
    start = 0
    while start + seq_length + 1 <= len(laid):
        windows.append(laid[start : start + seq_length + 1])
        start += seq_length  # the last token of a window is the first of the next

    shuffled: list[int] = []
    for first, stop in ((0, before_last), (before_last, len(windows))) if apart else ((0, len(windows)),):
        numbers = np.arange(first, stop, dtype=np.uint32)
        stream.shuffle(numbers)
        shuffled += numbers.tolist()
    return [windows[number] for number in shuffled]


def normalised(weights: list[float]) -> list[float]:
    """Weights that sum to 1."""
    array = np.array(weights, dtype=np.float64)
    return [float(weight) for weight in array / np.sum(array)]


def reference_requests(weights: list[float], num_samples: int) -> list[int]:
    """Samples that each dataset of a blend is asked for."""
    return [math.ceil(math.ceil(num_samples * weight) * 1.005) for weight in normalised(weights)]


def reference_choices(weights: list[float], num_samples: int, *, by_size: bool = False) -> list[tuple[int, int]]:
    """Dataset of each sample of a blend, and which of its samples it is."""
    shares = normalised(weights)
    if not by_size:  # weights that a user gives are normalised when the datasets are built, and again when they are blended
        shares = normalised(shares)
    taken = [0] * len(shares)
    found = []
    for number in range(num_samples):
        best, most = 0, -math.inf
        for dataset, share in enumerate(shares):
            behind = share * max(float(number), 1.0) - float(taken[dataset])
            if behind > most:
                best, most = dataset, behind
        found.append((best, taken[best]))
        taken[best] += 1
    return found


def write(prefix: Path, lengths: list[int]) -> list[list[int]]:
    """Documents of these lengths, in which all tokens are different."""
    with write_dataset(str(prefix), np.uint16) as writer:
        writer.add_documents(np.arange(sum(lengths)), lengths)
    return [part.tolist() for part in np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])]


def megatron(prefix: Path, documents: range, seq_length: int, num_samples: int | None, seed: int, **more: object) -> GPTDataset:
    """The samples that are asked for."""
    return GPTDataset(
        IndexedDataset(str(prefix)),
        documents,
        split=0,
        seed=seed,
        seq_length=seq_length,
        vocab_size=65536,
        order="megatron",
        num_samples=num_samples,
        **more,  # type: ignore[arg-type]
    )


@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=12),
    seq_length=st.integers(1, 9),
    num_samples=st.none() | st.integers(0, 120),
    seed=st.integers(0, 2**32 - 1),
    bounds=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_every_sample_is_that_of_the_plain_order(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    seq_length: int,
    num_samples: int | None,
    seed: int,
    bounds: tuple[int, int],
) -> None:
    prefix = tmp_path_factory.mktemp("d") / "d"
    documents = write(prefix, lengths)
    split = range(min(bounds[0], len(lengths)), max(len(lengths) - bounds[1], 0))
    inside = [documents[number] for number in split]
    assume(sum(map(len, inside)) > seq_length)
    expected = reference_samples(inside, seq_length, num_samples, seed)
    assert len(expected) >= (num_samples or 0)
    source = megatron(prefix, split, seq_length, num_samples, seed)
    assert source.get_samples(0, len(expected)).tolist() == expected
    middle = len(expected) // 2
    assert source.get_samples(middle, 1).tolist() == expected[middle : middle + 1]
    with pytest.raises(DatasetError, match="no sample"):
        source.get_samples(len(expected), 1)


@pytest.mark.parametrize(
    ("num_samples", "epochs", "apart"),
    [(None, 1, False), (1, 1, False), (14, 1, False), (15, 2, True), (24, 2, True), (25, 2, False), (28, 2, False), (29, 3, True)],
)
def test_the_last_epoch_is_apart_below_80_percent_of_its_samples(num_samples: int | None, epochs: int, apart: bool) -> None:
    """An epoch of 87 tokens has 14 samples of 6; 11 of them are 80 % rounded down, and 14 come from the first epoch."""
    plan = MegatronPlan(87, 6, num_samples)
    assert (plan.num_epochs, plan.has_separate_last_epoch) == (epochs, apart)
    large = [MegatronPlan(6_000_001, 6, count).has_separate_last_epoch for count in (1_799_999, 1_800_000)]
    assert large == [True, False]


def test_the_order_never_changes(tmp_path: Path) -> None:
    write(tmp_path / "d", LENGTHS)
    assert megatron(tmp_path / "d", range(10), 6, 20, 1234).get_samples(0, 28)[:, 0].tolist() == [
        *(40, 58, 80, 85, 64, 46, 74, 52, 14, 8, 28, 68, 3, 34),
        *(40, 58, 20, 34, 52, 1, 28, 46, 64, 70, 76, 7, 19, 13),
    ]


def test_another_length_of_the_run_reads_in_another_order(tmp_path: Path) -> None:
    """The reason why it is not the default."""
    write(tmp_path / "d", LENGTHS)
    short, long = (megatron(tmp_path / "d", range(10), 6, count, 1).get_samples(0, 10) for count in (14, 20))
    assert not np.array_equal(short, long)


def test_a_sample_beyond_the_order_and_another_sequence_length_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "d", LENGTHS)
    with pytest.raises(DatasetError, match=r"no sample 28.*computed for 20 requested samples and has 28 samples") as error:
        megatron(tmp_path / "d", range(10), 6, 20, 1).get_samples(20, 9)
    assert str(tmp_path / "d") in str(error.value)
    with pytest.raises(ValueError, match=r"--data-order megatron .*4 before, 6 now") as refusal:
        megatron(tmp_path / "d", range(10), 6, 20, 1, earlier=[LengthPeriod(4, 3)])
    assert "--data-order epoch" in str(refusal.value)


def test_the_report_says_how_many_epochs_are_shuffled(tmp_path: Path) -> None:
    write(tmp_path / "d", LENGTHS)
    report = "\n".join(megatron(tmp_path / "d", range(10), 6, 20, 1).describe(20))
    assert "10 of 10 documents, 87 tokens; epochs 0.00 to 1.43 of 14 samples; --data-order megatron shuffles 2 epochs" in report
    assert "2 epochs, the last one separately: 28 samples (5 tokens left out: less than a sample)" in report


@given(
    weights=st.lists(st.integers(1, 100), min_size=2, max_size=6),
    numbers=st.lists(st.integers(0, 500), min_size=1, max_size=5),
)
def test_the_first_guess_rounds_the_largest_fractions_up(weights: list[int], numbers: list[int]) -> None:
    """In every lane by itself, and the counts of a lane sum to its number of choices."""
    shares = np.array(weights, dtype=np.float64) / sum(weights)
    found = megatron_order._estimate_counts(shares, np.array(numbers))
    for lane, number in enumerate(numbers):
        exact = shares * number
        counts = [int(count) for count in np.floor(exact)]
        by_fraction = sorted(range(len(weights)), key=lambda place: counts[place] - exact[place])
        for place in by_fraction[: number - sum(counts)]:
            counts[place] += 1
        assert found[:, lane].tolist() == counts


weights = st.lists(st.integers(1, 100).map(float) | st.floats(1e-3, 1.0), min_size=1, max_size=12)


@given(weights=weights, num_samples=st.integers(0, 10**7))
def test_each_dataset_is_asked_for_its_share_and_a_half_percent(weights: list[float], num_samples: int) -> None:
    assert count_requested_samples(weights, num_samples) == reference_requests(weights, num_samples)


@given(weights=weights, num_samples=st.integers(0, 700), first=st.integers(0, 700))
def test_the_blend_is_that_of_the_plain_rule(weights: list[float], num_samples: int, first: int) -> None:
    expected = reference_choices(weights, num_samples)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatron_order, "_BLOCK_SIZE", 64)
        check_blend(GreedyBlend(weights, num_samples), expected, min(first, num_samples))


def check_blend(blend: GreedyBlend, expected: list[tuple[int, int]], first: int) -> None:
    """Places and counts of the samples."""
    num_samples = len(expected)
    for start in (0, first):
        datasets, indices = blend.locate(np.arange(start, num_samples))
        assert list(zip(datasets.tolist(), indices.tolist(), strict=True)) == expected[start:]
    with pytest.raises(ValueError, match=f"no sample {num_samples}: .* {num_samples} samples"):
        blend.locate(np.arange(first, num_samples + 1))
    taken = [dataset for dataset, _ in expected[:first]]
    assert blend.count_samples(first) == [taken.count(dataset) for dataset in range(len(blend.weights))]


@given(
    weights=weights | st.lists(st.floats(-4, 0).map(lambda power: 10.0**power), min_size=1, max_size=5),
    num_samples=st.integers(0, 400),
    steps=st.integers(1, 40),
    warm_up=st.integers(0, 9),
)
def test_guesses_change_no_choice(weights: list[float], num_samples: int, steps: int, warm_up: int) -> None:
    """Lanes that start from a guess, whether it was right or wrong."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"_MAX_LANES": 6, "_CHOICES_PER_LANE": steps, "_MIN_LANES": 2, "_WARM_UP": min(warm_up, steps)}.items():
            patch.setattr(megatron_order, name, value)
        blend = GreedyBlend(weights, num_samples)
    check_blend(blend, reference_choices(weights, num_samples), 0)


def test_a_dataset_of_weight_0_is_never_chosen() -> None:
    """There all weights are above 0: it is as if the dataset were not named."""
    blend = GreedyBlend([0.0, 1.0, 0.0, 3.0], 400)
    datasets, _ = blend.locate(np.arange(400))
    plain = [(1, 3)[dataset] for dataset, _ in reference_choices([1.0, 3.0], 400)]
    assert datasets.tolist() == plain
    assert blend.count_samples(400) == [0, 100, 0, 300]
    assert blend.weights == [0.0, 0.25, 0.0, 0.75]


def test_the_last_bit_of_a_weight_decides_ties() -> None:
    """Dividing these weights by their sum once or twice makes other choices: twice if they were given, once for sizes."""
    weights = [8.0, 7.0, 21.0, 19.0, 2.0]
    given, by_size = reference_choices(weights, 300), reference_choices(weights, 300, by_size=True)
    assert given != by_size
    check_blend(GreedyBlend(weights, 300), given, 0)
    check_blend(GreedyBlend(weights, 300, by_size=True), by_size, 0)


def test_the_choices_never_change() -> None:
    datasets, _ = GreedyBlend([3.0, 5.0, 2.0], 20).locate(np.arange(20))
    assert datasets.tolist() == [1, 0, 2, 1, 0, 1, 2, 1, 0, 1, 0, 1, 2, 1, 0, 1, 2, 1, 0, 1]
