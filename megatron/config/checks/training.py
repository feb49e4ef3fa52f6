"""Rules about batches and the length of the run."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.checks.finding import (
    RANKS,
    Change,
    Finding,
    change,
    data_size,
    divisors,
    exclusive,
    multiples_near,
    positive,
    rule,
    shown,
    try_values,
)
from megatron.config.config import Config


@rule("train_iters", "train_samples")
def length_is_given_once(config: Config, world_size: int) -> Iterator[Finding]:
    """The run's length is given in steps or in samples."""
    training = config.training
    if training.train_iters is None and training.train_samples is None:
        yield Finding(
            ("train_iters", "train_samples"), "--train-iters and --train-samples are both missing.", "One says how long to train."
        )
    yield from exclusive(config, ("train_iters", "train_samples"), "Each says how long to train.")


@rule("micro_batch_size", "global_batch_size", *RANKS)
def batch_divides(config: Config, world_size: int) -> Iterator[Finding]:
    """A step is a whole number of microbatches on each data rank."""
    micro, batch, ranks = config.training.micro_batch_size, config.training.global_batch_size, data_size(config, world_size)
    if batch is None or not positive(micro, batch) or batch % (micro * (ranks or 1)) == 0:
        return
    if ranks is None:  # however many there are, it divides by one microbatch of each
        yield _batch_is_no_microbatches(batch, micro)
        return
    micros = divisors(batch // ranks) if batch % ranks == 0 else []
    yield Finding(
        ("global_batch_size", "micro_batch_size"),
        f"--global-batch-size {batch} does not divide by --micro-batch-size {micro} x {ranks} data ranks = {micro * ranks}.",
        "A step is a whole number of microbatches on each data rank.",
        (
            try_values("global_batch_size", batch, multiples_near(batch, micro * ranks)),
            try_values("micro_batch_size", micro, micros),
        ),
    )


def _batch_is_no_microbatches(batch: int, micro: int) -> Finding:
    return Finding(
        ("global_batch_size", "micro_batch_size"),
        f"--global-batch-size {batch} does not divide by --micro-batch-size {micro}.",
        "A step is a whole number of microbatches on each data rank, however many these are: that is known when the layout fits.",
        (
            try_values("global_batch_size", batch, multiples_near(batch, micro)),
            try_values("micro_batch_size", micro, divisors(batch)),
        ),
    )


@rule("rampup_batch_size", "micro_batch_size", "global_batch_size", *RANKS)
def ramp_up_reaches_batch(config: Config, world_size: int) -> Iterator[Finding]:
    """Batch sizes of the ramp-up are whole numbers of microbatches, and it ends at the global batch size."""
    ramp, micro, ranks = config.training.rampup_batch_size, config.training.micro_batch_size, data_size(config, world_size)
    if ramp is None or not positive(*ramp):
        return
    start, increment, samples = ramp
    fields = ("rampup_batch_size", "global_batch_size", "micro_batch_size")
    given = f"--rampup-batch-size {start} {increment} {samples}"
    batch = config.training.global_batch_size
    if batch is None:
        yield Finding(fields, f"{given} needs --global-batch-size.", "The batch grows from the start to the global batch size.")
        return
    unit = micro * ranks if ranks is not None and micro > 0 else 1
    starts = [size for size in multiples_near(start, unit) if size < batch]
    if start % unit or increment % unit:
        increments = [size for size in multiples_near(increment, unit) if size < batch]
        yield Finding(
            fields,
            f"{given}: START and INCREMENT do not both divide by --micro-batch-size {micro} x {ranks} data ranks = {unit}.",
            "Every step is a whole number of microbatches on each data rank.",
            (_ramps([(s, i) for s in starts for i in increments], ramp),),
        )
    elif start >= batch:
        yield Finding(
            fields,
            f"{given} starts at {start}, which is not below --global-batch-size {batch}.",
            "The batch grows from the start to the global batch size; leave --rampup-batch-size out for a constant batch.",
            (_ramps([(s, increment) for s in range(unit, batch, unit)[-64:]], ramp),),
        )
    elif (batch - start) % increment:
        steps = [step * unit for step in divisors((batch - start) // unit)] if (batch - start) % unit == 0 else []
        yield Finding(
            fields,
            f"{given} does not reach --global-batch-size {batch}: {batch} - {start} does not divide by {increment}.",
            "The batch grows from START by whole INCREMENTs to the global batch size.",
            (
                _ramps([(start, step) for step in steps], ramp),
                try_values("global_batch_size", batch, [start + size for size in multiples_near(batch - start, increment)]),
            ),
        )


def _ramps(pairs: list[tuple[int, int]], ramp: tuple[int, int, int]) -> tuple[Change, ...]:
    """Candidates with other starts and increments of the ramp-up."""
    start, increment, samples = ramp
    pairs = sorted(pairs, key=lambda pair: (abs(pair[0] - start) + abs(pair[1] - increment), pair))
    return tuple(change(rampup_batch_size=(*pair, samples)) for pair in pairs)


@rule("train_samples", "rampup_batch_size", "micro_batch_size", "global_batch_size", *RANKS)
def samples_fill_a_step(config: Config, world_size: int) -> Iterator[Finding]:
    """There is at least one step."""
    samples, ranks = config.training.train_samples, data_size(config, world_size)
    if samples is None or ranks is None or not positive(samples, config.training.micro_batch_size):
        return
    ramp = config.training.rampup_batch_size
    batch = ramp[0] if ramp else config.training.global_batch_size or config.training.micro_batch_size * ranks
    if samples < batch:
        yield Finding(
            ("train_samples", "global_batch_size", "micro_batch_size", "rampup_batch_size"),
            f"--train-samples {samples} is less than one step of {batch} sequences.",
            "The run would have no step.",
            ((change(train_samples=batch),),),
        )


@rule("iterations_to_skip", "train_iters")
def skipped_iterations_exist(config: Config, world_size: int) -> Iterator[Finding]:
    """Iterations to skip are iterations of the run."""
    last = config.training.train_iters
    beyond = [iteration for iteration in config.training.iterations_to_skip if last is not None and iteration > last]
    if last is not None and last > 0 and beyond:
        kept = tuple(iteration for iteration in config.training.iterations_to_skip if iteration <= last)
        yield Finding(
            ("iterations_to_skip", "train_iters"),
            f"--iterations-to-skip names {', '.join(map(str, beyond))}, but the run ends at --train-iters {last}.",
            f"Iterations are 1 to {last}.",
            ((change(iterations_to_skip=kept),) if kept else (),),
        )


@rule("profile", "profile_pipeline", "profile_step_start", "profile_step_end", "train_iters")
def profile_window_opens(config: Config, world_size: int) -> Iterator[Finding]:
    """The profiler's window is not empty, and what is recorded begins within the run."""
    start, end, last = config.logging.profile_step_start, config.logging.profile_step_end, config.training.train_iters
    recording = [field for field in ("profile", "profile_pipeline") if getattr(config.logging, field)]
    if not recording or not positive(start, end):
        return
    if config.logging.profile and end <= start:
        yield Finding(
            ("profile_step_start", "profile_step_end", "profile"),
            f"--profile-step-end {end} is not above --profile-step-start {start}.",
            "The profiler records from the start up to, but without, the end.",
            ((change(profile_step_end=start + 1),), (change(profile_step_start=max(1, end - 1)),)),
        )
    elif positive(last) and last is not None and start > last:
        yield Finding(
            ("profile_step_start", "train_iters", *recording),
            f"--profile-step-start {start} is beyond --train-iters {last}.",
            f"{' and '.join(shown(config, field) for field in recording)} would record nothing.",
            ((change(profile_step_start=last),),),
        )


@rule("save_interval", "save_retain_interval")
def retained_are_saved(config: Config, world_size: int) -> Iterator[Finding]:
    """Checkpoints to retain are among those that are saved."""
    every, retain = config.checkpoint.save_interval, config.checkpoint.save_retain_interval
    if every is None or retain is None or not positive(every, retain) or retain % every == 0:
        return
    yield Finding(
        ("save_retain_interval", "save_interval"),
        f"--save-retain-interval {retain} is not a multiple of --save-interval {every}.",
        "Only what is saved can be retained.",
        (try_values("save_retain_interval", retain, multiples_near(retain, every)),),
    )


@rule("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler", "finetune")
def one_scheduler(config: Config, world_size: int) -> Iterator[Finding]:
    """On resume the schedules come from one place."""
    take, override = "use_checkpoint_opt_param_scheduler", "override_opt_param_scheduler"
    yield from exclusive(config, (override, take), "On resume the schedules come from the command line or from the checkpoint.")
    yield from exclusive(config, (take, "finetune"), "Fine-tuning takes only the weights from the checkpoint.")


@rule("pretrained_checkpoint", "finetune", "exit_on_missing_checkpoint")
def one_beginning(config: Config, world_size: int) -> Iterator[Finding]:
    """What a run does that finds no checkpoint of its own is said once."""
    base = "pretrained_checkpoint"
    counts = (
        "--finetune takes weights from --load and counts from 0 at every start, --pretrained-checkpoint only as long as --load "
        "holds no checkpoint, so that the run can go on."
    )
    yield from exclusive(config, (base, "finetune"), counts)
    ends = "One begins a run where --load holds no checkpoint, the other ends it."
    yield from exclusive(config, (base, "exit_on_missing_checkpoint"), ends)
