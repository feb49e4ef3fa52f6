"""Idle time of a run: time between its starts that no failure took from it, and that its goodput leaves out.

A run is idle while it is finished, until it is started again to be extended or to go back to an earlier checkpoint. A run that
another one leaves as a branch (--load and --save are different folders) loses nothing either.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from megatron.config.outputs import get_run_folder
from megatron.config.regular_file import open_regular, parse_json
from megatron.metrics.history import HISTORY_FILE

if TYPE_CHECKING:
    from megatron.training.features import RunComponents


_MAX_GAP_S = 366 * 24 * 3600.0
"""Seconds between a checkpoint and a start from which on one of the two clocks must have been wrong."""


def measure_gap_seconds(run: RunComponents, saved_at: float, start_time: float) -> float:
    """Return the seconds between the checkpoint from which a run continues and its start that count in the goodput of the run.

    Only rank 0 reads the history of the run. The other ranks do not report their time.

    Args:
        saved_at: time at which the checkpoint was saved, in seconds since 1970.
        start_time: time of the start, in seconds since 1970.
    """
    config = run.config.checkpoint
    if config.load is None or config.save is None or os.path.realpath(config.load) != os.path.realpath(config.save):
        return 0.0  # a branch: the run that it leaves may still train
    folder = get_run_folder(config, run.config.logging)
    records = _read_starts_and_events(folder) if folder is not None and run.context.rank == 0 else []
    if not records and _was_complete(run):
        return 0.0
    return limit_gap(start_time - saved_at, sum_idle_seconds(records, saved_at, start_time))


def limit_gap(gap_s: float, idle_s: float) -> float:
    """Return the seconds of a gap without the idle time. If the gap is negative or longer than a year, the clock of this machine or
    the clock of the checkpoint's machine was wrong, and the gap counts as 0."""
    return max(0.0, gap_s - idle_s) if gap_s <= _MAX_GAP_S else 0.0


def _was_complete(run: RunComponents) -> bool:
    """Return whether the checkpoint from which a run continues is at the end that the settings in it ask for."""
    settings = run.control.checkpoint.get("config")
    training = settings.get("training") if isinstance(settings, dict) else None
    if not isinstance(training, dict):
        return False
    progress = run.progress
    return progress.iteration == training.get("train_iters") or progress.consumed_samples == training.get("train_samples")


def sum_idle_seconds(records: Iterable[Mapping[str, Any]], saved_at: float, start_time: float) -> float:
    """Return the seconds between a checkpoint and a start in which the run was finished.

    A finished run is idle from its end to its next start, whatever happens then: that start may fail, or may continue from an
    earlier checkpoint.

    Args:
        records: starts and events of the run before this start, in the order of its history file.
        saved_at: time at which the checkpoint was saved, in seconds since 1970.
        start_time: time of the start, in seconds since 1970.
    """
    idle_s, idle_since, was_idle = 0.0, None, False
    for record in records:
        if record["kind"] == "start":
            was_idle = idle_since is not None
            if idle_since is not None:
                idle_s, idle_since = idle_s + max(0.0, min(record["time"], start_time) - idle_since), None
        elif is_complete_end(record) or (was_idle and is_end_without_training(record)):
            idle_since = max(saved_at, record["time"])
    return idle_s if idle_since is None else idle_s + max(0.0, start_time - idle_since)


def is_complete_end(record: Mapping[str, Any]) -> bool:
    """Return whether a line of the history file is the end of a run that trained as long as its settings asked for."""
    if record.get("event") != "end":
        return False
    # Histories of earlier versions do not have the key.
    return bool(record.get("complete", str(record.get("words")).startswith("done after ")))


def is_end_without_training(record: Mapping[str, Any]) -> bool:
    """Return whether a line of the history file is the end of a start that only evaluated. The run is then as complete
    as before."""
    return record.get("event") == "end" and record.get("complete", False) is None


def _read_starts_and_events(folder: str) -> Sequence[Mapping[str, Any]]:
    """Return the lines about starts and events in the history file of a run. Empty if there is no such file, or if a line of them
    is damaged."""
    try:
        with io.BufferedReader(cast(io.RawIOBase, open_regular(Path(folder) / HISTORY_FILE))) as file:
            records = [parse_json(line) for line in file if line.startswith((b'{"kind": "start"', b'{"kind": "event"'))]
        return records if all(type(record["time"]) in (int, float) for record in records) else []
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
