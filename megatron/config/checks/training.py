"""Rules about batch sizes, the length of the run, schedules of learning rate and weight decay, loss scale and optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron.config.checks.finding import (
    MODEL_PARALLEL_SIZES,
    Change,
    Finding,
    create_change,
    find_divisors,
    find_multiples_near,
    format_setting,
    get_data_parallel_size,
    is_set,
    require_divisible,
    require_exclusive,
    require_not_above,
    reset,
    rule,
    try_values,
)
from megatron.config.config import Config
from megatron.config.setting import condition, get_flag_name
from megatron.config.training import BatchStep, format_batch_schedule, parse_batch_schedule, parse_batch_schedule_or_empty

_RUN_LENGTHS = ("train_iters", "train_samples")


@rule(*_RUN_LENGTHS, "train_epochs")
def check_run_length(config: Config, world_size: int) -> Iterator[Finding]:
    """--train-iters, --train-samples or --train-epochs must set the length of training."""
    training = config.training
    if training.train_iters is None and training.train_samples is None and training.train_epochs is None:
        yield Finding("--train-iters, --train-samples and --train-epochs are all missing.", is_missing=True)


check_single_run_length = require_exclusive(*_RUN_LENGTHS, "train_epochs", reason="Each of them sets the length of the run.")


@rule("global_batch_size", "micro_batch_size", depends_on=MODEL_PARALLEL_SIZES)
def check_global_batch_divisible(config: Config, world_size: int) -> Iterator[Finding]:
    """--global-batch-size must be divisible by --micro-batch-size x data-parallel size, because a step is a whole number of
    microbatches on each data rank."""
    micro, batch = config.training.micro_batch_size, config.training.global_batch_size
    data_size = get_data_parallel_size(config, world_size)
    unit = micro * (data_size or 1)  # with unknown data ranks, one microbatch must divide the batch
    if batch is None or batch % unit == 0:
        return
    divisibility = "A step must be a whole number of microbatches on each data rank"
    reason = "the number of data ranks is unknown until the world size fits the layout"
    micro_batch_candidates = find_divisors(batch // (data_size or 1)) if batch % (data_size or 1) == 0 else []
    yield Finding(
        f"--global-batch-size {batch} is not divisible by --micro-batch-size {micro}"
        f"{'' if data_size is None else f' x {data_size} data ranks = {unit}'}.",
        [
            try_values("global_batch_size", batch, find_multiples_near(batch, unit)),
            try_values("micro_batch_size", micro, micro_batch_candidates),
        ],
        f"{divisibility}; {reason}." if data_size is None else "",
    )


@rule("log_gradient_noise", "global_batch_size", "micro_batch_size", depends_on=(*MODEL_PARALLEL_SIZES, "step_batch_size_schedule"))
def check_gradient_noise_batches(config: Config, world_size: int) -> Iterator[Finding]:
    """--log-gradient-noise needs a global batch of several microbatches. The noise scale is estimated from two batch sizes: the
    step's first microbatch and the whole batch."""
    micro, data_size = config.training.micro_batch_size, get_data_parallel_size(config, world_size)
    if config.logging.log_gradient_noise and data_size is not None and config.training.get_final_batch_size(data_size) == micro:
        message = f"--log-gradient-noise needs steps of several microbatches, but the batch is one microbatch of {micro} sequences."
        yield Finding(message, [create_change(global_batch_size=2 * micro), create_change(log_gradient_noise=False)])


