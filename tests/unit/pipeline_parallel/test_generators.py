"""Every generated schedule: complete, in order, with the memory that its paper promises; and what the registry refuses."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline_parallel.validate import compute_peak_live_activations, validate
from megatron.spec.operations import Op, Schedule, extract_forwards, truncate_microbatches
from megatron.spec.schedules import SCHEDULES, assign_chunks, build_schedule
from tests.support.schedule_examples import B, F, I, W, generated_schedules, random_schedules

STAGES, MICROBATCHES = st.integers(1, 6) | st.integers(1, 16), st.integers(1, 12) | st.integers(1, 64)
"""Mostly small: those say as much and cost less."""
CHUNKS = st.integers(1, 4)


@functools.lru_cache(maxsize=4)
def make(name: str, stages: int, microbatches: int, chunks: int) -> tuple[Schedule, int]:
    """The schedule with this many chunks a stage, or its own number; and that number."""
    chunks = SCHEDULES[name].chunks_per_stage or chunks
    return build_schedule(name, stages, microbatches, chunks), chunks


def words(schedule: Schedule, stage: int) -> str:
    """The operations of a stage, as kind, microbatch and, where there are several, the place of the chunk on the stage."""
    mine = [chunk for chunk, place in enumerate(schedule.stage_of_chunk) if place == stage]
    return " ".join(f"{op.type.value}{op.microbatch}" + "'" * mine.index(op.chunk) for op in schedule.ops[stage])


# ---- what there is to compute


@pytest.mark.parametrize("name", SCHEDULES)
@given(STAGES, MICROBATCHES, CHUNKS)
def test_every_chunk_computes_every_microbatch_once(name: str, stages: int, microbatches: int, chunks: int) -> None:
    """Counted here as well as by the validator."""
    schedule, chunks = make(name, stages, microbatches, chunks)
    validate(schedule)
    kinds = (F, I, W) if SCHEDULES[name].splits_backward else (F, B)
    all_ops = [Op(kind, chunk, m) for kind in kinds for chunk in range(stages * chunks) for m in range(microbatches)]
    assert Counter(op for ops in schedule.ops for op in ops) == Counter(all_ops)
    assert (schedule.name, schedule.num_stages, schedule.num_microbatches) == (name, stages, microbatches)
    assert schedule.stage_of_chunk == assign_chunks(name, stages, chunks)
    assert all(schedule.stage_of_chunk[op.chunk] == stage for stage, ops in enumerate(schedule.ops) for op in ops)


@pytest.mark.parametrize("name", SCHEDULES)
@given(STAGES, MICROBATCHES, CHUNKS)
def test_microbatches_keep_their_order(name: str, stages: int, microbatches: int, chunks: int) -> None:
    """Each chunk takes them from the first to the last, with each kind of operation: sums of gradients do not depend on timing."""
    schedule, _ = make(name, stages, microbatches, chunks)
    seen: dict[object, int] = {}
    for ops in schedule.ops:
        for op in ops:
            assert op.microbatch == seen.get((op.type, op.chunk), 0)
            seen[op.type, op.chunk] = op.microbatch + 1


def test_placements() -> None:
    assert assign_chunks("1f1b", 3) == assign_chunks("gpipe", 3) == assign_chunks("zb-h1", 3) == (0, 1, 2)
    assert assign_chunks("interleaved", 3, 2) == (0, 1, 2, 0, 1, 2)
    assert assign_chunks("zb-v", 3, 2) == (0, 1, 2, 2, 1, 0)


# ---- memory


def longest_round(stages: int, microbatches: int) -> int:
    """The longest when microbatches are dealt evenly to as many rounds as have room for `stages` each."""
    rounds = max(1, microbatches // stages)
    return (microbatches + rounds - 1) // rounds


LIVE: dict[str, Callable[[int, int, int, int], int]] = {
    "gpipe": lambda p, m, v, stage: m,  # Huang et al. 2019: all of a step
    "1f1b": lambda p, m, v, stage: min(m, p - stage),  # Narayanan et al. 2021, section 2.2.1: never more than p
    # Narayanan et al. 2021, section 2.2.2: the warm-up and one more.
    "interleaved": lambda p, m, v, stage: min(m * v, 2 * (p - stage - 1) + (v - 1) * longest_round(p, m) + 1),
    "zb-h1": lambda p, m, v, stage: min(m, p),  # Qi et al. 2023, section 2.1: on every rank that of 1F1B's first
}
"""Peak of live activations of (stages, microbatches, chunks a stage, stage)."""


@pytest.mark.parametrize("name", LIVE)
@given(STAGES, MICROBATCHES, CHUNKS)
def test_live_activations(name: str, stages: int, microbatches: int, chunks: int) -> None:
    """An activation lives from its forward to the end of its backward: where that is split, of its weight gradient."""
    schedule, chunks = make(name, stages, microbatches, chunks)
    expected = tuple(LIVE[name](stages, microbatches, chunks, stage) for stage in range(stages))
    assert compute_peak_live_activations(schedule) == expected


@given(STAGES, MICROBATCHES)
def test_live_activations_of_zb_v(stages: int, microbatches: int) -> None:
    """Qi et al. 2023, section 6: 2p of half a stage each on every rank; fewer while there are not as many microbatches."""
    peaks = compute_peak_live_activations(build_schedule("zb-v", stages, microbatches, 2))
    if microbatches >= 2 * stages - 1:
        assert peaks == (2 * stages,) * stages
    assert max(peaks) == min(2 * stages, 2 * microbatches)


def test_every_generator_has_its_memory_tested() -> None:
    assert {*LIVE, "zb-v"} == set(SCHEDULES)


# ---- by hand


def test_one_f_one_b_by_hand() -> None:
    """Narayanan et al. 2021, fig. 4 (top): the first and the last stage."""
    schedule = build_schedule("1f1b", 4, 8)
    assert words(schedule, 0) == "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7"
    assert words(schedule, 3) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"


def test_interleaved_by_hand() -> None:
    """Narayanan et al. 2021, fig. 4 (bottom): the first and the last stage."""
    schedule = build_schedule("interleaved", 4, 8, 2)
    assert words(schedule, 0) == (
        "F0 F1 F2 F3 F0' F1' F2' F3' F4 F5 F6 B0' F7 B1' F4' B2' F5' B3' F6' B0 F7' B1 B2 B3 B4' B5' B6' B7' B4 B5 B6 B7"
    )
    assert words(schedule, 3) == (
        "F0 F1 F2 F3 F0' B0' F1' B1' F2' B2' F3' B3' F4 B0 F5 B1 F6 B2 F7 B3 F4' B4' F5' B5' F6' B6' F7' B7' B4 B5 B6 B7"
    )


def test_uneven_rounds_by_hand() -> None:
    """Seven microbatches on three stages: a round of four, a round of three."""
    schedule = build_schedule("interleaved", 3, 7, 2)
    assert words(schedule, 2) == (
        "F0 F1 F2 F3 F0' B0' F1' B1' F2' B2' F3' B3' F4 B0 F5 B1 F6 B2 F4' B3 F5' B4' F6' B5' B6' B4 B5 B6"
    )


def test_zb_h1_by_hand() -> None:
    """Qi et al. 2023, section 2.1: stage s puts off s weight gradients."""
    schedule = build_schedule("zb-h1", 3, 4)
    assert words(schedule, 0) == "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3"
    assert words(schedule, 1) == "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3"
    assert words(schedule, 2) == "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"


def test_zb_v_by_hand() -> None:
    """Qi et al. 2023, section 6: down (F0) and up again (F0')."""
    schedule = build_schedule("zb-v", 2, 3, 2)
    assert words(schedule, 0) == "F0 F1 F2 F0' I0' W0' F1' I1' W1' I0 W0 F2' I2' W2' I1 W1 I2 W2"
    assert words(schedule, 1) == "F0 F0' F1 F1' I0' W0' F2 I0 W0 F2' I1' W1' I1 I2' I2 W1 W2' W2"


# ---- parts of schedules


@pytest.mark.parametrize("name", SCHEDULES)
@given(STAGES, MICROBATCHES, CHUNKS)
def test_forward_only_keeps_the_order_of_the_forwards(name: str, stages: int, microbatches: int, chunks: int) -> None:
    training, chunks = make(name, stages, microbatches, chunks)
    schedule = extract_forwards(training)
    validate(schedule)
    assert sum(map(len, schedule.ops)) == stages * chunks * microbatches
    for whole, part in zip(training.ops, schedule.ops, strict=True):
        place_of = {op: place for place, op in enumerate(whole)}
        places = [place_of[op] for op in part]
        assert all(op.type is F for op in part) and places == sorted(places)
    assert schedule.stage_of_chunk == training.stage_of_chunk and schedule.num_microbatches == microbatches


@given(st.one_of(random_schedules(), generated_schedules()), st.data())
def test_the_first_microbatches_are_a_schedule(schedule: Schedule, data: st.DataObject) -> None:
    """They wait for none that come later, in whatever order those stand between them."""
    kept = data.draw(st.integers(1, schedule.num_microbatches))
    front = truncate_microbatches(schedule, kept)
    validate(front)
    assert front.num_microbatches == kept
    assert front.ops == tuple(tuple(op for op in ops if op.microbatch in range(kept)) for ops in schedule.ops)


# ---- the registry


def test_the_registry_says_what_it_cannot_make() -> None:
    with pytest.raises(ValueError, match=f"there is no pipeline schedule '2f2b': use one of {', '.join(SCHEDULES)}$"):
        build_schedule("2f2b", 2, 2)
    with pytest.raises(ValueError, match="there is no pipeline schedule '2f2b'"):
        assign_chunks("2f2b", 2)
    for name in ("gpipe", "1f1b", "zb-h1"):
        with pytest.raises(ValueError, match=f"the pipeline schedule {name} requires 1 chunk per stage, not 2"):
            build_schedule(name, 2, 2, 2)
    for chunks in (1, 3):
        with pytest.raises(ValueError, match=f"the pipeline schedule zb-v requires 2 chunks per stage, not {chunks}"):
            assign_chunks("zb-v", 2, chunks)


@pytest.mark.parametrize("numbers", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (-2, 4, 1)])
def test_nothing_has_no_schedule(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(
        ValueError, match="must be at least 1, not {} stages, {} microbatches and {} chunks per stage".format(*numbers)
    ):
        build_schedule("interleaved", *numbers)
