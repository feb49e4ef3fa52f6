"""The steps of a run: the same samples at every layout, number of workers and resume point."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron.data.loader import StepLoader
from megatron.data.samples import DocumentRules, DocumentSpan, Microbatch, MockDataset, SampleSource
from tests.support.cli import spawn_cli

RULES = DocumentRules(eod=6)


class Numbers(SampleSource):
    """Sample n holds n, n + 1, n + 2, n + 3."""

    seq_length = 3

    def __init__(self, bad: int | None = None) -> None:
        self.bad = bad
        self.read: list[int] = []

    def get_samples(self, first: int, count: int) -> NDArray[np.int64]:
        """Four numbers each, or an error at the bad sample."""
        self.read += range(first, first + count)
        if self.bad in range(first, first + count):
            raise ValueError(f"sample {self.bad} is damaged")
        return np.arange(first, first + count)[:, None] + np.arange(4)

    def get_lineage(self, sample_index: int) -> list[DocumentSpan]:
        """One document for each sample."""
        return [DocumentSpan("numbers", sample_index, 0, 4)]

    def describe(self, num_samples: int) -> list[str]:
        """A name."""
        return ["numbers"]


def ramp(consumed: int) -> int:
    """A global batch that grows."""
    return 12 if consumed < 48 else 24


def loader(
    source: SampleSource, rules: DocumentRules = RULES, prepare: Callable[[Microbatch], Any] = lambda batch: batch, **changes: Any
) -> StepLoader[Any]:
    """A loader of one data rank, changed as asked."""
    settings: dict[str, Any] = {
        "micro_batch_size": 2,
        "data_rank": 0,
        "data_size": 1,
        "global_batch_size_at": ramp,
        "consumed_samples": 0,
        "total_samples": 120,
        "num_workers": 0,
    }
    return StepLoader(source, rules, prepare, **{**settings, **changes})


def loader_threads() -> list[threading.Thread]:
    """Threads of loaders that are alive."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


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
    source = MockDataset(split=0, seed=3, seq_length=16, vocab_size=100, eod=99)
    rules = DocumentRules(99, True, True, True)
    plain, threaded = list(loader(source, rules)), list(loader(source, rules, num_workers=4))
    assert len(plain) == len(threaded) == 7
    for one, other in zip(plain, threaded, strict=True):
        for a, b in zip(one, other, strict=True):
            assert a.first_sample == b.first_sample
            for name in ("tokens", "labels", "loss_mask", "positions", "cu_seqlens"):
                assert getattr(a, name).tobytes() == getattr(b, name).tobytes()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_microbatch_is_prepared_where_it_is_read(num_workers: int) -> None:
    steps = loader(Numbers(), prepare=lambda batch: threading.current_thread().name, num_workers=num_workers)
    names = set(next(steps))
    steps.close()
    here = threading.current_thread().name
    assert names <= {"loader_0", "loader_1"} if num_workers else names == {here}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_state_counts_only_the_steps_given_out(num_workers: int) -> None:
    steps = loader(Numbers(), num_workers=num_workers)
    assert steps.consumed_samples == 0
    next(steps)
    next(steps)
    assert steps.consumed_samples == 24
    steps.close()


@pytest.mark.parametrize(
    "batch, num_workers, steps_ahead",
    [
        pytest.param(240, 1, 2, id="two steps"),
        pytest.param(240, 4, 2, id="two steps of four tasks each"),
        pytest.param(2, 3, 6, id="two small steps for each thread"),
    ],
)
def test_threads_read_a_bounded_distance_ahead(batch: int, num_workers: int, steps_ahead: int) -> None:
    """And not before the step given out has been used."""
    source = Numbers()
    steps = loader(source, global_batch_size_at=lambda _: batch, total_samples=5000, num_workers=num_workers)
    assert [microbatch.first_sample for microbatch in next(steps)] == list(range(0, batch, 2))
    settled(source, steps_ahead * batch)
    steps.prefetch()
    settled(source, (1 + steps_ahead) * batch)
    next(steps)
    settled(source, (1 + steps_ahead) * batch)
    steps.close()


def settled(source: Numbers, count: int) -> None:
    """So many samples are read, and no more."""
    wait_for(lambda: len(source.read) >= count)
    for _ in range(20):
        time.sleep(0.001)
    assert sorted(source.read) == list(range(count))


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


def test_an_error_in_preparing_reaches_the_reader_too() -> None:
    def prepare(batch: Microbatch) -> Microbatch:
        if batch.first_sample == 4:
            raise RuntimeError("no pinned memory is left")
        return batch

    with pytest.raises(RuntimeError, match="no pinned memory is left"):
        next(loader(Numbers(), prepare=prepare, num_workers=2))
    _no_threads_left()


