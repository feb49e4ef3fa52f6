"""The simulated time of every generated schedule against the closed formulas of the papers.

With stages p, microbatches m, chunks a stage v; forward F, input gradient I and weight gradient W of a whole stage. Durations are
whole numbers that divide by the chunks of a stage, so sums are exact.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron.pipeline_parallel.simulate import simulate
from megatron.pipeline_parallel.validate import compute_peak_live_activations
from megatron.spec.operations import OpCosts, add_recompute
from megatron.spec.schedules import SCHEDULES
from megatron_lab.schedule_plots.formulas import compute_expected
from megatron_lab.schedule_plots.table import compute_idle_times
from tests.unit.pipeline_parallel.test_generators import CHUNKS, MICROBATCHES, STAGES, make

WHOLE = 12
"""Divides by every number of chunks a stage."""
DURATIONS = st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 9)).map(lambda t: OpCosts(*(WHOLE * d for d in t)))
DELAYS = st.integers(0, 20)
EQUAL = OpCosts(WHOLE, WHOLE, WHOLE)


@pytest.mark.parametrize("name", SCHEDULES)
@given(STAGES, MICROBATCHES, CHUNKS, DURATIONS, st.integers(1, 9), DELAYS)
def test_recompute_ahead_of_the_gradient_hides_in_the_bubble(
    name: str, p: int, m: int, v: int, costs: OpCosts, again: int, p2p: int
) -> None:
    """Against the same work within backward. The gradient of a microbatch comes to the first stage through all others, so what
    each of them has done before saves (p - 1) times this work at least; where there is one stage, nobody waits."""
    plain, v = make(name, p, m, v)
    schedule, extra = add_recompute(plain, range(p * v)), float(WHOLE * again)
    ahead = simulate(schedule, replace(costs, recompute=extra, p2p=v * p2p).divide_by_chunks(v)).step_time
    within = simulate(plain, replace(costs, input_grad=costs.input_grad + extra, p2p=v * p2p).divide_by_chunks(v)).step_time
    assert ahead < within if p > 1 else ahead == within


def step_time(name: str, stages: int, microbatches: int, chunks: int, costs: OpCosts, p2p: float = 0) -> float:
    """Of a step where these are the costs of a whole stage."""
    schedule, chunks = make(name, stages, microbatches, chunks)
    return simulate(schedule, OpCosts(costs.forward / chunks, costs.input_grad / chunks, costs.weight_grad / chunks, p2p)).step_time


def bubble(name: str, stages: int, microbatches: int, chunks: int, costs: OpCosts) -> float:
    """The step without the work of a stage."""
    work = microbatches * (costs.forward + costs.input_grad + costs.weight_grad)
    return step_time(name, stages, microbatches, chunks, costs) - work


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@given(STAGES, MICROBATCHES, DURATIONS)
def test_whole_backwards(name: str, p: int, m: int, costs: OpCosts) -> None:
    """Narayanan et al. 2021, section 2.2.1: (p - 1)(F + I + W), for any number of microbatches."""
    assert bubble(name, p, m, 1, costs) == (p - 1) * (costs.forward + costs.input_grad + costs.weight_grad)


@given(STAGES, MICROBATCHES, CHUNKS, DURATIONS)
def test_interleaved(p: int, m: int, v: int, costs: OpCosts) -> None:
    """Narayanan et al. 2021, section 2.2.2: that of 1F1B divided by v; here for any m >= p, which need not divide by p.

    With fewer microbatches than stages there is one round, and p - m more waits of a chunk for each further chunk.
    """
    whole = costs.forward + costs.input_grad + costs.weight_grad
    waits = p - 1 + (v - 1) * max(0, p - m)
    assert bubble("interleaved", p, m, v, costs) == waits * whole / v


@given(STAGES, MICROBATCHES, DURATIONS)
def test_zb_h1(p: int, m: int, costs: OpCosts) -> None:
    """Qi et al. 2023, section 2.1: (p - 1)(F + I - W). Exact where a weight gradient takes no longer than the other two.

    A longer one fills its gap and more: then waits of the longer of forward and input gradient remain.
    """
    assume(m >= p)
    f, i, w = costs.forward, costs.input_grad, costs.weight_grad
    assert bubble("zb-h1", p, m, 1, costs) == (p - 1) * max(f + i - w, f, i)


@given(STAGES, st.integers(1, 31))
def test_zb_h1_with_few_microbatches(p: int, m: int) -> None:
    """At equal costs; the first stage waits for the first forward to come down and its gradient to come back."""
    assert bubble("zb-h1", p, m, 1, EQUAL) == WHOLE * max(p - 1, 2 * p - 1 - m)


@given(STAGES, st.integers(1, 33))
def test_zb_v_does_not_wait(p: int, more: int) -> None:
    """Qi et al. 2023, section 6: at equal costs and m >= 2p - 1 no stage is idle between its first operation and its last."""
    m = 2 * p - 2 + more
    schedule, _ = make("zb-v", p, m, 2)
    timeline = simulate(schedule)
    assert compute_idle_times(timeline) == (0.0,) * p
    assert timeline.busy_times == (6.0 * m,) * p
    # In units of a whole stage's F = I = W = 1: m microbatches, and the way down.
    assert timeline.step_time / 2 == 3 * m + (p - 1) / 2


@given(STAGES, st.integers(1, 31))
def test_zb_v_with_few_microbatches(p: int, m: int) -> None:
    """At equal costs: never more than zb-h1's, and from 1.5p microbatches on no more than the way down."""
    least = (p - 1) * WHOLE / 2
    assert least <= bubble("zb-v", p, m, 2, EQUAL) <= max(least, (2 * p - 1 - m) * WHOLE)


