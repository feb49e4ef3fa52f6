"""History file of a run, `history.jsonl`: metrics and events from the first start to the last. The module needs neither torch nor
numpy.

The file is in the folder of --save, or of --tensorboard-dir if --save is no local folder (`get_run_folder` in
`megatron/config/outputs.py`). Each start of the run appends to the file and removes nothing. Each line is a JSON object with
`kind`, `time` (seconds since 1970) and `iteration` (completed steps of the run); NaN and infinity are null. The kinds and their
other keys:

    start       first line of every start. `iteration` is the one that the run continues from. `format` (1), `consumed_samples`,
                `tokens` (read so far), `total_iterations`, `total_samples`, `seq_length`, `parameters`, `world_size`, `layout`
                (sizes by axis), `device` (name), `peak_flops` (FLOP/s of one device, or null), `attention` (`kernel`, with
                `milliseconds` and `failures` by kernel; null without a measurement), `config` (all settings by topic),
                `command`, `versions`
    steps       consecutive steps with their metrics; `iteration` is the last of them. `consumed_samples` and `tokens` after it,
                `batch` (sequences of each of the steps), `seq_length`. Lists with one entry per step: `lm_loss`, `grad_norm`
                (null for a skipped update), `learning_rate`, `seconds`
    log         the values of a log line, as in --metrics-file (names in `megatron_lab/monitoring/loggers.py`), without values of
                single layers; means and sums are over the steps since the previous line. Also `memory_bytes` (peak memory of
                rank 0: on its device with CUDA, else of the process), `host_bytes`, `spent` (seconds of the run so far by use,
                which sum to the run's time: `megatron_lab/monitoring/goodput.py`), and with --timing-log-level `timers_ms` (the
                slowest rank's)
    evaluation  `validation_loss` or `test_loss`, and the same with suffix `_mtp_loss`. With named validation sets also
                `validation_loss/NAME` for each; `validation_loss` is then their unweighted mean
    samples     texts of --sample-interval. `samples`: a list of objects with `prompt` and `text`, the text without the prompt
    measured    other measurements: memory of ranks by --log-memory, stragglers, ...
    event       `event` and `words`, the log's message about it. Events: warning, spike, rewind (`iteration` is the one that the
                run went back to, `left` the one that it came from), save, end (`complete`: whether the run trained as long as its
                settings ask for, null if the start only evaluated; missing after an error)

`read_history` omits steps that were run again after a resume or a rewind. It also skips lines of unknown kinds, and lines that are
not valid JSON, because the process was killed while it wrote them.
"""

from __future__ import annotations

import io
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import IO, Any, NamedTuple, NotRequired, TypedDict, cast

from megatron.config.regular_file import open_regular, parse_json
from megatron.config.save import check_json_type
from megatron.metrics.log_line import LineFile

HISTORY_FILE = "history.jsonl"
FORMAT_VERSION = 1
_FLUSH_AFTER_S, _FLUSH_AFTER_STEPS = 30.0, 1000
_SIGNIFICANT_DIGITS = {"lm_loss": 8, "grad_norm": 6, "learning_rate": 6, "seconds": 5}
"""Lists of a `steps` line, and the significant digits of their values."""
_REVOCABLE_TYPES = ("steps", "log", "evaluation", "samples", "measured")
"""Line types that a return to an earlier iteration invalidates."""


