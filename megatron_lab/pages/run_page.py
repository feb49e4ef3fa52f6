"""HTML report of a run, or a comparison of several runs, from the history files of the runs (`megatron/metrics/history.py`)."""

from __future__ import annotations

import json
import math
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from typing import Any

from megatron.checkpoint.save_folder import get_checkpoint_name, read_best
from megatron.checkpoint.storage_url import open_storage
from megatron.config.data import PATH_FIELDS, SPLIT_FIELDS
from megatron.config.flags import get_flags
from megatron.metrics.history import History
from megatron.metrics.log_line import format_compact, format_duration
from megatron_lab.pages.figures import Bar, build_stacked_bars
from megatron_lab.pages.html import Section, build_facts, build_page, build_table
from megatron_lab.pages.run_charts import build_run_charts
from megatron_lab.pages.run_facts import (
    Run,
    compute_median_mfu,
    compute_median_tokens_per_s,
    find_last_loss,
    format_loss,
    format_ranks,
    format_seconds_since_1970,
    format_state,
    list_evaluation_losses,
    list_timed_logs,
    list_validation_sets,
    name_validation_loss,
)
from megatron_lab.pages.samples import build_samples_sections
from megatron_lab.planner.units import format_bytes
from megatron_lab.terminal import wrap_command

_MAX_EVENTS = 200
_COMMAND_WIDTH = 110
_NO_PLAN_HTML = "<p>tools/report.py with --plan also shows the planned memory and the grid of the ranks.</p>"


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
        Section("Curves", build_run_charts(runs)),
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
            *build_samples_sections(single_run.history),
            Section("Data", _build_data(single_run.history)),
            Section("Checkpoints", _build_checkpoints(single_run)),
            Section("Events", _build_events(single_run.history)),
            Section("Settings", _build_settings(single_run.history)),
        ]
    else:
        sections.append(Section("Settings that differ between the runs", _build_different_settings(runs)))
    title = f"Run {single_run.name}" if single_run is not None else f"{len(runs)} runs: {', '.join(run.name for run in runs)}"
    descriptions = dict.fromkeys(run.description for run in runs if run.description)
    lead = [f"Model of {'; '.join(descriptions)}." if descriptions else "", f"Created {format_seconds_since_1970(time.time())}."]
    return build_page(title, sections, f'<p class="faint">{escape(" ".join(filter(None, lead)))}</p>')


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
    """Return an HTML table of the main properties of the runs, with a column for each run. The properties of a single run are a
    list in columns."""
    sets = dict.fromkeys(key for run in runs for key in list_validation_sets(run.history))
    columns: dict[str, Callable[[Run], str]] = {
        "model": lambda run: run.description,
        "state": lambda run: format_state(run.history),
        "iterations": _format_iterations,
        "tokens": lambda run: format_compact(run.history.steps[-1].tokens) if run.history.steps else "",
        "training loss": _format_last_loss,
        **{name_validation_loss(key, [*sets]): partial(_format_evaluation, key=key) for key in sets},
        "test loss": lambda run: _format_evaluation(run, "test_loss"),
        "tokens/s (median)": lambda run: _format_optional(compute_median_tokens_per_s(run.history), format_compact),
        "MFU (median)": lambda run: _format_optional(compute_median_mfu(run.history), "{:.1%}".format),
        "ranks": _format_ranks,
        "device": lambda run: str(run.last_start.get("device", "")),
        "goodput": lambda run: _format_optional(run.history.logs[-1].get("goodput") if run.history.logs else None, "{:.1%}".format),
        "folder": lambda run: str(run.folder),
    }
    rows = {name: [format_column(run) for run in runs] for name, format_column in columns.items()}
    rows = {name: cells for name, cells in rows.items() if any(cells)}
    if len(runs) == 1:
        return build_facts({name: cells[0] for name, cells in rows.items()})
    return build_table(
        ["", *(run.name for run in runs)], [[name, *(cell or "-" for cell in cells)] for name, cells in rows.items()]
    )


def _format_optional(value: float | None, format_value: Callable[[float], str]) -> str:
    return "" if value is None else format_value(value)


