"""Check this machine's GPU in a few minutes: limits, kernels against float64, speed beside plain torch, memory, and whole runs.

    python tools/check_gpu.py --minutes 8 --json gpu.json      run the checks in order of value, as many as fit
    python tools/check_gpu.py --resume gpu.json                run those that are left, and add them to the file
    python tools/check_gpu.py --device cpu                     the same with small models; what needs a GPU says so
    python tools/check_gpu.py --table gpu.json --write-docs docs/gpu.md

docs/gpu.md explains the output. The file is complete after every check. The last 100 lines that are printed have everything
important.

Exit status: 0 no check failed; 1 one failed; 2 the command line or a file is wrong, or there is no such device; 130 interrupted.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

from megatron_lab.commands.parser import ToolParser
from megatron_lab.gpu.checks import CHECKS, Check
from megatron_lab.gpu.report import BAD, markdown, progress_line, summary, write_docs
from megatron_lab.gpu.session import Interrupted, blank, run_checks

PROGRAM = "check_gpu.py"
_LOOK = (
    "import json, torch; cuda = torch.cuda.is_available(); "
    "print(json.dumps({'torch': torch.__version__, 'gpus': torch.cuda.device_count() if cuda else 0, "
    "'name': torch.cuda.get_device_name(0) if cuda else None}))"
)
_INTERRUPTED_STATUS = 130
_CACHE = "megatron-check-gpu-compiler-cache"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    flags = ToolParser(description=__doc__, prog=PROGRAM)
    flags.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where to run (cuda)")
    flags.add_argument("--minutes", type=_minutes, default=15.0, metavar="N", help="time for all checks together (15)")
    flags.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE, after every check")
    flags.add_argument(
        "--resume", type=Path, metavar="FILE", help="take the results of FILE and run what is left; implies --json FILE"
    )
    flags.add_argument(
        "--only", type=_checks, metavar="A,B,...", help="run these checks only; with --resume, also those of them that have failed"
    )
    flags.add_argument("--list", action="store_true", help="print each check, its estimated time and what it proves; run nothing")
    flags.add_argument("--table", type=Path, metavar="FILE", help="run nothing: print the results of FILE as tables")
    flags.add_argument("--write-docs", type=Path, metavar="PAGE", help="put the tables into a page, as docs/gpu.md has them")
    return flags


def _checks(text: str) -> list[Check]:
    known = {check.name: check for check in CHECKS}
    names = [name for name in text.split(",") if name]
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"no check has the name {unknown[0]!r}; `--list` shows all names")
    if not names:
        raise argparse.ArgumentTypeError("names no check; `--list` shows all names")
    return [check for check in CHECKS if check.name in names]


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0.0 < minutes < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of minutes above 0, not {text!r}")
    return minutes


def main(arguments: list[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    args = parser().parse_args(arguments)
    checks = args.only or list(CHECKS)
    if args.list:
        for check in checks:
            needs = ", needs CUDA" if check.needs_cuda else ""
            print(f"{check.name:24} {check.estimate(args.device):4.0f} s  {check.proves}{needs}")
        return 0
    status = 0
    try:
        if args.table:
            report = read_report(args.table)
            print(markdown(report))
        else:
            report, was_interrupted = run_session(args, checks)
            status = _INTERRUPTED_STATUS if was_interrupted else 0
        if args.write_docs:
            write_docs(args.write_docs, report)
    except (OSError, ValueError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    return status or int(any(result["state"] in BAD for result in report["checks"]))


def run_session(args: argparse.Namespace, checks: list[Check]) -> tuple[dict[str, Any], bool]:
    """Run the checks within the time and write the file after each; returns the report and whether a signal came.

    Raises:
        ValueError: there is no such device, or the file to resume is not of this device and torch.
    """
    report = new_report(args.device)
    if args.resume:
        report = resumed_report(args.resume, report)
    file = args.json or args.resume
    results = {result["name"]: result for result in report["checks"]}
    if args.only:
        for check in checks:
            if results[check.name]["state"] in BAD:
                results[check.name].update(blank(check))
    width = max(len(check.name) for check in checks)
    print(f"{report['device_name']}, torch {report['torch']}: {len(checks)} checks in at most {args.minutes:g} minutes", flush=True)

    def after_each(result: dict[str, Any]) -> None:
        if file:
            write_atomically(file, report)
        log = [f"    {line}" for line in result["data"].get("log", [])]
        print("\n".join([progress_line(result, width), *log]), flush=True)

    if file:
        write_atomically(file, report)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = compiler_cache()
    old_handlers = {number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    was_interrupted = False
    try:
        try:
            run_checks(checks, results, args.device, 60 * args.minutes, after_each)
        except Interrupted:
            was_interrupted = True
        if file:
            write_atomically(file, report)
        print("\n".join(summary(report)), flush=True)
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
    return report, was_interrupted


def compiler_cache() -> str:
    """Return the compiler's cache folder as an absolute path: the processes of the checks run in the repository's root.

    By default it is a fixed folder, so that a second session on this machine finds what the compiler has made.
    """
    return os.path.abspath(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or Path(tempfile.gettempdir()) / _CACHE)


def _interrupt(number: int, frame: FrameType | None) -> None:
    for repeated in (signal.SIGTERM, signal.SIGINT):  # `timeout` sends two: to the process, and to its group
        signal.signal(repeated, signal.SIG_IGN)
    raise Interrupted


def new_report(device: str) -> dict[str, Any]:
    """Return the report of a session in which no check has run.

    Raises:
        ValueError: there is no such device.
    """
    done = subprocess.run([sys.executable, "-c", _LOOK], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"torch cannot be imported by {sys.executable}: {(done.stderr.splitlines() or ['no message'])[-1]}")
    facts = json.loads(done.stdout)
    if device == "cuda" and not facts["gpus"]:
        raise ValueError("torch sees no GPU here. Check the driver and CUDA_VISIBLE_DEVICES, or give --device cpu.")
    return {
        "device": device,
        "device_name": facts["name"] if device == "cuda" else "CPU",
        "gpus": facts["gpus"],
        "torch": facts["torch"],
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "checks": [blank(check) for check in CHECKS],
    }


def resumed_report(file: Path, new: dict[str, Any]) -> dict[str, Any]:
    """Return a new report with the results of a file.

    Raises:
        ValueError: the file is of another device or torch.
    """
    old = read_report(file)
    for key in ("device_name", "torch"):
        if old[key] != new[key]:
            raise ValueError(f"--resume {file} has results of {old[key]}, but here is {new[key]}. Give another file to --json.")
    results = {result["name"]: result for result in old["checks"]}
    return {**new, "date": old["date"], "checks": [results.get(result["name"], result) for result in new["checks"]]}


def read_report(file: Path) -> dict[str, Any]:
    """Read what --json wrote.

    Raises:
        ValueError: the file is something else.
    """
    try:
        report: dict[str, Any] = json.loads(file.read_text())
        if not all(set(blank(CHECKS[0])) <= set(result) for result in report["checks"]) or not {
            "device",
            "device_name",
            "torch",
            "date",
        } <= set(report):
            raise KeyError("a field is missing")
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not what --json writes: {error!r}") from error
    return report


def write_atomically(file: Path, report: dict[str, Any]) -> None:
    """Replace a file by one with the report, so that a reader never finds half of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text(json.dumps(report, indent=1) + "\n")
    temporary.replace(file)
