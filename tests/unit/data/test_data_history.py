"""Changing the blend, its weights, the sequence length or the batch size in mid-run: what was consumed stays consumed."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.config.data import DataConfig
from megatron.data.blend import Blend
from megatron.data.datasets import SplitData
from megatron.data.history import (
    BlendEntry,
    LengthPeriod,
    Phase,
    continue_phases,
    describe_phases,
    find_earlier_periods,
    merge_batch_phases,
)
from megatron.data.indexed_dataset import DatasetError
from megatron.data.indexed_writer import write_dataset
from megatron.data.splits import open_datasets
from megatron.data.tokenizer import NullTokenizer
from megatron_lab.data_tools.megatron_order import GreedyBlend

A, B, C = (BlendEntry(name, f"digest of {name}", 0, 10, 0.0) for name in "ABC")


def phase(at: int, weights: dict[BlendEntry, float], **settings: object) -> Phase:
    """A phase from sample `at` on, four samples an iteration."""
    parts = tuple(replace(part, weight=weight) for part, weight in weights.items())
    made = Phase(at // 4, at, "epoch", 1, 8, 4, None, parts)
    return replace(made, **settings)  # type: ignore[arg-type]


def test_the_same_settings_go_on_in_the_same_phase() -> None:
    first = phase(0, {A: 0.5, B: 0.5})
    moved = replace(phase(40, {A: 0.5, B: 0.5}), parts=tuple(replace(part, prefix=f"disk/{part.prefix}") for part in first.parts))
    (found,) = continue_phases([first], moved)
    assert (found.first_iteration, found.first_sample) == (0, 0)
    assert [part.prefix for part in found.parts] == ["disk/A", "disk/B"]  # the files may have moved


@pytest.mark.parametrize(
    "change",
    [
        {"seq_length": 16},
        {"global_batch_size": 8},
        {"rampup_batch_size": (4, 4, 8)},
        {"seed": 2},
        {"order": "megatron"},
        {"parts": ()},
    ],
)
def test_other_settings_begin_a_phase(change: dict[str, object]) -> None:
    first = phase(0, {A: 1.0})
    now = replace(phase(40, {A: 1.0}), **change)  # type: ignore[arg-type]
    assert continue_phases([first], now) == [first, now]


def test_a_phase_that_read_nothing_is_forgotten() -> None:
    first, second, third = phase(0, {A: 1.0}), phase(40, {B: 1.0}), phase(40, {C: 1.0})
    assert continue_phases([first, second], third) == [first, third]
    assert continue_phases([first, second], phase(40, {A: 1.0})) == [first]


def test_a_checkpoint_that_does_not_say_what_was_read_is_taken_as_unchanged() -> None:
    assert continue_phases([], phase(40, {A: 1.0})) == [phase(0, {A: 1.0})]


def test_phases_survive_a_checkpoint() -> None:
    saved = phase(40, {A: 0.25, B: 0.75}, rampup_batch_size=(2, 2, 10))
    assert Phase.from_json(json.loads(json.dumps(saved.to_json()))) == saved
    assert "step_batch_size_schedule" not in saved.to_json()  # as older ones
    saved = phase(40, {A: 1.0}, step_batch_size_schedule=("0:2 9:4",))
    assert Phase.from_json(json.loads(json.dumps(saved.to_json()))) == saved
    assert saved.order_settings() == phase(40, {A: 1.0}).order_settings()


def test_a_dataset_goes_on_after_what_it_gave() -> None:
    phases = [
        phase(0, {A: 0.5, B: 0.5}),
        phase(40, {A: 0.25, B: 0.75}),
        phase(80, {A: 1.0}, seq_length=16),
        phase(100, {A: 0.5, C: 0.5}),
    ]
    of_a, of_b = map(int, Blend([0.25, 0.75]).count_samples(40))
    assert find_earlier_periods(phases, A) == [LengthPeriod(8, 20), LengthPeriod(8, of_a), LengthPeriod(16, 20)]
    assert find_earlier_periods(phases, C) == []
    assert find_earlier_periods([*phases[:2], phase(80, {B: 1.0})], B) == [LengthPeriod(8, 20), LengthPeriod(8, of_b)]
    # Under another seed the order is another one, until it comes back.
    assert find_earlier_periods([*phases[:1], phase(40, {A: 1.0}, seed=2)], A) == []
    assert find_earlier_periods([*phases[:1], phase(40, {A: 1.0}, seed=2), phase(80, {A: 1.0})], A) == [LengthPeriod(8, 20)]


def test_other_batches_do_not_begin_a_blend_anew() -> None:
    """Rounding would add up otherwise: a third of 4 samples, twice, is not a third of 8."""
    thirds = {A: 1 / 3, B: 1 / 3, C: 1 / 3}
    phases = [phase(0, thirds), phase(4, thirds, global_batch_size=8), phase(8, {A: 1.0})]
    for at, part in enumerate((A, B, C)):
        assert sum(stretch.num_samples for stretch in find_earlier_periods(phases, part)) == Blend([1 / 3] * 3).count_samples(8)[at]
    assert [found.first_sample for found in merge_batch_phases(phases)] == [0, 8]


def test_a_change_is_told() -> None:
    assert describe_phases([phase(0, {A: 1.0}), phase(8, {A: 1.0}, global_batch_size=8)]) == []
    lines = "\n".join(describe_phases([phase(0, {A: 1.0}), phase(40, {A: 0.5, C: 0.5}, seq_length=16)]))
    for part in ("sample 40", "iteration 10", "A: continues after 40 samples of 8 tokens", "C: starts"):
        assert part in lines


def test_what_may_come_again_is_told() -> None:
    """Other documents or another order are no continuation."""
    first = phase(0, {A: 1.0})
    remade, other_split = replace(A, fingerprint="another"), replace(A, first_document=5)
    for now, expected in (
        (phase(40, {A: 1.0}, seed=2), "A: starts again: it was read with another --seed"),
        (phase(40, {other_split: 1.0}), "A: starts again"),
        (phase(40, {remade: 1.0}), "A: starts: the dataset that was read"),
        (phase(40, {A: 1.0}, order="megatron"), "samples may be read a second time"),
    ):
        assert expected in "\n".join(describe_phases([first, now]))
    back = [phase(0, {A: 1.0}, order="megatron"), phase(40, {A: 1.0})]
    assert "A: starts again" in "\n".join(describe_phases(back))


@dataclass(frozen=True)
class Change:
    """Settings of a phase of a run."""

    weights: tuple[int, int]
    seq_length: int
    num_samples: int


CHANGES = st.lists(
    st.builds(Change, st.tuples(st.integers(1, 5), st.integers(1, 5)), st.sampled_from([3, 4, 5, 8]), st.integers(0, 12)),
    min_size=1,
    max_size=5,
)


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two datasets of some hundred tokens."""
    folder = tmp_path_factory.mktemp("history")
    for name, seed in (("A", 0), ("B", 1)):
        lengths = np.random.default_rng(seed).integers(0, 40, 30)
        with write_dataset(str(folder / name), np.uint16) as writer:
            writer.add_documents(np.arange(lengths.sum()) + 1000 * seed, lengths.tolist())
    return [str(folder / "A"), str(folder / "B")]


