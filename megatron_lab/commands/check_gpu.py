"""Check this machine's GPU in a few minutes: limits, kernels against float64, speed compared with plain torch, memory, and full
runs.

    python tools/check_gpu.py --minutes 8 --json gpu.json      run the most valuable checks that fit into the time
    python tools/check_gpu.py --resume gpu.json                run the remaining checks, and add them to the file
    python tools/check_gpu.py --device cpu                     run with small models; checks that need a GPU report so
    python tools/check_gpu.py --table gpu.json --write-docs docs/gpu.md

docs/gpu.md explains the output. The file is complete after every check. The last 100 printed lines contain everything important.

Exit status: 0 no check failed; 1 a check failed; 2 the command line or a file is invalid, or the device does not exist; 130
interrupted.
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

from megatron.config.regular_file import check_replaceable, parse_json, read_text
from megatron_lab.commands.parser import ToolParser
from megatron_lab.gpu.checks import CHECKS, Check
from megatron_lab.gpu.report import FAILED_STATES, format_markdown, format_progress, format_summary, write_docs
from megatron_lab.gpu.session import Interrupted, create_result, run_checks

PROGRAM = "check_gpu.py"
_PROBE_CODE = (
    "import json, torch; cuda = torch.cuda.is_available(); "
    "print(json.dumps({'torch': torch.__version__, 'gpus': torch.cuda.device_count() if cuda else 0, "
    "'name': torch.cuda.get_device_name(0) if cuda else None}))"
)
_INTERRUPTED_STATUS = 130
_CACHE_NAME = "megatron-check-gpu-compiler-cache"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = ToolParser(description=__doc__, prog=PROGRAM)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="Run on this device (default cuda).")
    parser.add_argument(
        "--minutes", type=_parse_minutes, default=15.0, metavar="N", help="Limit the time of all checks to N minutes (default 15)."
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write the results to FILE after every check.")
    parser.add_argument(
        "--resume", type=Path, metavar="FILE", help="Load the results of FILE and run the remaining checks; implies --json FILE."
    )
    parser.add_argument(
        "--only",
        type=_parse_checks,
        metavar="A,B,...",
        help="Run only these checks; with --resume, also those of them that have failed.",
    )
    parser.add_argument(
        "--list", action="store_true", help="Print each check with its estimated time and what it proves, and run nothing."
    )
    parser.add_argument("--table", type=Path, metavar="FILE", help="Print the results of FILE as tables, and run nothing.")
    parser.add_argument("--write-docs", type=Path, metavar="PAGE", help="Write the tables into a page such as docs/gpu.md.")
    return parser


def _parse_checks(text: str) -> list[Check]:
    checks_by_name = {check.name: check for check in CHECKS}
    names = [name for name in text.split(",") if name]
    if unknown := [name for name in names if name not in checks_by_name]:
        raise argparse.ArgumentTypeError(f"no check has the name {unknown[0]!r}; `--list` shows all names")
    if not names:
        raise argparse.ArgumentTypeError("must contain at least one name of a check; `--list` shows all names")
    return [check for check in CHECKS if check.name in names]


def _parse_minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0.0 < minutes < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of minutes above 0, not {text!r}")
    return minutes


def main(arguments: list[str] | None = None) -> int:
    """Run the checks, or print the results of earlier ones. Returns the exit status: 0 if no check failed, 1 if a check failed, 2
    for invalid flags or files, 130 after an interrupt."""
    args = build_parser().parse_args(arguments)
    checks = args.only or list(CHECKS)
    if args.list:
        for check in checks:
            needs = ", needs CUDA" if check.needs_cuda else ""
            print(f"{check.name:24} {check.estimate(args.device):4.0f} s  {check.proves}{needs}")
        return 0
    status = 0
    try:
        if args.table:
            report = load_report(args.table)
            print(format_markdown(report))
        else:
            report, was_interrupted = run_session(args, checks)
            status = _INTERRUPTED_STATUS if was_interrupted else 0
        if args.write_docs:
            write_docs(args.write_docs, report)
    except (OSError, ValueError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    return status or int(any(result["state"] in FAILED_STATES for result in report["checks"]))


def run_session(args: argparse.Namespace, checks: list[Check]) -> tuple[dict[str, Any], bool]:
    """Run the checks within the time limit of --minutes. The report file is written after each check.

    Returns:
        The report, and whether a signal interrupted the session.

    Raises:
        ValueError: the device does not exist, or the file of --resume is from another device or version of torch.
    """
    report = create_report(args.device)
    if args.resume:
        report = resume_report(args.resume, report)
    file = args.json or args.resume
    results = {result["name"]: result for result in report["checks"]}
    if args.only:
        for check in checks:
            if results[check.name]["state"] in FAILED_STATES:
                results[check.name].update(create_result(check))
    width = max(len(check.name) for check in checks)
    print(f"{report['device_name']}, torch {report['torch']}: {len(checks)} checks in at most {args.minutes:g} minutes", flush=True)

    def report_result(result: dict[str, Any]) -> None:
        if file:
            write_atomically(file, report)
        log = [f"    {line}" for line in result["data"].get("log", [])]
        print("\n".join([format_progress(result, width), *log]), flush=True)

    if file:
        write_atomically(file, report)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = get_compiler_cache()
    old_handlers = {signum: signal.signal(signum, _raise_interrupted) for signum in (signal.SIGTERM, signal.SIGINT)}
    was_interrupted = False
    try:
        try:
            run_checks(checks, results, args.device, 60 * args.minutes, report_result)
        except Interrupted:
            was_interrupted = True
        if file:
            write_atomically(file, report)
        print("\n".join(format_summary(report)), flush=True)
    finally:
        for signum, handler in old_handlers.items():
            signal.signal(signum, handler)
    return report, was_interrupted


def get_compiler_cache() -> str:
    """Return the cache folder of the compiler as an absolute path, because the processes of the checks run in the repository's
    root.

    The default is a fixed folder, so that a second session on this machine reuses compiled code.
    """
    return os.path.abspath(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or Path(tempfile.gettempdir()) / _CACHE_NAME)


def _raise_interrupted(signum: int, frame: FrameType | None) -> None:
    for repeated in (signal.SIGTERM, signal.SIGINT):  # `timeout` sends two: to the process, and to its group
        signal.signal(repeated, signal.SIG_IGN)
    raise Interrupted


def create_report(device: str) -> dict[str, Any]:
    """Return a new report for this run of the tool: the device, the torch version, the date, and all checks in the state "not run".

    Raises:
        ValueError: the device does not exist, or torch cannot be imported.
    """
    process = subprocess.run([sys.executable, "-c", _PROBE_CODE], capture_output=True, text=True)
    if process.returncode:
        raise ValueError(
            f"torch cannot be imported by {sys.executable}: {(process.stderr.splitlines() or ['no message'])[-1]}. Install torch "
            "for this Python"
        )
    environment = json.loads(process.stdout)
    if device == "cuda" and not environment["gpus"]:
        raise ValueError("torch sees no GPU here. Check the driver and CUDA_VISIBLE_DEVICES, or give --device cpu.")
    return {
        "device": device,
        "device_name": environment["name"] if device == "cuda" else "CPU",
        "gpus": environment["gpus"],
        "torch": environment["torch"],
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "checks": [create_result(check) for check in CHECKS],
    }


def resume_report(file: Path, new: dict[str, Any]) -> dict[str, Any]:
    """Return the report of this session with the results of an earlier session added.

    Args:
        file: report of the earlier session.
        new: report of this session, without results.

    Raises:
        ValueError: the file is from another device or version of torch.
    """
    old = load_report(file)
    for key in ("device_name", "torch"):
        if old[key] != new[key]:
            name = key.removesuffix("_name")
            raise ValueError(
                f"--resume {file} has results of {name} {old[key]}, but this session has {name} {new[key]}: the results cannot be "
                "combined. "
                "Start a new report with --json FILE."
            )
    results = {result["name"]: result for result in old["checks"]}
    return {**new, "date": old["date"], "checks": [results.get(result["name"], result) for result in new["checks"]]}


def load_report(file: Path) -> dict[str, Any]:
    """Load a report that --json has written.

    Raises:
        ValueError: the file is not a report that --json has written.
    """
    try:
        report: dict[str, Any] = parse_json(read_text(file))
        if not all(set(create_result(CHECKS[0])) <= set(result) for result in report["checks"]) or not {
            "device",
            "device_name",
            "torch",
            "date",
        } <= set(report):
            raise KeyError(f"the report {file} lacks a field that --json always writes")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not a report that --json has written ({error!r}). Choose another file") from error
    return report


def write_atomically(file: Path, report: dict[str, Any]) -> None:
    """Write the report to a file atomically, so that a reader never sees an incomplete file.

    Raises:
        OSError: the file cannot be written, or a folder, device or pipe is at its path.
    """
    check_replaceable(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text(json.dumps(report, indent=1) + "\n")
    temporary.replace(file)
