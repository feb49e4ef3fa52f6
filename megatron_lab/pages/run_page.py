"""The report of a run, or of several beside each other, as a page: what its record tells (`megatron/metrics/history.py`)."""

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

from megatron.config.flags import flags
from megatron.metrics.history import History
from megatron.metrics.log_line import duration, in_short
from megatron_lab.pages.curves import Curve, chart, choice, script, smoothed
from megatron_lab.pages.figures import Bar, stacked_bars
from megatron_lab.pages.html import COLOURS, Section, page, table
from megatron_lab.planner.state_report import amount

_SMOOTHED_OVER = 50
"""The smoothed curve is a mean over this part of the steps."""
_WARM_UP = 1
"""Log lines that are left out of the account of a step: the first steps make connections, compile and fill caches."""
_MOST_EVENTS = 200


@dataclass(frozen=True)
class Run:
    """A run that is reported."""

    folder: Path
    name: str
    """The shortest end of its path that tells it from the others."""
    history: History


def runs_of(folders: Sequence[Path], histories: Sequence[History]) -> list[Run]:
    """Runs with names that differ."""
    paths = [folder.absolute() for folder in folders]
    parts = next(n for n in range(1, 99) if len({path.parts[-n:] for path in paths}) == len(set(paths)))
    return [Run(path, "/".join(path.parts[-parts:]), history) for path, history in zip(paths, histories, strict=True)]


def run_page(runs: Sequence[Run], memory: str = "", grid: str = "") -> str:
    """One HTML file without links to anything outside of it.

    Args:
        runs: at least one. Of several, their curves, times and settings are compared.
        memory, grid: HTML of the planned memory and of the ranks of a single run.
    """
    one = runs[0] if len(runs) == 1 else None
    sections = [
        Section("Run" if one is not None else "Runs", _overview(runs)),
        Section("Curves", "\n".join([choice(), *_charts(runs), script()])),
        Section("Where the time went", "\n".join([_use_of_time(runs), _step_ledger(runs)])),
    ]
    if one is not None:
        sections += [
            Section("Memory", f"{'<h3>Planned</h3>' if memory else ''}{memory}<h3>Measured</h3>{_measured_memory(one.history)}"),
            *([Section("Ranks", grid)] if grid else []),
            Section("Data", _data(one.history)),
            Section("Checkpoints", _checkpoints(one)),
            Section("Events", _events(one.history)),
            Section("Settings", _settings(one.history)),
        ]
    else:
        sections.append(Section("Settings that differ", _different_settings(runs)))
    title = f"Run {one.name}" if one is not None else f"{len(runs)} runs"
    return page(title, sections, f'<p class="faint">Made {_clock(time.time())}.</p>')


def summary(history: History) -> list[str]:
    """How the loss went, in one line or two."""
    steps = [step for step in history.steps if step.lm_loss is not None]
    if not steps:
        return ["no step with a loss is in the record"]
    first, last = steps[0], steps[-1]
    said = [f"training loss {first.lm_loss:.3f} at iteration {first.iteration}, {last.lm_loss:.3f} at iteration {last.iteration}"]
    held_out = [f"{loss:.3f} at iteration {at}" for at, loss in _validation(history)]
    return said + (["validation loss " + ", ".join(held_out)] if held_out else [])


def fell(history: History) -> bool:
    """Whether the training loss is lower at the end of the record than at its beginning."""
    losses = [step.lm_loss for step in history.steps if step.lm_loss is not None]
    return len(losses) > 1 and losses[-1] < losses[0]


def shares(parts: Mapping[str, float]) -> dict[str, str]:
    """Parts as percentages with one decimal whose sum is 100.0 as printed (the largest remainders are rounded up)."""
    total = math.fsum(parts.values())
    if total <= 0:
        return dict.fromkeys(parts, "-")
    exact = {name: 1000 * value / total for name, value in parts.items()}
    rounded = {name: math.floor(value) for name, value in exact.items()}
    for name in sorted(exact, key=lambda name: rounded[name] - exact[name])[: 1000 - sum(rounded.values())]:
        rounded[name] += 1
    return {name: f"{value / 10:.1f} %" for name, value in rounded.items()}


