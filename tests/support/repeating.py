"""The end of a run that fails: each test, its seed or example, and the command that repeats it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

MOST = 10
"""Failures that are listed. With two lines each they fit on a screen."""
_WIDTH = 300
_EXAMPLE = re.compile(r"(?:Falsifying|Failing)\b.*\b(?:example|test case): ")
"""How a property test begins what it tells of the example, in one version of hypothesis or another."""
_SEED = re.compile(r"(?:\w+: )?(Repeat it by: .*|.*\bseed[ =:]+\d+.*)")


def lines(failures: Sequence[tuple[str, str]], *, full: bool) -> Iterator[str]:
    """List the failures.

    Args:
        failures: node id and report of each, as they came; a node may have several.
        full: whether the run had --full.
    """
    reports: dict[str, str] = {}
    for node, text in failures:
        reports[node] = f"{reports.get(node, '')}\n{text}"
    yield f"{len(reports)} failed; each repeated alone by:"
    for node, text in [*reports.items()][:MOST]:
        yield f"bash tests/run.sh -n 0 {'--full ' if full else ''}{shlex.quote(node)}"
        if how := seed(text):
            yield f"    {how}"
    if len(reports) > MOST:
        yield f"and {len(reports) - MOST} more"


def seed(report: str) -> str:
    """Return what a report says of a random draw: the example of a property test, or the line that names the seed; else nothing."""
    told = [line[1:].strip().partition("  # ")[0] for line in report.splitlines() if line.startswith("E")]
    for number, line in enumerate(told):
        if begins := _EXAMPLE.match(line):
            end = next((at for at in range(number, len(told)) if told[at].endswith(")")), number)
            example = " ".join([line[begins.end() :], *told[number + 1 : end + 1]]).replace("( ", "(").replace(", )", ")")
            again = re.search(r"@reproduce_failure\(.*?\)", " ".join(told[end:]))
            return _cut(f"example, the same in each run: {example}") + (f"; by itself: {again[0]}" if again else "")
    return next((_cut(found[1]) for line in told if (found := _SEED.match(line))), "")


def _cut(line: str) -> str:
    return line if len(line) <= _WIDTH else f"{line[:_WIDTH]}..."
