"""Simulate how much of its time a job spends on training if devices fail, and find the best interval between saves.

    python tools/simulate_failures.py --gpus 16384 --step-s 8 --save-stall-s 1 --save-s 60

The tool draws random failures and simulates the job between them: steps, asynchronous saves, detection, restart, repeated steps.
ETTR, the effective training time ratio, is the share of the time that is spent on steps that are not lost. docs/planning.md lists
the assumptions.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megatron.config.regular_file import check_output
from megatron_lab.cluster.failures import (
    GPU_HOURS,
    Job,
    Outcome,
    compute_daly_interval_s,
    compute_young_interval_s,
    find_best_interval,
    list_intervals,
    simulate,
)
from megatron_lab.commands.parser import ToolParser

PROGRAM = "simulate_failures.py"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit status: 0, or 2 for invalid values."""
    argv = sys.argv[1:] if argv is None else argv
    args = _build_parser().parse_args(argv)
    try:
        job = _build_job(args)
        if args.json is not None:
            check_output("--json", args.json)
        save_intervals = args.save_interval or list_intervals(job)
        outcomes = {
            save_interval: simulate(job, save_interval, args.days, args.draws, args.seed) for save_interval in save_intervals
        }
    except ValueError as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 2
    for line in _format_outcomes(job, outcomes, args):
        print(line)
    if args.json is not None:
        report = {"job": asdict(job), "intervals": {save_interval: asdict(outcome) for save_interval, outcome in outcomes.items()}}
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def _build_parser() -> argparse.ArgumentParser:
    parser = ToolParser(PROGRAM, description=__doc__)
    parser.add_argument("--gpus", type=int, default=16_384, help="Set the number of devices of the job (default 16384).")
    rate = parser.add_mutually_exclusive_group()
    rate.add_argument(
        "--failures-like",
        choices=sorted(GPU_HOURS),
        default="llama3",
        help="Use the failure rate of a publication (default llama3).",
    )
    rate.add_argument(
        "--gpu-hours", type=float, metavar="H", help="Set the mean device hours between two failures that end the job."
    )
    parser.add_argument("--step-s", type=float, default=8.0, metavar="S", help="Set the seconds of a step (default 8).")
    parser.add_argument(
        "--save-stall-s", type=float, default=1.0, metavar="S", help="Set the seconds that training waits for a save (default 1)."
    )
    parser.add_argument(
        "--save-s",
        type=float,
        default=60.0,
        metavar="S",
        help="Set the seconds until a save is a complete checkpoint (default 60).",
    )
    parser.add_argument(
        "--detect-s", type=float, default=30.0, metavar="S", help="Set the seconds from a failure to its detection (default 30)."
    )
    parser.add_argument(
        "--restart-s",
        type=float,
        default=300.0,
        metavar="S",
        help="Set the seconds from the detection to the first step (default 300).",
    )
    parser.add_argument(
        "--copy-interval",
        type=int,
        default=0,
        metavar="STEPS",
        help="Copy the state to the memory of other nodes every N steps (default 0: never).",
    )
    parser.add_argument(
        "--copy-stall-s", type=float, default=0.5, metavar="S", help="Set the seconds that training waits for a copy (default 0.5)."
    )
    parser.add_argument(
        "--copy-survives",
        type=float,
        default=0.95,
        metavar="SHARE",
        help="Set the share of failures after which a copy still exists (default 0.95).",
    )
    parser.add_argument(
        "--copy-restart-s", type=float, default=60.0, metavar="S", help="Set the seconds of a restart from a copy (default 60)."
    )
    parser.add_argument(
        "--save-interval", type=int, nargs="+", metavar="STEPS", help="Simulate these intervals between saves, instead of a range."
    )
    parser.add_argument("--days", type=float, default=54.0, help="Set the duration of a job in days (default 54).")
    parser.add_argument("--draws", type=int, default=40, help="Simulate this many jobs for each interval (default 40).")
    parser.add_argument("--seed", type=int, default=1, help="Set the seed of the random failures (default 1).")
    parser.add_argument("--json", metavar="FILE", help="Also write the job and all results as JSON.")
    return parser


def _build_job(args: argparse.Namespace) -> Job:
    hours = args.gpu_hours if args.gpu_hours is not None else GPU_HOURS[args.failures_like]
    if args.gpus < 1 or args.draws < 1 or not args.days > 0 or not hours > 0:
        raise ValueError(
            f"--gpus {args.gpus}, --draws {args.draws}, --days {args.days:g}, --gpu-hours {hours:g}: all "
            "must be more than 0. Correct these flags."
        )
    return Job(
        mtbf_s=3600 * hours / args.gpus,
        step_s=args.step_s,
        save_stall_s=args.save_stall_s,
        save_s=args.save_s,
        detect_s=args.detect_s,
        restart_s=args.restart_s,
        copy_interval=args.copy_interval,
        copy_stall_s=args.copy_stall_s,
        copy_survives=args.copy_survives,
        copy_restart_s=args.copy_restart_s,
    )


def _format_outcomes(job: Job, outcomes: dict[int, Outcome], args: argparse.Namespace) -> list[str]:
    best_interval = find_best_interval(outcomes)
    lines = [
        f"{args.gpus:,} devices: a failure every {job.mtbf_s / 3600:.2f} h, "
        f"{outcomes[best_interval].failures:,.0f} in {args.days:g} days",
        f"{'save every':>16} {'ETTR':>7} {'(90 % between)':>18} {'again':>7} {'saves':>7} {'down':>7}",
    ]
    for save_interval, outcome in outcomes.items():
        minutes = save_interval * job.step_s / 60
        lines.append(
            f"{save_interval:7,} {minutes:5.1f} min {outcome.ettr:7.2%} {outcome.low:8.2%} .. {outcome.high:6.2%} "
            f"{outcome.again:7.2%} {outcome.saving:7.2%} {outcome.down:7.2%}"
            + ("   best" if save_interval == best_interval else "")
        )
    formulas = (
        f"Young {compute_young_interval_s(job) / job.step_s:,.0f} steps, Daly {compute_daly_interval_s(job) / job.step_s:,.0f}"
    )
    lines.append(f"best: --save-interval {best_interval} ({formulas}, from the stall of a save alone)")
    return lines
