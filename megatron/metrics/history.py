"""The record of a run: `history.jsonl` in its folder, from the first start to the last. Needs neither torch nor numpy.

The folder is --save, or without one on a file system --tensorboard-dir (`run_folder` of `megatron/config/outputs.py`). A start adds
to the file and removes nothing. Each line is a JSON object with `kind`, `time` (seconds since 1970) and `iteration` (steps done
since the run began); NaN and infinity are null. The kinds, with what else they have:

    start       first line of every start. `iteration` is the one from which it goes on. `format` (1), `consumed_samples`, `tokens`
                (read so far), `total_iterations`, `total_samples`, `seq_length`, `parameters`, `world_size`, `layout` (sizes by
                axis), `device` (name), `peak_flops` (FLOP/s of one device, or null), `attention`
                (`kernel`, with `milliseconds` and `failures` by kernel; null where none was measured), `config` (all settings by
                topic), `command`, `versions`
    steps       consecutive steps, each with its numbers; `iteration` is the last of them. `consumed_samples` and `tokens` after it,
                `batch` (sequences of each of the steps), `seq_length`. Lists, an entry a step: `lm_loss`, `grad_norm` (null where
                no update was made), `learning_rate`, `seconds`
    log         what a log line tells, as --metrics-file has it (names in `megatron_lab/monitoring/loggers.py`), without what is of
                single layers; means and sums are over the steps since the line before. Also `memory_bytes` (the most that rank 0
                has held: on CUDA on its device, else of the process), `host_bytes`, `spent` (seconds of the run up to now by use,
                whose sum is the run's time: `megatron/training/progress.py`), and with --timing-log-level `timers_ms` (the slowest
                rank's)
    evaluation  `validation_loss` or `test_loss`, and the like with `_mtp_loss`
    measured    other numbers: memory of ranks by --log-memory, stragglers, ...
    event       `event` and `words`, what the log says of it. Events: warning, spike, rewind (`iteration` is the one that the run
                went back to, `left` the one that it came from), save, end

`read_history` leaves out what does not count: steps that a later start or a rewind made again. Lines that are no JSON (of a process
that was killed while it wrote) are left out too, and so are kinds that a reader does not know.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megatron.metrics.log_line import LineFile

HISTORY = "history.jsonl"
FORMAT = 1
_FLUSH_AFTER_S, _FLUSH_AFTER_STEPS = 30.0, 1000
_DIGITS = {"lm_loss": 8, "grad_norm": 6, "learning_rate": 6, "seconds": 5}
"""The lists of a line of steps, and significant digits of their numbers."""
_RUN_COUNTS = ("steps", "log", "evaluation", "measured")
"""Kinds whose lines do not count any more where a run went back behind them."""


class HistoryFile:
    """Writes the record. What cannot be written is lost, and told once.

    Args:
        folder: of the run.
        seq_length: tokens of a sample.
        clock: seconds since 1970.

    Raises:
        ValueError: the file cannot be opened.
    """

    def __init__(self, folder: str | Path, seq_length: int, clock: Callable[[], float] = time.time) -> None:
        self._file = LineFile("the record of the run,", Path(folder) / HISTORY, append=True)
        self._seq_length, self._clock = seq_length, clock
        self._base = (0, 0)
        self._steps: dict[str, list[float | None]] = {}
        self._place = (0, 0, 0)
        self._flushed = clock()

    def start(self, iteration: int, consumed_samples: int, tokens: int, facts: Mapping[str, Any]) -> None:
        """A start begins here.

        Args:
            tokens: read so far, by samples that may have been of another length.
            facts: what else the line has.
        """
        self.flush()
        self._base = (consumed_samples, tokens)
        self._write("start", iteration, {"format": FORMAT, **self._consumed(consumed_samples), **facts})

    def step(self, iteration: int, consumed_samples: int, batch: int, **numbers: float | None) -> None:
        """Add a step. It is written with others, a little later.

        Args:
            numbers: lm_loss, grad_norm, learning_rate and seconds.
        """
        if self._steps and self._place[2] != batch:
            self.flush()
        for name, digits in _DIGITS.items():
            value = numbers[name]
            kept = None if value is None or not math.isfinite(value) else float(f"{value:.{digits}g}")
            self._steps.setdefault(name, []).append(kept)
        self._place = (iteration, consumed_samples, batch)
        if len(self._steps["lm_loss"]) >= _FLUSH_AFTER_STEPS or self._clock() - self._flushed > _FLUSH_AFTER_S:
            self.flush()

    def line(self, kind: str, iteration: int, consumed_samples: int, values: Mapping[str, Any]) -> None:
        """Write a line of any kind, behind the steps that were made."""
        self.flush()
        self._write(kind, iteration, {**self._consumed(consumed_samples), **values})

    def flush(self) -> None:
        """Write the steps that are kept."""
        self._flushed = self._clock()
        if not self._steps:
            return
        iteration, consumed_samples, batch = self._place
        steps, self._steps = self._steps, {}
        self._write(
            "steps", iteration, {**self._consumed(consumed_samples), "batch": batch, "seq_length": self._seq_length, **steps}
        )

    def close(self) -> None:
        """Write what is kept, and close the file."""
        self.flush()
        self._file.close()

    def _consumed(self, samples: int) -> dict[str, int]:
        samples_before, tokens_before = self._base
        return {"consumed_samples": samples, "tokens": tokens_before + (samples - samples_before) * self._seq_length}

    def _write(self, kind: str, iteration: int, values: Mapping[str, Any]) -> None:
        line = {"kind": kind, "time": round(self._clock(), 3), "iteration": iteration, **values}
        self._file.write(json.dumps(_finite(line), allow_nan=False))


def _finite(value: Any) -> Any:
    """With null for numbers that JSON has not."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


