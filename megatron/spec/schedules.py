"""Pipeline schedules: the functions that build them, and a table of all schedules by their name in `--pipeline-schedule`.

Flags, checks of the settings, the planner, benchmarks and tests all read the table. To add a schedule, write a function that builds
it and add a `ScheduleSpec` to the table.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass

from megatron.spec.operations import (
    Op,
    OpType,
    Schedule,
    add_recompute,
    assign_chunks_round_robin,
    assign_chunks_v_shape,
    truncate_microbatches,
)


@dataclass(frozen=True)
class ScheduleSpec:
    """Name and properties of a pipeline schedule, and the function that builds it."""

    name: str
    """Name of the schedule: a value of `--pipeline-schedule`."""
    build: Callable[[int, int, int], Schedule]
    """Function that builds the schedule from (number of stages, number of microbatches, chunks per stage)."""
    assign_chunks: Callable[[int, int], tuple[int, ...]] = assign_chunks_round_robin
    """Function that returns the stage of each chunk, from (number of stages, chunks per stage)."""
    chunks_per_stage: int | None = 1
    """Required number of model chunks per stage. None for any number from 2 on."""
    splits_backward: bool = False
    """Whether the schedule has separate operations for input gradients and weight gradients."""
    chunk_description: str = "It has one virtual stage (chunk) on each pipeline rank."
    """Sentence for error messages about how many chunks per stage the schedule has. It begins with "It"."""

    def supports(self, chunks_per_stage: int) -> bool:
        """Return whether the schedule can have `chunks_per_stage` model chunks on each stage."""
        return chunks_per_stage == self.chunks_per_stage if self.chunks_per_stage else chunks_per_stage > 1


# ---- schedules with combined backwards


def build_gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """Build the GPipe schedule: all forwards, then all backwards (Huang et al. 2019).

    Up to `num_microbatches` activations are alive on a stage.
    """
    ops = tuple(
        tuple(Op(OpType.FORWARD, stage, m) for m in range(num_microbatches))
        + tuple(Op(OpType.BACKWARD, stage, m) for m in range(num_microbatches))
        for stage in range(num_stages)
    )
    return Schedule("gpipe", num_microbatches, assign_chunks_round_robin(num_stages), ops)


def build_1f1b(num_stages: int, num_microbatches: int) -> Schedule:
    """Build the 1F1B schedule: one forward and one backward alternate (PipeDream-Flush, Narayanan et al. 2021, fig. 4).

    The warm-up of a stage has `num_stages - stage - 1` forwards, so at most `num_stages - stage` activations are alive on it.
    """

    def build_stage_ops(stage: int) -> tuple[Op, ...]:
        warmup = min(num_stages - stage - 1, num_microbatches)
        ops = [Op(OpType.FORWARD, stage, m) for m in range(warmup)]
        for m in range(num_microbatches - warmup):
            ops += [Op(OpType.FORWARD, stage, warmup + m), Op(OpType.BACKWARD, stage, m)]
        return tuple(ops + [Op(OpType.BACKWARD, stage, m) for m in range(num_microbatches - warmup, num_microbatches)])

    return Schedule("1f1b", num_microbatches, assign_chunks_round_robin(num_stages), tuple(map(build_stage_ops, range(num_stages))))


def build_interleaved_1f1b(num_stages: int, num_microbatches: int, chunks_per_stage: int) -> Schedule:
    """Build the interleaved 1F1B schedule (Narayanan et al. 2021, section 2.2.2).

    Its bubble is that of 1F1B divided by the chunks per stage. Microbatches are divided into rounds: a stage runs all microbatches
    of a round through one chunk, then through its next chunk. The paper requires rounds of exactly `num_stages` microbatches, so
    its `num_microbatches` must be a multiple. Here the remainder is distributed over the rounds, longer rounds first.

    A round has at least `num_stages` microbatches. So when the first stage begins the next chunk, the last stage has finished the
    round's first microbatch, and no stage waits. The bubble therefore equals that of the paper for any number of microbatches from
    `num_stages` on, at the price of a few more live activations.
    """
    rounds = split_into_rounds(num_stages, num_microbatches)
    local_chunks = range(chunks_per_stage)
    forward_order = [(local_chunk, m) for microbatches in rounds for local_chunk in local_chunks for m in microbatches]
    backward_order = [(local_chunk, m) for microbatches in rounds for local_chunk in reversed(local_chunks) for m in microbatches]

    def build_stage_ops(stage: int) -> tuple[Op, ...]:
        forwards = [Op(OpType.FORWARD, local_chunk * num_stages + stage, m) for local_chunk, m in forward_order]
        backwards = [Op(OpType.BACKWARD, local_chunk * num_stages + stage, m) for local_chunk, m in backward_order]
        # Warm-up: the first round through all chunks but the last, plus the time from this stage to the last and back.
        warmup = min(len(forwards), (chunks_per_stage - 1) * len(rounds[0]) + 2 * (num_stages - stage - 1))
        steady = [op for pair in zip(forwards[warmup:], backwards, strict=False) for op in pair]
        return tuple(forwards[:warmup] + steady + backwards[len(forwards) - warmup :])

    stages = tuple(map(build_stage_ops, range(num_stages)))
    return Schedule("interleaved", num_microbatches, assign_chunks_round_robin(num_stages, chunks_per_stage), stages)


def split_into_rounds(num_stages: int, num_microbatches: int) -> list[range]:
    """Split the microbatches into rounds of the interleaved schedule: as many ranges of consecutive microbatches as possible, each
    of at least `num_stages` (see `build_interleaved_1f1b`).

    The lengths of the ranges differ by at most 1. Fewer microbatches than stages form a single range.
    """
    num_rounds = max(1, num_microbatches // num_stages)
    length, num_longer = divmod(num_microbatches, num_rounds)
    starts = [i * length + min(i, num_longer) for i in range(num_rounds + 1)]
    return [range(*ends) for ends in itertools.pairwise(starts)]


# ---- zero-bubble schedules: backward is split in two, and weight gradients run while a stage would otherwise be idle


def build_zb_h1(num_stages: int, num_microbatches: int) -> Schedule:
    """Build the ZB-H1 schedule: 1F1B with deferred weight gradients (Qi et al. 2023, section 2.1, "handcrafted schedule ZB-H1").

    With p stages, stage s (from 0) defers s weight gradients. So every stage has p live activations, as many as the first stage of
    1F1B. During the cooldown, input gradients are passed on without waiting for weight gradients.
    """

    def build_stage_ops(stage: int) -> tuple[Op, ...]:
        warmup = min(num_stages - stage - 1, num_microbatches)
        ops = [Op(OpType.FORWARD, stage, m) for m in range(warmup)]
        next_weight = 0
        for m in range(num_microbatches):
            if warmup + m < num_microbatches:
                ops.append(Op(OpType.FORWARD, stage, warmup + m))
            ops.append(Op(OpType.INPUT_GRAD, stage, m))
            # In the cooldown an input gradient arrives only in every second slot: weight gradients fill the slots in between.
            if m >= stage:
                ops.append(Op(OpType.WEIGHT_GRAD, stage, next_weight))
                next_weight += 1
        return tuple(ops + [Op(OpType.WEIGHT_GRAD, stage, m) for m in range(next_weight, num_microbatches)])

    return Schedule(
        "zb-h1", num_microbatches, assign_chunks_round_robin(num_stages), tuple(map(build_stage_ops, range(num_stages)))
    )


def build_zb_v(num_stages: int, num_microbatches: int) -> Schedule:
    """Build the ZB-V schedule: two chunks per stage, in V shape ("ZB-V", Qi et al. 2023, section 6; "V-ZB", Qi et al. 2024).

    With p stages, equal durations of all operations and at least 2p - 1 microbatches, no stage is idle between its first and its
    last operation. Each stage has 2p live activations of half a stage each, which is as much memory as on the first stage of 1F1B.
    With fewer microbatches, the schedule is that for 2p - 1 microbatches, without the operations of the missing microbatches.
    """
    schedule_microbatches = max(num_microbatches, 2 * num_stages - 1)

    def build_stage_ops(stage: int) -> tuple[Op, ...]:
        down, up = stage, 2 * num_stages - 1 - stage
        ops: list[Op] = []
        next_microbatch = {(op_type, chunk): 0 for op_type in OpType for chunk in (down, up)}

        def add(chunk: int, *op_types: OpType) -> None:
            for op_type in op_types:
                ops.append(Op(op_type, chunk, next_microbatch[op_type, chunk]))
                next_microbatch[op_type, chunk] += 1

        forward, input_grad, weight_grad = OpType.FORWARD, OpType.INPUT_GRAD, OpType.WEIGHT_GRAD
        # Warm-up: until the first microbatch has returned to this stage through the upper chunks.
        for _ in range(2 * (num_stages - stage) - 1):
            add(down, forward)
        # Until that microbatch has reached the last chunk, on stage 0.
        for _ in range(stage):
            add(up, forward)
            add(down, forward)
        # Until its gradient has returned to this stage's lower chunk.
        for _ in range(num_stages - stage):
            add(up, forward, input_grad, weight_grad)
        while next_microbatch[forward, up] < schedule_microbatches:
            if next_microbatch[forward, down] < schedule_microbatches:
                add(down, forward)
            add(down, input_grad, weight_grad)
            add(up, forward, input_grad, weight_grad)
        # Cooldown: first the input gradients that other stages wait for, then also the deferred weight gradients.
        for _ in range(stage):
            add(down, input_grad)
            add(up, input_grad)
        for _ in range(num_stages - stage):
            add(down, input_grad, weight_grad)
        for chunk in (up, down):
            while next_microbatch[weight_grad, chunk] < schedule_microbatches:
                add(chunk, weight_grad)
        return tuple(ops)

    schedule = Schedule(
        "zb-v", schedule_microbatches, assign_chunks_v_shape(num_stages), tuple(map(build_stage_ops, range(num_stages)))
    )
    return truncate_microbatches(schedule, num_microbatches)


# ---- table of schedules


_SPECS = (
    ScheduleSpec("gpipe", build=lambda p, m, v: build_gpipe(p, m)),
    ScheduleSpec("1f1b", build=lambda p, m, v: build_1f1b(p, m)),
    ScheduleSpec(
        "interleaved",
        build=build_interleaved_1f1b,
        chunks_per_stage=None,
        chunk_description="It takes turns between two or more virtual stages (chunks) on each pipeline rank.",
    ),
    ScheduleSpec("zb-h1", build=lambda p, m, v: build_zb_h1(p, m), splits_backward=True),
    ScheduleSpec(
        "zb-v",
        build=lambda p, m, v: build_zb_v(p, m),
        assign_chunks=lambda p, v: assign_chunks_v_shape(p),
        chunks_per_stage=2,
        splits_backward=True,
        chunk_description="It places two virtual stages (chunks) on each pipeline rank, in a V.",
    ),
)
SCHEDULES: dict[str, ScheduleSpec] = {spec.name: spec for spec in _SPECS}


def get_default_schedule(has_multiple_chunks: bool) -> str:
    """Return the name of the default pipeline schedule: "1f1b", or "interleaved" with several chunks per stage.

    Args:
        has_multiple_chunks: whether a stage has several chunks.
    """
    return "interleaved" if has_multiple_chunks else "1f1b"


def list_split_backward_schedules() -> list[str]:
    """Return the names of the schedules that split backward into input gradients and weight gradients."""
    return [spec.name for spec in SCHEDULES.values() if spec.splits_backward]


def build_schedule(
    name: str, num_stages: int, num_microbatches: int, chunks_per_stage: int = 1, *, recomputed_chunks: Collection[int] = ()
) -> Schedule:
    """Build the pipeline schedule with the given name (a value of --pipeline-schedule).

    Args:
        recomputed_chunks: indices of the model chunks with layers that are recomputed before backward.

    Raises:
        ValueError: the name is unknown, a number is not positive, or the schedule does not support `chunks_per_stage`.
    """
    if min(num_stages, num_microbatches, chunks_per_stage) < 1:
        raise ValueError(
            f"the numbers of pipeline stages, microbatches and chunks per stage must be at least 1, "
            f"not {num_stages} stages, {num_microbatches} microbatches and {chunks_per_stage} chunks per stage: raise the number "
            "that is too small"
        )
    schedule = _get_spec(name, chunks_per_stage).build(num_stages, num_microbatches, chunks_per_stage)
    return add_recompute(schedule, recomputed_chunks) if recomputed_chunks else schedule


def assign_chunks(name: str, num_stages: int, chunks_per_stage: int = 1) -> tuple[int, ...]:
    """Return the stage of each model chunk in the pipeline schedule with the given name.

    Raises:
        ValueError: the name is unknown, or the schedule does not support `chunks_per_stage`.
    """
    return _get_spec(name, chunks_per_stage).assign_chunks(num_stages, chunks_per_stage)


def _get_spec(name: str, chunks_per_stage: int) -> ScheduleSpec:
    if name not in SCHEDULES:
        raise ValueError(f"there is no pipeline schedule {name!r}: use one of {', '.join(SCHEDULES)}")
    required_chunks = SCHEDULES[name].chunks_per_stage
    if required_chunks is not None and chunks_per_stage != required_chunks:
        raise ValueError(
            f"the pipeline schedule {name} requires {required_chunks} chunk{'s' * (required_chunks > 1)} per stage, not "
            f"{chunks_per_stage}: change the number of chunks (virtual stages), or choose another schedule"
        )
    return SCHEDULES[name]
