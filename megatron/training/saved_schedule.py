"""With which schedules of learning rate and weight decay a run goes on: its command line's, or those of its checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.checkpoint.errors import MismatchError
from megatron.checkpoint.storage import Place
from megatron.config.config import Config
from megatron.optimizer.lr_schedule import learning_rate
from megatron.training.progress import LearningSchedule, with_defaults

_FLAGS = (
    *("train_iters", "train_samples", "global_batch_size", "rampup_batch_size", "step_batch_size_schedule"),
    *("lr", "min_lr", "lr_decay_style", "lr_decay_iters", "lr_decay_samples"),
    *("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction", "lr_warmup_init"),
    *("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples"),
    *("lr_rewarm_start_iters", "lr_rewarm_start_samples", "lr_rewarm_iters", "lr_rewarm_samples", "lr_rewarm_factor"),
    *("weight_decay", "start_weight_decay", "end_weight_decay", "weight_decay_incr_style", "decoupled_lr", "decoupled_min_lr"),
)
"""Settings that the schedules follow from."""


def flags_that_differ(saved: Config, here: Config) -> list[str]:
    """The settings of the schedules that differ from those of a checkpoint, in words of the command line."""
    found = []
    for name in _FLAGS:
        there, this = ({**vars(config.training), **vars(config.optimizer)}.get(name) for config in (saved, here))
        if there != this:
            was, now = ("not given" if value is None else value for value in (there, this))
            found.append(f"--{name.replace('_', '-')} {was} in the checkpoint, {now} here")
    return found


def agreed_schedule(
    here: LearningSchedule, saved: dict[str, Any], path: Place, flags: Sequence[str] = (), updated_samples: int = 0
) -> LearningSchedule:
    """The schedule to continue with.

    Args:
        here: that of the command line.
        saved: that of the checkpoint.
        flags: what `flags_that_differ` found.
        updated_samples: the place in the schedules from which the run goes on.

    Raises:
        MismatchError: the two differ and no flag says which one counts.
    """
    if here.optimizer.takes_schedules == "saved":
        return here.with_saved(saved)
    mine, saved = here.to_json(), with_defaults(saved)
    if here.optimizer.takes_schedules == "new" or mine == saved:
        return here
    flat_mine, flat_saved = ({**d, **d["lengths"]} for d in (mine, saved))
    idle = {"lengths"}  # the run may be longer or shorter where no schedule depends on its length
    if here.optimizer.weight_decay_incr_style == "constant":
        idle.add("total_samples")
    if here.optimizer.lr_decay_style == "constant":
        idle.add("decay_samples")
    elif here.lengths.rewarm_start is not None:
        idle.discard("total_samples")  # at which the second course ends
    differing = [
        f"{name}: {flat_saved[name]} there, {flat_mine[name]} here"
        for name in flat_mine
        if name not in idle and flat_mine[name] != flat_saved[name]
    ]
    if not differing:
        return here
    old = here.with_saved(saved)
    then, now = (learning_rate(updated_samples, one.optimizer, one.lengths) for one in (old, here))
    raise MismatchError(
        f"the schedules of learning rate or weight decay differ from those of {path}:\n  "
        + "\n  ".join([*flags, *differing])
        + "\n  Say which count, by one word:\n"
        f"    --resume-schedule new    those of this command line: the learning rate goes on with {now:.3g}\n"
        f"    --resume-schedule saved  those of the checkpoint: it goes on with {then:.3g}\n"
        "  (In Megatron-LM's words: --override-opt-param-scheduler, --use-checkpoint-opt-param-scheduler.)"
    )
