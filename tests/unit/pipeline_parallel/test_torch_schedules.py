"""The order of operations against the schedules of torch.distributed.pipelining, without a process.

Where both have a schedule they agree, operation by operation. What differs:
- torch's 1F1B refuses fewer microbatches than stages, and its interleaved schedules refuse those that their rounds do not divide;
- zb-h1 is torch's interleaved zero bubble with one chunk a stage; with more chunks that has no counterpart here.

torch's own list of a schedule is read where it runs from that list. GPipe and 1F1B run from loops, and the list that 1F1B shows
counts the last stage's forwards from one; so those two run here, with a stage that only takes notes.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock, patch

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from megatron.spec.operations import OpType, Schedule
from megatron.spec.schedules import SCHEDULES, build_schedule

Order = list[list[tuple[str, int, int | None]]]
"""For each stage: kind, chunk, microbatch."""

LISTED = {
    "interleaved": torch_schedules.ScheduleInterleaved1F1B,
    "zb-h1": torch_schedules.ScheduleInterleavedZeroBubble,
    "zb-v": torch_schedules.ScheduleZBVZeroBubble,
}
RUN = {"gpipe": torch_schedules.ScheduleGPipe, "1f1b": torch_schedules.Schedule1F1B}
SIZES = sorted({(p, m) for p in (1, 2, 3, 4, 8) for m in (1, p - 1, p, p + 1, 2 * p - 1, 2 * p, 4 * p) if m > 0})
"""(stages, microbatches): fewer microbatches than stages, as many, one more, twice as many less one, many."""


def order(schedule: Schedule) -> Order:
    return [[(op.type.value, op.chunk, op.microbatch) for op in ops] for ops in schedule.ops]


def stages_of_first_rank(stages: int, chunks: int) -> list[Any]:
    """What torch calls stages, as its schedules ask for them: each is a chunk and knows the size of the whole."""
    return [Mock(num_stages=stages * chunks, group_size=stages, group_rank=0, stage_index=i * stages) for i in range(chunks)]


def listed(name: str, stages: int, microbatches: int, chunks: int) -> tuple[Order, tuple[int, ...]]:
    """What torch would run, and the stage of each chunk. Its idle turns are left out."""
    schedule = LISTED[name](stages_of_first_rank(stages, chunks), microbatches)
    actions = [[action for action in schedule.pipeline_order[stage] if action is not None] for stage in range(stages)]
    place = schedule.stage_index_to_group_rank
    return (
        [[(a.computation_type.value, a.stage_index, a.microbatch_index) for a in mine] for mine in actions],
        tuple(place[chunk] for chunk in range(stages * chunks)),
    )


def run(name: str, stages: int, microbatches: int) -> Order:
    """What torch calls on the stage of each rank."""
    done: Order = []
    for rank in range(stages):
        stage = Mock(num_stages=stages, stage_index=rank, is_last=False)
        for messages in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
            getattr(stage, messages).return_value = []
        schedule = RUN[name](stage, microbatches)
        with patch.object(schedule, "_initialize_stage"):
            schedule._step_microbatches()
        kinds = {"forward_one_chunk": "F", "backward_one_chunk": "B"}
        calls = [(what, args[0]) for what, args, _ in stage.method_calls if what in kinds]
        done.append([(kinds[what], rank, microbatch) for what, microbatch in calls])
    return done


@pytest.mark.parametrize("name", RUN)
def test_whole_backwards(name: str) -> None:
    for stages, microbatches in SIZES:
        if name == "1f1b" and microbatches < stages:
            with pytest.raises(ValueError, match="must be greater than or equal to the number of stages"):
                run(name, stages, microbatches)
        else:
            ours = order(build_schedule(name, stages, microbatches))
            assert run(name, stages, microbatches) == ours, (stages, microbatches)


@pytest.mark.parametrize("name, chunks", [("interleaved", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zb-v", 2)])
def test_interleaved_and_zero_bubble(name: str, chunks: int) -> None:
    for stages, microbatches in SIZES:
        if name != "zb-v" and microbatches % max(1, microbatches // stages) != 0:
            with pytest.raises(ValueError, match="multiple of the number of rounds"):
                listed(name, stages, microbatches, chunks)
        else:
            schedule = build_schedule(name, stages, microbatches, chunks)
            ours = order(schedule), schedule.stage_of_chunk
            assert listed(name, stages, microbatches, chunks) == ours, (stages, microbatches)


def test_every_schedule_is_compared() -> None:
    assert {*LISTED, *RUN} == set(SCHEDULES)


@pytest.mark.parametrize("stages, microbatches, chunks", [(3, 7, 2), (4, 9, 3), (8, 17, 4)])
def test_torch_accepts_the_rounds_that_it_does_not_make(stages: int, microbatches: int, chunks: int) -> None:
    """Its own check and its own dry run with sends and receives, on interleaved schedules of uneven rounds."""
    schedule = build_schedule("interleaved", stages, microbatches, chunks)
    known = [kind for kind in OpType if kind is not OpType.RECOMPUTE]  # which torch has not
    kinds: dict[OpType, Any] = {kind: torch_schedules._ComputationType(kind.value) for kind in known}
    actions: dict[int, list[Any]] = {
        stage: [torch_schedules._Action(op.chunk, kinds[op.type], op.microbatch) for op in ops]
        for stage, ops in enumerate(schedule.ops)
    }
    place = torch_schedules._validate_schedule(actions, stages, stages * chunks, microbatches)
    assert place == dict(enumerate(schedule.stage_of_chunk))
    with_messages = torch_schedules._add_send_recv(actions, place.__getitem__, stages * chunks)
    torch_schedules._simulate_comms_compute(with_messages, place.__getitem__, stages * chunks)
