"""HTML report of a run, or a comparison of several runs, from the history files of the runs (`megatron/metrics/history.py`)."""

from __future__ import annotations

import json
import math
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from megatron.config.flags import get_flags
from megatron.metrics.history import History
from megatron.metrics.log_line import format_compact, format_duration
from megatron_lab.pages.curves import Curve, build_axis_buttons, build_chart, build_script, smooth
from megatron_lab.pages.figures import Bar, build_stacked_bars
from megatron_lab.pages.html import COLOURS, Section, build_page, build_table
from megatron_lab.planner.units import format_bytes

_SMOOTHING_DIVISOR = 50
"""The smoothed curve is the moving mean over 1/50 of the steps."""
_WARMUP_LOG_LINES = 1
"""Log lines that are ignored in the time of a step: the first steps create connections, compile and fill caches."""
_MAX_EVENTS = 200
_NO_PLAN_HTML = "<p>tools/report.py with --plan also shows the planned memory and the grid of the ranks.</p>"


@dataclass(frozen=True)
class Run:
    """One run of a report: its folder, its name in the report, and the content of its history file."""

    folder: Path
    name: str
    """Name of the run in the report: the shortest suffix of its path that distinguishes it from the other runs."""
    history: History


def name_runs(folders: Sequence[Path], histories: Sequence[History]) -> list[Run]:
    """Build the runs of a report from their folders and histories.

    The name of a run is the end of its path, with as few path components as distinguish the runs.
    """
    paths = [folder.absolute() for folder in folders]
    num_components = next(n for n in range(1, 99) if len({path.parts[-n:] for path in paths}) == len(set(paths)))
    return [Run(path, "/".join(path.parts[-num_components:]), history) for path, history in zip(paths, histories, strict=True)]


def build_run_page(runs: Sequence[Run], memory: str = "", grid: str = "") -> str:
    """Return the report as one HTML file without links to other files.

    Args:
        runs: one run, or several runs whose curves, times and settings are compared.
        memory: HTML of the predicted memory; used only in the report of a single run.
        grid: HTML of the rank grid; used only in the report of a single run.
    """
    single_run = runs[0] if len(runs) == 1 else None
    sections = [
        Section("Run" if single_run is not None else "Runs", _build_overview(runs)),
        Section("Curves", "\n".join([build_axis_buttons(), *_build_charts(runs), build_script()])),
        Section("Where the time went", "\n".join([_build_time_use(runs), _build_step_times(runs)])),
    ]
    if single_run is not None:
        sections += [
            Section(
                "Memory",
                f"{f'<h3>Planned</h3>{memory}' if memory else _NO_PLAN_HTML}<h3>Measured</h3>"
                f"{_build_measured_memory(single_run.history)}",
            ),
            *([Section("Ranks", grid)] if grid else []),
            Section("Data", _build_data(single_run.history)),
            Section("Checkpoints", _build_checkpoints(single_run)),
            Section("Events", _build_events(single_run.history)),
            Section("Settings", _build_settings(single_run.history)),
        ]
    else:
        sections.append(Section("Settings that differ between the runs", _build_different_settings(runs)))
    title = f"Run {single_run.name}" if single_run is not None else f"{len(runs)} runs"
    return build_page(title, sections, f'<p class="faint">Created {_format_time(time.time())}.</p>')


def summarize(history: History) -> list[str]:
    """Return a text line with the first and the last training loss of a run. If the run has evaluated, add a line with all
    validation losses."""
    steps = [step for step in history.steps if step.lm_loss is not None]
    if not steps:
        return ["the history has no step with a loss"]
    first_step, last_step = steps[0], steps[-1]
    sentences = [
        f"training loss {first_step.lm_loss:.3f} at iteration {first_step.iteration}, "
        f"{last_step.lm_loss:.3f} at iteration {last_step.iteration}"
    ]
    validation_losses = [f"{loss:.3f} at iteration {iteration}" for iteration, loss in _list_validation_losses(history)]
    return sentences + (["validation loss " + ", ".join(validation_losses)] if validation_losses else [])


def is_loss_lower(history: History) -> bool:
    """Return whether the last recorded training loss of a run is lower than the first one."""
    losses = [step.lm_loss for step in history.steps if step.lm_loss is not None]
    return len(losses) > 1 and losses[-1] < losses[0]