def train_data(prefixes: list[str], weights: tuple[float, ...], seq_length: int, **flags: object) -> SplitData:
    """The training split of a blend that takes all documents."""
    words = tuple(word for pair in zip(map(str, weights), prefixes, strict=True) for word in pair)
    config = DataConfig(train_data_path=words, **flags)  # type: ignore[arg-type]
    opened = open_datasets(
        config, seed=7, seq_length=seq_length, tokenizer=NullTokenizer(2000), need_validation=False, need_test=False
    )
    assert isinstance(opened.train, SplitData)
    return opened.train


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=CHANGES)
def test_no_token_is_read_twice_in_an_epoch_whatever_changes(prefixes: list[str], changes: list[Change]) -> None:
    """Each token of a dataset is to be predicted at most once, as long as the run takes less than an epoch of it."""
    phases: list[Phase] = []
    at, predicted = 0, Counter[tuple[str, int, int]]()
    for change in changes:
        data = train_data(prefixes, change.weights, change.seq_length)
        now = Phase(at, at, "epoch", 7, change.seq_length, 1, None, data.blend_entries(), data.blending)
        phases = continue_phases(phases, now)
        source = data.build_source(1, phases)
        for number in range(at, at + change.num_samples):
            pieces = source.get_lineage(number)
            places = [(piece.prefix, piece.document, piece.first_token + i) for piece in pieces for i in range(piece.num_tokens)]
            assert len(places) == change.seq_length + 1
            predicted.update(places[1:])
        at += change.num_samples
    assert max(predicted.values(), default=1) == 1


def test_a_run_that_goes_on_unchanged_reads_what_it_would_have_read(prefixes: list[str]) -> None:
    data = train_data(prefixes, (1, 2), 4)
    first = Phase(0, 0, "epoch", 7, 4, 1, None, data.blend_entries(), data.blending)
    whole = data.build_source(1, [first]).get_samples(0, 60)
    # A larger batch is another phase, but the samples stay the same.
    again = data.build_source(1, continue_phases([first], replace(first, first_iteration=20, first_sample=20, global_batch_size=8)))
    assert np.array_equal(again.get_samples(20, 40), whole[20:])


