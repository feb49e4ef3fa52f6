"""Rules about batches and the length of the run."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.checks.finding import (
    RANKS,
    Change,
    Finding,
    change,
    data_size,
    divides,
    divisors,
    exclude_each_other,
    multiples_near,
    rule,
    shown,
    try_values,
)
from megatron.config.config import Config


@rule("train_iters", "train_samples")
def length_is_given(config: Config, world_size: int) -> Iterator[Finding]:
    """One says how long to train."""
    if config.training.train_iters is None and config.training.train_samples is None:
        yield Finding("--train-iters and --train-samples are both missing.")


length_is_given_once = exclude_each_other("train_iters", "train_samples", why="Each says how long to train.")


@rule("global_batch_size", "micro_batch_size", reads=RANKS)
def batch_divides(config: Config, world_size: int) -> Iterator[Finding]:
    """A step is a whole number of microbatches on each data rank."""
    micro, batch, ranks = config.training.micro_batch_size, config.training.global_batch_size, data_size(config, world_size)
    unit = micro * (ranks or 1)  # however many ranks there are, it divides by one microbatch of each
    if batch is None or batch % unit == 0:
        return
    fits, if_known = "A step is a whole number of microbatches on each data rank", "that is known when the layout fits"
    micros = divisors(batch // (ranks or 1)) if batch % (ranks or 1) == 0 else []
    yield Finding(
        f"--global-batch-size {batch} does not divide by --micro-batch-size {micro}"
        f"{'' if ranks is None else f' x {ranks} data ranks = {unit}'}.",
        [try_values("global_batch_size", batch, multiples_near(batch, unit)), try_values("micro_batch_size", micro, micros)],
        f"{fits}, however many these are: {if_known}." if ranks is None else "",
    )


@rule("rampup_batch_size", "global_batch_size", "micro_batch_size", reads=RANKS)
def ramp_up_reaches_batch(config: Config, world_size: int) -> Iterator[Finding]:
    """Batch sizes of the ramp-up are whole numbers of microbatches, and it ends at the global batch size."""
    ramp, micro, ranks = config.training.rampup_batch_size, config.training.micro_batch_size, data_size(config, world_size)
    if ramp is None:
        return
    start, increment, samples = ramp
    given = f"--rampup-batch-size {start} {increment} {samples}"
    batch = config.training.global_batch_size
    if batch is None:
        yield Finding(f"{given} needs --global-batch-size.", why="The batch grows from the start to the global batch size.")
        return
    unit = micro * ranks if ranks is not None else 1
    starts = [size for size in multiples_near(start, unit) if size < batch]
    if start % unit or increment % unit:
        increments = [size for size in multiples_near(increment, unit) if size < batch]
        yield Finding(
            f"{given}: START and INCREMENT do not both divide by --micro-batch-size {micro} x {ranks} data ranks = {unit}.",
            [_ramps([(s, i) for s in starts for i in increments], ramp)],
            "Every step is a whole number of microbatches on each data rank.",
        )
    elif start >= batch:
        yield Finding(
            f"{given} starts at {start}, which is not below --global-batch-size {batch}.",
            [_ramps([(s, increment) for s in range(unit, batch, unit)[-64:]], ramp)],
            "The batch grows from the start to the global batch size; leave --rampup-batch-size out for a constant batch.",
        )
    elif (batch - start) % increment:
        steps = [step * unit for step in divisors((batch - start) // unit)] if (batch - start) % unit == 0 else []
        yield Finding(
            f"{given} does not reach --global-batch-size {batch}: {batch} - {start} does not divide by {increment}.",
            [
                _ramps([(start, step) for step in steps], ramp),
                try_values("global_batch_size", batch, [start + size for size in multiples_near(batch - start, increment)]),
            ],
            "The batch grows from START by whole INCREMENTs to the global batch size.",
        )


def _ramps(pairs: list[tuple[int, int]], ramp: tuple[int, int, int]) -> list[Change]:
    """Candidates with other starts and increments of the ramp-up."""
    start, increment, samples = ramp
    pairs = sorted(pairs, key=lambda pair: (abs(pair[0] - start) + abs(pair[1] - increment), pair))
    return [change(rampup_batch_size=(*pair, samples)) for pair in pairs]


@rule("train_samples", "global_batch_size", "micro_batch_size", "rampup_batch_size", reads=RANKS)
def samples_fill_a_step(config: Config, world_size: int) -> Iterator[Finding]:
    """The run has at least one step."""
    training, ranks = config.training, data_size(config, world_size)
    if training.train_samples is None or ranks is None:
        return
    ramp = training.rampup_batch_size
    batch = ramp[0] if ramp else training.global_batch_size or training.micro_batch_size * ranks
    if training.train_samples < batch:
        message = f"--train-samples {training.train_samples} is less than one step of {batch} sequences."
        yield Finding(message, [change(train_samples=batch)])


@rule("iterations_to_skip", "train_iters")
def skipped_iterations_exist(config: Config, world_size: int) -> Iterator[Finding]:
    """Iterations to skip are iterations of the run."""
    last, skipped = config.training.train_iters, config.training.iterations_to_skip
    if last is not None and (beyond := [iteration for iteration in skipped if iteration > last]):
        kept = tuple(iteration for iteration in skipped if iteration <= last)
        yield Finding(
            f"--iterations-to-skip names {', '.join(map(str, beyond))}, but the run ends at --train-iters {last}.",
            [change(iterations_to_skip=kept)] if kept else [],
            f"Iterations are 1 to {last}.",
        )


@rule("profile_step_start", "profile_step_end", "profile", reads=("profile_pipeline", "train_iters"))
def profile_window_opens(config: Config, world_size: int) -> Iterator[Finding]:
    """The profiler's window is not empty, and what is recorded begins within the run."""
    start, end, last = config.logging.profile_step_start, config.logging.profile_step_end, config.training.train_iters
    recording = [field for field in ("profile", "profile_pipeline") if getattr(config.logging, field)]
    if config.logging.profile and end <= start:
        yield Finding(
            f"--profile-step-end {end} is not above --profile-step-start {start}.",
            [change(profile_step_end=start + 1), change(profile_step_start=max(1, end - 1))],
            "The profiler records from the start up to, but without, the end.",
        )
    elif recording and last is not None and start > last:
        yield Finding(
            f"--profile-step-start {start} is beyond --train-iters {last}.",
            [change(profile_step_start=last)],
            f"{' and '.join(shown(config, field) for field in recording)} would record nothing.",
            ("profile_step_start", "train_iters", *recording),
        )


retained_are_saved = divides("save_retain_interval", "save_interval", "Only what is saved can be retained.")

_TAKEN, _BASE = "use_checkpoint_opt_param_scheduler", "pretrained_checkpoint"
one_scheduler = exclude_each_other(
    "override_opt_param_scheduler", _TAKEN, why="On resume the schedules come from the command line or from the checkpoint."
)
weights_alone_or_schedules = exclude_each_other(_TAKEN, "finetune", why="Fine-tuning takes only the weights from the checkpoint.")
one_start_from_weights = exclude_each_other(
    _BASE,
    "finetune",
    why="--finetune takes weights from --load and counts from 0 at every start, --pretrained-checkpoint only as long as --load "
    "holds no checkpoint, so that the run can go on.",
)
one_beginning = exclude_each_other(
    _BASE, "exit_on_missing_checkpoint", why="One begins a run where --load holds no checkpoint, the other ends it."
)
