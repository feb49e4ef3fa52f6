"""Rules about batches, the length of the run, schedules of learning rate and weight decay, the loss scale, and who updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron.config.checks.finding import (
    RANKS,
    Change,
    Finding,
    at_most,
    change,
    data_size,
    divides,
    divisors,
    exclude_each_other,
    multiples_near,
    rule,
    shown,
    try_values,
    without,
)
from megatron.config.config import Config
from megatron.config.setting import acts_with, typed
from megatron.config.training import BatchStep, as_words, batch_steps, readable_steps


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


@rule("log_gradient_noise", "global_batch_size", "micro_batch_size", reads=(*RANKS, "step_batch_size_schedule"))
def noise_has_two_batches(config: Config, world_size: int) -> Iterator[Finding]:
    """The noise of the gradient is told from two batches: a step's first microbatch, and the whole one."""
    micro, ranks = config.training.micro_batch_size, data_size(config, world_size)
    if config.logging.log_gradient_noise and ranks is not None and config.training.final_batch_size(ranks) == micro:
        message = f"--log-gradient-noise needs steps of several microbatches, and the batch is one of {micro} sequences."
        yield Finding(message, [change(global_batch_size=2 * micro), change(log_gradient_noise=False)])


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


@rule("train_samples", "global_batch_size", "micro_batch_size", "rampup_batch_size", "step_batch_size_schedule", reads=RANKS)
def samples_fill_a_step(config: Config, world_size: int) -> Iterator[Finding]:
    """The run has at least one step."""
    training, ranks = config.training, data_size(config, world_size)
    if training.train_samples is None or ranks is None:
        return
    batch = training.first_batch_size(ranks)
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


@rule("spike_policy", "save", "save_interval", "save_optim", "data_order")
def rewinds_have_somewhere_to_go(config: Config, world_size: int) -> Iterator[Finding]:
    """A rewind takes a whole checkpoint that the run has saved, and reads behind what the run was to read."""
    checkpoint = config.checkpoint
    if config.spikes.spike_policy != "rewind":
        return
    other, policy = change(spike_policy="skip"), "--spike-policy rewind"
    missing = [field for field in ("save", "save_interval") if not getattr(checkpoint, field)]
    if missing:
        message = f"{policy} needs {' and '.join(map(typed, missing))}."
        yield Finding(message, [other], fields=("spike_policy", *missing))
    if checkpoint.save and not checkpoint.save_optim:
        message = f"{policy} needs the optimizer state that --no-save-optim leaves out."
        yield Finding(message, [other, change(save_optim=True)], fields=("spike_policy", "save_optim"))
    if config.data.data_order == "megatron":
        message = f"{policy} does not go with --data-order megatron, whose order depends on how many samples are read."
        yield Finding(message, [other, change(data_order="epoch")], fields=("spike_policy", "data_order"))


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
    "override_opt_param_scheduler",
    _TAKEN,
    "resume_schedule",
    why="On resume the schedules come from the command line or from the checkpoint.",
)
weights_alone_or_schedules = exclude_each_other(
    _TAKEN, "resume_schedule", "finetune", why="Fine-tuning takes only the weights from the checkpoint."
)
one_start_from_weights = exclude_each_other(
    _BASE,
    "finetune",
    why="--finetune takes weights from --load and counts from 0 at every start, --pretrained-checkpoint only as long as --load "
    "holds no checkpoint, so that the run can go on.",
)
one_beginning = exclude_each_other(
    _BASE, "exit_on_missing_checkpoint", why="One begins a run where --load holds no checkpoint, the other ends it."
)

_UNITS = ("lr_decay", "lr_warmup", "lr_wsd_decay", "lr_rewarm_start", "lr_rewarm")
_LENGTHS = tuple(f"{schedule}_{unit}" for schedule in _UNITS for unit in ("iters", "samples"))
_RUN = ("train_iters", "train_samples")