def test_a_dataset_named_twice_is_refused(prefixes: list[str], tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="contains one dataset twice"):
        train_data([prefixes[0], prefixes[0]], (1, 2), 4)
    for suffix in (".bin", ".idx"):
        (tmp_path / f"copy{suffix}").write_bytes(Path(prefixes[0] + suffix).read_bytes())
    with pytest.raises(DatasetError, match=f"{tmp_path}/copy: each sample would be read twice"):
        train_data([prefixes[0], str(tmp_path / "copy")], (1, 2), 4)


def test_datasets_of_the_same_lengths_are_not_the_same(tmp_path: Path) -> None:
    """Packed ahead, all documents have one length, and the .idx files are equal byte for byte."""
    made = [str(tmp_path / name) for name in "ab"]
    for at, prefix in enumerate(made):
        with write_dataset(prefix, np.uint16) as writer:
            for _ in range(9):
                writer.add_documents(np.full(17, at))
    assert Path(made[0] + ".idx").read_bytes() == Path(made[1] + ".idx").read_bytes()
    parts = train_data(made, (1, 2), 4).blend_entries()
    assert parts[0].key != parts[1].key


@pytest.mark.parametrize(
    ("flags", "blending"),
    [
        ({"data_path": ["a"]}, "none"),
        ({"data_path": ["1", "a"]}, "weights"),
        ({"train_data_path": ["1", "a"]}, "none"),
        ({"data_path": ["a", "b"]}, "sizes"),
        ({"train_data_path": ["a", "b"]}, "sizes"),
        ({"train_data_path": ["1", "a", "2", "b"]}, "weights"),
    ],
)
def test_which_paths_are_blends(prefixes: list[str], flags: dict[str, list[str]], blending: str) -> None:
    """In Megatron's order a blend asks for more samples than a dataset alone, and that is another order."""
    places = {"a": prefixes[0], "b": prefixes[1]}
    ((name, words),) = flags.items()
    config = DataConfig(split="1", **{name: tuple(places.get(word, word) for word in words)})  # type: ignore[arg-type]
    opened = open_datasets(config, seed=7, seq_length=4, tokenizer=NullTokenizer(2000), need_validation=False, need_test=False)
    assert opened.train.blending == blending


def test_weights_by_size_follow_the_samples_of_an_epoch(prefixes: list[str]) -> None:
    config = DataConfig(train_data_path=tuple(prefixes))
    data = open_datasets(config, seed=7, seq_length=4, tokenizer=NullTokenizer(2000), need_validation=False, need_test=False).train
    sizes = [(component.dataset.count_tokens(component.documents) - 1) // 4 for component in data.components]
    assert [component.weight for component in data.components] == sizes


@pytest.mark.parametrize("order", ["epoch", "megatron"])
def test_a_dataset_of_weight_zero_is_not_read(prefixes: list[str], order: str) -> None:
    source = train_data([*prefixes, "not there"], (1, 2, 0), 4, data_order=order).build_source(50)
    assert {piece.prefix for number in range(50) for piece in source.get_lineage(number)} == set(prefixes)


def test_equal_ratios_are_the_same_phase() -> None:
    assert phase(0, {A: 30, B: 70}).get_settings() == phase(0, {A: 0.3, B: 0.7}).get_settings()


def test_megatrons_blend_by_sizes_has_one_epoch(prefixes: list[str]) -> None:
    config = DataConfig(train_data_path=tuple(prefixes), data_order="megatron")
    data = open_datasets(config, seed=7, seq_length=4, tokenizer=NullTokenizer(2000), need_validation=False, need_test=False).train
    total = int(sum(component.weight for component in data.components))
    labels = data.build_source(total).get_samples(0, total)[:, 1:].ravel().tolist()
    assert len(set(labels)) == len(labels)
    with pytest.raises(DatasetError, match="training split needs .* one epoch of each"):
        data.build_source(total + 1)
    # Evaluations take the first samples again and again.
    assert np.array_equal(
        data.build_source(10 * total, num_consumed=total - 1).get_samples(0, total - 1),
        data.build_source(total).get_samples(0, total - 1),
    )


def test_megatrons_blend_by_sizes_divides_the_sizes_once(prefixes: list[str]) -> None:
    config = DataConfig(train_data_path=tuple(prefixes), data_order="megatron")
    data = open_datasets(config, seed=7, seq_length=4, tokenizer=NullTokenizer(2000), need_validation=False, need_test=False).train
    assert isinstance(data, SplitData)
    sizes = [829.0, 520.0]  # of which dividing twice gives other choices
    data = replace(data, components=tuple(replace(each, weight=size) for each, size in zip(data.components, sizes, strict=True)))
    blend = GreedyBlend(sizes, 100, by_size=True)
    source = data.build_source(100)
    assert [source.get_lineage(number)[0].prefix for number in range(100)] == [
        prefixes[at] for at in blend.locate(np.arange(100))[0]
    ]
    assert blend.weights == [size / sum(sizes) for size in sizes]
