"""Results of the checks: lines for the terminal, a summary that stands for itself, and the table of docs/gpu.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lab.gpu.profile_text import format_profile

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
"""`write_docs` puts the tables between these two lines of a page."""
BAD = ("fail", "too slow", "crash")
"""States for which the exit status is 1."""
MAX_SUMMARY_LINES = 100
_PROFILE_ROWS = 25
_FIGURE_WIDTH, _MESSAGE_WIDTH = 74, 240

Report = Mapping[str, Any]
"""What --json writes."""


def progress_line(result: Mapping[str, Any], width: int) -> str:
    """Return the line that is printed when a check has ended."""
    text = "  ".join(part for part in (result["figure"], result["message"]) if part)
    return f"{result['state']:12} {result['name']:{width}} {result['seconds']:6.1f} s  {text}"


def count_states(results: Sequence[Mapping[str, Any]]) -> str:
    """Return how many checks are in each state."""
    states = [result["state"] for result in results]
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))


def speed_rows(report: Report) -> list[Mapping[str, Any]]:
    """Return the rows of all speed checks."""
    return [row for result in report["checks"] for row in result["data"].get("rows", [])]


def speed_table(report: Report) -> list[list[str]]:
    """Return the cells of the speed table: a heading, and a row for each model and mode."""
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
    rows = speed_rows(report)
    for model, mode in dict.fromkeys((row["model"], row["mode"]) for row in rows):
        by_loop = {row["loop"]: row for row in rows if row["model"] == model and (row["mode"] == mode)}
        if "ours" not in by_loop:
            continue
        ours = by_loop["ours"]
        # In 8 bits there is no plain loop: the eager one in bfloat16 stands beside ours.
        others = [row for row in rows if row["model"] == model and row["loop"] == "plain" and row["mode"] == "eager"]
        plain = by_loop.get("plain") or (others[0] if others and mode.startswith("fp8") else None)
        table.append(
            [
                f"{model} ({ours['layers']} layers)",
                mode,
                f"{ours['milliseconds']:.1f}",
                _number(plain, "milliseconds", ".1f"),
                "-" if plain is None else f"{plain['milliseconds'] / ours['milliseconds']:.3f}",
                f"{ours['tokens_per_second']:,.0f}",
                f"{ours['tflops']:.4g}",
                _number(ours, "mfu", ".1%"),
                _number(plain, "mfu", ".1%"),
                _number(ours, "peak_gb", ".2f"),
                _number(ours, "planned_gb", ".2f"),
                _number(plain, "peak_gb", ".2f"),
                ours["attention"] if plain is None else _attention(ours["attention"], plain["attention"]),
            ]
        )
    return table


def _attention(ours: str, plain: str) -> str:
    """Return the attention kernel of both loops, or of each."""
    return ours if ours == plain else f"{ours} (plain: {plain})"


def _number(row: Mapping[str, Any] | None, name: str, form: str) -> str:
    return "-" if row is None or row[name] is None else format(row[name], form)


def summary(report: Report) -> list[str]:
    """Return at most 100 lines that tell everything important: limits, speed, kernels, and the state of each check."""
    results = report["checks"]
    by_name = {result["name"]: result for result in results}
    lines = ["", f"== {report['device_name']}, torch {report['torch']}, {report['date']}: {count_states(results)}"]
    lines += [by_name[name]["figure"] for name in ("device", "roofline", "attention-speed") if by_name.get(name, {}).get("figure")]
    if len(table := speed_table(report)) > 1:
        widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
        lines += ["", *("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table)]
    lines += _error_lines(results)
    profiles = [result["data"] for result in results if "profile" in result["data"]]
    states = _state_lines(results)
    room = MAX_SUMMARY_LINES - len(lines) - len(states)
    for data in profiles:
        rows = min(_PROFILE_ROWS, room // len(profiles) - 3)
        if rows > 0:
            lines += ["", *format_profile(f"{data['model']}, eager", data["profile"], rows)]
    return [*lines, *states][:MAX_SUMMARY_LINES]


def _error_lines(results: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{result['name']}: {error}" for result in results for error in result["data"].get("errors", [])]


def _state_lines(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what failed in full, the figures of what passed in short, and the names of the rest."""
    bad = [
        f"{one['state'].upper()} {one['name']}: {one['figure']} {one['message']}"[:_MESSAGE_WIDTH]
        for one in results
        if one["state"] in BAD
    ]
    told = ("device", "roofline", "attention-speed")
    passed = [
        f"pass {one['name']}: {one['figure']}"[:_FIGURE_WIDTH]
        for one in results
        if one["state"] == "pass" and one["name"] not in told and not one["data"].get("rows") and "profile" not in one["data"]
    ]
    pairs = [f"{left:{_FIGURE_WIDTH}}  {right}".rstrip() for left, right in zip(passed[::2], [*passed[1::2], ""], strict=False)]
    rest: dict[str, list[str]] = {}
    for one in results:
        if one["state"] not in (*BAD, "pass"):
            rest.setdefault(one["state"], []).append(one["name"])
    return ["", *pairs, *(f"{state}: {', '.join(names)}" for state, names in rest.items()), *bad]


def markdown(report: Report) -> str:
    """Return the report as tables, below a line that says what it was measured on.

    Figures of speed on a CPU, of tiny models, would mislead: there is only the table of states and of figures without times.
    """
    head = f"{report['device_name']}, torch {report['torch']}, {report['date']} (`--device {report['device']}`): "
    parts = [head + count_states(report["checks"]) + "."]
    on_gpu = report["device"] != "cpu"
    if on_gpu and len(table := speed_table(report)) > 1:
        parts += ["", _markdown_row(table[0]), "|---" * len(table[0]) + "|", *map(_markdown_row, table[1:])]
    for data in (result["data"] for result in report["checks"] if on_gpu and "profile" in result["data"]):
        parts += ["", "```text", *format_profile(f"{data['model']}, eager", data["profile"], _PROFILE_ROWS), "```"]
    parts += ["", "| check | state | figure | seconds |", "|---|---|---|---|"]
    for result in report["checks"]:
        is_timed = bool(result["data"].get("rows")) or "profile" in result["data"]
        text = " ".join((result["figure"] or result["message"]).replace("|", "/").split()) if on_gpu or not is_timed else ""
        parts.append(f"| {result['name']} | {result['state']} | {text} | {result['seconds']:.0f} |")
    return "\n".join(parts)


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def write_docs(page: Path, report: Report) -> None:
    """Replace the tables of a page.

    Raises:
        ValueError: the page does not mark where they stand.
    """
    text = page.read_text() if page.exists() else ""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no lines {BEGIN} and {END}, between which the table goes. Add them, or give another page.")
    page.write_text(f"{before}{BEGIN}\n{markdown(report)}\n{END}{after}")
