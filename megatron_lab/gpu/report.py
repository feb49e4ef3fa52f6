"""Formatting of the results of all checks: progress lines and a summary for the terminal, and the tables of docs/gpu.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lab.gpu.profile_text import format_profile

START_MARKER, END_MARKER = "<!-- results: begin -->", "<!-- results: end -->"
"""Lines of a page between which `write_docs` puts the tables."""
FAILED_STATES = ("fail", "too slow", "crash")
"""States of a check that make the exit status 1."""
MAX_SUMMARY_LINES = 100
_PROFILE_ROWS = 25
_FIGURE_WIDTH, _MESSAGE_WIDTH = 74, 240

Report = Mapping[str, Any]
"""Content of the file that --json writes."""


def format_progress(result: Mapping[str, Any], width: int) -> str:
    """Return the line that is printed when a check ends: state, name, duration and measured values.

    Args:
        result: result of the check.
        width: number of characters of the column of names.
    """
    text = "  ".join(message for message in (result["figure"], result["message"]) if message)
    return f"{result['state']:12} {result['name']:{width}} {result['seconds']:6.1f} s  {text}"


def count_states(results: Sequence[Mapping[str, Any]]) -> str:
    """Return a text with the number of checks in each state, such as "52 pass, 1 fail"."""
    states = [result["state"] for result in results]
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))


def get_speed_rows(report: Report) -> list[Mapping[str, Any]]:
    """Return the measurements of all speed checks. Each is the row of one training loop: the framework's or the plain one, for one
    model and mode."""
    return [row for result in report["checks"] for row in result["data"].get("rows", [])]


def build_speed_table(report: Report) -> list[list[str]]:
    """Return the cells of the speed table: a header, and one row for each model and mode (eager, compiled or 8-bit). A row compares
    the framework with a plain torch loop."""
    table = [
        [
            "model",
            "mode",
            "ours ms",
            "plain ms",
            "ours/plain",
            "tokens/s",
            "TFLOP/s",
            "MFU",
            "plain MFU",
            "peak GB",
            "plan",
            "plain GB",
            "attention",
        ]
    ]
    rows = get_speed_rows(report)
    for model, mode in dict.fromkeys((row["model"], row["mode"]) for row in rows):
        by_loop = {row["loop"]: row for row in rows if row["model"] == model and (row["mode"] == mode)}
        if "ours" not in by_loop:
            continue
        framework_row = by_loop["ours"]
        # No plain loop runs in 8 bits, so the table compares with the eager one in bfloat16.
        eager_plain_rows = [row for row in rows if row["model"] == model and row["loop"] == "plain" and row["mode"] == "eager"]
        plain_row = by_loop.get("plain") or (eager_plain_rows[0] if eager_plain_rows and mode.startswith("fp8") else None)
        table.append(
            [
                f"{model} ({framework_row['layers']} layers)",
                mode,
                f"{framework_row['milliseconds']:.1f}",
                _format_value(plain_row, "milliseconds", ".1f"),
                "-" if plain_row is None else f"{plain_row['milliseconds'] / framework_row['milliseconds']:.3f}",
                f"{framework_row['tokens_per_second']:,.0f}",
                f"{framework_row['tflops']:.4g}",
                _format_value(framework_row, "mfu", ".1%"),
                _format_value(plain_row, "mfu", ".1%"),
                _format_value(framework_row, "peak_gb", ".2f"),
                _format_value(framework_row, "planned_gb", ".2f"),
                _format_value(plain_row, "peak_gb", ".2f"),
                framework_row["attention"]
                if plain_row is None
                else _format_attention(framework_row["attention"], plain_row["attention"]),
            ]
        )
    return table


def _format_attention(framework_kernel: str, plain_kernel: str) -> str:
    """Return the name of the attention kernel if the framework and the plain torch loop use the same, otherwise both names."""
    return framework_kernel if framework_kernel == plain_kernel else f"{framework_kernel} (plain: {plain_kernel})"


def _format_value(row: Mapping[str, Any] | None, name: str, format_spec: str) -> str:
    return "-" if row is None or row[name] is None else format(row[name], format_spec)


def format_summary(report: Report) -> list[str]:
    """Return a summary of at most `MAX_SUMMARY_LINES` lines: limits of the device, speed, kernels that take most time, and the
    state of each check."""
    results = report["checks"]
    by_name = {result["name"]: result for result in results}
    lines = ["", f"== {report['device_name']}, torch {report['torch']}, {report['date']}: {count_states(results)}"]
    lines += [by_name[name]["figure"] for name in ("device", "roofline", "attention-speed") if by_name.get(name, {}).get("figure")]
    if len(table := build_speed_table(report)) > 1:
        widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
        lines += ["", *("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table)]
    lines += _format_errors(results)
    profiles = [result["data"] for result in results if "profile" in result["data"]]
    state_lines = _format_states(results)
    available_lines = MAX_SUMMARY_LINES - len(lines) - len(state_lines)
    for data in profiles:
        rows = min(_PROFILE_ROWS, available_lines // len(profiles) - 3)
        if rows > 0:
            lines += ["", *format_profile(f"{data['model']}, eager", data["profile"], rows)]
    return [*lines, *state_lines][:MAX_SUMMARY_LINES]


def _format_errors(results: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{result['name']}: {error}" for result in results for error in result["data"].get("errors", [])]


def _format_states(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines on the states of the checks: measured values of passed checks (shortened), names of checks that did not run,
    and messages of failures."""
    failed = [
        f"{result['state'].upper()} {result['name']}: {result['figure']} {result['message']}"[:_MESSAGE_WIDTH]
        for result in results
        if result["state"] in FAILED_STATES
    ]
    headline_checks = ("device", "roofline", "attention-speed")
    passed = [
        f"pass {result['name']}: {result['figure']}"[:_FIGURE_WIDTH]
        for result in results
        if result["state"] == "pass"
        and result["name"] not in headline_checks
        and not result["data"].get("rows")
        and "profile" not in result["data"]
    ]
    pairs = [f"{left:{_FIGURE_WIDTH}}  {right}".rstrip() for left, right in zip(passed[::2], [*passed[1::2], ""], strict=False)]
    names_by_state: dict[str, list[str]] = {}
    for result in results:
        if result["state"] not in (*FAILED_STATES, "pass"):
            names_by_state.setdefault(result["state"], []).append(result["name"])
    return ["", *pairs, *(f"{state}: {', '.join(names)}" for state, names in names_by_state.items()), *failed]


