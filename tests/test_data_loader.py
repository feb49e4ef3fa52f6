"""The steps of a run: the same samples at every layout, number of workers and resume point."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron.config.data import DataConfig
from megatron.data.batches import Microbatch, read_microbatch
from megatron.data.build import build_datasets
from megatron.data.loader import StepLoader
from megatron.data.mock import MockDataset
from megatron.data.tokenizers.simple import NullTokenizer
from tests.cli import spawn_cli


class Numbers:
    """Sample n holds n, n + 1, n + 2, n + 3."""

    seq_length = 3
    masked_id: int | None = None

    def __init__(self, bad: int | None = None) -> None:
        self.bad = bad
        self.read: list[int] = []

    def sample(self, number: int) -> NDArray[np.int64]:
        """Four numbers, or an error at the bad sample."""
        self.read.append(number)
        if number == self.bad:
            raise ValueError(f"sample {number} is damaged")
        return np.arange(number, number + 4)

    def epochs_for(self, num_samples: int) -> float:
        """Never repeated."""
        return 0.0

    def describe(self) -> str:
        """A name."""
        return "numbers"


def ramp(consumed: int) -> int:
    """A global batch that grows."""
    return 12 if consumed < 48 else 24


def loader(source: object, **changes: object) -> StepLoader:
    """A loader of one data rank, changed as asked."""
    settings: dict[str, object] = {
        "micro_batch_size": 2,
        "data_rank": 0,
        "data_size": 1,
        "global_batch_size_at": ramp,
        "consumed_samples": 0,
        "total_samples": 120,
        "num_workers": 0,
    }
    return StepLoader(source, **{**settings, **changes})  # type: ignore[arg-type]


def loader_threads() -> list[threading.Thread]:
    """Threads of loaders that are alive."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


def test_a_microbatch_is_inputs_and_the_ids_that_follow() -> None:
    source = Numbers()
    source.masked_id = 6
    batch = read_microbatch(source, 5, 2)
    assert batch.tokens.tolist() == [[5, 6, 7], [6, 7, 8]]
    assert batch.labels.tolist() == [[6, 7, 8], [7, 8, 9]]
    assert batch.loss_mask.tolist() == [[1, 0, 1], [0, 1, 1]]
    assert batch.first_sample == 5
    assert (batch.tokens.dtype, batch.labels.dtype, batch.loss_mask.dtype) == (np.int64, np.int64, np.float32)
    assert batch.tokens.flags.c_contiguous
    assert batch.labels.flags.c_contiguous


@given(
    micro=st.sampled_from([1, 2, 3, 4, 6, 12]),
    data_size=st.sampled_from([1, 2, 3, 4, 6, 12]),
    num_workers=st.sampled_from([0, 1, 3]),
    resume_after=st.integers(0, 4),
)
def test_every_layout_reads_the_same_steps(micro: int, data_size: int, num_workers: int, resume_after: int) -> None:
    assume(12 % (micro * data_size) == 0)
    starts = [0, 12, 24, 36, 48, 72, 96]
    ranks = [
        loader(
            Numbers(),
            micro_batch_size=micro,
            data_rank=rank,
            data_size=data_size,
            consumed_samples=starts[resume_after],
            num_workers=num_workers,
        )
        for rank in range(data_size)
    ]
    for start, *steps in zip(starts[resume_after:], *ranks, strict=True):
        samples: list[int] = []
        for microbatches in zip(*steps, strict=True):
            for microbatch in microbatches:
                assert microbatch.tokens[:, 0].tolist() == list(range(microbatch.first_sample, microbatch.first_sample + micro))
                samples += microbatch.tokens[:, 0].tolist()
        assert samples == list(range(start, start + ramp(start)))
    assert {rank.consumed_samples for rank in ranks} == {120}


def test_zero_and_four_workers_are_bitwise_equal() -> None:
    source = MockDataset(split=0, seed=3, seq_length=16, vocab_size=100, eod=99, masked_id=99)
    plain, threaded = list(loader(source)), list(loader(source, num_workers=4))
    assert len(plain) == len(threaded) == 7
    for one, other in zip(plain, threaded, strict=True):
        for a, b in zip(one, other, strict=True):
            assert a.first_sample == b.first_sample
            for name in ("tokens", "labels", "loss_mask"):
                assert getattr(a, name).tobytes() == getattr(b, name).tobytes()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_state_counts_only_the_steps_given_out(num_workers: int) -> None:
    steps = loader(Numbers(), num_workers=num_workers)
    assert steps.consumed_samples == 0
    next(steps)
    next(steps)
    assert steps.consumed_samples == 24
    steps.close()


def test_threads_read_at_most_two_steps_beyond_the_last_one_given_out() -> None:
    source = Numbers()
    steps = loader(source, num_workers=3)
    next(steps)
    steps._threads.shutdown(wait=True)  # type: ignore[union-attr]
    assert max(source.read) < 36
    steps.close()


