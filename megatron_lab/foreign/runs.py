"""The state of a run of Megatron-LM as that of a run here: its counts, schedules and loss scale, and its settings."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron.checkpoint.errors import CheckpointError
from megatron.config.config import Config
from megatron.config.data import TOKENIZER_SETTINGS, DataConfig
from megatron.config.flags import build, flags
from megatron.config.training import OptimizerConfig
from megatron.training.progress import LearningSchedule, Progress, ScheduleLengths
from megatron_lab.foreign.megatron_source import WEIGHTS_ALONE, MegatronSource, SavedRun

_TOPICS = ("training", "optimizer", "precision", "parallel", "data")
"""Topics of settings that mean the same there. The model's are read apart."""
_OLD_NAMES = {
    "max_lr": ("start_lr",),
    "lr_decay_style": ("decay_style",),
    "lr_warmup_steps": ("warmup_steps", "warmup_iter"),
    "lr_decay_steps": ("decay_steps", "end_iter"),
    "num_steps": ("num_iters",),
}
"""Names in schedules, with those of older programs."""


def settings_of(source: MegatronSource, data: DataConfig) -> Config:
    """The settings of the run, as far as they have the same name here.

    Args:
        data: the settings of the tokenizer.
    """
    given = {name: value for name, value in vars(source.args).items() if value is not None}
    parts: dict[str, dict[str, Any]] = {topic: {} for topic in _TOPICS}
    for flag in flags().values():
        if flag.topic in _TOPICS and flag.field in given and flag.field not in ("tokenizer_type", *TOKENIZER_SETTINGS):
            with contextlib.suppress(ValueError):
                parts[flag.topic][flag.field] = flag.from_plain(given[flag.field])
    found = build(parts)
    mine = {field: getattr(found.data, field) for field in parts["data"]}
    return dataclasses.replace(found, model=source.model, data=dataclasses.replace(data, **{**mine, "data_order": "megatron"}))


def state_of(run: SavedRun, settings: Config, where: str) -> dict[str, Any]:
    """What `state.json` of a checkpoint holds.

    Args:
        settings: of the run, from `settings_of`.
        where: the checkpoint, for messages.

    Raises:
        CheckpointError: a count is missing or is none.
    """
    try:
        given, schedule = vars(run.args), run.schedule
        progress = Progress(
            iteration=run.iteration,
            consumed_samples=int(given["consumed_train_samples"]),
            updated_samples=int(_of(schedule, "num_steps")),
            skipped_iterations=max(0, run.iteration - run.updates),
        )
        scaler: dict[str, Any] = {"kind": "constant", "scale": 1.0}
        if run.scaler:
            scaler = {
                "kind": "dynamic",
                "scale": float(run.scaler["scale"]),
                "clean_steps": int(run.scaler["growth_tracker"]),
                "hysteresis_left": int(run.scaler["hysteresis_tracker"]),
            }
        learning = _schedule_of(schedule, given, settings)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: its counts, schedule or loss scale cannot be read ({error!r}). {WEIGHTS_ALONE}") from error
    return {
        "progress": progress.to_json(),
        "optimizer_updates": run.updates,
        "scaler": scaler,
        "schedule": learning.to_json(),
        "has_optimizer": True,
        "ema_decay": None,
    }


def _schedule_of(schedule: Mapping[str, Any], given: Mapping[str, Any], settings: Config) -> LearningSchedule:
    """Rates and lengths as the run had them. Its schedules count samples, as here."""
    optimizer: OptimizerConfig = settings.optimizer
    changes = schedule["wd_incr_style"] != "constant"
    optimizer = dataclasses.replace(
        optimizer,
        lr=float(_of(schedule, "max_lr")),
        min_lr=float(schedule["min_lr"]),
        lr_decay_style=str(_of(schedule, "lr_decay_style")),  # type: ignore[arg-type]
        weight_decay=optimizer.weight_decay if changes else float(schedule["start_wd"]),
        start_weight_decay=float(schedule["start_wd"]) if changes else None,
        end_weight_decay=float(schedule["end_wd"]) if changes else None,
        weight_decay_incr_style=str(schedule["wd_incr_style"]),  # type: ignore[arg-type]
    )
    last = 0
    if optimizer.lr_decay_style == "WSD":
        samples, steps = given.get("lr_wsd_decay_samples"), given.get("lr_wsd_decay_iters")
        last = int(samples) if samples else int(steps) * int(given["global_batch_size"])  # type: ignore[arg-type]
    return LearningSchedule(
        optimizer,
        ScheduleLengths(
            warmup_samples=float(_of(schedule, "lr_warmup_steps")),
            decay_samples=int(_of(schedule, "lr_decay_steps")),
            wsd_decay_samples=last,
            total_samples=int(schedule["wd_incr_steps"]),
        ),
    )


def _of(schedule: Mapping[str, Any], name: str) -> Any:
    """A number of the schedules', under its name of now or an older one."""
    names = (name, *_OLD_NAMES.get(name, ()))
    return schedule[next((each for each in names if each in schedule), name)]
