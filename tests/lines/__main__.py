"""Run pytest, and print which share of the lines of `megatron/` and `megatron_lab/` the tests run, by package.

    python -m tests.lines -n auto --dist worksteal                   the whole suite
    python -m tests.lines -n 0 tests/unit/moe tests/proof/test_layouts_experts.py
    python -m tests.lines --missing FILE -n auto                     writes the lines that no test runs

Needs Python 3.12, whose `sys.monitoring` costs next to nothing. Lines that `torch.compile` traces count when they are traced.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).resolve().parents[2]
_WRITTEN = re.compile(r"^(.+):(\d+);$", re.MULTILINE)


def main(argv: Sequence[str] | None = None) -> int:
    """Run pytest with the recorder, print the table, and return pytest's exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.lines", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--missing", type=Path, metavar="FILE", help="write the lines that no test runs to a file")
    args, for_pytest = parser.parse_known_args(argv)
    if sys.version_info < (3, 12):
        raise SystemExit(f"tests.lines needs Python 3.12 or newer, and this is {sys.version.split()[0]}")
    with tempfile.TemporaryDirectory(prefix="lines-") as folder:
        path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "TEST_LINES_FOLDER": folder, "TEST_LINES_ROOT": f"{ROOT}/"}
        status = subprocess.call([sys.executable, "-m", "pytest", *for_pytest], cwd=ROOT, env=environment)
        run = read_lines(Path(folder))
    wanted = {
        str(path.relative_to(ROOT)): executable_lines(path)
        for path in sorted((ROOT / "megatron").rglob("*.py")) + sorted((ROOT / "megatron_lab").rglob("*.py"))
    }
    print(table(wanted, run))
    if args.missing:
        missing = [f"{name}:{line}" for name, lines in wanted.items() for line in sorted(lines - run.get(name, set()))]
        args.missing.write_text("\n".join([*missing, ""]))
    return status


def read_lines(folder: Path) -> dict[str, set[int]]:
    """Read what the recorders wrote, but for what a limit on the size of files cut off: the numbers of lines by file."""
    found: dict[str, set[int]] = defaultdict(set)
    for file in folder.iterdir():
        for name, line in _WRITTEN.findall(file.read_text()):
            found[name].add(int(line))
    return found


def executable_lines(path: Path) -> set[int]:
    """Return the numbers of the lines for which a source file has bytecode."""
    return set(_lines_of(compile(path.read_text(), str(path), "exec")))


def _lines_of(code: CodeType) -> Iterator[int]:
    # The first line of a module's or function's code is that of its start, at which no line event need come.
    yield from (line for start, _, line in code.co_lines() if line and start > 0)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _lines_of(constant)


def table(wanted: Mapping[str, set[int]], run: Mapping[str, set[int]]) -> str:
    """Build a Markdown table of lines and lines run, by package and over all."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, lines in wanted.items():
        for row in (f"`{'/'.join(name.split('/')[:2])}`", "all"):
            counts[row][0] += len(lines)
            counts[row][1] += len(lines & run.get(name, set()))
    order = sorted(counts, key=lambda row: (row == "all", row))
    return "\n".join(
        ["| | lines | run | share |", "|---|---|---|---|"]
        + [f"| {row} | {counts[row][0]} | {counts[row][1]} | {counts[row][1] / counts[row][0]:.2%} |" for row in order]
    )


if __name__ == "__main__":
    sys.exit(main())
