"""Schedules by the names of `--pipeline-schedule`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron.pipeline_parallel.schedule import Schedule
from megatron.pipeline_parallel.schedules.interleaved import interleaved
from megatron.pipeline_parallel.schedules.placement import loop, v_shape
from megatron.pipeline_parallel.schedules.simple import gpipe, one_f_one_b
from megatron.pipeline_parallel.schedules.zero_bubble import zb_h1, zb_v


@dataclass(frozen=True)
class Generator:
    """How a schedule is made."""

    make: Callable[[int, int, int], Schedule]
    """(stages, microbatches, chunks a stage) to the schedule."""
    place: Callable[[int, int], tuple[int, ...]]
    """(stages, chunks a stage) to the stage of each chunk."""
    chunks_per_stage: int | None = 1
    """The only number of chunks a stage, or None for any."""


GENERATORS: dict[str, Generator] = {
    "gpipe": Generator(lambda p, m, v: gpipe(p, m), lambda p, v: loop(p)),
    "1f1b": Generator(lambda p, m, v: one_f_one_b(p, m), lambda p, v: loop(p)),
    "interleaved": Generator(interleaved, loop, chunks_per_stage=None),
    "zb-h1": Generator(lambda p, m, v: zb_h1(p, m), lambda p, v: loop(p)),
    "zb-v": Generator(lambda p, m, v: zb_v(p, m), lambda p, v: v_shape(p), chunks_per_stage=2),
}


def make_schedule(name: str, num_stages: int, num_microbatches: int, chunks_per_stage: int = 1) -> Schedule:
    """The schedule of this name.

    Raises:
        ValueError: the name is unknown, a number is not positive, or the schedule cannot have so many chunks a stage.
    """
    if min(num_stages, num_microbatches, chunks_per_stage) < 1:
        raise ValueError(
            f"stages, microbatches and chunks a stage must be at least 1, not {num_stages}, {num_microbatches}, {chunks_per_stage}"
        )
    _check_chunks(name, chunks_per_stage)
    return GENERATORS[name].make(num_stages, num_microbatches, chunks_per_stage)


def placement(name: str, num_stages: int, chunks_per_stage: int = 1) -> tuple[int, ...]:
    """Stage of each chunk under the schedule of this name.

    Raises:
        ValueError: the name is unknown, or the schedule cannot have so many chunks a stage.
    """
    _check_chunks(name, chunks_per_stage)
    return GENERATORS[name].place(num_stages, chunks_per_stage)


def _check_chunks(name: str, chunks_per_stage: int) -> None:
    if name not in GENERATORS:
        raise ValueError(f"no schedule is called {name!r}; there are {', '.join(GENERATORS)}")
    fixed = GENERATORS[name].chunks_per_stage
    if fixed is not None and chunks_per_stage != fixed:
        raise ValueError(f"the schedule {name} has {fixed} chunk{'s' * (fixed > 1)} a stage, not {chunks_per_stage}")
