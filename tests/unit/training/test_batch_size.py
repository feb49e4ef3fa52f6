"""The plan of batch sizes against a loop that makes every step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron.config.training import TrainingConfig
from megatron.training.progress import BatchSizePlan
from megatron_lab.verification.reference.training import compute_batch_size, parse_batch_size_schedule


def test_without_ramp_up_the_batch_is_constant() -> None:
    plan = BatchSizePlan(TrainingConfig(micro_batch_size=2, global_batch_size=24, train_iters=50), data_size=3, seq_length=8)
    assert plan.final_global_batch_size == 24
    assert [plan.get_global_batch_size(n) for n in (0, 24, 10**9)] == [24, 24, 24]
    assert plan.get_num_microbatches(0) == 4
    assert [plan.count_consumed_samples(n) for n in (0, 1, 50)] == [0, 24, 1200]
    assert (plan.total_iterations, plan.total_samples) == (50, 1200)


def test_batch_size_defaults_to_one_microbatch_a_rank() -> None:
    plan = BatchSizePlan(TrainingConfig(micro_batch_size=2, train_iters=1), data_size=3, seq_length=8)
    assert (plan.final_global_batch_size, plan.get_num_microbatches(0)) == (6, 1)


def test_last_incomplete_batch_of_the_samples_is_dropped() -> None:
    plan = BatchSizePlan(TrainingConfig(micro_batch_size=1, global_batch_size=8, train_samples=31), data_size=1, seq_length=8)
    assert (plan.total_iterations, plan.total_samples) == (3, 31)


def test_ramp_up_by_hand() -> None:
    # Two increments over 40 samples: 2 until 20, 4 until 40, then 6.
    training = TrainingConfig(micro_batch_size=1, global_batch_size=6, rampup_batch_size=(2, 2, 40), train_samples=63)
    plan = BatchSizePlan(training, data_size=2, seq_length=8)
    assert [plan.get_global_batch_size(n) for n in (0, 19, 20, 39, 40, 1000)] == [2, 2, 4, 4, 6, 6]
    assert [plan.get_num_microbatches(n) for n in (0, 20, 40)] == [1, 2, 3]
    assert [plan.count_consumed_samples(n) for n in (0, 10, 11, 15, 16)] == [0, 20, 24, 40, 46]
    assert plan.total_iterations == 18  # 10 of 2, 5 of 4, 3 of 6; 5 samples are left


def test_a_schedule_by_hand() -> None:
    """Tokens count as whole samples of 8; a step that passes two marks takes the batch of the second."""
    schedule = ("0:4", "0.1K:8,136:12")  # from 12 and 17 samples on
    training = TrainingConfig(micro_batch_size=2, step_batch_size_schedule=schedule, train_samples=100)
    plan = BatchSizePlan(training, data_size=2, seq_length=8)
    assert (plan.final_global_batch_size, training.get_first_batch_size(2)) == (12, 4)
    assert [plan.get_global_batch_size(n) for n in (0, 11, 12, 16, 17, 1000)] == [4, 4, 8, 8, 12, 12]
    assert [plan.count_consumed_samples(n) for n in range(6)] == [0, 4, 8, 12, 20, 32]
    assert plan.total_iterations == 4 + (100 - 20) // 12
    assert [plan.resume_at(3, 12).count_consumed_samples(n) for n in (3, 4, 5)] == [12, 20, 32]
    late = plan.resume_at(2, 40)  # with other batches before
    assert [late.count_consumed_samples(n) for n in (2, 3)] == [40, 52]


@given(
    seq_length=st.integers(1, 9),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5).map(sorted),
    gaps=st.lists(st.integers(1, 60), min_size=4, max_size=4),
    steps=st.integers(0, 40),
)
def test_a_schedule_equals_a_loop_over_all_steps(seq_length: int, sizes: list[int], gaps: list[int], steps: int) -> None:
    marks = [sum(gaps[:n]) * seq_length for n in range(len(sizes))]
    schedule = " ".join(f"{tokens}:{size}" for tokens, size in zip(marks, sizes, strict=True))
    training = TrainingConfig(micro_batch_size=1, step_batch_size_schedule=(schedule,), train_iters=40)
    plan = BatchSizePlan(training, 1, seq_length)
    consumed = 0
    for made in range(steps):
        assert plan.count_consumed_samples(made) == consumed
        size = [size for mark, size in zip(marks, sizes, strict=True) if mark <= consumed * seq_length][-1]
        assert plan.get_global_batch_size(consumed) == size
        assert compute_batch_size(consumed, 0, None, parse_batch_size_schedule(schedule), seq_length) == size
        consumed += size


@given(
    micro=st.integers(1, 3),
    data_size=st.integers(1, 3),
    start=st.integers(1, 4),
    increment=st.integers(1, 3),
    increments=st.integers(0, 8),
    ramp_samples=st.integers(1, 400),
    train_samples=st.integers(1, 1500),
)
def test_plan_equals_a_loop_over_all_steps(
    micro: int, data_size: int, start: int, increment: int, increments: int, ramp_samples: int, train_samples: int
) -> None:
    unit = micro * data_size
    ramp = (start * unit, increment * unit, ramp_samples)
    final = (start + increment * increments) * unit
    training = TrainingConfig(micro_batch_size=micro, global_batch_size=final, rampup_batch_size=ramp, train_samples=train_samples)
    plan = BatchSizePlan(training, data_size, seq_length=8)

    iterations, consumed = 0, 0
    while True:
        assert plan.count_consumed_samples(iterations) == consumed
        # START + floor(consumed / (SAMPLES / increments)) * INCREMENT, at most the global batch size
        batch = min(final, ramp[0] + consumed * increments // ramp_samples * ramp[1]) if consumed <= ramp_samples else final
        assert plan.get_global_batch_size(consumed) == batch == plan.get_num_microbatches(consumed) * unit
        if consumed + batch > train_samples:
            break
        consumed += batch
        iterations += 1
    assert plan.total_iterations == iterations


def test_long_runs_are_answered_without_a_loop() -> None:
    training = TrainingConfig(micro_batch_size=1, global_batch_size=1536, rampup_batch_size=(16, 16, 6_000_000), train_iters=10**15)
    plan = BatchSizePlan(training, data_size=16, seq_length=8)
    ramp_iterations = next(n for n in range(0, 10**6, 1000) if plan.count_consumed_samples(n) > 6_000_000)
    later = plan.count_consumed_samples(ramp_iterations)
    assert plan.count_consumed_samples(10**15) == later + (10**15 - ramp_iterations) * 1536 == plan.total_samples