def format_shares(values: Mapping[str, float]) -> dict[str, str]:
    """Format each value as its percentage of the sum of all values, with one decimal. The printed percentages add up to 100.0.

    To achieve this, all percentages are rounded down, and then those with the largest remainders are rounded up.
    """
    total = math.fsum(values.values())
    if total <= 0:
        return dict.fromkeys(values, "-")
    exact_tenths = {name: 1000 * value / total for name, value in values.items()}
    tenths = {name: math.floor(value) for name, value in exact_tenths.items()}
    for name in sorted(exact_tenths, key=lambda name: tenths[name] - exact_tenths[name])[: 1000 - sum(tenths.values())]:
        tenths[name] += 1
    return {name: f"{value / 10:.1f} %" for name, value in tenths.items()}


def _build_overview(runs: Sequence[Run]) -> str:
    """Return an HTML table of the main properties of the runs, with a row for each run. For a single run, there is a row for each
    property."""
    header = [
        "run",
        "state",
        "iterations",
        "tokens",
        "loss",
        "validation",
        "tokens/s",
        "MFU",
        "parameters",
        "ranks",
        "device",
        "goodput",
    ]
    rows = []
    for run in runs:
        history, start = run.history, run.history.starts[-1] if run.history.starts else {}
        last_step = history.steps[-1] if history.steps else None
        last_log = history.logs[-1] if history.logs else {}
        validation_losses = _list_validation_losses(history)
        total_iterations, loss, tokens = (
            start.get("total_iterations"),
            _compute_last_loss(history),
            None if last_step is None else last_step.tokens,
        )
        layout = ", ".join(f"{axis} {size}" for axis, size in start.get("layout", {}).items() if size > 1)
        rows.append(
            [
                run.name,
                _format_state(history),
                "-"
                if last_step is None
                else f"{last_step.iteration:,}" + (f" of {total_iterations:,}" if total_iterations else ""),
                "-" if tokens is None else format_compact(tokens),
                "-" if loss is None else f"{loss:.4f}",
                f"{validation_losses[-1][1]:.4f}" if validation_losses else "-",
                format_compact(last_log["tokens_per_s"]) if last_log.get("tokens_per_s") else "-",
                _format_mfu(last_log, start),
                format_compact(start["parameters"]) if start.get("parameters") else "-",
                f"{start.get('world_size', '-')}" + (f" ({layout})" if layout else ""),
                str(start.get("device", "-")),
                f"{last_log['goodput']:.1%}" if last_log.get("goodput") is not None else "-",
            ]
        )
    return build_table(header, rows, range(2, 9)) if len(runs) > 1 else _build_list(header[1:], rows[0][1:])


def _build_list(names: Sequence[str], values: Sequence[str]) -> str:
    return build_table(["", ""], [[name, value] for name, value in zip(names, values, strict=True) if value != "-"])


def _format_state(history: History) -> str:
    """Return a text that says how the run ended after its last start or, if no end is recorded, when it last wrote to its
    history."""
    last_time = max(
        (record["time"] for record in [*history.starts, *history.logs, *history.events, *history.evaluations]), default=0.0
    )
    start_time = history.starts[-1]["time"] if history.starts else 0.0
    end_event = next(
        (record for record in reversed(history.events) if record["event"] == "end" and record["time"] >= start_time), None
    )
    return (
        str(end_event["words"])
        if end_event is not None
        else f"running, or killed; last entry in the history {_format_time(last_time)}"
    )


def _format_mfu(log: Mapping[str, Any], start: Mapping[str, Any]) -> str:
    tflops, peak_flops = log.get("tflops_per_device"), start.get("peak_flops")
    return f"{tflops * 1e12 / peak_flops:.1%}" if tflops and peak_flops else "-"


