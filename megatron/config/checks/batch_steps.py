"""Rules about --step-batch-size-schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron.config.checks.finding import (
    RANKS,
    Change,
    Finding,
    change,
    data_size,
    divisors,
    exclude_each_other,
    rule,
    try_values,
    without,
)
from megatron.config.config import Config
from megatron.config.training import BatchStep, as_words, batch_steps, readable_steps


@rule("step_batch_size_schedule")
def schedule_can_be_read(config: Config, world_size: int) -> Iterator[Finding]:
    """It takes batch sizes with the tokens after which each begins, such as "0:768 250B:1536"."""
    words = config.training.step_batch_size_schedule
    try:
        batch_steps(words)
    except ValueError as error:
        yield Finding(f"--step-batch-size-schedule {' '.join(words)} {error}.")


batch_grows_in_one_way = exclude_each_other(
    "rampup_batch_size", "step_batch_size_schedule", why="Each says how the batch grows. A schedule can grow by steps of any size."
)


@rule("step_batch_size_schedule", "global_batch_size")
def schedule_names_the_batch(config: Config, world_size: int) -> Iterator[Finding]:
    """The schedule says the global batch size, the last one too."""
    steps, batch = readable_steps(config.training.step_batch_size_schedule), config.training.global_batch_size
    if steps and batch is not None and batch != steps[-1].batch_size:
        last = steps[-1].batch_size
        yield Finding(
            f"--step-batch-size-schedule ends with a batch of {last}, and --global-batch-size is {batch}.",
            [without(config, "global_batch_size"), change(global_batch_size=last)],
        )


@rule("step_batch_size_schedule", "seq_length")
def schedule_has_samples_between(config: Config, world_size: int) -> Iterator[Finding]:
    """Tokens count as whole samples of --seq-length."""
    steps, length = readable_steps(config.training.step_batch_size_schedule), config.model.seq_length
    if length is None:
        return
    samples = [step.tokens // length for step in steps]
    for place in range(1, len(steps)):
        if samples[place] == samples[place - 1]:
            yield Finding(
                f"--step-batch-size-schedule: {steps[place - 1]} and {steps[place]} begin with the same sample of "
                f"--seq-length {length}.",
                [change(step_batch_size_schedule=as_words([*steps[: place - 1], _from(steps[place - 1].tokens, steps[place])]))]
                if place + 1 == len(steps)
                else [],
            )


@rule("step_batch_size_schedule", "micro_batch_size", reads=RANKS)
def scheduled_batches_divide(config: Config, world_size: int) -> Iterator[Finding]:
    """Every step is a whole number of microbatches on each data rank. What a run has behind it may be left out of the schedule:
    the rest then begins at 0."""
    steps, micro = readable_steps(config.training.step_batch_size_schedule), config.training.micro_batch_size
    ranks = data_size(config, world_size)
    unit = micro * (ranks or 1)
    odd = [step for step in steps if step.batch_size % unit]
    if not odd:
        return
    whole, rest = divmod(odd[0].batch_size, ranks or 1)
    micros = [] if rest else divisors(whole)
    told = ", ".join(map(str, odd))
    yield Finding(
        f"--step-batch-size-schedule: {told} do{'es' * (len(odd) == 1)} not divide by --micro-batch-size {micro}"
        f"{'' if ranks is None else f' x {ranks} data ranks = {unit}'}.",
        [_rounded(steps, unit), _later(steps, unit), try_values("micro_batch_size", micro, micros)],
    )


def _rounded(steps: Sequence[BatchStep], unit: int) -> list[Change]:
    """The schedule with whole steps, each batch rounded up."""
    whole = [BatchStep(step.tokens, -(-step.batch_size // unit) * unit) for step in steps]
    return [change(step_batch_size_schedule=as_words(whole))]


def _later(steps: Sequence[BatchStep], unit: int) -> list[Change]:
    """The end of the schedule from the first batch on behind which all are whole."""
    first = max(place for place, step in enumerate(steps) if step.batch_size % unit) + 1
    return [change(step_batch_size_schedule=as_words([_from(0, steps[first]), *steps[first + 1 :]]))] if first < len(steps) else []


def _from(tokens: int, step: BatchStep) -> BatchStep:
    return BatchStep(tokens, step.batch_size)
