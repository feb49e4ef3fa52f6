"""All schedules: their generators, and a table by their names in `--pipeline-schedule`. Flags, rules, advice, benches and tests ask
here.

A new schedule is a generator and its `ScheduleSpec` in the table.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass

from megatron.spec.operations import Op, OpKind, Schedule, first_microbatches, loop, v_shape, with_recompute


@dataclass(frozen=True)
class ScheduleSpec:
    """The facts about one kind of schedule: how it is made, where its chunks lie."""

    name: str
    """Its name in `--pipeline-schedule`."""
    make: Callable[[int, int, int], Schedule]
    """Makes the schedule from (stages, microbatches, chunks a stage)."""
    place: Callable[[int, int], tuple[int, ...]] = loop
    """Gives the stage of each chunk from (stages, chunks a stage)."""
    chunks_per_stage: int | None = 1
    """The only possible number of chunks a stage. None: any number from two on (with one it would be another schedule)."""
    splits_backward: bool = False
    """Whether it has input gradients and weight gradients in place of whole backwards."""
    about_chunks: str = "It has one virtual stage (chunk) on each pipeline rank."
    """What it does with its chunks, as a sentence that begins with "It"."""

    def takes(self, chunks_per_stage: int) -> bool:
        """Whether a user may ask for it with this number of chunks a stage."""
        return chunks_per_stage == self.chunks_per_stage if self.chunks_per_stage else chunks_per_stage > 1


# ---- whole backwards


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019): up to `num_microbatches` live activations."""
    ops = tuple(
        tuple(Op(OpKind.FORWARD, stage, m) for m in range(num_microbatches))
        + tuple(Op(OpKind.BACKWARD, stage, m) for m in range(num_microbatches))
        for stage in range(num_stages)
    )
    return Schedule("gpipe", num_microbatches, loop(num_stages), ops)


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """One forward, one backward in turn (PipeDream-Flush, Narayanan et al. 2021, fig. 4).

    Warm-up is `num_stages - stage - 1` forwards, so at most that many plus one activations are alive.
    """

    def stage_ops(stage: int) -> tuple[Op, ...]:
        warmup = min(num_stages - stage - 1, num_microbatches)
        ops = [Op(OpKind.FORWARD, stage, m) for m in range(warmup)]
        for m in range(num_microbatches - warmup):
            ops += [Op(OpKind.FORWARD, stage, warmup + m), Op(OpKind.BACKWARD, stage, m)]
        return tuple(ops + [Op(OpKind.BACKWARD, stage, m) for m in range(num_microbatches - warmup, num_microbatches)])

    return Schedule("1f1b", num_microbatches, loop(num_stages), tuple(map(stage_ops, range(num_stages))))


def interleaved(num_stages: int, num_microbatches: int, chunks_per_stage: int) -> Schedule:
    """Interleaved 1F1B (Narayanan et al. 2021, section 2.2.2): the bubble of 1F1B divided by the chunks a stage.

    Microbatches go through the chunks of a stage in rounds. The paper's rounds have `num_stages` microbatches each, so that number
    must divide. Here the remainder is spread over the rounds, the longer ones first. A round of at least `num_stages` never waits
    for itself: so the bubble is the paper's for every number of microbatches from `num_stages` on, for some more live activations.
    """
    turns = rounds(num_stages, num_microbatches)
    depths = range(chunks_per_stage)
    down = [(depth, m) for turn in turns for depth in depths for m in turn]
    back = [(depth, m) for turn in turns for depth in reversed(depths) for m in turn]

    def stage_ops(stage: int) -> tuple[Op, ...]:
        forwards = [Op(OpKind.FORWARD, depth * num_stages + stage, m) for depth, m in down]
        backwards = [Op(OpKind.BACKWARD, depth * num_stages + stage, m) for depth, m in back]
        # Warm-up: a round through all chunks but the last, and the way from this stage to the last and back.
        warmup = min(len(forwards), (chunks_per_stage - 1) * len(turns[0]) + 2 * (num_stages - stage - 1))
        steady = [op for pair in zip(forwards[warmup:], backwards, strict=False) for op in pair]
        return tuple(forwards[:warmup] + steady + backwards[len(forwards) - warmup :])

    stages = tuple(map(stage_ops, range(num_stages)))
    return Schedule("interleaved", num_microbatches, loop(num_stages, chunks_per_stage), stages)