def _build_charts(runs: Sequence[Run]) -> list[str]:
    """Return the HTML of all charts of a report: loss, learning rate, gradient norm, speed and memory.

    In a report of one run, the training and the validation loss have different colours. With several runs, each run has one colour.
    """
    is_single = len(runs) == 1
    loss_curves: list[Curve] = []
    curves_by_title: dict[str, list[Curve]] = {"learning rate": [], "gradient norm": [], "tokens per second": [], "memory (GB)": []}
    for run_index, run in enumerate(runs):
        steps, logs = run.history.steps, run.history.logs
        colour, validation_colour = (
            COLOURS[run_index % len(COLOURS)],
            COLOURS[1] if is_single else COLOURS[run_index % len(COLOURS)],
        )
        name_prefix = "" if is_single else f"{run.name}: "
        iterations, tokens = [step.iteration for step in steps], [step.tokens for step in steps]
        lm_losses = [step.lm_loss for step in steps]
        evaluations = [record for record in run.history.evaluations if record.get("validation_loss") is not None]
        if is_single:
            loss_curves.append(Curve("each step", colour, iterations, tokens, lm_losses, is_faint=True))
        loss_curves.append(
            Curve(
                f"{name_prefix}training", colour, iterations, tokens, _smooth(lm_losses, len(lm_losses) // _SMOOTHING_DIVISOR // 2)
            )
        )
        loss_curves.append(
            Curve(
                f"{name_prefix}validation",
                validation_colour,
                [record["iteration"] for record in evaluations],
                [record["tokens"] for record in evaluations],
                [record["validation_loss"] for record in evaluations],
                is_dashed=not is_single,
                has_dots=len(evaluations) <= 60,
            )
        )
        log_iterations, log_tokens = [record["iteration"] for record in logs], [record["tokens"] for record in logs]
        run_name = run.name if not is_single else ""
        curves_by_title["learning rate"].append(
            Curve(run_name or "learning rate", colour, iterations, tokens, [step.learning_rate for step in steps])
        )
        curves_by_title["gradient norm"].append(
            Curve(run_name or "gradient norm", colour, iterations, tokens, [step.grad_norm for step in steps])
        )
        tokens_per_s = [record.get("tokens_per_s") for record in logs]
        curves_by_title["tokens per second"].append(
            Curve(run_name or "tokens per second", colour, log_iterations, log_tokens, tokens_per_s)
        )
        memory_gb = [None if record.get("memory_bytes") is None else record["memory_bytes"] / 1e9 for record in logs]
        curves_by_title["memory (GB)"].append(
            Curve(run_name or "first rank, peak so far", colour, log_iterations, log_tokens, memory_gb)
        )
    charts = [build_chart("loss (nats per token)", loss_curves)]
    charts += [
        build_chart(title, curves, is_strip=True, includes_zero=title != "gradient norm")
        for title, curves in curves_by_title.items()
    ]
    return charts


def _smooth(values: Sequence[float | None], half_width: int) -> list[float | None]:
    import numpy as np

    means = smooth(np.array([math.nan if value is None else value for value in values], dtype=float), half_width)
    return [None if math.isnan(value) else float(value) for value in means]


def _build_time_use(runs: Sequence[Run]) -> str:
    """Return the HTML of bars and a table that divide the time since each run's first start by use, such as steps or saves."""
    bars, rows = [], []
    for run in runs:
        spent = next((record["spent"] for record in reversed(run.history.logs) if record.get("spent")), None)
        if spent is not None:
            bars.append(Bar(run.name, spent, _format_seconds(math.fsum(spent.values()))))
            rows += [
                [run.name, use, _format_seconds(spent[use]), share] for use, share in format_shares(spent).items() if spent[use] > 0
            ]
    if not bars:
        return "<p>The history has no log line yet.</p>"
    caption_text = "Time from the first start of the run to its last log line."
    return build_stacked_bars(bars, _format_seconds, caption_text=caption_text) + _build_time_table("use", rows, len(runs))


def _build_step_times(runs: Sequence[Run]) -> str:
    """Return the HTML of bars and a table that divide the mean time of a step into the parts that the run's timers measured."""
    bars, rows = [], []
    for run in runs:
        step_times = compute_step_times(run.history)
        if step_times:
            bars.append(Bar(run.name, step_times, _format_seconds(math.fsum(step_times.values()) / 1000)))
            rows += [
                [run.name, name, f"{step_times[name]:.1f} ms", share]
                for name, share in format_shares(step_times).items()
                if step_times[name] > 0
            ]
    if not bars:
        return "<p>With --timing-log-level 1 a run measures the parts of a step, and this section shows them.</p>"
    caption_text = (
        "A step: mean over all log lines except the first. The time of each part is that of its slowest rank; "
        "'other' is the remainder."
    )
    return build_stacked_bars(bars, lambda ms: f"{ms:.1f} ms", caption_text=caption_text) + build_table(
        ["run", "part of a step", "time", "share"], rows, (2, 3)
    )


def _build_time_table(column_name: str, rows: Sequence[Sequence[str]], num_runs: int) -> str:
    """Return the HTML of the table below the bars of times. In the report of a single run the table has no column with run names.

    Args:
        column_name: title of the column that names the uses of time.
        rows: (name of the run, use, time, share) of each row.
    """
    if num_runs == 1:
        return build_table([column_name, "time", "share"], [row[1:] for row in rows], (1, 2))
    return build_table(["run", column_name, "time", "share"], rows, (2, 3))


def compute_step_times(history: History) -> dict[str, float]:
    """Return the mean time of a step in milliseconds by part: data, forward and backward, gradient reduction, gradient norm,
    optimizer, other.

    The parts add up to the step time. If the run has not recorded timers (--timing-log-level), the dictionary is empty.
    """
    logs = [record for record in history.logs if record.get("timers_ms") and record.get("elapsed_ms")]
    logs = logs[_WARMUP_LOG_LINES:] or logs
    if not logs:
        return {}

    def compute_mean(timer: str) -> float:
        return math.fsum(record["timers_ms"].get(timer, 0.0) for record in logs) / len(logs)

    reduce_ms = compute_mean("grads-reduce")
    step_times = {
        "data": compute_mean("batch-generator"),
        "forward and backward": max(
            0.0, compute_mean("forward-backward") - reduce_ms
        ),  # the timer grads-reduce runs within forward-backward
        "reducing gradients": reduce_ms,
        "gradient norm": compute_mean("grad-norm"),
        "optimizer": compute_mean("optimizer"),
    }
    step_ms, measured_ms = math.fsum(record["elapsed_ms"] for record in logs) / len(logs), math.fsum(step_times.values())
    if measured_ms > step_ms:  # the parts have different slowest ranks
        return {name: value * step_ms / measured_ms for name, value in step_times.items()}
    return {**step_times, "other": step_ms - measured_ms}


def _build_measured_memory(history: History) -> str:
    """Return the HTML of the measured peak memory of rank 0, and of a bar that divides the memory by purpose. The bar shows the
    last measurement of --log-memory."""
    max_bytes = max((record["memory_bytes"] for record in history.logs if record.get("memory_bytes")), default=None)
    max_text = "" if max_bytes is None else f"<p>Peak memory of the first rank: {format_bytes(max_bytes)}.</p>"
    memory_by_purpose: dict[str, float] = {}
    for record in history.measurements:
        memory_by_purpose |= {
            name.removeprefix("memory/").replace("-", " "): value
            for name, value in record.items()
            if name.startswith("memory/") and "peak" not in name and isinstance(value, int | float)
        }
    if not memory_by_purpose:
        return max_text + "<p>With --log-memory a run measures its memory by purpose, and this section shows it.</p>"
    return max_text + build_stacked_bars(
        [Bar("measured", memory_by_purpose)],
        format_bytes,
        caption_text="Last measurement of --log-memory, on the rank that uses most for each purpose.",
    )


def _build_data(history: History) -> str:
    start = history.starts[-1] if history.starts else {}
    data = start.get("config", {}).get("data", {})
    last_step = history.steps[-1] if history.steps else None
    names = ("data_path", "train_data_path", "valid_data_path", "test_data_path", "split", "data_order", "tokenizer_type", "seed")
    rows = [[name.replace("_", " "), _format_value(data[name])] for name in names if data.get(name)]
    if data.get("mock_data"):
        rows.append(["data", "mock data (--mock-data)"])
    if last_step is not None:
        seq_length = f"{start['seq_length']:,}" if "seq_length" in start else "-"
        rows += [["tokens read", f"{last_step.tokens:,}"], ["sequence length", seq_length]]
        num_samples = next((record["consumed_samples"] for record in reversed(history.logs) if "consumed_samples" in record), None)
        rows += [["samples read", f"{num_samples:,} of {start.get('total_samples') or 0:,}"]] if num_samples is not None else []
    batch_sizes = sorted({step.batch for step in history.steps})
    rows += (
        [["batch size", f"{batch_sizes[0]:,}" + (f" to {batch_sizes[-1]:,}" if len(batch_sizes) > 1 else "")]]
        if batch_sizes
        else []
    )
    return build_table(["", ""], rows)


def _build_checkpoints(run: Run) -> str:
    """Return the HTML of a table of the checkpoints that the save folder now contains, with their time and size."""
    rows = []
    for folder in sorted(run.folder.glob("iter_*")):
        paths = [path for path in folder.rglob("*") if path.is_file()]
        if paths:
            save_time = max(path.stat().st_mtime for path in paths)
            rows.append(
                [folder.name, _format_time(save_time), format_bytes(sum(path.stat().st_size for path in paths)), str(len(paths))]
            )
    saves = [event for event in run.history.events if event["event"] == "save"]
    saves_text = (
        f"<p>{len(saves):,} checkpoints were saved; these are in the folder now.</p>"
        if rows
        else f"<p>{len(saves):,} checkpoints were saved; none is in this folder now.</p>"
    )
    return saves_text + (build_table(["checkpoint", "created", "size", "files"], rows, (2, 3)) if rows else "")


def _build_events(history: History) -> str:
    """Return the HTML of a table of the run's starts, restarts and events, and of the number of steps without an update."""
    events = [
        (
            record["time"],
            record["iteration"],
            "restart" if at else "start",
            f"{record.get('world_size', '?')} ranks on {record.get('device', '?')}",
        )
        for at, record in enumerate(history.starts)
    ]
    events += [(record["time"], record["iteration"], record["event"], record["words"]) for record in history.events]
    events.sort(key=lambda event: event[0])
    skipped = [step.iteration for step in history.steps if step.grad_norm is None]
    counts = {name: sum(event[2] == name for event in events) for name in dict.fromkeys(event[2] for event in events)}
    counts_text = ", ".join(f"{count} x {name}" for name, count in counts.items())
    skipped_text = (
        f" {len(skipped):,} steps made no update, the last one {skipped[-1]:,}." if skipped else " All steps made an update."
    )
    last_events = [event for event in events if event[2] != "save"][-_MAX_EVENTS:]
    limit_text = (
        f'<p class="faint">The last {_MAX_EVENTS} events; saves are not listed.</p>' if len(last_events) == _MAX_EVENTS else ""
    )
    rows = [[_format_time(at), f"{iteration:,}", event, str(message)] for at, iteration, event, message in last_events]
    return f"<p>{escape(counts_text)}.{skipped_text}</p>{limit_text}" + build_table(
        ["time", "iteration", "event", "message"], rows, (1,)
    )


def _build_settings(history: History) -> str:
    if not history.starts:
        return "<p>The history has no start of the run.</p>"
    start = history.starts[-1]
    config = start.get("config", {})
    rows = [[name, value, default] for name, value, default in list_changed_settings(config)]
    everything = json.dumps(config, indent=1)
    return (
        f"<p>The command of the last start:</p><pre>{escape(shlex.join(map(str, start.get('command', []))))}</pre>"
        "<p>Settings that differ from their defaults:</p>"
        + build_table(["flag", "value", "default"], rows)
        + f"<details><summary>All settings, and versions</summary><pre>{escape(everything)}\n\n"
        + f"{escape(json.dumps(start.get('versions', {}), indent=1))}</pre></details>"
    )


def list_changed_settings(config: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """Return (flag, value, default) as texts, for each flag whose value differs from its default.

    Args:
        config: values of all settings: by topic, and then by field name.
    """
    changed = []
    for flag in get_flags().values():
        value, default = _format_value(config.get(flag.topic, {}).get(flag.field, flag.default)), _format_value(flag.default)
        if value != default:
            changed.append((f"--{flag.name}", value, default))
    return changed


def _build_different_settings(runs: Sequence[Run]) -> str:
    """Return the HTML of a table of the settings in which the runs differ, by the settings of each run's last start."""
    configs = [run.history.starts[-1].get("config", {}) if run.history.starts else {} for run in runs]
    rows = []
    for flag in get_flags().values():
        values = [_format_value(config.get(flag.topic, {}).get(flag.field, flag.default)) for config in configs]
        if len(set(values)) > 1:
            rows.append([f"--{flag.name}", *values])
    return build_table(["flag", *(run.name for run in runs)], rows) if rows else "<p>None.</p>"


def _list_validation_losses(history: History) -> list[tuple[int, float]]:
    return [
        (record["iteration"], record["validation_loss"])
        for record in history.evaluations
        if record.get("validation_loss") is not None
    ]


def _compute_last_loss(history: History) -> float | None:
    losses = [step.lm_loss for step in history.steps]
    num_steps = max(1, len(losses) // _SMOOTHING_DIVISOR)
    tail = [value for value in losses[-num_steps:] if value is not None]
    return math.fsum(tail) / len(tail) if tail else None


def _format_value(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _format_seconds(seconds: float) -> str:
    if seconds >= 60:
        return format_duration(seconds)
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def _format_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
