"""Blends: exact proportions at every point, the same by formula and one after another, each dataset in its own order."""

from __future__ import annotations

import itertools
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron.data.blend import Blend, BlendedDataset, _Node
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.indexed_writer import write_dataset
from megatron.data.samples import DocumentSpan, SampleSource
from megatron_lab.data_tools.megatron_order import GreedyBlend

weights = st.lists(
    st.sampled_from([0.0, 1.0, 1.0, 2.0, 50.0, 1e-25]) | st.floats(0.01, 1.0) | st.floats(-9, 0).map(lambda power: 10.0**power),
    min_size=1,
    max_size=30,
).filter(any)


def plain(blend: Blend, num_samples: int) -> list[tuple[int, int]]:
    """Places by counting: the dataset whose count grows."""
    found = []
    for before, after in itertools.pairwise(blend.count_samples(number) for number in range(num_samples + 1)):
        (dataset,) = (at for at, count in enumerate(after) if count > before[at])
        found.append((dataset, before[dataset]))
    return found


def places(blend: Blend, numbers: NDArray[np.integer]) -> list[tuple[int, int]]:
    """Dataset and sample of each number."""
    datasets, indices = blend.locate(numbers)
    return list(zip(datasets.tolist(), indices.tolist(), strict=True))


@given(weights=weights, num_samples=st.integers(0, 300))
def test_random_access_is_counting_one_after_another(weights: list[float], num_samples: int) -> None:
    blend = Blend(weights)
    expected = plain(blend, num_samples)
    assert places(blend, np.arange(num_samples)) == expected
    numbers = np.random.RandomState(0).permutation(num_samples)
    assert places(blend, numbers) == [expected[number] for number in numbers]


@given(weights=weights, start=st.integers(0, 2**61) | st.integers(0, 10**6))
def test_no_dataset_is_ever_two_samples_from_its_share(weights: list[float], start: int) -> None:
    blend, total = Blend(weights), sum(map(Fraction, weights))
    shares = [Fraction(weight) / total for weight in weights]
    for number in range(start, start + 20):
        counts = blend.count_samples(number)
        assert sum(counts) == number
        for count, share in zip(counts, shares, strict=True):
            if number < 2**40:  # beyond, the rounding of the shares begins to show
                assert abs(count - share * number) < Blend.MAX_ERROR


@given(count=st.integers(0, 2**62 - 1), share=st.integers(1, 2**61))
def test_the_formula_of_a_node_is_exact(count: int, share: int) -> None:
    (found,) = _Node(0, 1, share).count_left(np.array([count])).tolist()
    assert found == (2 * count * share + 2**62) // 2**63


@given(weights=weights)
def test_the_weights_are_those_given_up_to_rounding(weights: list[float]) -> None:
    blend = Blend(weights)
    total = sum(weights)
    assert sum(blend.weights) == pytest.approx(1.0, abs=1e-12)
    for weight, share in zip(weights, blend.weights, strict=True):
        assert share == pytest.approx(weight / total, abs=1e-12)
        assert (share > 0) == (weight > 0)


def test_a_bad_chain_of_weights_stays_inside_the_bound() -> None:
    """Fibonacci numbers make the deepest tree, in which the errors of the nodes add up most."""
    numbers = [1.0, 1e-9]
    while len(numbers) < 24:
        numbers.append(numbers[-1] + numbers[-2])
    blend = Blend(numbers)
    worst = 0.0
    for number in np.random.RandomState(1).randint(0, 2**31, 600).tolist():
        errors = [abs(count - weight * number) for count, weight in zip(blend.count_samples(number), blend.weights, strict=True)]
        worst = max(worst, *errors)
    assert 0.9 < worst < Blend.MAX_ERROR


def test_samples_far_away_are_exact() -> None:
    blend = Blend([1.0, 2.0, 0.5])
    far = 2**61 + 12345
    (dataset, index), *_ = places(blend, np.array([far]))
    before, after = blend.count_samples(far), blend.count_samples(far + 1)
    assert after[dataset] - before[dataset] == 1
    assert index == before[dataset]


