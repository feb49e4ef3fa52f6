"""The reference's batch sizes, learning rates and weight decays against values worked out by hand."""

from __future__ import annotations

import math

import pytest

from megatron_lab.verification.reference.training import ScalarSchedule, compute_batch_size


def test_warm_up_goes_in_a_line_from_its_start_to_the_highest_rate() -> None:
    course = ScalarSchedule(peak=1.0, initial=0.2, warmup=8, style="constant")
    assert [course.get_value_at(samples) for samples in (0, 2, 8, 9, 10**9)] == pytest.approx([0.2, 0.4, 1.0, 1.0, 1.0])
    assert ScalarSchedule(peak=1.0, initial=0.2, style="constant").get_value_at(0) == 1.0, "without warm-up the start is not seen"


@pytest.mark.parametrize(
    ("style", "quarter", "half", "final"),
    [
        ("linear", 0.75, 0.5, False),
        ("linear", 0.75, 0.5, True),
        ("cosine", (1 + math.sqrt(0.5)) / 2, 0.5, False),
        ("cosine", (1 + math.sqrt(0.5)) / 2, 0.5, True),
        ("exponential", 2**0.75 - 1, math.sqrt(2) - 1, True),
        ("minus_sqrt", 0.5, 1 - math.sqrt(0.5), True),
    ],
)
def test_decays(style: str, quarter: float, half: float, final: bool) -> None:
    """From 10 at 40 samples down to 2 at 80: after a warm-up of 40, or as the final decay of WSD."""
    course = ScalarSchedule(10.0, 2.0, warmup=40, style=style, end=80)
    if final:
        course = ScalarSchedule(10.0, 2.0, style="WSD", end=80, final_decay=40, final_decay_style=style)
    for samples, left in ((40, 1.0), (50, quarter), (60, half), (80, 0.0), (81, 0.0)):
        assert course.get_value_at(samples) == pytest.approx(2 + 8 * left, rel=1e-14)
    assert course.get_value_at(39) == pytest.approx(10.0 if final else 10 * 39 / 40)


def test_inverse_square_root() -> None:
    course = ScalarSchedule(1.0, 0.3, warmup=4, style="inverse-square-root", end=100)
    assert [course.get_value_at(samples) for samples in (4, 16, 25, 100, 101)] == pytest.approx([1.0, 0.5, 0.4, 0.3, 0.3])
    assert ScalarSchedule(1.0, style="inverse-square-root", end=100).get_value_at(0) == 1.0


def test_weight_decay_grows_over_the_run() -> None:
    assert ScalarSchedule(0.1, style="constant").get_value_at(17) == 0.1
    linear = ScalarSchedule(0.1, 0.3, style="linear", end=40)
    assert [linear.get_value_at(samples) for samples in (0, 10, 40, 50)] == pytest.approx([0.1, 0.15, 0.3, 0.3])
    cosine = ScalarSchedule(0.0, 1.0, style="cosine", end=40)
    assert [cosine.get_value_at(samples) for samples in (0, 10, 20, 40)] == pytest.approx([0, (1 - math.sqrt(0.5)) / 2, 0.5, 1.0])


def test_sizes_of_a_ramp_share_its_samples_equally() -> None:
    """4, 8 and 12 for 10 samples each; a step that begins within the share of a size has it."""
    sizes: list[int] = []
    consumed = 0
    while not sizes or sizes[-1] < 16:
        sizes.append(compute_batch_size(consumed, 16, (4, 4, 30)))
        consumed += sizes[-1]
    assert sizes == [4, 4, 4, 8, 12, 16]
    assert [compute_batch_size(consumed, 16, (4, 4, 30)) for consumed in (9, 10, 19, 20, 29, 30)] == [4, 8, 8, 12, 12, 16]
    assert compute_batch_size(10**6, 16, (4, 4, 30)) == 16 and compute_batch_size(0, 16, None) == 16
