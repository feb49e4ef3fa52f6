"""All schedules, by their names in `--pipeline-schedule`. Flags, rules, advice, benches and tests ask here.

A new schedule is a file with its generator and its `ScheduleSpec`, and its name in the list below.
"""

from __future__ import annotations

from megatron.spec.operations import Schedule
from megatron.spec.schedule_spec import ScheduleSpec
from megatron.spec.whole_backward import GPIPE, INTERLEAVED, ONE_F_ONE_B
from megatron.spec.zero_bubble import ZB_H1, ZB_V

SCHEDULES: dict[str, ScheduleSpec] = {spec.name: spec for spec in (GPIPE, ONE_F_ONE_B, INTERLEAVED, ZB_H1, ZB_V)}


def default_schedule(several_chunks: bool) -> str:
    """The default schedule, which depends on whether stages hold several chunks."""
    return (INTERLEAVED if several_chunks else ONE_F_ONE_B).name


def names_that_split_backward() -> list[str]:
    """Names of the schedules that defer weight gradients."""
    return [spec.name for spec in SCHEDULES.values() if spec.splits_backward]


def make_schedule(name: str, num_stages: int, num_microbatches: int, chunks_per_stage: int = 1) -> Schedule:
    """The schedule of this name.

    Raises:
        ValueError: the name is unknown, a number is not positive, or the schedule cannot have so many chunks a stage.
    """
    if min(num_stages, num_microbatches, chunks_per_stage) < 1:
        raise ValueError(
            f"stages, microbatches and chunks a stage must be at least 1, not {num_stages}, {num_microbatches}, {chunks_per_stage}"
        )
    return _spec(name, chunks_per_stage).make(num_stages, num_microbatches, chunks_per_stage)


def placement(name: str, num_stages: int, chunks_per_stage: int = 1) -> tuple[int, ...]:
    """The stage of each chunk under the schedule of this name.

    Raises:
        ValueError: the name is unknown, or the schedule cannot have so many chunks a stage.
    """
    return _spec(name, chunks_per_stage).place(num_stages, chunks_per_stage)


def _spec(name: str, chunks_per_stage: int) -> ScheduleSpec:
    if name not in SCHEDULES:
        raise ValueError(f"no schedule is called {name!r}; there are {', '.join(SCHEDULES)}")
    fixed = SCHEDULES[name].chunks_per_stage
    if fixed is not None and chunks_per_stage != fixed:
        raise ValueError(f"the schedule {name} has {fixed} chunk{'s' * (fixed > 1)} a stage, not {chunks_per_stage}")
    return SCHEDULES[name]
