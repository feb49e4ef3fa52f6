"""Learning rate and weight decay: values worked out by hand, and what every style must satisfy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.training import OptimizerConfig, TrainingConfig
from megatron.training.progress import (
    BatchSizePlan,
    ScheduleLengths,
    compute_learning_rate,
    compute_schedule_lengths,
    compute_weight_decay,
)

STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")


def rate(samples: int, lengths: ScheduleLengths, **settings: Any) -> float:
    config = OptimizerConfig(**{"lr": 1.0, "min_lr": 0.2, **settings})
    return compute_learning_rate(samples, config, lengths)


@pytest.mark.parametrize(("samples", "expected"), [(0, 0.1), (25, 0.325), (50, 0.55), (100, 1.0)])
def test_warmup_is_linear_from_its_first_rate(samples: int, expected: float) -> None:
    lengths = ScheduleLengths(warmup_samples=100, decay_samples=1100, wsd_decay_samples=0, total_samples=1100)
    for style in STYLES:
        assert rate(samples, lengths, lr_decay_style=style, lr_warmup_init=0.1) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    ("style", "samples", "expected"),
    [
        ("constant", 600, 1.0),
        ("constant", 5000, 1.0),
        ("linear", 100 + 250, 0.8),
        ("linear", 1100, 0.2),
        ("cosine", 100 + 500, 0.6),
        ("cosine", 100 + 250, 0.2 + 0.8 * 0.8535533905932737),
        ("inverse-square-root", 400, 0.5),
        ("inverse-square-root", 1100, 0.30151134457776363),
        ("inverse-square-root", 1101, 0.2),  # the floor holds after the decay length even where the curve is above it
        ("linear", 1101, 0.2),
        ("cosine", 10**9, 0.2),
        ("WSD", 1101, 0.2),
    ],
)
def test_decay_values(style: str, samples: int, expected: float) -> None:
    lengths = ScheduleLengths(warmup_samples=100, decay_samples=1100, wsd_decay_samples=0, total_samples=1100)
    assert rate(samples, lengths, lr_decay_style=style) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(
    ("style", "quarter", "half"),
    [
        ("linear", 0.75, 0.5),
        ("cosine", 0.8535533905932737, 0.5),
        ("exponential", 2 * 0.8408964152537145 - 1, 2 * 0.7071067811865476 - 1),
        ("minus_sqrt", 0.5, 1 - 0.7071067811865476),
    ],
)
def test_wsd_holds_the_peak_and_then_decays(style: str, quarter: float, half: float) -> None:
    lengths = ScheduleLengths(warmup_samples=100, decay_samples=1000, wsd_decay_samples=400, total_samples=1000)
    shares = {101: 1.0, 600: 1.0, 700: quarter, 800: half, 1000: 0.0}
    for samples, share in shares.items():
        value = rate(samples, lengths, lr_decay_style="WSD", lr_wsd_decay_style=style)
        assert value == pytest.approx(0.2 + 0.8 * share, rel=1e-14)


def test_first_update_without_warmup_takes_the_peak() -> None:
    lengths = ScheduleLengths(0, 1000, 100, 1000)
    for style in STYLES:
        assert rate(0, lengths, lr_decay_style=style) == 1.0


@given(
    style=st.sampled_from(STYLES),
    wsd_style=st.sampled_from(WSD_STYLES),
    warmup=st.integers(0, 500),
    plateau=st.integers(1, 500),
    final=st.integers(1, 500),
    floor=st.floats(0, 1),
    data=st.data(),
)
def test_rate_rises_to_the_peak_then_never_rises(
    style: str, wsd_style: str, warmup: int, plateau: int, final: int, floor: float, data: st.DataObject
) -> None:
    decay = warmup + plateau + final
    lengths = ScheduleLengths(warmup, decay, final, decay)
    early, late = sorted((data.draw(st.integers(0, 2 * decay)), data.draw(st.integers(0, 2 * decay))))
    first, second = (rate(n, lengths, lr_decay_style=style, lr_wsd_decay_style=wsd_style, min_lr=floor) for n in (early, late))
    slack = 1e-12
    assert -slack <= first <= 1 + slack
    if late <= warmup:
        assert first <= second + slack
    elif early >= warmup:
        assert first >= second - slack
        assert second >= floor - slack


def test_a_second_course_rises_from_where_it_begins_and_decays_to_the_end_of_the_run() -> None:
    """The first is as without it, also where it has ended."""
    lengths = ScheduleLengths(100, 500, 0, 1600, rewarm_start=600, rewarm_samples=200)
    before = ScheduleLengths(100, 500, 0, 1600)
    for samples in (0, 50, 100, 300, 500, 600):
        assert rate(samples, lengths, lr_decay_style="cosine") == rate(samples, before, lr_decay_style="cosine")
    values = {601: 0.2 + 0.3 / 200, 700: 0.35, 800: 0.5, 1200: 0.35, 1600: 0.2, 2000: 0.2}
    for samples, value in values.items():
        assert rate(samples, lengths, lr_decay_style="cosine", lr_rewarm_factor=0.5) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(("style", "middle"), [("constant", 2.0), ("linear", 1.1), ("inverse-square-root", 2 * (100 / 500) ** 0.5)])
def test_a_second_course_has_the_form_of_the_first(style: str, middle: float) -> None:
    """Counted from where it begins. In the middle of a course, at its highest rate: it may be higher than the first's."""
    lengths = ScheduleLengths(0, 1000, 0, 1900, rewarm_start=1000, rewarm_samples=100)
    assert rate(1100, lengths, lr_decay_style=style, lr_rewarm_factor=2.0) == pytest.approx(2.0, rel=1e-12)
    assert rate(1500, lengths, lr_decay_style=style, lr_rewarm_factor=2.0) == pytest.approx(middle, rel=1e-12)


