"""Duration and disk space of training commands, estimated from the measured speed of an earlier run."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.config.config import Config
from megatron.config.regular_file import open_regular, parse_json
from megatron.metrics.history import HISTORY_FILE, History, StepRecord
from megatron.metrics.log_line import format_duration
from megatron.spec.counts import count_flops_per_token, count_parameters

_TAIL_BYTES = 1 << 18
"""Bytes at the end of a history file that contain the latest steps."""
_MAX_STEPS = 100
"""Number of latest steps whose median duration is the speed of a run."""


def read_seconds_per_sample(folder: str | Path) -> float | None:
    """Return the median duration of the latest steps of a run, divided by the number of sequences of a step. Return None if the
    history file of the run (`history.jsonl`) is missing or has no steps. Only the end of the file is read."""
    records = []
    try:
        with open_regular(Path(folder) / HISTORY_FILE) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in lines:
        try:
            record = parse_json(line)
            if record["kind"] == "steps":
                records += [seconds / record["batch"] for seconds in record["seconds"] if seconds is not None]
        except (ValueError, KeyError, TypeError, ArithmeticError):  # the first line may be partial
            continue
    return statistics.median(records[-_MAX_STEPS:]) if records else None


@dataclass(frozen=True)
class RunEstimate:
    """Estimate of a training command: seconds of its remaining steps, and bytes that it writes."""

    min_seconds: float
    max_seconds: float
    checkpoint_bytes: float
    """Bytes of one checkpoint."""
    num_checkpoints: int
    """Number of checkpoints that exist at the end."""

    def format(self) -> str:
        """Return the estimate for a user, for example "3 to 8 min, 92 MB of disk"."""
        low, high = format_duration(self.min_seconds), format_duration(self.max_seconds)
        low_value, low_unit = low.split(" ", 1)
        has_same_unit = high.split(" ", 1)[1] == low_unit
        duration = low if low == high else f"{low_value if has_same_unit else low} to {high}"
        return f"{duration}, {format_megabytes(self.checkpoint_bytes * self.num_checkpoints)} of disk"


def estimate_run(
    history: History, checkpoint_bytes: int, measured: Config, config: Config, vocab_size: int, start_iteration: int
) -> RunEstimate:
    """Estimate the duration and the disk space of a training command on the machine of an earlier run.

    With the same model, a step takes as long as in the earlier run. With another model, the duration lies between two bounds: the
    ratio of the numbers of layers, if the time of a step is mostly overhead per operation, and the ratio of FLOPs. A checkpoint has
    as many bytes per parameter as that of the earlier run.

    Args:
        history: history of the earlier run.
        checkpoint_bytes: size of a checkpoint of the earlier run.
        measured: settings of the earlier run.
        config: settings of the command.
        vocab_size: rows of the word embedding, without padding, in both runs.
        start_iteration: iteration from which the command continues.

    Raises:
        ValueError: the history has no steps with a duration, or the command has no number of iterations.
    """
    step_seconds = [step.seconds for step in _skip_first_steps(history) if step.seconds is not None]
    if not step_seconds or config.training.train_iters is None:
        raise ValueError("the run has no measured steps, or the command has no --train-iters: its duration cannot be estimated")
    seconds = statistics.median(step_seconds[-_MAX_STEPS:])
    iterations = max(0, config.training.train_iters - start_iteration)
    factors = [1.0, 1.0]
    if config.model != measured.model:
        flops_ratio = count_flops_per_token(config.model, vocab_size) / count_flops_per_token(measured.model, vocab_size)
        factors = sorted((flops_ratio, config.model.num_layers / measured.model.num_layers))
    batch_ratio = (config.training.global_batch_size or 1) / (measured.training.global_batch_size or 1)
    overhead_seconds = _measure_overhead(history)
    low, high = (iterations * seconds * batch_ratio * factor + overhead_seconds for factor in factors)
    parameter_ratio = count_parameters(config.model, vocab_size) / count_parameters(measured.model, vocab_size)
    interval = config.checkpoint.save_interval
    num_checkpoints = math.ceil(iterations / interval) if interval else 1
    return RunEstimate(low, high, checkpoint_bytes * parameter_ratio, num_checkpoints)


def measure_folder(folder: Path) -> int:
    """Return the total size of the files in a folder, in bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def find_latest_checkpoint(folder: Path) -> Path | None:
    """Return the folder of the newest checkpoint in a save folder, or None if the folder has no checkpoint."""
    return max(folder.glob("iter_*"), default=None)


def _skip_first_steps(history: History) -> Iterator[StepRecord]:
    """Yield the steps of a run, without the first step of each start, which also creates connections."""
    starts = {int(start["iteration"]) for start in history.starts}
    yield from (step for step in history.steps if step.iteration - 1 not in starts)


def _measure_overhead(history: History) -> float:
    """Return the seconds of the last start of a run outside of its steps: start-up, evaluations, saves and the report."""
    ends = [event["time"] for event in history.events if event["event"] == "end"]
    if not history.starts or not ends:
        return 0.0
    start = history.starts[-1]
    step_seconds = sum(step.seconds or 0.0 for step in history.steps if step.iteration > int(start["iteration"]))
    return max(0.0, ends[-1] - start["time"] - step_seconds)


def format_megabytes(num_bytes: float) -> str:
    """Format a size of files in whole megabytes, or in gigabytes."""
    megabytes = num_bytes / 1e6
    return f"{megabytes / 1000:.1f} GB" if megabytes >= 1000 else f"{max(1, round(megabytes))} MB"