def format_markdown(report: Report) -> str:
    """Return the report as Markdown tables, below a line with the device and versions.

    A CPU runs tiny models whose times would mislead, so its report has only the table of states, without measured times.
    """
    head = f"{report['device_name']}, torch {report['torch']}, {report['date']} (`--device {report['device']}`): "
    blocks = [head + count_states(report["checks"]) + "."]
    is_gpu = report["device"] != "cpu"
    if is_gpu and len(table := build_speed_table(report)) > 1:
        blocks += ["", _format_markdown_row(table[0]), "|---" * len(table[0]) + "|", *map(_format_markdown_row, table[1:])]
    for data in (result["data"] for result in report["checks"] if is_gpu and "profile" in result["data"]):
        blocks += ["", "```text", *format_profile(f"{data['model']}, eager", data["profile"], _PROFILE_ROWS), "```"]
    blocks += ["", "| check | state | figure | seconds |", "|---|---|---|---|"]
    for result in report["checks"]:
        has_times = bool(result["data"].get("rows")) or "profile" in result["data"]
        text = " ".join((result["figure"] or result["message"]).replace("|", "/").split()) if is_gpu or not has_times else ""
        blocks.append(f"| {result['name']} | {result['state']} | {text} | {result['seconds']:.0f} |")
    return "\n".join(blocks)


def _format_markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def write_docs(page: Path, report: Report) -> None:
    """Replace the tables of a documentation page by those of a report.

    Args:
        page: Markdown file, such as docs/gpu.md.
        report: content of the file that --json writes.

    Raises:
        ValueError: the page has no lines `START_MARKER` and `END_MARKER`, between which the tables go.
    """
    text = page.read_text() if page.exists() else ""
    head, start_marker, remainder = text.partition(START_MARKER)
    _, end_marker, tail = remainder.partition(END_MARKER)
    if not start_marker or not end_marker:
        raise ValueError(
            f"{page} has no lines {START_MARKER} and {END_MARKER}, between which the table goes. Add them, or give another page."
        )
    page.write_text(f"{head}{START_MARKER}\n{format_markdown(report)}\n{END_MARKER}{tail}")
