"""The closed formulas of the papers: wherever one is given, the simulator agrees exactly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline_parallel.validate import compute_peak_live_activations
from megatron.spec.operations import OpCosts
from megatron.spec.schedules import SCHEDULES, build_schedule
from megatron_lab.schedule_plots.formulas import SCHEDULE_FORMULAS, ExpectedValues, compute_expected
from tests.support.timelines import chunks_of, timeline

names = st.sampled_from(list(SCHEDULES))
# Twelve has all numbers of chunks as divisors, so costs of chunks are whole and sums of them exact.
durations = st.integers(0, 9).map(lambda n: 12.0 * n)
costs_of_a_stage = st.one_of(
    st.builds(OpCosts, durations, durations, durations, recompute=durations),
    st.builds(lambda n, again: OpCosts(n, n, n, recompute=again), durations, durations),
)


def test_every_published_schedule_has_its_formulas() -> None:
    assert {"gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"} <= SCHEDULE_FORMULAS.keys() <= SCHEDULES.keys()
    assert compute_expected("unpublished", 4, 8, 1, OpCosts()) == ExpectedValues(None, None, ())


@given(names, st.integers(1, 12), st.integers(1, 40), st.integers(1, 4), costs_of_a_stage)
def test_a_formula_that_is_given_is_exact(name: str, stages: int, microbatches: int, chunks: int, costs: OpCosts) -> None:
    said = compute_expected(name, stages, microbatches, chunks_of(name, chunks), costs)
    if said.bubble_time is not None:
        step = microbatches * (costs.forward + costs.recompute + costs.input_grad + costs.weight_grad) + said.bubble_time
        assert timeline(name, stages, microbatches, chunks, costs).step_time == step
    if said.max_activations is not None:
        schedule = build_schedule(name, stages, microbatches, chunks_of(name, chunks))
        assert said.max_activations == compute_peak_live_activations(schedule)


@given(st.integers(2, 10), st.integers(0, 20), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_the_bubble_of_zb_h1_needs_weight_gradients_that_are_not_the_longest(
    stages: int, more: int, f: int, i: int, w: int
) -> None:
    """W <= F and W <= I are not only enough: wherever one is missing the simulator has another bubble."""
    costs, microbatches = OpCosts(f, i, w), stages + more
    said = compute_expected("zb-h1", stages, microbatches, 1, costs).bubble_time
    assert (said is not None) == (w <= f and w <= i)
    bubble = timeline("zb-h1", stages, microbatches, 1, costs).step_time - microbatches * (f + i + w)
    assert (bubble == (stages - 1) * (f + i - w)) == (said is not None)


@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "chunks", "costs"),
    [
        ("gpipe", 4, 8, 1, OpCosts(1, 1, 1, p2p=0.1)),
        ("1f1b", 4, 8, 1, OpCosts(1, 1, 1, p2p=0.1)),
        ("interleaved", 4, 3, 2, OpCosts()),
        ("zb-h1", 4, 3, 1, OpCosts()),
        ("zb-v", 4, 6, 2, OpCosts()),
        ("zb-v", 4, 8, 2, OpCosts(2, 2, 1)),
    ],
)
def test_no_formula_is_stretched(name: str, stages: int, microbatches: int, chunks: int, costs: OpCosts) -> None:
    assert compute_expected(name, stages, microbatches, chunks, costs).bubble_time is None


def test_few_microbatches_of_zb_v_have_no_formula_of_memory() -> None:
    assert compute_expected("zb-v", 4, 6, 2, OpCosts()).max_activations is None
    assert compute_expected("zb-v", 4, 7, 2, OpCosts()).max_activations == (8, 8, 8, 8)


def test_messages_between_no_stages_take_no_time() -> None:
    assert compute_expected("zb-v", 1, 3, 2, OpCosts(1, 2, 3, p2p=9)).bubble_time == 0