def test_wsd_holds_the_second_course_too_and_decays_as_long() -> None:
    lengths = ScheduleLengths(0, 1000, 100, 2000, rewarm_start=900, rewarm_samples=100)
    shares = {900: 1.0, 950: 1.0, 1900: 1.0, 1950: 0.5, 2000: 0.0}
    for samples, share in shares.items():
        value = rate(samples, lengths, lr_decay_style="WSD", lr_wsd_decay_style="linear")
        assert value == pytest.approx(0.2 + 0.8 * share, rel=1e-12)


def batches_of(size: int) -> Callable[[int], int]:
    return lambda iterations: iterations * size


def test_iterations_count_as_global_batches() -> None:
    optimizer = OptimizerConfig(lr=1.0, lr_decay_iters=80, lr_warmup_iters=5, lr_wsd_decay_iters=7, lr_decay_style="WSD")
    lengths = compute_schedule_lengths(optimizer, TrainingConfig(train_iters=100), batches_of(32), total_samples=3200)
    assert lengths == ScheduleLengths(warmup_samples=160, decay_samples=2560, wsd_decay_samples=224, total_samples=3200)


def test_iterations_of_a_ramp_up_count_as_the_samples_they_take() -> None:
    """So a warm-up of 3 steps ends with the third step, and one that is shorter than the decay is so in samples too."""
    training = TrainingConfig(train_iters=6, micro_batch_size=2, global_batch_size=8, rampup_batch_size=(2, 2, 12))
    plan = BatchSizePlan(training, data_size=1, seq_length=8)
    sizes = [2, 2, 4, 6, 8, 8]
    assert [plan.count_consumed_samples(n) for n in range(7)] == [sum(sizes[:n]) for n in range(7)]
    optimizer = OptimizerConfig(lr=1.0, lr_warmup_iters=3, lr_wsd_decay_iters=2, lr_decay_style="WSD")
    lengths = compute_schedule_lengths(optimizer, training, plan.count_consumed_samples, plan.total_samples)
    assert lengths == ScheduleLengths(warmup_samples=8, decay_samples=30, wsd_decay_samples=16, total_samples=30)
    late = OptimizerConfig(lr=1.0, lr_warmup_iters=5, lr_decay_style="linear")  # 5 whole batches would be more than the run has
    assert compute_schedule_lengths(late, training, plan.count_consumed_samples, plan.total_samples).warmup_samples == 22


def test_sample_flags_count_with_train_samples() -> None:
    optimizer = OptimizerConfig(
        lr=1.0, lr_decay_samples=900, lr_warmup_samples=33, lr_wsd_decay_samples=100, lr_decay_iters=1, lr_warmup_iters=1
    )
    lengths = compute_schedule_lengths(optimizer, TrainingConfig(train_samples=1000), batches_of(32), total_samples=1000)
    assert lengths == ScheduleLengths(warmup_samples=33, decay_samples=900, wsd_decay_samples=100, total_samples=1000)


def test_decay_defaults_to_the_run_and_a_fraction_counts_of_it() -> None:
    optimizer = OptimizerConfig(lr=1.0, lr_warmup_fraction=0.015, lr_warmup_iters=3)
    lengths = compute_schedule_lengths(optimizer, TrainingConfig(train_iters=100), batches_of(1), total_samples=100)
    assert lengths == ScheduleLengths(warmup_samples=1.5, decay_samples=100, wsd_decay_samples=0, total_samples=100)
    assert compute_learning_rate(1, optimizer, lengths) == pytest.approx(1 / 1.5)


def test_wsd_without_a_length_names_the_flag() -> None:
    optimizer = OptimizerConfig(lr=1.0, lr_decay_style="WSD")
    with pytest.raises(ValueError, match=r"--lr-wsd-decay-iters \(often a tenth of the run, here 10\)"):
        compute_schedule_lengths(optimizer, TrainingConfig(train_iters=100), batches_of(4), total_samples=400)
    with pytest.raises(ValueError, match=r"--lr-wsd-decay-samples \(often a tenth of the run, here 40\)"):
        compute_schedule_lengths(optimizer, TrainingConfig(train_samples=400), batches_of(4), total_samples=400)


def test_warmup_as_long_as_the_decay_is_refused_unless_constant() -> None:
    training = TrainingConfig(train_iters=10)
    with pytest.raises(ValueError, match="Lower --lr-warmup-iters"):
        compute_schedule_lengths(OptimizerConfig(lr=1.0, lr_warmup_iters=10), training, batches_of(4), total_samples=40)
    constant = OptimizerConfig(lr=1.0, lr_warmup_iters=10, lr_decay_style="constant")
    assert compute_schedule_lengths(constant, training, batches_of(4), total_samples=40).warmup_samples == 40


def test_weight_decay_grows_from_start_to_end() -> None:
    lengths = ScheduleLengths(0, 1, 0, total_samples=1000)

    def decay(samples: int, style: Any) -> float:
        config = OptimizerConfig(weight_decay=0.3, start_weight_decay=0.1, end_weight_decay=0.5, weight_decay_incr_style=style)
        return compute_weight_decay(samples, config, lengths)

    assert [decay(n, "constant") for n in (0, 500, 2000)] == [0.3, 0.3, 0.3]
    assert [decay(n, "linear") for n in (0, 250, 500, 1000, 2000)] == pytest.approx([0.1, 0.2, 0.3, 0.5, 0.5], rel=1e-14)
    quarter = 0.1 + 0.4 * (1 - 0.8535533905932737)
    assert [decay(n, "cosine") for n in (0, 250, 500, 1000, 2000)] == pytest.approx([0.1, quarter, 0.3, 0.5, 0.5], rel=1e-14)