def rounds(num_stages: int, num_microbatches: int) -> list[range]:
    """Consecutive runs of microbatches: as many as have room for `num_stages` each. Their lengths differ by at most one."""
    count = max(1, num_microbatches // num_stages)
    length, longer = divmod(num_microbatches, count)
    starts = [turn * length + min(turn, longer) for turn in range(count + 1)]
    return [range(*ends) for ends in itertools.pairwise(starts)]


# ---- zero bubble: backward is split in two, and weight gradients run where a stage would otherwise wait


def zb_h1(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B with late weight gradients (Qi et al. 2023, section 2.1, "handcrafted schedule ZB-H1").

    Each stage defers as many weight gradients as there are stages before it. So every stage keeps as many live activations as the
    first stage of 1F1B (p), and while the pipeline drains, input gradients pass on without waiting for weight gradients.
    """

    def stage_ops(stage: int) -> tuple[Op, ...]:
        warmup = min(num_stages - stage - 1, num_microbatches)
        ops = [Op(OpKind.FORWARD, stage, m) for m in range(warmup)]
        next_weight = 0
        for m in range(num_microbatches):
            if warmup + m < num_microbatches:
                ops.append(Op(OpKind.FORWARD, stage, warmup + m))
            ops.append(Op(OpKind.INPUT_GRAD, stage, m))
            # In the drain an input gradient comes only every second turn: weight gradients fill the turns between.
            if m >= stage:
                ops.append(Op(OpKind.WEIGHT_GRAD, stage, next_weight))
                next_weight += 1
        return tuple(ops + [Op(OpKind.WEIGHT_GRAD, stage, m) for m in range(next_weight, num_microbatches)])

    return Schedule("zb-h1", num_microbatches, loop(num_stages), tuple(map(stage_ops, range(num_stages))))


def zb_v(num_stages: int, num_microbatches: int) -> Schedule:
    """Two chunks a stage in a V ("ZB-V", Qi et al. 2023, section 6; "V-ZB", Qi et al. 2024).

    At equal costs and at least 2p - 1 microbatches, no stage waits between its first and last operation. Each stage keeps as much
    as the first stage of 1F1B (2p live activations of half a stage each). With fewer it is the beginning of a longer one.
    """
    total = max(num_microbatches, 2 * num_stages - 1)

    def stage_ops(stage: int) -> tuple[Op, ...]:
        down, up = stage, 2 * num_stages - 1 - stage
        ops: list[Op] = []
        done = {(kind, chunk): 0 for kind in OpKind for chunk in (down, up)}

        def add(chunk: int, *kinds: OpKind) -> None:
            for kind in kinds:
                ops.append(Op(kind, chunk, done[kind, chunk]))
                done[kind, chunk] += 1

        forward, input_grad, weight_grad = OpKind.FORWARD, OpKind.INPUT_GRAD, OpKind.WEIGHT_GRAD
        # Until the first microbatch has come back up to this stage.
        for _ in range(2 * (num_stages - stage) - 1):
            add(down, forward)
        # Until it has gone from here to the end.
        for _ in range(stage):
            add(up, forward)
            add(down, forward)
        # Until its gradient comes back to the lower chunk.
        for _ in range(num_stages - stage):
            add(up, forward, input_grad, weight_grad)
        while done[forward, up] < total:
            if done[forward, down] < total:
                add(down, forward)
            add(down, input_grad, weight_grad)
            add(up, forward, input_grad, weight_grad)
        # Drain: first the input gradients that others wait for, then also the deferred weight gradients.
        for _ in range(stage):
            add(down, input_grad)
            add(up, input_grad)
        for _ in range(num_stages - stage):
            add(down, input_grad, weight_grad)
        for chunk in (up, down):
            while done[weight_grad, chunk] < total:
                add(chunk, weight_grad)
        return tuple(ops)

    whole = Schedule("zb-v", total, v_shape(num_stages), tuple(map(stage_ops, range(num_stages))))
    return first_microbatches(whole, num_microbatches)


# ---- the table


_ALL = (
    ScheduleSpec("gpipe", make=lambda p, m, v: gpipe(p, m)),
    ScheduleSpec("1f1b", make=lambda p, m, v: one_f_one_b(p, m)),
    ScheduleSpec(
        "interleaved",
        make=interleaved,
        chunks_per_stage=None,
        about_chunks="It takes turns between two or more virtual stages (chunks) on each pipeline rank.",
    ),
    ScheduleSpec("zb-h1", make=lambda p, m, v: zb_h1(p, m), splits_backward=True),
    ScheduleSpec(
        "zb-v",
        make=lambda p, m, v: zb_v(p, m),
        place=lambda p, v: v_shape(p),
        chunks_per_stage=2,
        splits_backward=True,
        about_chunks="It places two virtual stages (chunks) on each pipeline rank, in a V.",
    ),
)
SCHEDULES: dict[str, ScheduleSpec] = {spec.name: spec for spec in _ALL}


def default_schedule(several_chunks: bool) -> str:
    """The default schedule, which depends on whether stages hold several chunks."""
    return "interleaved" if several_chunks else "1f1b"


def names_that_split_backward() -> list[str]:
    """Names of the schedules that defer weight gradients."""
    return [spec.name for spec in SCHEDULES.values() if spec.splits_backward]


def make_schedule(
    name: str, num_stages: int, num_microbatches: int, chunks_per_stage: int = 1, *, recomputed: Collection[int] = ()
) -> Schedule:
    """The schedule of this name.

    Args:
        recomputed: chunks of which layers are run again in backward.

    Raises:
        ValueError: the name is unknown, a number is not positive, or the schedule cannot have so many chunks a stage.
    """
    if min(num_stages, num_microbatches, chunks_per_stage) < 1:
        raise ValueError(
            f"stages, microbatches and chunks a stage must be at least 1, not {num_stages}, {num_microbatches}, {chunks_per_stage}"
        )
    made = _spec(name, chunks_per_stage).make(num_stages, num_microbatches, chunks_per_stage)
    return with_recompute(made, recomputed) if recomputed else made


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