def _format_iterations(run: Run) -> str:
    if not run.history.steps:
        return ""
    total = run.last_start.get("total_iterations")
    return f"{run.history.steps[-1].iteration:,}" + (f" of {total:,}" if total else "")


def _format_last_loss(run: Run) -> str:
    last_loss = find_last_loss(run.history)
    return "" if last_loss is None else f"{last_loss} ({last_loss.definition})"


def _format_evaluation(run: Run, key: str) -> str:
    losses = list_evaluation_losses(run.history, key)
    return f"{format_loss(losses[-1][1])} (at iteration {losses[-1][0]:,})" if losses else ""


def _format_ranks(run: Run) -> str:
    layout = ", ".join(f"{axis} {size}" for axis, size in run.last_start.get("layout", {}).items() if size > 1)
    return f"{run.last_start.get('world_size', '')}" + (f" ({layout})" if layout else "")


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
    caption_text = "Time from the first start of the run to its last log line, without the time in which the run was finished."
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
        "A step: mean over all log lines except the first one after each start. The time of each part is that of its slowest rank; "
        "'other' is the remainder."
    )
    return build_stacked_bars(bars, lambda ms: f"{ms:.1f} ms", caption_text=caption_text) + _build_time_table(
        "part of a step", rows, len(runs)
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
    logs = [record for record in list_timed_logs(history) if record.get("timers_ms") and record.get("elapsed_ms")]
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
    is_divided = any(data.get(name) for name in ("data_path", "data_args_path")) and not any(map(data.get, SPLIT_FIELDS))
    names = (*PATH_FIELDS, *(["split"] if is_divided else []), "data_order", "tokenizer_type")
    rows = [[name.replace("_", " "), _format_value(data[name])] for name in names if data.get(name)]
    if data.get("mock_data"):
        rows.append(["data", "mock data (--mock-data)"])
    if last_step is not None:
        seq_length = f"{start['seq_length']:,}" if "seq_length" in start else "-"
        rows += [["tokens read", f"{last_step.tokens:,}"], ["sequence length", seq_length]]
        num_samples = next((record["consumed_samples"] for record in reversed(history.logs) if "consumed_samples" in record), None)
        total = start.get("total_samples") or 0  # a rewind that skips data makes the run read more
        of_total = f" of {total:,}" if num_samples is not None and num_samples <= total else ""
        rows += [["samples read", f"{num_samples:,}{of_total}"]] if num_samples is not None else []
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
                [
                    folder.name,
                    format_seconds_since_1970(save_time),
                    format_bytes(sum(path.stat().st_size for path in paths)),
                    str(len(paths)),
                ]
            )
    saves = [event for event in run.history.events if event["event"] == "save"]
    saves_text = (
        f"<p>{len(saves):,} checkpoints were saved; these are in the folder now.</p>"
        if rows
        else f"<p>{len(saves):,} checkpoints were saved; none is in this folder now.</p>"
    )
    best = read_best(open_storage(run.folder))
    if best is not None:
        saves_text += f"<p>{get_checkpoint_name(best)} has the lowest validation loss (--keep-best).</p>"
    return saves_text + (build_table(["checkpoint", "created", "size", "files"], rows, (2, 3)) if rows else "")


def _build_events(history: History) -> str:
    """Return the HTML of a table of the run's starts, restarts and events, and of the number of steps without an update."""
    events = [
        (
            record["time"],
            record["iteration"],
            "restart" if at else "start",
            format_ranks(record),
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
    rows = [[format_seconds_since_1970(at), f"{iteration:,}", event, str(message)] for at, iteration, event, message in last_events]
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
    flags = wrap_command(shlex.join(map(str, start.get("command", []))), _COMMAND_WIDTH)
    return (
        f'<p>The flags of the last start:</p><pre class="command">{escape(chr(10).join(flags))}</pre>'
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


def _format_value(value: Any) -> str:
    if value is None or value in ((), []):
        return "not set"
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _format_seconds(seconds: float) -> str:
    if seconds >= 60:
        return format_duration(seconds)
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"