class HistoryFile:
    """Writer of `history.jsonl`, the file of a run to which metrics and events are appended as JSON lines. A line that cannot be
    written is lost, and the error is reported on stderr once.

    Args:
        folder: folder of the run, in which the file is written.
        seq_length: tokens per sample.
        clock: function that returns the seconds since 1970.

    Raises:
        ValueError: the file cannot be opened.
    """

    def __init__(self, folder: str | Path, seq_length: int, clock: Callable[[], float] = time.time) -> None:
        self._file = LineFile("the record of the run,", Path(folder) / HISTORY_FILE, append=True)
        self._seq_length, self._clock = seq_length, clock
        self._start_counts = (0, 0)
        self._steps: dict[str, list[float | None]] = {}
        self._last_step = (0, 0, 0)
        self._flushed = clock()

    def write_start(self, iteration: int, consumed_samples: int, tokens: int, fields: Mapping[str, Any]) -> None:
        """Write a line of kind `start`: the run starts for the first time, or is resumed.

        Args:
            iteration: iteration that the run continues from, 0 for a new run.
            consumed_samples: samples that earlier steps of the run have consumed.
            tokens: tokens of these samples. Earlier samples may have had another sequence length.
            fields: further keys of the line, such as `world_size` and `config`.
        """
        self.flush()
        self._start_counts = (consumed_samples, tokens)
        self._write("start", iteration, {"format": FORMAT_VERSION, **self._count_consumed(consumed_samples), **fields})

    def add_step(self, iteration: int, consumed_samples: int, batch: int, **metrics: float | None) -> None:
        """Add the metrics of a step to the buffer. Several steps are written together, as one line.

        Args:
            iteration: number of the step, counted from 1.
            consumed_samples: samples of the run so far, including those of the step.
            batch: number of sequences of the step.
            metrics: values of lm_loss, grad_norm, learning_rate and seconds (duration of the step).
        """
        if self._steps and self._last_step[2] != batch:
            self.flush()
        for name, digits in _SIGNIFICANT_DIGITS.items():
            value = metrics[name]
            rounded = None if value is None or not math.isfinite(value) else float(f"{value:.{digits}g}")
            self._steps.setdefault(name, []).append(rounded)
        self._last_step = (iteration, consumed_samples, batch)
        if len(self._steps["lm_loss"]) >= _FLUSH_AFTER_STEPS or self._clock() - self._flushed > _FLUSH_AFTER_S:
            self.flush()

    def write_line(self, line_type: str, iteration: int, consumed_samples: int, fields: Mapping[str, Any]) -> None:
        """Write a line. Buffered steps are written before it.

        Args:
            line_type: "log", "evaluation", "samples", "measured" or "event".
            iteration: number of completed steps.
            consumed_samples: samples that these steps have consumed.
            fields: further keys of the line. The module docstring lists them for each type.
        """
        self.flush()
        self._write(line_type, iteration, {**self._count_consumed(consumed_samples), **fields})

    def flush(self) -> None:
        """Write the buffered steps as one line of the file."""
        self._flushed = self._clock()
        if not self._steps:
            return
        iteration, consumed_samples, batch = self._last_step
        steps, self._steps = self._steps, {}
        self._write(
            "steps", iteration, {**self._count_consumed(consumed_samples), "batch": batch, "seq_length": self._seq_length, **steps}
        )

    def close(self) -> None:
        """Write the buffered steps and close the file."""
        self.flush()
        self._file.close()

    def _count_consumed(self, consumed_samples: int) -> dict[str, int]:
        start_samples, start_tokens = self._start_counts
        return {
            "consumed_samples": consumed_samples,
            "tokens": start_tokens + (consumed_samples - start_samples) * self._seq_length,
        }

    def _write(self, line_type: str, iteration: int, fields: Mapping[str, Any]) -> None:
        record = {"kind": line_type, "time": round(self._clock(), 3), "iteration": iteration, **fields}
        self._file.write(json.dumps(_replace_non_finite(record), allow_nan=False))


def _replace_non_finite(value: Any) -> Any:
    """Replace numbers that JSON cannot represent (NaN and infinity) by None, recursively."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _replace_non_finite(item) for name, item in value.items()}
    return [_replace_non_finite(item) for item in value] if isinstance(value, list | tuple) else value


class _Line(TypedDict):
    """Keys that lines of every type have, and their types."""

    time: float
    iteration: int
    consumed_samples: NotRequired[int]


class _MetricsLine(_Line):
    """Keys of a line with metrics."""

    tokens: int


class _StartLine(_Line):
    """Keys of a `start` line that readers use."""

    total_iterations: NotRequired[int]
    total_samples: NotRequired[int]
    seq_length: NotRequired[int]
    parameters: NotRequired[int]
    world_size: NotRequired[int]
    layout: NotRequired[dict[str, int]]
    device: NotRequired[str]
    peak_flops: NotRequired[float | None]
    attention: NotRequired[dict[str, Any] | None]
    config: NotRequired[dict[str, dict[str, Any]]]
    command: NotRequired[list[str]]
    versions: NotRequired[dict[str, Any]]


class _LogLine(_MetricsLine):
    """Keys of a `log` line that readers use and that are not plain numbers, or are needed."""

    memory_bytes: NotRequired[float | None]
    host_bytes: NotRequired[float | None]
    elapsed_ms: NotRequired[float | None]
    goodput: NotRequired[float | None]
    tokens_per_s: NotRequired[float | None]
    tflops_per_device: NotRequired[float | None]
    spent: NotRequired[dict[str, float | None]]
    timers_ms: NotRequired[dict[str, float | None]]


class _EvaluationLine(_MetricsLine):
    """Keys of an `evaluation` line that readers use."""

    validation_loss: NotRequired[float | None]
    test_loss: NotRequired[float | None]


class _SamplesLine(_Line):
    """Keys of a `samples` line."""

    samples: list[dict[str, str]]


class _EventLine(_Line):
    """Keys of an `event` line."""

    event: str
    words: str
    left: NotRequired[int]


class _StepsLine(_MetricsLine):
    """Keys of a `steps` line, besides its lists of numbers."""

    batch: int
    seq_length: int


_LINE_TYPES = {
    "start": _StartLine,
    "event": _EventLine,
    "steps": _StepsLine,
    "log": _LogLine,
    "evaluation": _EvaluationLine,
    "samples": _SamplesLine,
}


class StepRecord(NamedTuple):
    """Metrics of one step, as read from the history file."""

    iteration: int
    tokens: int
    """Tokens read since the start of the run, including those of the step."""
    batch: int
    """Number of sequences of the step."""
    lm_loss: float | None
    """Language-model loss. None if --iterations-to-skip skips the iteration, or if the loss is not finite."""
    grad_norm: float | None
    learning_rate: float | None
    seconds: float | None


@dataclass
class History:
    """Content of a run's history file (`history.jsonl`), sorted by type of line. Each dictionary is one parsed JSON line, with the
    keys that the module docstring lists."""

    starts: list[dict[str, Any]] = field(default_factory=list)
    """One dictionary for each start of the run: the first start and each resume. The key `left`, which the file does not have, is
    the last recorded iteration before the start."""
    steps: list[StepRecord] = field(default_factory=list)
    """Steps in ascending order. A step that was run again after a resume or a rewind is contained once, with its latest
    metrics."""
    logs: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    measurements: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    """All events (warnings, loss spikes, rewinds, saves, ends), including those of steps that were run again."""
    num_unreadable: int = 0
    """Number of lines that were skipped because they are not valid JSON or lack a key."""

    def discard_after(self, iteration: int) -> None:
        """Discard steps, log lines, evaluations, samples and measurements after `iteration`, because the run has gone back to
        this iteration. Events are kept."""
        while self.steps and self.steps[-1].iteration > iteration:
            self.steps.pop()
        for records in (self.logs, self.evaluations, self.samples, self.measurements):
            while records and records[-1]["iteration"] > iteration:
                records.pop()

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a parsed line of the history file. If the line says that the run has restarted or gone back to an earlier iteration,
        later steps are discarded.

        Raises:
            KeyError, TypeError, ValueError: the line does not have the format that a run writes.
        """
        line_type = record["kind"]
        check_json_type(record, _LINE_TYPES.get(line_type, _Line), "", is_open=True)
        iteration: int = record["iteration"]
        if line_type == "start":
            self.starts.append({**record, "left": self.steps[-1].iteration if self.steps else iteration})
            self.discard_after(iteration)
        elif line_type == "event":
            self.events.append(dict(record))
            if record["event"] == "rewind":
                self.discard_after(iteration)
        elif line_type == "steps":
            self.steps += _parse_steps(record)
        elif line_type in _REVOCABLE_TYPES:
            lists = {"log": self.logs, "evaluation": self.evaluations, "samples": self.samples, "measured": self.measurements}
            lists[line_type].append(dict(record))