@rule("rampup_batch_size", "global_batch_size", "micro_batch_size", depends_on=MODEL_PARALLEL_SIZES)
def check_rampup_batch_size(config: Config, world_size: int) -> Iterator[Finding]:
    """START and INCREMENT of --rampup-batch-size must be multiples of --micro-batch-size x data-parallel size, because a step is a
    whole number of microbatches. The batch must grow from START by whole INCREMENTs to --global-batch-size."""
    ramp, micro = config.training.rampup_batch_size, config.training.micro_batch_size
    data_size = get_data_parallel_size(config, world_size)
    if ramp is None:
        return
    start, increment, samples = ramp
    setting = f"--rampup-batch-size {start} {increment} {samples}"
    batch = config.training.global_batch_size
    if batch is None:
        yield Finding(f"{setting} needs --global-batch-size.", reason="The batch grows from the start to the global batch size.")
        return
    unit = micro * data_size if data_size is not None else 1
    starts = [size for size in find_multiples_near(start, unit) if size < batch]
    if start % unit or increment % unit:
        increments = [size for size in find_multiples_near(increment, unit) if size < batch]
        yield Finding(
            f"{setting}: START and INCREMENT are not both divisible by --micro-batch-size {micro} x {data_size} data ranks "
            f"= {unit}.",
            [_build_rampup_candidates([(s, i) for s in starts for i in increments], ramp)],
            "Every step is a whole number of microbatches on each data rank.",
        )
    elif start >= batch:
        yield Finding(
            f"{setting} starts at {start}, which is not below --global-batch-size {batch}.",
            [_build_rampup_candidates([(s, increment) for s in range(unit, batch, unit)[-64:]], ramp)],
            "The batch grows from the start to the global batch size; leave --rampup-batch-size out for a constant batch.",
        )
    elif (batch - start) % increment:
        steps = [step * unit for step in find_divisors((batch - start) // unit)] if (batch - start) % unit == 0 else []
        yield Finding(
            f"{setting} does not reach --global-batch-size {batch}: {batch} - {start} is not divisible by {increment}.",
            [
                _build_rampup_candidates([(start, step) for step in steps], ramp),
                try_values("global_batch_size", batch, [start + size for size in find_multiples_near(batch - start, increment)]),
            ],
            "The batch grows from START by whole INCREMENTs to the global batch size.",
        )


def _build_rampup_candidates(pairs: list[tuple[int, int]], ramp: tuple[int, int, int]) -> list[Change]:
    """Return one candidate change of --rampup-batch-size for each pair of start and increment. Changes to values near the current
    ones come first.

    Args:
        pairs: pairs of start and increment.
        ramp: current start, increment and number of samples.
    """
    start, increment, samples = ramp
    pairs = sorted(pairs, key=lambda pair: (abs(pair[0] - start) + abs(pair[1] - increment), pair))
    return [create_change(rampup_batch_size=(*pair, samples)) for pair in pairs]


@rule(
    *("train_samples", "global_batch_size", "micro_batch_size", "rampup_batch_size", "step_batch_size_schedule"),
    depends_on=MODEL_PARALLEL_SIZES,
)
def check_samples_fill_step(config: Config, world_size: int) -> Iterator[Finding]:
    """--train-samples must be at least the batch size of the first step, so that the run has at least one step."""
    training, data_size = config.training, get_data_parallel_size(config, world_size)
    if training.train_samples is None or data_size is None:
        return
    batch = training.get_first_batch_size(data_size)
    if training.train_samples < batch:
        message = f"--train-samples {training.train_samples} is less than one step of {batch} sequences."
        yield Finding(message, [create_change(train_samples=batch)])


@rule("train_epochs", "mock_data", depends_on=("hf_dataset",))
def check_epochs_have_data(config: Config, world_size: int) -> Iterator[Finding]:
    """--train-epochs needs an indexed dataset: the generated tokens of --mock-data have no end, and the number of tokens of a
    dataset that is tokenized during the run (--hf-dataset) is not known at its start."""
    for field, source in (("mock_data", config.data.mock_data), ("hf_dataset", config.data.hf_dataset)):
        if config.training.train_epochs is not None and source:
            message = f"--train-epochs cannot be used with {get_flag_name(field)}."
            yield Finding(message, [create_change(train_epochs=None, train_iters=100)], fields=("train_epochs", field))


@rule(depends_on=("keep_best", "early_stopping_patience", "eval_interval", "eval_iters"))
def check_watched_evaluations(config: Config, world_size: int) -> Iterator[Finding]:
    """--keep-best and --early-stopping-patience need evaluations during the run: --eval-interval, and --eval-iters above 0."""
    training = config.training
    for field in ("keep_best", "early_stopping_patience"):
        if not is_set(config, field):
            continue
        for missing in ("eval_interval", "eval_iters"):
            if not getattr(training, missing):
                value = "is not set" if missing == "eval_interval" else "is 0"
                yield Finding(
                    f"{format_setting(config, field)} compares validation losses, but {get_flag_name(missing)} {value}.",
                    [create_change(**{missing: 100})],
                    fields=(field, missing),
                )


@rule("iterations_to_skip", "train_iters")
def check_iterations_to_skip(config: Config, world_size: int) -> Iterator[Finding]:
    """--iterations-to-skip must name only iterations of the run, from 1 to --train-iters."""
    last, skipped = config.training.train_iters, config.training.iterations_to_skip
    if last is not None and (invalid := [iteration for iteration in skipped if iteration > last]):
        valid = tuple(iteration for iteration in skipped if iteration <= last)
        yield Finding(
            f"--iterations-to-skip names {', '.join(map(str, invalid))}, but the run ends at --train-iters {last}.",
            [create_change(iterations_to_skip=valid)] if valid else [],
            f"Iterations are 1 to {last}.",
        )


@rule("spike_policy", "save", "save_interval", "save_optim", "data_order")
def check_rewind_settings(config: Config, world_size: int) -> Iterator[Finding]:
    """--spike-policy rewind loads a checkpoint of the run, so it needs --save, --save-interval and a saved optimizer state. It
    reads more samples than the run would otherwise read, so it cannot be used with --data-order megatron, whose order depends on
    this number."""
    checkpoint = config.checkpoint
    if config.spikes.spike_policy != "rewind":
        return
    use_skip, policy = create_change(spike_policy="skip"), "--spike-policy rewind"
    missing = [field for field in ("save", "save_interval") if not getattr(checkpoint, field)]
    if missing:
        message = f"{policy} needs {' and '.join(map(get_flag_name, missing))}."
        yield Finding(message, [use_skip], fields=("spike_policy", *missing))
    if checkpoint.save and not checkpoint.save_optim:
        message = f"{policy} needs the optimizer state that --no-save-optim leaves out."
        yield Finding(message, [use_skip, create_change(save_optim=True)], fields=("spike_policy", "save_optim"))
    if config.data.data_order == "megatron":
        message = f"{policy} cannot be used with --data-order megatron, whose order depends on the number of samples."
        yield Finding(message, [use_skip, create_change(data_order="epoch")], fields=("spike_policy", "data_order"))


@rule("profile_step_start", "profile_step_end", "profile", depends_on=("profile_pipeline", "train_iters"))
def check_profile_steps(config: Config, world_size: int) -> Iterator[Finding]:
    """--profile-step-end must be above --profile-step-start, and --profile-step-start must not be beyond --train-iters. Otherwise
    no step would be profiled."""
    start, end, last = config.logging.profile_step_start, config.logging.profile_step_end, config.training.train_iters
    recording = [field for field in ("profile", "profile_pipeline") if getattr(config.logging, field)]
    if config.logging.profile and end <= start:
        yield Finding(
            f"--profile-step-end {end} is not above --profile-step-start {start}.",
            [create_change(profile_step_end=start + 1), create_change(profile_step_start=max(1, end - 1))],
            "The profiler records from the start up to, but without, the end.",
        )
    elif recording and last is not None and start > last:
        yield Finding(
            f"--profile-step-start {start} is beyond --train-iters {last}.",
            [create_change(profile_step_start=last)],
            f"{' and '.join(format_setting(config, field) for field in recording)} would record nothing.",
            ("profile_step_start", "train_iters", *recording),
        )


check_retain_interval = require_divisible("save_retain_interval", "save_interval", "Only saved checkpoints can be retained.")

_USE_CHECKPOINT_SCHEDULER, _PRETRAINED = "use_checkpoint_opt_param_scheduler", "pretrained_checkpoint"
check_single_scheduler_source = require_exclusive(
    "override_opt_param_scheduler",
    _USE_CHECKPOINT_SCHEDULER,
    "resume_schedule",
    reason="On resume the schedules come from the command line or from the checkpoint.",
)
check_no_saved_schedule_with_finetune = require_exclusive(
    _USE_CHECKPOINT_SCHEDULER, "resume_schedule", "finetune", reason="Fine-tuning takes only the weights from the checkpoint."
)
check_pretrained_or_finetune = require_exclusive(
    _PRETRAINED,
    "finetune",
    reason="--finetune loads weights from --load and counts from 0 at every start, --pretrained-checkpoint only until --load "
    "holds a checkpoint, so that the run can be resumed.",
)
check_pretrained_or_exit_on_missing = require_exclusive(
    _PRETRAINED,
    "exit_on_missing_checkpoint",
    reason="If --load holds no checkpoint, the first flag starts a run, and the second ends it.",
)

_SCHEDULES = ("lr_decay", "lr_warmup", "lr_wsd_decay", "lr_rewarm_start", "lr_rewarm")
_UNITS = ("iters", "samples")
_SCHEDULE_LENGTHS = tuple(f"{schedule}_{unit}" for schedule in _SCHEDULES for unit in _UNITS)


@rule(*_RUN_LENGTHS, *_SCHEDULE_LENGTHS, depends_on=("train_epochs",))
def check_schedule_unit(config: Config, world_size: int) -> Iterator[Finding]:
    """With --train-iters, the lengths of learning-rate phases must be set in iterations (for example --lr-warmup-iters). With
    --train-samples, the lengths must be set in samples (for example --lr-warmup-samples). With --train-epochs, either unit is
    valid, but not both."""
    training = config.training
    lengths = [tuple(field for field in _SCHEDULE_LENGTHS if field.endswith(unit) and is_set(config, field)) for unit in _UNITS]
    if training.train_epochs is not None and all(lengths):
        yield Finding(
            f"{format_setting(config, lengths[0][0])} and {format_setting(config, lengths[1][0])} cannot be used together.",
            [reset(config, *fields) for fields in lengths],
            "A schedule is measured in iterations or in samples.",
            (lengths[0][0], lengths[1][0]),
        )
    if (training.train_iters is None) == (training.train_samples is None):
        return
    unit, wrong_unit = ("iters", "samples") if training.train_iters is not None else ("samples", "iters")
    for schedule in _SCHEDULES:
        if getattr(config.optimizer, f"{schedule}_{wrong_unit}"):
            yield Finding(
                f"{format_setting(config, f'{schedule}_{wrong_unit}')} cannot be used with --train-{unit}.",
                reason=f"A run measured in {unit} has its schedule in {unit}: use {get_flag_name(schedule)}-{unit}.",
                fields=(f"{schedule}_{wrong_unit}", f"train_{unit}"),
            )


_SAME_LENGTH = "Each of them sets the same length."
check_single_decay_length = require_exclusive("lr_decay_iters", "lr_decay_samples", reason=_SAME_LENGTH)
check_single_warmup_length = require_exclusive("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction", reason=_SAME_LENGTH)
check_single_wsd_decay_length = require_exclusive("lr_wsd_decay_iters", "lr_wsd_decay_samples", reason=_SAME_LENGTH)

_LR_IS_PEAK = "--lr is the maximum learning rate of the run."
check_min_lr = require_not_above("min_lr", "lr", _LR_IS_PEAK)
check_lr_warmup_init = require_not_above("lr_warmup_init", "lr", _LR_IS_PEAK)


@rule(depends_on=(*_RUN_LENGTHS, *_SCHEDULE_LENGTHS, "lr_warmup_fraction", "lr_decay_style"))
def check_lr_phases(config: Config, world_size: int) -> Iterator[Finding]:
    """The learning-rate warm-up must be shorter than the decay length (--lr-decay-iters or --lr-decay-samples, by default the
    length of the run), because this length includes the warm-up. With --lr-decay-style WSD, the final decay must fit after the
    warm-up."""
    optimizer, training = config.optimizer, config.training
    for unit, run_length in (("iters", training.train_iters), ("samples", training.train_samples)):
        decay_length: int | None = getattr(optimizer, f"lr_decay_{unit}")
        length = run_length if decay_length is None else decay_length
        warmup = getattr(optimizer, f"lr_warmup_{unit}")
        wsd_decay = getattr(optimizer, f"lr_wsd_decay_{unit}") if optimizer.lr_decay_style == "WSD" else None
        if length is None or run_length is None or optimizer.lr_decay_style == "constant":
            continue
        fields = (f"lr_warmup_{unit}", f"lr_decay_{unit}", f"train_{unit}")
        decay_text = f"the {length} {unit} of the decay (--lr-decay-{unit}, by default --train-{unit})"
        if warmup >= length:
            yield Finding(
                f"{format_setting(config, f'lr_warmup_{unit}')} is not below {decay_text}.",
                [create_change(**{f"lr_warmup_{unit}": length - 1}), create_change(**{f"lr_decay_{unit}": warmup + 1})],
                "The learning rate first warms up, then decays.",
                fields,
            )
            continue
        if optimizer.lr_warmup_fraction is not None:
            warmup = optimizer.lr_warmup_fraction * length
        remaining = int(length - warmup)
        if wsd_decay is not None and wsd_decay > remaining:
            yield Finding(
                f"{format_setting(config, f'lr_wsd_decay_{unit}')} does not fit after a warm-up of {warmup:g} into {decay_text}.",
                [create_change(**{f"lr_wsd_decay_{unit}": remaining})] if remaining > 0 else [],
                "The final decay of WSD is the last part of the decay's length.",
                (*fields, f"lr_wsd_decay_{unit}", "lr_warmup_fraction"),
            )


@rule(depends_on=(*_RUN_LENGTHS, *_SCHEDULE_LENGTHS))
def check_lr_rewarm(config: Config, world_size: int) -> Iterator[Finding]:
    """The second warm-up (--lr-rewarm-start-iters and --lr-rewarm-iters, or their -samples forms) must start and end before the end
    of the run, so that the learning rate can decay again."""
    optimizer, training = config.optimizer, config.training
    for unit, run_length in (("iters", training.train_iters), ("samples", training.train_samples)):
        start, warmup = getattr(optimizer, f"lr_rewarm_start_{unit}"), getattr(optimizer, f"lr_rewarm_{unit}")
        if run_length is None or start is None:
            continue
        if start + warmup >= run_length:
            max_warmup = run_length - start - 1
            shorter_warmup = [create_change(**{f"lr_rewarm_{unit}": max_warmup})] if 0 < max_warmup < warmup else []
            yield Finding(
                f"{format_setting(config, f'lr_rewarm_start_{unit}')} and a warm-up of {warmup} leave nothing of "
                f"the {run_length} {unit} of the run.",
                [*shorter_warmup, create_change(**{f"train_{unit}": start + warmup + 1})],
                fields=(f"lr_rewarm_start_{unit}", f"lr_rewarm_{unit}", f"train_{unit}"),
            )


check_single_rewarm_start = require_exclusive("lr_rewarm_start_iters", "lr_rewarm_start_samples", reason=_SAME_LENGTH)


@rule("lr_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples")
def check_wsd_decay_length(config: Config, world_size: int) -> Iterator[Finding]:
    """--lr-decay-style WSD needs the length of its final decay: set --lr-wsd-decay-iters with --train-iters, or
    --lr-wsd-decay-samples with --train-samples. With --train-epochs, set either of them."""
    optimizer = config.optimizer
    if optimizer.lr_decay_style == "WSD" and not (optimizer.lr_wsd_decay_iters or optimizer.lr_wsd_decay_samples):
        yield Finding("--lr-decay-style WSD needs the length of its final decay.")


@rule("weight_decay_incr_style", "start_weight_decay", "end_weight_decay", depends_on=["weight_decay"])
def check_weight_decay_schedule(config: Config, world_size: int) -> Iterator[Finding]:
    """A --weight-decay-incr-style other than constant needs --start-weight-decay and --end-weight-decay, because the weight decay
    changes from one to the other over the run."""
    optimizer = config.optimizer
    style = optimizer.weight_decay_incr_style
    missing = [field for field in ("start_weight_decay", "end_weight_decay") if getattr(optimizer, field) is None]
    if style != "constant" and missing:
        missing_flags = " and ".join(map(get_flag_name, missing))
        yield Finding(
            f"--weight-decay-incr-style {style} needs {missing_flags}.",
            [create_change(**dict.fromkeys(missing, optimizer.weight_decay)), create_change(weight_decay_incr_style="constant")],
        )


check_single_dtype = require_exclusive(
    "fp16", "bf16", "fp64", reason="Each of them sets the dtype of the model, which is float32 by default."
)
check_loss_scale_order = require_not_above(
    "min_loss_scale",
    "initial_loss_scale",
    "The dynamic loss scale must start at or above its minimum.",
    condition=condition(require_all=True, fp16=True, loss_scale=None),
)


@rule("use_apex", depends_on=("optimizer_cpu_offload", "optimizer_offload_fraction", "device", "fp64"))
def check_apex(config: Config, world_size: int) -> Iterator[Finding]:
    """--use-apex cannot be used with --optimizer-cpu-offload, --device cpu or --fp64, because NVIDIA apex updates only float32
    parameters on CUDA devices."""
    for field, is_conflicting, alternative in (
        (
            "optimizer_cpu_offload",
            config.optimizer.optimizer_cpu_offload,
            reset(config, "optimizer_offload_fraction", optimizer_cpu_offload=False),
        ),
        ("device", config.parallel.device == "cpu", create_change(device="cuda")),
        ("fp64", config.precision.fp64, create_change(fp64=False)),
    ):
        if config.optimizer.use_apex and is_conflicting:
            message = f"--use-apex and {format_setting(config, field)} exclude each other."
            yield Finding(message, [create_change(use_apex=False), alternative], fields=("use_apex", field))


@rule("qk_clip", "qk_layernorm", depends_on=("multi_latent_attention",))
def check_no_qk_layernorm_with_qk_clip(config: Config, world_size: int) -> Iterator[Finding]:
    """--qk-clip cannot be used with --qk-layernorm, except in latent attention. QK-clip scales weights down to reduce attention
    scores, but a norm of queries and keys cancels this scale. In latent attention the norms are before these weights."""
    if config.optimizer.qk_clip and config.model.qk_layernorm and not config.model.multi_latent_attention:
        yield Finding(
            "--qk-clip cannot reduce attention scores with --qk-layernorm.",
            [create_change(qk_clip=False), create_change(qk_layernorm=False)],
            "The norm of queries and keys already bounds the scores, and cancels any scale of the weights before it.",
        )


# ---- Rules about --step-batch-size-schedule.


@rule("step_batch_size_schedule")
def check_batch_schedule_syntax(config: Config, world_size: int) -> Iterator[Finding]:
    """--step-batch-size-schedule must be batch sizes, each with the number of tokens after which it starts, such as "0:768
    250B:1536"."""
    entries = config.training.step_batch_size_schedule
    try:
        parse_batch_schedule(entries)
    except ValueError as error:
        yield Finding(f"{error}.")


check_single_batch_schedule = require_exclusive(
    "rampup_batch_size",
    "step_batch_size_schedule",
    reason="Both define how the batch size grows. A schedule allows steps of any size.",
)


@rule("step_batch_size_schedule", "global_batch_size")
def check_batch_schedule_end(config: Config, world_size: int) -> Iterator[Finding]:
    """--step-batch-size-schedule sets the global batch size of all steps, so --global-batch-size must be omitted or equal the last
    batch size of the schedule."""
    steps, batch = parse_batch_schedule_or_empty(config.training.step_batch_size_schedule), config.training.global_batch_size
    if steps and batch is not None and batch != steps[-1].batch_size:
        last = steps[-1].batch_size
        yield Finding(
            f"--step-batch-size-schedule ends with a batch of {last}, and --global-batch-size is {batch}.",
            [reset(config, "global_batch_size"), create_change(global_batch_size=last)],
        )


@rule("step_batch_size_schedule", "seq_length")
def check_batch_schedule_samples(config: Config, world_size: int) -> Iterator[Finding]:
    """Two entries of --step-batch-size-schedule must not start at the same sample. Their start in tokens is converted to whole
    samples of --seq-length tokens."""
    steps, seq_length = parse_batch_schedule_or_empty(config.training.step_batch_size_schedule), config.model.seq_length
    if seq_length is None:
        return
    samples = [step.tokens // seq_length for step in steps]
    for index in range(1, len(steps)):
        if samples[index] == samples[index - 1]:
            merged = [*steps[: index - 1], _with_start(steps[index - 1].tokens, steps[index])]
            yield Finding(
                f"--step-batch-size-schedule: {steps[index - 1]} and {steps[index]} start at the same sample of "
                f"--seq-length {seq_length}.",
                [create_change(step_batch_size_schedule=format_batch_schedule(merged))] if index + 1 == len(steps) else [],
            )


@rule("step_batch_size_schedule", "micro_batch_size", depends_on=MODEL_PARALLEL_SIZES)
def check_batch_schedule_divisible(config: Config, world_size: int) -> Iterator[Finding]:
    """Batch sizes in --step-batch-size-schedule must be divisible by --micro-batch-size x data-parallel size, because a step is a
    whole number of microbatches on each data rank. Entries that the run has already passed can be removed; the first remaining
    entry then starts at 0."""
    steps, micro = parse_batch_schedule_or_empty(config.training.step_batch_size_schedule), config.training.micro_batch_size
    data_size = get_data_parallel_size(config, world_size)
    unit = micro * (data_size or 1)
    invalid = [step for step in steps if step.batch_size % unit]
    if not invalid:
        return
    samples_per_rank, remainder = divmod(invalid[0].batch_size, data_size or 1)
    micro_batch_candidates = [] if remainder else find_divisors(samples_per_rank)
    invalid_text = ", ".join(map(str, invalid))
    yield Finding(
        f"--step-batch-size-schedule: {invalid_text} {'is' if len(invalid) == 1 else 'are'} not divisible by "
        f"--micro-batch-size {micro}{'' if data_size is None else f' x {data_size} data ranks = {unit}'}.",
        [
            _round_up_candidates(steps, unit),
            _drop_start_candidates(steps, unit),
            try_values("micro_batch_size", micro, micro_batch_candidates),
        ],
    )


def _round_up_candidates(steps: Sequence[BatchStep], unit: int) -> list[Change]:
    """Return a candidate change in which all batch sizes of --step-batch-size-schedule are rounded up to multiples of `unit`."""
    rounded = [BatchStep(step.tokens, -(-step.batch_size // unit) * unit) for step in steps]
    return [create_change(step_batch_size_schedule=format_batch_schedule(rounded))]


def _drop_start_candidates(steps: Sequence[BatchStep], unit: int) -> list[Change]:
    """Return a candidate change that drops the start of --step-batch-size-schedule, up to the last batch size that is not a
    multiple of `unit`. The list is empty if no batch size would remain."""
    first = max(index for index, step in enumerate(steps) if step.batch_size % unit) + 1
    return (
        [create_change(step_batch_size_schedule=format_batch_schedule([_with_start(0, steps[first]), *steps[first + 1 :]]))]
        if first < len(steps)
        else []
    )


def _with_start(tokens: int, step: BatchStep) -> BatchStep:
    return BatchStep(tokens, step.batch_size)
