"""Facts about a run that its report, its loss plot and their summaries show, from the history file of the run. Each number that
several of them print is defined here once.

The last training loss is that of the last log line: the mean over the steps since the log line before. The log, the report, the
picture `loss.png` and the summary print this number.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from megatron.metrics.history import History
from megatron.metrics.log_line import format_compact, format_time
from megatron_lab.monitoring.idle_time import is_complete_end, is_end_without_training

VALIDATION = "validation_loss"
"""Key of the validation loss in the history file. With several validation sets it is the mean of the sets, and
`validation_loss/NAME` is the loss of the set NAME."""
_GENERIC_FOLDERS = re.compile(
    r"(checkpoints?|ckpts?|runs?|outputs?|out|saved?|models?|train(ing)?|results?|logs?|tensorboard|tb|tmp|temp|data|exp(eriments?)?)?"
    r"[-_.]?\d*",
    re.IGNORECASE,
)
"""Names of folders that many runs have, and that therefore do not identify a run."""
_MAX_NAME_COMPONENTS = 4
_MAX_SUMMARY_LOSSES = 8
"""Maximum number of losses of a validation set in the summary: the first and the last ones."""


@dataclass(frozen=True)
class Run:
    """One run of a report: its folder, its name in the report, and the content of its history file."""

    folder: Path
    name: str
    """Name of the run in the report: the end of its path, as long as needed to identify the run."""
    history: History

    @property
    def last_start(self) -> Mapping[str, Any]:
        """Line of the history about the last start; empty without a start."""
        return self.history.starts[-1] if self.history.starts else {}

    @property
    def description(self) -> str:
        """Size and layers of the model, such as "1.24B parameters, 16 layers"; empty if the history does not have them."""
        layers = self.last_start.get("config", {}).get("model", {}).get("num_layers")
        size = self.last_start.get("parameters")
        parts = [f"{format_compact(size)} parameters" if size else "", f"{layers} layer{'s' * (layers != 1)}" if layers else ""]
        return ", ".join(part for part in parts if part)


def name_runs(folders: Sequence[Path], histories: Sequence[History]) -> list[Run]:
    """Build the runs of a report from their folders and histories.

    The name of a run is the end of its path. It has as few path components as distinguish the runs, and further components while
    the first one is a name that many folders have, such as `checkpoints`.
    """
    paths = [folder.absolute() for folder in folders]
    num_components = next(n for n in range(1, 99) if len({path.parts[-n:] for path in paths}) == len(set(paths)))
    names = ["/".join(path.parts[-_count_name_components(path, num_components) :]) for path in paths]
    return [Run(path, name, history) for path, name, history in zip(paths, names, histories, strict=True)]


def _count_name_components(path: Path, num_components: int) -> int:
    limit = min(max(num_components, _MAX_NAME_COMPONENTS), len(path.parts) - 1)  # without the root
    while num_components < limit and _GENERIC_FOLDERS.fullmatch(path.parts[-num_components]):
        num_components += 1
    return num_components


class LastLoss(NamedTuple):
    """Training loss of the last log line of a run."""

    value: float
    iteration: int
    num_steps: int
    """Number of steps over which `value` is the mean."""

    def __str__(self) -> str:
        return format_loss(self.value)

    @property
    def definition(self) -> str:
        """Definition of `value`, for readers of a report."""
        return "last log line" if self.num_steps == 1 else f"last log line, mean of {self.num_steps:,} steps"


def find_last_loss(history: History) -> LastLoss | None:
    """Return the training loss of a run's last log line that has one. If there is no such line, return the loss of the last step;
    None if no step has a loss."""
    for index in range(len(history.logs) - 1, -1, -1):
        loss, iteration = history.logs[index].get("lm_loss"), history.logs[index]["iteration"]
        if isinstance(loss, int | float):
            starts = [record["iteration"] for record in history.starts if record["iteration"] < iteration]
            earlier_lines = [history.logs[index - 1]["iteration"]] if index else []
            return LastLoss(loss, iteration, iteration - max([*starts, *earlier_lines], default=iteration - 1))
    steps = ((step.lm_loss, step.iteration) for step in reversed(history.steps) if step.lm_loss is not None)
    return next((LastLoss(loss, iteration, 1) for loss, iteration in steps), None)


def format_loss(loss: float) -> str:
    """Format a loss as the log lines do."""
    return f"{loss:.3f}"


def list_validation_sets(history: History) -> list[str]:
    """Return the keys of the validation losses in the history: `validation_loss`, then `validation_loss/NAME` of each validation
    set in the order of the first evaluation that has it."""
    keys = dict.fromkeys(key for record in history.evaluations for key in record if _is_validation_key(key))
    return sorted(keys, key=lambda key: key != VALIDATION)


def _is_validation_key(key: str) -> bool:
    return key == VALIDATION or key.startswith(f"{VALIDATION}/")


def name_validation_set(key: str, keys: Sequence[str]) -> str:
    """Return the name of a validation loss for readers.

    Args:
        key: key of the loss in the history.
        keys: all keys of validation losses of the run.
    """
    if key != VALIDATION:
        return f"validation {key.removeprefix(f'{VALIDATION}/')}"
    return "validation" if len(keys) == 1 else "validation (mean)"


def name_validation_loss(key: str, keys: Sequence[str]) -> str:
    """Return the name of a validation loss for tables and summaries, such as "validation loss code". The arguments are those of
    `name_validation_set`."""
    return name_validation_set(key, keys).replace("validation", "validation loss", 1)


def list_evaluation_losses(history: History, key: str = VALIDATION) -> list[tuple[int, float]]:
    """Return (iteration, loss) of each evaluation that has the loss `key`."""
    return [(record["iteration"], record[key]) for record in history.evaluations if isinstance(record.get(key), int | float)]


def list_timed_logs(history: History) -> list[Mapping[str, Any]]:
    """Return the log lines whose times are typical of the run: without the first line of each start, whose steps create
    connections, compile and fill caches. If there is no other line, return all."""
    first_lines, index = set[int](), 0
    for start in history.starts:
        while index < len(history.logs) and history.logs[index]["iteration"] <= start["iteration"]:
            index += 1
        first_lines.add(index)
    return [record for index, record in enumerate(history.logs) if index not in first_lines] or list(history.logs)


def compute_median_tokens_per_s(history: History) -> float | None:
    """Return the median of the tokens per second over the log lines (`list_timed_logs`); None if no line has them."""
    return _compute_median([record.get("tokens_per_s") for record in list_timed_logs(history)])


def compute_median_mfu(history: History) -> float | None:
    """Return the median of the model FLOPs utilization over the log lines (`list_timed_logs`), from 0 to 1; None if no line has
    it."""
    peak_flops = history.starts[-1].get("peak_flops") if history.starts else None
    values = []
    for record in list_timed_logs(history):
        tflops, mfu = record.get("tflops_per_device"), record.get("mfu")
        values.append(mfu if mfu is not None or not peak_flops or not tflops else 1e12 * tflops / peak_flops)
    return _compute_median(values)


def _compute_median(values: Sequence[Any]) -> float | None:
    numbers = [value for value in values if isinstance(value, int | float) and math.isfinite(value)]
    return statistics.median(numbers) if numbers else None


def format_ranks(start: Mapping[str, Any]) -> str:
    """Format the number of ranks and the device of a start of the run."""
    num_ranks = start.get("world_size", "?")
    return f"{num_ranks} rank{'s' * (num_ranks != 1)} on {start.get('device', '?')}"


def format_state(history: History) -> str:
    """Return a text that says how the run ended after its last start or, if no end is recorded, when it last wrote to its
    history."""
    records = [*history.starts, *history.logs, *history.events, *history.evaluations]
    last_time = max((record["time"] for record in records), default=0.0)
    end_event = find_end(history)
    if end_event is not None:
        return f"{end_event['words']}; {format_seconds_since_1970(end_event['time'])}"
    return f"running, or killed; last entry in the history {format_seconds_since_1970(last_time)}"


def find_end(history: History) -> Mapping[str, Any] | None:
    """Return the event with which the run ended after its last start; None if it is running or was killed."""
    start_time = history.starts[-1]["time"] if history.starts else 0.0
    ends = (record for record in reversed(history.events) if record["event"] == "end" and record["time"] >= start_time)
    return next(ends, None)


def has_ended_early(history: History) -> bool:
    """Return whether the run has stopped before the end that its settings ask for."""
    end_event = find_end(history)
    return end_event is not None and not is_complete_end(end_event) and not is_end_without_training(end_event)


def format_seconds_since_1970(seconds: float) -> str:
    """Format a time of the history file as the date and time in this machine's zone, with the zone."""
    return format_time(datetime.fromtimestamp(seconds))


