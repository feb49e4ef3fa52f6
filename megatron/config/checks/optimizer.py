"""Rules about the schedules of learning rate and weight decay, about the loss scale, and about who updates."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.checks.finding import Finding, at_most, change, exclude_each_other, rule, shown, without
from megatron.config.config import Config
from megatron.config.setting import acts_with

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
            yield Finding(
                f"{shown(config, f'{schedule}_{other}')} does not go with --train-{mine}.",
                why=f"A run measured in {mine} has its schedule in {mine}: use --{schedule.replace('_', '-')}-{mine}.",
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
        needs = " and ".join(f"--{field.replace('_', '-')}" for field in missing)
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