@rule(*_RUN, *_LENGTHS)
def schedule_counts_as_run(config: Config, world_size: int) -> Iterator[Finding]:
    """A run in steps has its schedule in steps, a run in samples has it in samples."""
    training = config.training
    if (training.train_iters is None) == (training.train_samples is None):
        return
    mine, other = ("iters", "samples") if training.train_iters is not None else ("samples", "iters")
    for schedule in _UNITS:
        if getattr(config.optimizer, f"{schedule}_{other}"):
            yield Finding(
                f"{shown(config, f'{schedule}_{other}')} does not go with --train-{mine}.",
                why=f"A run measured in {mine} has its schedule in {mine}: use {typed(schedule)}-{mine}.",
                fields=(f"{schedule}_{other}", f"train_{mine}"),
            )


_ONE_LENGTH = "Each sets the same length."
decay_is_given_once = exclude_each_other("lr_decay_iters", "lr_decay_samples", why=_ONE_LENGTH)
warmup_is_given_once = exclude_each_other("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction", why=_ONE_LENGTH)
final_decay_is_given_once = exclude_each_other("lr_wsd_decay_iters", "lr_wsd_decay_samples", why=_ONE_LENGTH)

_HIGHEST = "--lr is the highest learning rate of the run."
lowest_rate_is_lower = at_most("min_lr", "lr", _HIGHEST)
first_rate_is_lower = at_most("lr_warmup_init", "lr", _HIGHEST)


@rule(reads=(*_RUN, *_LENGTHS, "lr_warmup_fraction", "lr_decay_style"))
def phases_fit_decay(config: Config, world_size: int) -> Iterator[Finding]:
    """Warm-up ends before the decay does, and leaves room for the final decay of WSD."""
    optimizer, training = config.optimizer, config.training
    for unit, run in (("iters", training.train_iters), ("samples", training.train_samples)):
        given: int | None = getattr(optimizer, f"lr_decay_{unit}")
        length = run if given is None else given
        warmup = getattr(optimizer, f"lr_warmup_{unit}")
        final = getattr(optimizer, f"lr_wsd_decay_{unit}") if optimizer.lr_decay_style == "WSD" else None
        if length is None or run is None or optimizer.lr_decay_style == "constant":
            continue
        fields = (f"lr_warmup_{unit}", f"lr_decay_{unit}", f"train_{unit}")
        decays_over = f"the {length} {unit} of the decay (--lr-decay-{unit}, by default --train-{unit})"
        if warmup >= length:
            yield Finding(
                f"{shown(config, f'lr_warmup_{unit}')} is not below {decays_over}.",
                [change(**{f"lr_warmup_{unit}": length - 1}), change(**{f"lr_decay_{unit}": warmup + 1})],
                "The learning rate first warms up, then decays.",
                fields,
            )
            continue
        if optimizer.lr_warmup_fraction is not None:
            warmup = optimizer.lr_warmup_fraction * length
        room = int(length - warmup)
        if final is not None and final > room:
            yield Finding(
                f"{shown(config, f'lr_wsd_decay_{unit}')} does not fit after a warm-up of {warmup:g} into {decays_over}.",
                [change(**{f"lr_wsd_decay_{unit}": room})] if room > 0 else [],
                "The final decay of WSD is the last part of the decay's length.",
                (*fields, f"lr_wsd_decay_{unit}", "lr_warmup_fraction"),
            )