def test_the_blend_of_version_one_never_changes() -> None:
    assert [dataset for dataset, _ in places(Blend([3.0, 5.0, 2.0, 0.0]), np.arange(24))] == [
        1,
        0,
        1,
        2,
        1,
        0,
        1,
        2,
        1,
        0,
        1,
        0,
        1,
        2,
        1,
        0,
        1,
        2,
        1,
        0,
        1,
        0,
        1,
        2,
    ]
    assert Blend([0.7, 0.1, 0.1, 0.1]).count_samples(10**12 + 7) == [700000000005, 100000000001, 100000000000, 100000000001]


@pytest.mark.parametrize("bad", [[], [0.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [float("inf"), 1.0]])
def test_senseless_weights_are_refused(bad: list[float]) -> None:
    for make in (lambda: Blend(bad), lambda: GreedyBlend(bad, 5)):
        with pytest.raises(ValueError, match="weight"):
            make()


class Numbered(SampleSource):
    """Sample n of dataset d holds d, n."""

    seq_length = 1

    def __init__(self, name: int) -> None:
        self.name = name
        self.calls = 0

    def get_samples(self, first: int, count: int) -> NDArray[np.int64]:
        """Rows of (name, number)."""
        self.calls += 1
        return np.stack([np.full(count, self.name), np.arange(first, first + count)], axis=1)

    def get_lineage(self, sample_index: int) -> list[DocumentSpan]:
        """One document."""
        return [DocumentSpan(str(self.name), sample_index, 0, 2)]

    def describe(self, num_samples: int) -> list[str]:
        """Two lines."""
        return [f"dataset {self.name}", f"dataset {self.name}: {num_samples} samples"]


@given(weights=weights, first=st.integers(0, 200), count=st.integers(0, 60))
def test_samples_come_from_their_datasets_in_the_order_of_each(weights: list[float], first: int, count: int) -> None:
    sources = [Numbered(name) for name in range(len(weights))]
    blended = BlendedDataset(sources, Blend(weights))
    found = blended.get_samples(first, count)
    expected = [[name, index] for name, index in places(Blend(weights), np.arange(first, first + count))]
    assert found.tolist() == expected
    assert found.shape == (count, 2)
    assert max(source.calls for source in sources) <= 1
    name, index = places(Blend(weights), np.array([first]))[0]
    assert blended.get_lineage(first) == [DocumentSpan(str(name), index, 0, 2)]


def test_the_report_has_shares_counts_and_what_is_never_read() -> None:
    lines = BlendedDataset([Numbered(name) for name in range(3)], Blend([3.0, 0.0, 1.0])).describe(40)
    assert lines == [
        "dataset 0; 75.0000% of the blend: 30 of 40 samples",
        "dataset 0: 30 samples",
        "dataset 1; weight 0, never read",
        "dataset 2; 25.0000% of the blend: 10 of 40 samples",
        "dataset 2: 10 samples",
    ]
    with pytest.raises(AssertionError, match="2 datasets have 3 weights"):
        BlendedDataset([Numbered(0), Numbered(1)], Blend([1.0, 1.0, 1.0]))


def test_a_blend_of_token_files_reads_each_in_its_own_order(tmp_path: Path) -> None:
    parts = []
    for name in range(2):
        with write_dataset(str(tmp_path / f"d{name}"), np.uint16) as writer:
            writer.add_documents(np.arange(300) + 300 * name, [30] * 10)
        dataset = IndexedDataset(str(tmp_path / f"d{name}"))
        parts.append(GPTDataset(dataset, range(10), split=0, seed=3, seq_length=9, vocab_size=600))
    for blend in (Blend([2.0, 1.0]), GreedyBlend([2.0, 1.0], 60)):
        found = BlendedDataset(parts, blend).get_samples(0, 60)
        for name, part in enumerate(parts):
            mine = found[found[:, 0] // 300 == name]
            assert np.array_equal(mine, part.get_samples(0, len(mine)))
            assert len(mine) == (40, 20)[name]
