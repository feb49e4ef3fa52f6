"""Conversion of a Megatron-LM run to a run of this framework: its settings, counters, schedules and loss scale."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron.checkpoint.errors import CheckpointError
from megatron.config.config import Config
from megatron.config.data import TOKENIZER_SETTINGS, DataConfig
from megatron.config.flags import build_config, get_flags
from megatron.config.training import OptimizerConfig
from megatron.training.progress import LearningSchedule, Progress, ScheduleLengths
from megatron_lab.foreign.megatron_source import WEIGHTS_ONLY_HINT, MegatronSource, SavedRun

_SHARED_TOPICS = ("training", "optimizer", "precision", "parallel", "data")
"""Topics whose settings mean the same in Megatron-LM. `build_model_config` converts the settings of the model."""
_FORMER_NAMES = {
    "max_lr": ("start_lr",),
    "lr_decay_style": ("decay_style",),
    "lr_warmup_steps": ("warmup_steps", "warmup_iter"),
    "lr_decay_steps": ("decay_steps", "end_iter"),
    "num_steps": ("num_iters",),
}
"""Keys of the schedule state, with the names that older versions of Megatron-LM used."""


def convert_settings(source: MegatronSource, data: DataConfig) -> Config:
    """Convert the arguments of a Megatron-LM run to settings of this framework. Arguments with the same name and meaning in this
    framework keep their values; all others are ignored.

    Args:
        source: checkpoint of the run.
        data: settings of the tokenizer.
    """
    args = {name: value for name, value in vars(source.args).items() if value is not None}
    values: dict[str, dict[str, Any]] = {topic: {} for topic in _SHARED_TOPICS}
    for flag in get_flags().values():
        if flag.topic in _SHARED_TOPICS and flag.field in args and flag.field not in ("tokenizer_type", *TOKENIZER_SETTINGS):
            with contextlib.suppress(ValueError):
                values[flag.topic][flag.field] = flag.from_json(args[flag.field])
    config = build_config(values)
    converted_data = {field: getattr(config.data, field) for field in values["data"]}
    return dataclasses.replace(
        config, model=source.model, data=dataclasses.replace(data, **{**converted_data, "data_order": "megatron"})
    )


def convert_run_state(run: SavedRun, config: Config, name: str) -> dict[str, Any]:
    """Convert the state of a Megatron-LM run to the content of `state.json` in a checkpoint of this framework.

    Args:
        run: state of the Megatron-LM run.
        config: settings of the run, from `convert_settings`.
        name: name of the checkpoint, for error messages.

    Raises:
        CheckpointError: a counter is missing or is not a number.
    """
    try:
        args, schedule = vars(run.args), run.schedule
        progress = Progress(
            iteration=run.iteration,
            consumed_samples=int(args["consumed_train_samples"]),
            updated_samples=int(_get_schedule_value(schedule, "num_steps")),
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
        learning_schedule = _convert_schedule(schedule, args, config)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{name}: the counters, the schedule or the loss scale of the run cannot be read ({error!r}). {WEIGHTS_ONLY_HINT}"
        ) from error
    return {
        "progress": progress.to_json(),
        "optimizer_updates": run.updates,
        "scaler": scaler,
        "schedule": learning_schedule.to_json(),
        "has_optimizer": True,
        "ema_decay": None,
    }


def _convert_schedule(schedule: Mapping[str, Any], args: Mapping[str, Any], config: Config) -> LearningSchedule:
    """Convert the saved state of the learning-rate and weight-decay schedules. Both programs measure the lengths of schedules in
    samples.

    Args:
        schedule: state of the schedules in the Megatron-LM checkpoint.
        args: arguments of the Megatron-LM run, by name.
        config: settings of the run, from `convert_settings`.
    """
    optimizer: OptimizerConfig = config.optimizer
    has_increment = schedule["wd_incr_style"] != "constant"
    optimizer = dataclasses.replace(
        optimizer,
        lr=float(_get_schedule_value(schedule, "max_lr")),
        min_lr=float(schedule["min_lr"]),
        lr_decay_style=str(_get_schedule_value(schedule, "lr_decay_style")),  # type: ignore[arg-type]
        weight_decay=optimizer.weight_decay if has_increment else float(schedule["start_wd"]),
        start_weight_decay=float(schedule["start_wd"]) if has_increment else None,
        end_weight_decay=float(schedule["end_wd"]) if has_increment else None,
        weight_decay_incr_style=str(schedule["wd_incr_style"]),  # type: ignore[arg-type]
    )
    wsd_decay_samples = 0
    if optimizer.lr_decay_style == "WSD":
        samples, steps = args.get("lr_wsd_decay_samples"), args.get("lr_wsd_decay_iters")
        wsd_decay_samples = int(samples) if samples else int(steps) * int(args["global_batch_size"])  # type: ignore[arg-type]
    return LearningSchedule(
        optimizer,
        ScheduleLengths(
            warmup_samples=float(_get_schedule_value(schedule, "lr_warmup_steps")),
            decay_samples=int(_get_schedule_value(schedule, "lr_decay_steps")),
            wsd_decay_samples=wsd_decay_samples,
            total_samples=int(schedule["wd_incr_steps"]),
        ),
    )


def _get_schedule_value(schedule: Mapping[str, Any], name: str) -> Any:
    """Return a value from the saved state of the schedules. Its key is `name`, or the name that older versions of Megatron-LM
    use."""
    candidates = (name, *_FORMER_NAMES.get(name, ()))
    return schedule[next((candidate for candidate in candidates if candidate in schedule), name)]