@rule(reads=(*_RUN, *_LENGTHS))
def second_course_fits_run(config: Config, world_size: int) -> Iterator[Finding]:
    """A second course of the learning rate begins within the run, and its rise leaves something to decay over."""
    optimizer, training = config.optimizer, config.training
    for unit, run in (("iters", training.train_iters), ("samples", training.train_samples)):
        start, rise = getattr(optimizer, f"lr_rewarm_start_{unit}"), getattr(optimizer, f"lr_rewarm_{unit}")
        if run is None or start is None:
            continue
        if start + rise >= run:
            shorter = [change(**{f"lr_rewarm_{unit}": run - start - 1})] if 0 < run - start - 1 < rise else []
            yield Finding(
                f"{shown(config, f'lr_rewarm_start_{unit}')} and a rise of {rise} leave nothing of the {run} {unit} of the run.",
                [*shorter, change(**{f"train_{unit}": start + rise + 1})],
                fields=(f"lr_rewarm_start_{unit}", f"lr_rewarm_{unit}", f"train_{unit}"),
            )


rewarm_begins_once = exclude_each_other("lr_rewarm_start_iters", "lr_rewarm_start_samples", why=_ONE_LENGTH)


@rule("lr_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples")
def wsd_has_final_decay(config: Config, world_size: int) -> Iterator[Finding]:
    """Give --lr-wsd-decay-iters with --train-iters, or --lr-wsd-decay-samples with --train-samples."""
    optimizer = config.optimizer
    if optimizer.lr_decay_style == "WSD" and not (optimizer.lr_wsd_decay_iters or optimizer.lr_wsd_decay_samples):
        yield Finding("--lr-decay-style WSD needs the length of its final decay.")


@rule("weight_decay_incr_style", "start_weight_decay", "end_weight_decay", reads=["weight_decay"])
def weight_decay_has_ends(config: Config, world_size: int) -> Iterator[Finding]:
    """A weight decay that changes goes from a start to an end over the run."""
    optimizer = config.optimizer
    style = optimizer.weight_decay_incr_style
    missing = [field for field in ("start_weight_decay", "end_weight_decay") if getattr(optimizer, field) is None]
    if style != "constant" and missing:
        needs = " and ".join(map(typed, missing))
        yield Finding(
            f"--weight-decay-incr-style {style} needs {needs}.",
            [change(**dict.fromkeys(missing, optimizer.weight_decay)), change(weight_decay_incr_style="constant")],
        )


one_precision = exclude_each_other("fp16", "bf16", "fp64", why="Each sets the dtype of the model; without any it is float32.")
loss_scales_are_ordered = at_most(
    "min_loss_scale",
    "initial_loss_scale",
    "The dynamic loss scale starts at or above its smallest value.",
    where=acts_with(every=True, fp16=True, loss_scale=None),
)


@rule("use_apex", reads=("optimizer_cpu_offload", "optimizer_offload_fraction", "device", "fp64"))
def apex_updates_on_cuda(config: Config, world_size: int) -> Iterator[Finding]:
    """NVIDIA apex updates float32 parameters on CUDA devices only."""
    for field, given, other in (
        (
            "optimizer_cpu_offload",
            config.optimizer.optimizer_cpu_offload,
            without(config, "optimizer_offload_fraction", optimizer_cpu_offload=False),
        ),
        ("device", config.parallel.device == "cpu", change(device="cuda")),
        ("fp64", config.precision.fp64, change(fp64=False)),
    ):
        if config.optimizer.use_apex and given:
            message = f"--use-apex and {shown(config, field)} exclude each other."
            yield Finding(message, [change(use_apex=False), other], fields=("use_apex", field))


@rule("qk_clip", "qk_layernorm", reads=("multi_latent_attention",))
def weights_bound_scores(config: Config, world_size: int) -> Iterator[Finding]:
    """QK-clip scales weights to make scores smaller, and a norm of queries and keys would undo that; those of latent attention come
    before these weights."""
    if config.optimizer.qk_clip and config.model.qk_layernorm and not config.model.multi_latent_attention:
        yield Finding(
            "--qk-clip changes no score beside --qk-layernorm.",
            [change(qk_clip=False), change(qk_layernorm=False)],
            "The norm of queries and keys bounds scores by itself, and undoes any scale of the weights before it.",
        )


# ---- Rules about --step-batch-size-schedule.


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