def test_the_end_comes_when_all_samples_are_consumed_and_ends_the_threads() -> None:
    steps = loader(Numbers(), total_samples=30, num_workers=2)
    assert len(list(steps)) == 3  # a step begins at 24
    assert next(steps, None) is None
    assert list(loader(Numbers(), consumed_samples=120)) == []
    _no_threads_left()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_in_a_sample_reaches_the_reader_at_its_step(num_workers: int) -> None:
    steps = loader(Numbers(bad=13), num_workers=num_workers)
    assert len(next(steps)) == 6
    with pytest.raises(ValueError, match="sample 13 is damaged"):
        next(steps)
    assert steps.consumed_samples == 12
    with pytest.raises(RuntimeError, match="closed"):
        next(steps)
    _no_threads_left()


@pytest.mark.parametrize("end", [StepLoader.close, lambda _: None])
def test_threads_end_when_the_loader_is_closed_or_dropped(end: Callable[[StepLoader], None]) -> None:
    steps = loader(Numbers(), num_workers=2)
    next(steps)
    assert loader_threads()
    end(steps)
    del steps
    gc.collect()
    _no_threads_left()


def test_a_loader_left_open_does_not_keep_the_interpreter() -> None:
    script = """
from megatron.data.loader import StepLoader
from megatron.data.mock import MockDataset
source = MockDataset(split=0, seed=1, seq_length=8, vocab_size=9, eod=8)
loader = StepLoader(source, micro_batch_size=4, data_rank=0, data_size=1, global_batch_size_at=lambda _: 8,
                    consumed_samples=0, total_samples=10**6, num_workers=3)
print(len(next(loader)))
"""
    done = spawn_cli(["-c", script], None, timeout=60)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


def test_a_batch_that_does_not_divide_names_the_flags() -> None:
    with pytest.raises(ValueError, match=r"global batch of 12 .*--micro-batch-size 5 x 1 data ranks") as error:
        next(loader(Numbers(), micro_batch_size=5))
    assert "multiple of 5" in str(error.value)


def mock(**changes: int) -> MockDataset:
    """Made-up data."""
    return MockDataset(**{"split": 0, "seed": 1, "seq_length": 50, "vocab_size": 1000, "eod": 999, **changes})


def test_mock_tokens_follow_from_seed_split_and_sample() -> None:
    assert mock().sample(7).tolist() == mock().sample(7).tolist()
    others = [mock().sample(8), mock(seed=2).sample(7), mock(split=1).sample(7)]
    assert not any(np.array_equal(mock().sample(7), other) for other in others)


@given(vocab_size=st.sampled_from([2, 3, 64, 65, 66, 1000, 50257]), eod=st.integers(0, 50256), seed=st.integers(0, 9))
def test_mock_tokens_follow_one_rule_except_after_a_document(vocab_size: int, eod: int, seed: int) -> None:
    eod %= vocab_size
    follower: dict[int, int] = {}
    ends = 0
    for split in (0, 1):  # the same rule in validation
        source = mock(vocab_size=vocab_size, eod=eod, seed=seed, split=split)
        for number in range(40):
            window = source.sample(number)
            assert window.shape == (51,)
            assert window.dtype == np.int64
            assert 0 <= window.min() <= window.max() < vocab_size
            ends += int((window == eod).sum())
            for token, after in zip(window[:-1].tolist(), window[1:].tolist(), strict=True):
                if eod not in (token, after):
                    assert follower.setdefault(token, after) == after
    assert len(follower) == min(vocab_size - 1, 64)
    assert 0.07 < ends / (80 * 51) < 0.13


def test_mock_ids_are_spread_over_the_vocabulary() -> None:
    used = np.unique(np.concatenate([mock().sample(number) for number in range(40)]))
    assert all(((used >= start) & (used < start + 125)).sum() >= 7 for start in range(0, 1000, 125))


def test_mock_data_masks_the_end_of_a_document_and_needs_two_ids() -> None:
    config = DataConfig(mock_data=True, eod_mask_loss=True)
    sets = build_datasets(config, seed=1, seq_length=64, tokenizer=NullTokenizer(30), need_validation=True, need_test=False)
    batch: Microbatch = read_microbatch(sets.train, 0, 4)
    assert np.array_equal(batch.loss_mask == 0, batch.tokens == 30)
    assert (batch.loss_mask == 0).any()
    assert sets.test is None
    assert ["training", "validation"] == [line.split(":")[0] for line in sets.describe()]
    with pytest.raises(ValueError, match="at least 2 ids"):
        mock(vocab_size=1, eod=0)


def _no_threads_left() -> None:
    for thread in loader_threads():
        thread.join(timeout=10)
    assert not loader_threads()