class StepRecord(NamedTuple):
    """One step."""

    iteration: int
    tokens: int
    """Read so far, those of the step included."""
    batch: int
    """Sequences."""
    lm_loss: float | None
    """None for a step that was left out, or whose loss is not finite."""
    grad_norm: float | None
    learning_rate: float | None
    seconds: float | None


@dataclass
class History:
    """The record of a run, in order. Lines are as in the file."""

    starts: list[dict[str, Any]] = field(default_factory=list)
    """All of them."""
    steps: list[StepRecord] = field(default_factory=list)
    """Those that count, ascending."""
    logs: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    measured: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    """All of them, those of steps that do not count too."""
    unreadable: int = 0
    """Lines that were passed over."""

    def go_back(self, iteration: int) -> None:
        """What lies behind an iteration does not count any more."""
        while self.steps and self.steps[-1].iteration > iteration:
            self.steps.pop()
        for lines in (self.logs, self.evaluations, self.measured):
            while lines and lines[-1]["iteration"] > iteration:
                lines.pop()

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line of the file.

        Raises:
            KeyError, TypeError, ValueError: it is not as a run writes it.
        """
        kind, iteration = line["kind"], int(line["iteration"])
        if kind == "start":
            self.starts.append(dict(line))
            self.go_back(iteration)
        elif kind == "event":
            self.events.append(dict(line))
            if line["event"] == "rewind":
                self.go_back(iteration)
        elif kind == "steps":
            self.steps += _steps_of(line)
        elif kind in _RUN_COUNTS:
            {"log": self.logs, "evaluation": self.evaluations, "measured": self.measured}[kind].append(dict(line))


def _steps_of(line: Mapping[str, Any]) -> list[StepRecord]:
    batch, last, lists = int(line["batch"]), int(line["iteration"]), [line[name] for name in _DIGITS]
    a_step = batch * int(line["seq_length"])
    places = range(len(lists[0]) - 1, -1, -1)
    return [
        StepRecord(last - back, int(line["tokens"]) - back * a_step, batch, *numbers)
        for back, *numbers in zip(places, *lists, strict=True)
    ]


def first_losses(folder: str | Path, count: int) -> list[float]:
    """The losses of the first steps of the run in a folder, without reading all of a long record; none if it has no record.

    Args:
        count: at most so many.
    """
    found: list[float] = []
    try:
        with (Path(folder) / HISTORY).open(encoding="utf-8", errors="replace") as file:
            for text in file:
                begins = text.startswith('{"kind": "start"')
                if begins and json.loads(text)["iteration"] == 0:
                    found = []  # a run that began anew in the folder
                elif text.startswith('{"kind": "steps"') and len(found) < count:
                    found += [loss for loss in json.loads(text)["lm_loss"] if loss is not None]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return found[:count]


def read_history(folder: str | Path) -> History:
    """The record of the run in a folder.

    Args:
        folder: the run's, or the path of the file itself.

    Raises:
        ValueError: there is none.
    """
    path = Path(folder)
    path = path / HISTORY if path.is_dir() else path
    found = History()
    if not path.is_file():
        raise ValueError(f"{path} is no file. A run keeps its record in the folder of --save, or of --tensorboard-dir.")
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                found.add(json.loads(text))
            except (ValueError, KeyError, TypeError):
                found.unreadable += 1
    return found