def test_closing_does_not_wait_for_a_read_that_hangs() -> None:
    began, released = threading.Event(), threading.Event()

    class Hanging(Numbers):
        def get_samples(self, first: int, count: int) -> NDArray[np.int64]:
            if first >= 12:
                began.set()
                released.wait(60)
            return super().get_samples(first, count)

    source = Hanging()
    steps = loader(source, num_workers=1)
    next(steps)
    assert began.wait(30)
    steps.close()
    assert loader_threads(), "it still hangs"
    released.set()
    _no_threads_left()
    assert max(source.read) < 24, "what was not begun is not read"


@pytest.mark.parametrize("end", [StepLoader.close, lambda _: None])
def test_threads_end_when_the_loader_is_closed_or_dropped(end: Callable[[StepLoader], None]) -> None:
    steps = loader(Numbers(), num_workers=2)
    next(steps)
    assert loader_threads()
    end(steps)
    del steps
    gc.collect()
    _no_threads_left()


@pytest.mark.parametrize("hang, left", [("pass", False), ("time.sleep(1000)", True)])
def test_a_loader_left_open_does_not_keep_the_interpreter(hang: str, left: bool) -> None:
    """Its threads end first, but nobody waits for ever for those that read from where no answer comes."""
    script = """
import atexit, threading, time
import numpy as np
atexit.register(lambda: print(any(thread.name.startswith("loader") for thread in threading.enumerate())))
from megatron.data.samples import DocumentRules, SampleSource
from megatron.data.loader import StepLoader

reached = threading.Event()

class Source(SampleSource):
    seq_length = 3
    def get_samples(self, first, count):
        if first >= 8:
            reached.set()
            HANG
        return np.zeros((count, 4), dtype=np.int64)

loader = StepLoader(Source(), DocumentRules(1), lambda batch: batch.tokens.shape, micro_batch_size=4, data_rank=0,
                    data_size=1, global_batch_size_at=lambda _: 8, consumed_samples=0, total_samples=10**6, num_workers=3)
print(next(loader))
reached.wait()
"""
    done = spawn_cli(["-c", script.replace("HANG", hang)], None, timeout=60, fresh=True)
    assert (done.returncode, done.stdout) == (0, f"[(4, 3), (4, 3)]\n{left}\n"), done.stderr


def test_a_batch_that_does_not_divide_names_the_flags() -> None:
    with pytest.raises(ValueError, match=r"global batch of 12 .*--micro-batch-size 5 x 1 data ranks") as error:
        next(loader(Numbers(), micro_batch_size=5))
    assert "multiple of 5" in str(error.value)


def mock(**changes: int) -> MockDataset:
    """Made-up data."""
    return MockDataset(**{"split": 0, "seed": 1, "seq_length": 50, "vocab_size": 1000, "eod": 999, **changes})


def test_mock_tokens_follow_from_seed_split_and_sample() -> None:
    seven = mock().get_samples(7, 1)
    assert np.array_equal(seven, mock().get_samples(7, 1)) and np.array_equal(seven, mock().get_samples(5, 4)[2:3])
    others = [mock().get_samples(8, 1), mock(seed=2).get_samples(7, 1), mock(split=1).get_samples(7, 1)]
    assert not any(np.array_equal(seven, other) for other in others)


@given(vocab_size=st.sampled_from([2, 3, 64, 65, 66, 1000, 50257]), eod=st.integers(0, 50256), seed=st.integers(0, 9))
def test_mock_tokens_follow_one_rule_except_after_a_document(vocab_size: int, eod: int, seed: int) -> None:
    eod %= vocab_size
    follower: dict[int, int] = {}
    ends = 0
    for split in (0, 1):  # the same rule in validation
        source = mock(vocab_size=vocab_size, eod=eod, seed=seed, split=split)
        for window in source.get_samples(0, 40):
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
    used = np.unique(mock().get_samples(0, 40))
    assert all(((used >= start) & (used < start + 125)).sum() >= 7 for start in range(0, 1000, 125))


def test_mock_data_needs_two_ids() -> None:
    with pytest.raises(ValueError, match="at least 2 ids"):
        mock(vocab_size=1, eod=0)


def wait_for(condition: Callable[[], bool]) -> None:
    """Until it holds."""
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline, "it never held"
        time.sleep(0.001)


def _no_threads_left() -> None:
    for thread in loader_threads():
        thread.join(timeout=10)
    assert not loader_threads()
