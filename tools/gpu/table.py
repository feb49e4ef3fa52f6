"""The results of the checks, as a table for people, as JSON, and as a page's table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
"""Between these lines of a page stands the table that `write_docs` puts there."""


def line(result: Mapping[str, Any], width: int) -> str:
    """One check for the terminal."""
    words = f"  {result['words']}" if result["words"] else ""
    return f"{result['state']:12} {result['name']:{width}} {result['seconds']:6.1f} s  {result['figure']}{words}"


def summary(results: Sequence[Mapping[str, Any]]) -> str:
    """How many ended how."""
    states = [result["state"] for result in results]
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))


def markdown(report: Mapping[str, Any]) -> str:
    """The report as a table, with what it was measured on above it."""
    head = f"{report['device_name']}, torch {report['torch']}, {report['date']} (`--device {report['device']}`): "
    rows = [
        f"| {one['name']} | {one['state']} | {_cell(one['figure'], one['words'])} | {one['seconds']:.0f} |"
        for one in report["checks"]
    ]
    return "\n".join(
        [head + summary(report["checks"]) + ".", "", "| check | state | figure | seconds |", "|---|---|---|---|", *rows]
    )


def _cell(figure: str, words: str) -> str:
    return " ".join((figure or words).replace("|", "/").split())


def write_docs(page: Path, report: Mapping[str, Any]) -> None:
    """Put the table into a page, in the place of the one that is there.

    Raises:
        ValueError: the page does not mark the place.
    """
    text = page.read_text() if page.exists() else ""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no lines {BEGIN} and {END}, between which the table goes. Add them, or give another page.")
    page.write_text(f"{before}{BEGIN}\n{markdown(report)}\n{END}{after}")