def test_zb_v_saves_a_quarter_of_1f1b() -> None:
    """At 8 stages, 16 microbatches and equal costs: 51.5 against 69 units."""
    assert step_time("zb-v", 8, 16, 2, EQUAL) == 51.5 * WHOLE
    assert step_time("1f1b", 8, 16, 1, EQUAL) == 69 * WHOLE


@pytest.mark.parametrize("name", SCHEDULES)
@given(STAGES, MICROBATCHES, CHUNKS, st.one_of(DURATIONS, st.just(EQUAL)))
def test_what_the_table_expects(name: str, p: int, m: int, v: int, costs: OpCosts) -> None:
    """Where it has a formula it is the simulator's time and the validator's memory; and it has them where the papers do."""
    schedule, v = make(name, p, m, v)
    table = compute_expected(name, p, m, v, costs)
    short = costs.weight_grad <= min(costs.forward, costs.input_grad)
    known = {"interleaved": m >= p, "zb-h1": m >= p and short, "zb-v": m >= 2 * p - 1 and costs == EQUAL}.get(name, True)
    assert table.bubble_time is not None or not known
    assert table.bubble_time in (None, bubble(name, p, m, v, costs))
    assert table.max_activations is not None or (name == "zb-v" and m < 2 * p - 1)
    assert table.max_activations in (None, compute_peak_live_activations(schedule))


# ---- messages that take time


@given(STAGES, MICROBATCHES, DURATIONS, DELAYS)
def test_messages_of_gpipe(p: int, m: int, costs: OpCosts, p2p: int) -> None:
    """Once down and once up: messages of later microbatches travel while others compute."""
    whole = costs.forward + costs.input_grad + costs.weight_grad
    assert step_time("gpipe", p, m, 1, costs, p2p) == (m + p - 1) * whole + 2 * (p - 1) * p2p


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1"])
@given(STAGES, CHUNKS, DURATIONS, DELAYS)
def test_one_microbatch_waits_for_every_message(name: str, p: int, v: int, costs: OpCosts, p2p: int) -> None:
    v = SCHEDULES[name].chunks_per_stage or v
    f, i, w = costs.forward, costs.input_grad, costs.weight_grad
    hops = 2 * (p * v - 1) if p > 1 else 0
    weights = w if name == "zb-h1" else p * w
    assert step_time(name, p, 1, v, costs, p2p) == p * (f + i) + weights + hops * p2p


@pytest.mark.parametrize("name", SCHEDULES)
@given(STAGES, MICROBATCHES, CHUNKS, DURATIONS, DELAYS)
def test_messages_cost_time(name: str, p: int, m: int, v: int, costs: OpCosts, p2p: int) -> None:
    """At least one way down or back; at most every message of every microbatch."""
    schedule, _ = make(name, p, m, v)
    extra = step_time(name, p, m, v, costs, p2p) - step_time(name, p, m, v, costs)
    hops = sum(a != b for a, b in itertools.pairwise(schedule.stage_of_chunk))
    assert (p - 1) * p2p <= extra <= 2 * hops * m * p2p


@pytest.mark.parametrize("name", SCHEDULES)
@given(STAGES, MICROBATCHES, CHUNKS, DURATIONS, DELAYS)
def test_another_microbatch_never_saves_time(name: str, p: int, m: int, v: int, costs: OpCosts, p2p: int) -> None:
    # Another microbatch may give interleaved another round or longer ones, which hide messages better: so without them there.
    p2p = 0 if name == "interleaved" else p2p
    assert step_time(name, p, m + 1, v, costs, p2p) >= step_time(name, p, m, v, costs, p2p)