def _parse_steps(record: Mapping[str, Any]) -> list[StepRecord]:
    batch, last, lists = record["batch"], record["iteration"], [record[name] for name in _SIGNIFICANT_DIGITS]
    tokens_per_step = batch * record["seq_length"]
    # Much faster than check_json_type for long lists.
    if not all(
        type(value) in (float, NoneType) or (type(value) is int and abs(value) < 1 << 62) for values in lists for value in values
    ):
        raise TypeError("a metric of a step is not a number")
    steps_back = range(len(lists[0]) - 1, -1, -1)
    return [
        StepRecord(last - back, record["tokens"] - back * tokens_per_step, batch, *metrics)
        for back, *metrics in zip(steps_back, *lists, strict=True)
    ]


def read_first_losses(folder: str | Path, max_losses: int) -> list[float]:
    """Return the language-model losses of the first steps of the run in `folder`. Return an empty list if the history file
    (`history.jsonl`) is missing or damaged.

    Steps without a loss are left out. If a run was started at iteration 0 again, only the losses of the last such start count.
    Later lines of a long file are not parsed.

    Args:
        max_losses: maximum number of losses to return.
    """
    losses: list[float] = []
    try:
        with _open_history(Path(folder) / HISTORY_FILE) as file:
            for line in file:
                is_start = line.startswith('{"kind": "start"')
                if is_start and parse_json(line)["iteration"] == 0:
                    losses = []  # a new run started in the folder
                elif line.startswith('{"kind": "steps"') and len(losses) < max_losses:
                    losses += [loss for loss in parse_json(line)["lm_loss"] if type(loss) in (int, float)]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    return losses[:max_losses]


def _open_history(path: Path) -> IO[str]:
    return io.TextIOWrapper(io.BufferedReader(cast(io.RawIOBase, open_regular(path))), encoding="utf-8", errors="replace")


def read_history(folder: str | Path) -> History:
    """Read the history file (`history.jsonl`) of a run. Lines that cannot be parsed are counted and skipped.

    Args:
        folder: folder of the run, or path of its history file.

    Raises:
        ValueError: there is no history file.
    """
    path = Path(folder)
    path = path / HISTORY_FILE if path.is_dir() else path
    history = History()
    if not path.is_file():
        raise ValueError(
            f"there is no history file {path}. A run writes this file to the folder of --save, or of --tensorboard-dir. "
            "Give the path of that folder."
        )
    with _open_history(path) as file:
        for line in file:
            try:
                history.add(parse_json(line))
            except (ValueError, KeyError, TypeError, RecursionError):
                history.num_unreadable += 1
    return history