def summarize(history: History) -> list[str]:
    """Return a text line with the first and the last training loss of a run. If the run has evaluated, add a line for each
    validation set with all its losses."""
    first_step, last_loss = next((step for step in history.steps if step.lm_loss is not None), None), find_last_loss(history)
    if first_step is None or first_step.lm_loss is None or last_loss is None:
        return ["the history has no step with a loss"]
    lines = [
        f"training loss {format_loss(first_step.lm_loss)} at iteration {first_step.iteration}, "
        f"{last_loss} at iteration {last_loss.iteration} ({last_loss.definition})"
    ]
    keys = list_validation_sets(history)
    for key in keys:
        losses = [f"{format_loss(loss)} at iteration {iteration}" for iteration, loss in list_evaluation_losses(history, key)]
        if len(losses) > _MAX_SUMMARY_LOSSES:
            losses[1 : 1 - _MAX_SUMMARY_LOSSES] = [f"... ({len(losses) - _MAX_SUMMARY_LOSSES:,} more)"]
        separator = " " if len(keys) == 1 else ": "
        lines += [f"{name_validation_loss(key, keys)}{separator}{', '.join(losses)}"] if losses else []
    return lines


def is_loss_lower(history: History) -> bool:
    """Return whether the last training loss of a run is lower than that of its first step."""
    first_step, last_loss = next((step for step in history.steps if step.lm_loss is not None), None), find_last_loss(history)
    if first_step is None or first_step.lm_loss is None or last_loss is None:
        return False
    return last_loss.iteration > first_step.iteration and last_loss.value < first_step.lm_loss
