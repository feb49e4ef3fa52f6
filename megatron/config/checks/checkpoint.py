"""Rules about saving and resuming."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.checks.finding import Finding, change, multiples_near, positive, rule, try_values
from megatron.config.config import Config


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
    optimizer = config.optimizer
    both = ("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler")
    if optimizer.override_opt_param_scheduler and optimizer.use_checkpoint_opt_param_scheduler:
        yield Finding(
            both,
            "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler exclude each other.",
            "On resume the schedules come from the command line or from the checkpoint.",
            ((change(override_opt_param_scheduler=False), change(use_checkpoint_opt_param_scheduler=False)),),
        )
    if optimizer.use_checkpoint_opt_param_scheduler and config.checkpoint.finetune:
        yield Finding(
            ("use_checkpoint_opt_param_scheduler", "finetune"),
            "--use-checkpoint-opt-param-scheduler and --finetune exclude each other.",
            "Fine-tuning takes only the weights from the checkpoint.",
            ((change(use_checkpoint_opt_param_scheduler=False), change(finetune=False)),),
        )


@rule("pretrained_checkpoint", "finetune", "exit_on_missing_checkpoint")
def one_beginning(config: Config, world_size: int) -> Iterator[Finding]:
    """What a run does that finds no checkpoint of its own is said once."""
    checkpoint = config.checkpoint
    if checkpoint.pretrained_checkpoint is None:
        return
    begins = f"--pretrained-checkpoint {checkpoint.pretrained_checkpoint}"
    if checkpoint.finetune:
        yield Finding(
            ("pretrained_checkpoint", "finetune"),
            f"{begins} and --finetune exclude each other.",
            "--finetune takes weights from --load and counts from 0 at every start, --pretrained-checkpoint only as long as --load "
            "holds no checkpoint, so that the run can go on.",
            ((change(finetune=False), change(pretrained_checkpoint=None)),),
        )
    if checkpoint.exit_on_missing_checkpoint:
        yield Finding(
            ("pretrained_checkpoint", "exit_on_missing_checkpoint"),
            f"{begins} and --exit-on-missing-checkpoint exclude each other.",
            "One begins a run where --load holds no checkpoint, the other ends it.",
            ((change(exit_on_missing_checkpoint=False), change(pretrained_checkpoint=None)),),
        )
