"""Rules about the schedules of learning rate and weight decay, about the loss scale, and about who updates."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from megatron.config.checks.finding import Finding, change, exclusive, positive, rule, shown, value_of, without
from megatron.config.config import Config

_UNITS = ("lr_decay", "lr_warmup", "lr_wsd_decay")
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
            flag = f"--{schedule.replace('_', '-')}"
            yield Finding(
                (f"{schedule}_{other}", f"train_{mine}"),
                f"{shown(config, f'{schedule}_{other}')} does not go with --train-{mine}.",
                f"A run measured in {mine} has its schedule in {mine}: use {flag}-{mine}.",
            )


@rule(*_LENGTHS, "lr_warmup_fraction")
def schedule_is_given_once(config: Config, world_size: int) -> Iterator[Finding]:
    """A length of the schedule is given in one way."""
    for schedule in _UNITS:
        fraction = ["lr_warmup_fraction"] if schedule == "lr_warmup" else []
        lengths = [f"{schedule}_iters", f"{schedule}_samples", *fraction]
        yield from exclusive(config, filter(partial(value_of, config), lengths), "Each sets the same length.")


@rule("lr", "min_lr", "lr_warmup_init")
def rates_are_ordered(config: Config, world_size: int) -> Iterator[Finding]:
    """--lr is the highest rate."""
    optimizer = config.optimizer
    for field in ("min_lr", "lr_warmup_init"):
        rate = getattr(optimizer, field)
        if optimizer.lr is not None and positive(optimizer.lr) and rate > optimizer.lr:
            yield Finding(
                (field, "lr"),
                f"{shown(config, field)} is above --lr {optimizer.lr}.",
                "--lr is the highest learning rate of the run.",
                ((change(**{field: optimizer.lr}),), (change(lr=rate),)),
            )


@rule(*_RUN, *_LENGTHS, "lr_warmup_fraction", "lr_decay_style")
def phases_fit_decay(config: Config, world_size: int) -> Iterator[Finding]:
    """Warm-up ends before the decay does, and leaves room for the final decay of WSD."""
    optimizer, training = config.optimizer, config.training
    for unit, run in (("iters", training.train_iters), ("samples", training.train_samples)):
        given: int | None = getattr(optimizer, f"lr_decay_{unit}")
        length = run if given is None else given
        warmup = getattr(optimizer, f"lr_warmup_{unit}")
        final = getattr(optimizer, f"lr_wsd_decay_{unit}") if optimizer.lr_decay_style == "WSD" else None
        if length is None or optimizer.lr_decay_style == "constant" or not positive(run, length):
            continue
        fields = (f"lr_warmup_{unit}", f"lr_decay_{unit}", f"train_{unit}")
        decays_over = f"the {length} {unit} of the decay (--lr-decay-{unit}, by default --train-{unit})"
        if warmup >= length:
            yield Finding(
                fields,
                f"{shown(config, f'lr_warmup_{unit}')} is not below {decays_over}.",
                "The learning rate first warms up, then decays.",
                ((change(**{f"lr_warmup_{unit}": length - 1}),), (change(**{f"lr_decay_{unit}": warmup + 1}),)),
            )
            continue
        if optimizer.lr_warmup_fraction is not None and 0 <= optimizer.lr_warmup_fraction < 1:
            warmup = optimizer.lr_warmup_fraction * length
        room = int(length - warmup)
        if final is not None and positive(final) and final > room:
            yield Finding(
                (*fields, f"lr_wsd_decay_{unit}", "lr_warmup_fraction"),
                f"{shown(config, f'lr_wsd_decay_{unit}')} does not fit after a warm-up of {warmup:g} into {decays_over}.",
                "The final decay of WSD is the last part of the decay's length.",
                ((change(**{f"lr_wsd_decay_{unit}": room}),) if room > 0 else (),),
            )


@rule("lr_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples")
def wsd_has_final_decay(config: Config, world_size: int) -> Iterator[Finding]:
    """WSD needs the length of its final decay."""
    optimizer = config.optimizer
    if optimizer.lr_decay_style == "WSD" and not (optimizer.lr_wsd_decay_iters or optimizer.lr_wsd_decay_samples):
        yield Finding(
            ("lr_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples"),
            "--lr-decay-style WSD needs the length of its final decay.",
            "Give --lr-wsd-decay-iters with --train-iters, or --lr-wsd-decay-samples with --train-samples.",
        )


@rule("weight_decay_incr_style", "weight_decay", "start_weight_decay", "end_weight_decay")
def weight_decay_has_ends(config: Config, world_size: int) -> Iterator[Finding]:
    """A weight decay that changes has a start and an end."""
    optimizer = config.optimizer
    style = optimizer.weight_decay_incr_style
    missing = [field for field in ("start_weight_decay", "end_weight_decay") if getattr(optimizer, field) is None]
    if style != "constant" and missing:
        needs = " and ".join(f"--{field.replace('_', '-')}" for field in missing)
        yield Finding(
            ("weight_decay_incr_style", *missing),
            f"--weight-decay-incr-style {style} needs {needs}.",
            "Weight decay goes from the start to the end over the run.",
            (
                (change(**dict.fromkeys(missing, optimizer.weight_decay)),),
                (change(weight_decay_incr_style="constant"),),
            ),
        )


@rule("fp16", "bf16", "fp64")
def one_precision(config: Config, world_size: int) -> Iterator[Finding]:
    """There is one dtype."""
    yield from exclusive(config, ("fp16", "bf16", "fp64"), "Each sets the dtype of the model; without any it is float32.")


@rule("fp16", "loss_scale", "initial_loss_scale", "min_loss_scale")
def loss_scales_are_ordered(config: Config, world_size: int) -> Iterator[Finding]:
    """The dynamic loss scale starts at or above its smallest value."""
    precision = config.precision
    if not precision.fp16 or precision.loss_scale is not None:
        return
    if positive(precision.min_loss_scale, precision.initial_loss_scale) and precision.min_loss_scale > precision.initial_loss_scale:
        yield Finding(
            ("min_loss_scale", "initial_loss_scale"),
            f"--min-loss-scale {precision.min_loss_scale} is above --initial-loss-scale {precision.initial_loss_scale}.",
            "The loss scale starts at or above its smallest value.",
            (
                (change(min_loss_scale=precision.initial_loss_scale),),
                (change(initial_loss_scale=precision.min_loss_scale),),
            ),
        )


@rule("use_apex", "optimizer_cpu_offload", "optimizer_offload_fraction", "device", "fp64")
def apex_updates_on_cuda(config: Config, world_size: int) -> Iterator[Finding]:
    """The kernels of apex take what lies on CUDA devices, and no float64."""
    if not config.optimizer.use_apex:
        return
    for field, given, others in (
        (
            "optimizer_cpu_offload",
            config.optimizer.optimizer_cpu_offload,
            (without(config, "optimizer_offload_fraction", optimizer_cpu_offload=False),),
        ),
        ("device", config.parallel.device == "cpu", (change(device="cuda"),)),
        ("fp64", config.precision.fp64, (change(fp64=False),)),
    ):
        if given:
            yield Finding(
                ("use_apex", field),
                f"--use-apex and {shown(config, field)} exclude each other.",
                "NVIDIA apex updates float32 parameters on CUDA devices only.",
                ((change(use_apex=False),), others),
            )
