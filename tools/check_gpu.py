"""What must be true on this machine's GPU, in order of value, in at most 15 minutes.

    python tools/check_gpu.py                          a table, with pass, fail and a figure for each check
    python tools/check_gpu.py --json gpu.json          and the same for programs
    python tools/check_gpu.py --device cpu             the same table with small models; what needs a GPU says so
    python tools/check_gpu.py --table gpu.json --write-docs docs/gpu.md

Each check runs in a process of its own with a time limit: one that fails, hangs or takes all memory ends alone.

Exit status: 0 nothing failed; 1 a check failed; 2 the command line is wrong, or there is no such device.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started from any folder

from tools.gpu.checks import CHECKS, Check
from tools.gpu.isolated import Ended, run
from tools.gpu.table import line, markdown, summary, write_docs
from tools.parser import ToolParser

PROGRAM = "check_gpu.py"
_RESULT = "result: "
_LOOK = (
    "import json, torch; there = torch.cuda.is_available(); "
    "print(json.dumps({'torch': torch.__version__, 'gpus': torch.cuda.device_count() if there else 0, "
    "'name': torch.cuda.get_device_name(0) if there else None}))"
)
BAD = ("fail", "too slow", "crash")


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = ToolParser(description=__doc__, prog=PROGRAM)
    flags.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where to run (cuda)")
    flags.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    flags.add_argument("--only", type=_checks, metavar="A,B,...", help="only these checks")
    flags.add_argument("--minutes", type=_minutes, default=15.0, metavar="N", help="time for all checks together (15)")
    flags.add_argument("--list", action="store_true", help="say what each check proves, and run nothing")
    flags.add_argument("--table", type=Path, metavar="FILE", help="run nothing: take the results that --json wrote")
    flags.add_argument("--write-docs", type=Path, metavar="PAGE", help="put the results into a page, as docs/gpu.md")
    return flags


def _checks(text: str) -> list[Check]:
    known = {check.name: check for check in CHECKS}
    names = [name for name in text.split(",") if name]
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"no check is called {', '.join(unknown)}; there are {', '.join(known)}")
    if not names:
        raise argparse.ArgumentTypeError("names no check; --list tells what there is")
    return [check for check in CHECKS if check.name in names]


def _minutes(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no time above 0")
    return number


def main(arguments: list[str] | None = None) -> int:
    """Run the checks; returns the exit status."""
    flags = parser()
    given = flags.parse_args(arguments)
    checks = given.only or list(CHECKS)
    if given.list:
        print("\n".join(f"{check.name:24} {check.proves}{' (needs CUDA)' if check.needs_cuda else ''}" for check in checks))
        return 0
    try:
        report = json.loads(given.table.read_text()) if given.table else made(checks, given.device, given.minutes)
        if given.table:
            print(markdown(report))
        if given.json:
            given.json.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
        if given.write_docs:
            write_docs(given.write_docs, report)
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"{given.table} is not what --json writes: {error!r}" if isinstance(error, KeyError | TypeError) else str(error)
        print(f"{PROGRAM}: {what}", file=sys.stderr)
        return 2
    return 1 if any(one["state"] in BAD for one in report["checks"]) else 0


def made(checks: list[Check], device: str, minutes: float) -> dict[str, Any]:
    """Run the checks and tell of each when it has ended.

    Raises:
        ValueError: there is no such device.
    """
    ends = time.monotonic() + 60 * minutes
    seen = json.loads(subprocess.run([sys.executable, "-c", _LOOK], check=True, capture_output=True, text=True).stdout)
    if device == "cuda" and not seen["gpus"]:
        raise ValueError("torch sees no GPU here. Look at the driver and CUDA_VISIBLE_DEVICES, or give --device cpu.")
    name = seen["name"] if device == "cuda" else "CPU"
    print(f"{name}, torch {seen['torch']}, {len(checks)} checks in at most {minutes:g} minutes", flush=True)
    results, width = [], max(len(check.name) for check in checks)
    for check in checks:
        results.append(one(check, device, ends - time.monotonic()))
        print(line(results[-1], width), flush=True)
    print(summary(results), flush=True)
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    return {"device": device, "device_name": name, "gpus": seen["gpus"], "torch": seen["torch"], "date": date, "checks": results}


def one(check: Check, device: str, left: float) -> dict[str, Any]:
    """A check's result.

    Args:
        left: seconds of the budget.
    """
    found: dict[str, Any] = {"name": check.name, "proves": check.proves, "figure": "", "seconds": 0.0, "words": ""}
    if check.needs_cuda and device != "cuda":
        return {**found, "state": "needs CUDA"}
    if left <= 0:
        return {**found, "state": "no time left"}
    limit = min(left, check.limit * (1 if device == "cuda" else 2))
    with tempfile.TemporaryDirectory(prefix="check_gpu_", ignore_cleanup_errors=True) as folder:
        ended = run([sys.executable, "-m", "tools.gpu.child", check.name, device, folder], limit, Path(folder))
    return {**found, "seconds": round(ended.seconds, 1), **verdict(ended, limit, out_of_budget=limit == left)}


def verdict(ended: Ended, limit: float, *, out_of_budget: bool) -> dict[str, str]:
    """State, figure and words of a check that has ended."""
    last = next((line for line in reversed(ended.out.splitlines()) if line.startswith(_RESULT)), None)
    if ended.code == 0 and last is not None:
        with contextlib.suppress(json.JSONDecodeError):
            return {**json.loads(last.removeprefix(_RESULT)), "words": ""}
    if ended.code is None:
        state = "no time left" if out_of_budget else "too slow"
        return {"state": state, "words": f"ended after {limit:.0f} s"}
    lines = [line.strip() for line in ended.err.splitlines() if line.strip()]
    memory = [line for line in lines if "out of memory" in line.lower()]
    return {"state": "crash", "words": f"exit status {ended.code}: {(memory or lines or ['it said nothing'])[-1][:300]}"}


if __name__ == "__main__":
    sys.exit(main())