def _overview(runs: Sequence[Run]) -> str:
    head = [
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
        last = history.steps[-1] if history.steps else None
        log = history.logs[-1] if history.logs else {}
        held_out = _validation(history)
        total, loss, tokens = start.get("total_iterations"), _last_loss(history), None if last is None else last.tokens
        layout = ", ".join(f"{axis} {size}" for axis, size in start.get("layout", {}).items() if size > 1)
        rows.append(
            [
                run.name,
                _state(history),
                "-" if last is None else f"{last.iteration:,}" + (f" of {total:,}" if total else ""),
                "-" if tokens is None else in_short(tokens),
                "-" if loss is None else f"{loss:.4f}",
                f"{held_out[-1][1]:.4f}" if held_out else "-",
                in_short(log["tokens_per_s"]) if log.get("tokens_per_s") else "-",
                _mfu(log, start),
                in_short(start["parameters"]) if start.get("parameters") else "-",
                f"{start.get('world_size', '-')}" + (f" ({layout})" if layout else ""),
                str(start.get("device", "-")),
                f"{log['goodput']:.1%}" if log.get("goodput") is not None else "-",
            ]
        )
    return table(head, rows, range(2, 9)) if len(runs) > 1 else _as_list(head[1:], rows[0][1:])


def _as_list(names: Sequence[str], values: Sequence[str]) -> str:
    return table(["", ""], [[name, value] for name, value in zip(names, values, strict=True) if value != "-"])


def _state(history: History) -> str:
    """How the last start ended, or that it has not."""
    last = max((line["time"] for line in [*history.starts, *history.logs, *history.events, *history.evaluations]), default=0.0)
    started = history.starts[-1]["time"] if history.starts else 0.0
    end = next((line for line in reversed(history.events) if line["event"] == "end" and line["time"] >= started), None)
    return str(end["words"]) if end is not None else f"runs, or was killed; last heard {_clock(last)}"


def _mfu(log: Mapping[str, Any], start: Mapping[str, Any]) -> str:
    speed, peak = log.get("tflops_per_device"), start.get("peak_flops")
    return f"{speed * 1e12 / peak:.1%}" if speed and peak else "-"


def _charts(runs: Sequence[Run]) -> list[str]:
    """Of one run each curve has its colour, of several each run."""
    alone = len(runs) == 1
    losses: list[Curve] = []
    others: dict[str, list[Curve]] = {"learning rate": [], "gradient norm": [], "tokens per second": [], "memory (GB)": []}
    for at, run in enumerate(runs):
        steps, logs = run.history.steps, run.history.logs
        colour, second = COLOURS[at % len(COLOURS)], COLOURS[1] if alone else COLOURS[at % len(COLOURS)]
        name = "" if alone else f"{run.name}: "
        x, tokens = [step.iteration for step in steps], [step.tokens for step in steps]
        loss = [step.lm_loss for step in steps]
        held_out = [line for line in run.history.evaluations if line.get("validation_loss") is not None]
        if alone:
            losses.append(Curve("each step", colour, x, tokens, loss, faint=True))
        losses.append(Curve(f"{name}training", colour, x, tokens, _smoothed(loss, len(loss) // _SMOOTHED_OVER // 2)))
        losses.append(
            Curve(
                f"{name}validation",
                second,
                [line["iteration"] for line in held_out],
                [line["tokens"] for line in held_out],
                [line["validation_loss"] for line in held_out],
                dashed=not alone,
                dots=len(held_out) <= 60,
            )
        )
        log_x, log_tokens = [line["iteration"] for line in logs], [line["tokens"] for line in logs]
        kind = run.name if not alone else ""
        others["learning rate"].append(Curve(kind or "learning rate", colour, x, tokens, [step.learning_rate for step in steps]))
        others["gradient norm"].append(Curve(kind or "gradient norm", colour, x, tokens, [step.grad_norm for step in steps]))
        speeds = [line.get("tokens_per_s") for line in logs]
        others["tokens per second"].append(Curve(kind or "tokens per second", colour, log_x, log_tokens, speeds))
        held = [None if line.get("memory_bytes") is None else line["memory_bytes"] / 1e9 for line in logs]
        others["memory (GB)"].append(Curve(kind or "first rank, most so far", colour, log_x, log_tokens, held))
    found = [chart("loss (nats per token)", losses)]
    found += [chart(title, curves, strip=True, from_zero=title != "gradient norm") for title, curves in others.items()]
    return found


def _smoothed(values: Sequence[float | None], half: int) -> list[float | None]:
    import numpy as np

    calm = smoothed(np.array([math.nan if value is None else value for value in values], dtype=float), half)
    return [None if math.isnan(value) else float(value) for value in calm]


def _use_of_time(runs: Sequence[Run]) -> str:
    """What the time since the first start went into."""
    bars, rows = [], []
    for run in runs:
        spent = next((line["spent"] for line in reversed(run.history.logs) if line.get("spent")), None)
        if spent is not None:
            bars.append(Bar(run.name, spent, _long(math.fsum(spent.values()))))
            rows += [[run.name, use, _long(spent[use]), share] for use, share in shares(spent).items() if spent[use] > 0]
    if not bars:
        return "<p>No log line is in the record yet.</p>"
    note = "All time of the run since its first start, up to its last log line."
    return stacked_bars(bars, _long, note=note) + _ledger("use", rows, len(runs))


def _step_ledger(runs: Sequence[Run]) -> str:
    """What the time of a step goes into, as the timers measure it."""
    bars, rows = [], []
    for run in runs:
        parts = step_parts(run.history)
        if parts:
            bars.append(Bar(run.name, parts, _long(math.fsum(parts.values()) / 1000)))
            rows += [[run.name, name, f"{parts[name]:.1f} ms", share] for name, share in shares(parts).items() if parts[name] > 0]
    if not bars:
        return "<p>With --timing-log-level 1 the parts of a step are measured, and are shown here.</p>"
    note = "A step: the mean over the log lines but the first. Of each part that of the slowest rank; what they leave is 'other'."
    return stacked_bars(bars, lambda ms: f"{ms:.1f} ms", note=note) + table(
        ["run", "part of a step", "time", "share"], rows, (2, 3)
    )


def _ledger(what: str, rows: Sequence[Sequence[str]], runs: int) -> str:
    """The table below bars; one run needs no name."""
    if runs == 1:
        return table([what, "time", "share"], [row[1:] for row in rows], (1, 2))
    return table(["run", what, "time", "share"], rows, (2, 3))


def step_parts(history: History) -> dict[str, float]:
    """Milliseconds of a step by part; their sum is the step. Empty where no timers were on."""
    logs = [line for line in history.logs if line.get("timers_ms") and line.get("elapsed_ms")]
    logs = logs[_WARM_UP:] or logs
    if not logs:
        return {}

    def mean(name: str) -> float:
        return math.fsum(line["timers_ms"].get(name, 0.0) for line in logs) / len(logs)

    reduces = mean("grads-reduce")
    parts = {
        "data": mean("batch-generator"),
        "forward and backward": max(0.0, mean("forward-backward") - reduces),  # that timer runs within this one
        "reducing gradients": reduces,
        "gradient norm": mean("grad-norm"),
        "optimizer": mean("optimizer"),
    }
    step, told = math.fsum(line["elapsed_ms"] for line in logs) / len(logs), math.fsum(parts.values())
    if told > step:  # the slowest ranks of the parts are not the same
        return {name: value * step / told for name, value in parts.items()}
    return {**parts, "other": step - told}


def _measured_memory(history: History) -> str:
    """What the ranks hold, as --log-memory tells it, and the most that the first rank has held."""
    most = max((line["memory_bytes"] for line in history.logs if line.get("memory_bytes")), default=None)
    said = "" if most is None else f"<p>The first rank has held {amount(most)} at the most.</p>"
    parts: dict[str, float] = {}
    for line in history.measured:
        parts |= {
            name.removeprefix("memory/").replace("-", " "): value
            for name, value in line.items()
            if name.startswith("memory/") and "peak" not in name and isinstance(value, int | float)
        }
    if not parts:
        return said + "<p>With --log-memory what each part takes is measured, and is shown here.</p>"
    return said + stacked_bars(
        [Bar("measured", parts)], amount, note="What --log-memory measured last, on the rank that holds the most."
    )


def _data(history: History) -> str:
    start = history.starts[-1] if history.starts else {}
    data = start.get("config", {}).get("data", {})
    last = history.steps[-1] if history.steps else None
    names = ("data_path", "train_data_path", "valid_data_path", "test_data_path", "split", "data_order", "tokenizer_type", "seed")
    rows = [[name.replace("_", " "), _told(data[name])] for name in names if data.get(name)]
    if data.get("mock_data"):
        rows.append(["data", "made-up tokens (--mock-data)"])
    if last is not None:
        rows += [["tokens read", f"{last.tokens:,}"], ["sequence length", f"{start.get('seq_length', '-'):,}"]]
        samples = next((line["consumed_samples"] for line in reversed(history.logs) if "consumed_samples" in line), None)
        rows += [["samples read", f"{samples:,} of {start.get('total_samples') or 0:,}"]] if samples is not None else []
    batches = sorted({step.batch for step in history.steps})
    rows += [["batch size", f"{batches[0]:,}" + (f" to {batches[-1]:,}" if len(batches) > 1 else "")]] if batches else []
    return table(["", ""], rows)


def _checkpoints(run: Run) -> str:
    """Those that are in the folder now, each with when it was made and its size."""
    rows = []
    for folder in sorted(run.folder.glob("iter_*")):
        files = [path for path in folder.rglob("*") if path.is_file()]
        if files:
            newest = max(path.stat().st_mtime for path in files)
            rows.append([folder.name, _clock(newest), amount(sum(path.stat().st_size for path in files)), str(len(files))])
    saves = [line for line in run.history.events if line["event"] == "save"]
    said = (
        f"<p>{len(saves):,} were saved; these are in the folder.</p>"
        if rows
        else f"<p>{len(saves):,} were saved; none is in this folder.</p>"
    )
    return said + (table(["checkpoint", "made", "size", "files"], rows, (2, 3)) if rows else "")


def _events(history: History) -> str:
    """Restarts, what was told beside the log lines, and how many steps were left out."""
    lines = [
        (
            line["time"],
            line["iteration"],
            "restart" if at else "start",
            f"{line.get('world_size', '?')} ranks on {line.get('device', '?')}",
        )
        for at, line in enumerate(history.starts)
    ]
    lines += [(line["time"], line["iteration"], line["event"], line["words"]) for line in history.events]
    lines.sort(key=lambda line: line[0])
    skipped = [step.iteration for step in history.steps if step.grad_norm is None]
    kinds = {kind: sum(line[2] == kind for line in lines) for kind in dict.fromkeys(line[2] for line in lines)}
    said = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    more = f" {len(skipped):,} steps made no update, the last one {skipped[-1]:,}." if skipped else " No step was left out."
    shown = [line for line in lines if line[2] != "save"][-_MOST_EVENTS:]
    left = f'<p class="faint">The last {_MOST_EVENTS} without saves.</p>' if len(shown) == _MOST_EVENTS else ""
    rows = [[_clock(at), f"{iteration:,}", event, str(words)] for at, iteration, event, words in shown]
    return f"<p>{escape(said)}.{more}</p>{left}" + table(["time", "iteration", "event", "what"], rows, (1,))


def _settings(history: History) -> str:
    if not history.starts:
        return "<p>The record has no start.</p>"
    start = history.starts[-1]
    rows = [[flag, value, default] for flag, value, default in changed(start["config"])]
    everything = json.dumps(start["config"], indent=1)
    return (
        f"<p>The command of the last start:</p><pre>{escape(shlex.join(map(str, start.get('command', []))))}</pre>"
        "<p>What differs from the defaults:</p>"
        + table(["flag", "value", "default"], rows)
        + f"<details><summary>All settings, and versions</summary><pre>{escape(everything)}\n\n"
        + f"{escape(json.dumps(start.get('versions', {}), indent=1))}</pre></details>"
    )


def changed(config: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """Flags whose value is not the default, with both as text."""
    found = []
    for flag in flags().values():
        value, default = _told(config.get(flag.topic, {}).get(flag.field, flag.default)), _told(flag.default)
        if value != default:
            found.append((f"--{flag.name}", value, default))
    return found


def _different_settings(runs: Sequence[Run]) -> str:
    """Settings in which the last starts of the runs differ."""
    configs = [run.history.starts[-1]["config"] if run.history.starts else {} for run in runs]
    rows = []
    for flag in flags().values():
        values = [_told(config.get(flag.topic, {}).get(flag.field, flag.default)) for config in configs]
        if len(set(values)) > 1:
            rows.append([f"--{flag.name}", *values])
    return table(["flag", *(run.name for run in runs)], rows) if rows else "<p>None.</p>"


def _validation(history: History) -> list[tuple[int, float]]:
    return [(line["iteration"], line["validation_loss"]) for line in history.evaluations if line.get("validation_loss") is not None]


def _last_loss(history: History) -> float | None:
    values = [step.lm_loss for step in history.steps]
    half = max(1, len(values) // _SMOOTHED_OVER)
    tail = [value for value in values[-half:] if value is not None]
    return math.fsum(tail) / len(tail) if tail else None


def _told(value: Any) -> str:
    if value is None:
        return "not given"
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _long(seconds: float) -> str:
    if seconds >= 60:
        return duration(seconds)
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
