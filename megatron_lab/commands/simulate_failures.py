"""What share of its time a job trains, where devices fail, and how often it should save.

    python tools/simulate_failures.py --gpus 16384 --step-s 8 --save-stall-s 1 --save-s 60

It draws failures, and plays the job between them: steps, saves in the background, detection, restart, steps made again. ETTR, the
effective training time ratio, is the share of the time that went into steps that count. docs/planning.md says what is assumed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megatron.config.given import check_output
from megatron_lab.cluster.failures import GPU_HOURS, Job, Outcome, best_of, daly_s, intervals, play, young_s
from megatron_lab.commands.parser import ToolParser

PROGRAM = "simulate_failures.py"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status: 0, or 2 for numbers that make no sense."""
    argv = sys.argv[1:] if argv is None else argv
    given = _parser().parse_args(argv)
    try:
        job = _job(given)
        if given.json is not None:
            check_output("--json", given.json)
        steps = given.save_interval or intervals(job)
        found = {number: play(job, number, given.days, given.draws, given.seed) for number in steps}
    except ValueError as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 2
    for line in _told(job, found, given):
        print(line)
    if given.json is not None:
        report = {"job": asdict(job), "intervals": {number: asdict(one) for number, one in found.items()}}
        Path(given.json).parent.mkdir(parents=True, exist_ok=True)
        Path(given.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = ToolParser(PROGRAM, description=__doc__)
    parser.add_argument("--gpus", type=int, default=16_384, help="devices of the job")
    rate = parser.add_mutually_exclusive_group()
    rate.add_argument("--failures-like", choices=sorted(GPU_HOURS), default="llama3", help="a published rate")
    rate.add_argument("--gpu-hours", type=float, metavar="H", help="hours of one device between two failures that end the job")
    parser.add_argument("--step-s", type=float, default=8.0, metavar="S", help="seconds of a step")
    parser.add_argument("--save-stall-s", type=float, default=1.0, metavar="S", help="seconds that training waits in a save")
    parser.add_argument("--save-s", type=float, default=60.0, metavar="S", help="seconds until a save is a checkpoint")
    parser.add_argument("--detect-s", type=float, default=30.0, metavar="S", help="seconds from a failure until it is known")
    parser.add_argument("--restart-s", type=float, default=300.0, metavar="S", help="seconds from then to the first step")
    parser.add_argument("--copy-interval", type=int, default=0, metavar="STEPS", help="keep a copy in other nodes' memory; 0: none")
    parser.add_argument("--copy-stall-s", type=float, default=0.5, metavar="S", help="seconds that training waits for such a copy")
    parser.add_argument("--copy-survives", type=float, default=0.95, metavar="SHARE", help="failures after which a copy is left")
    parser.add_argument("--copy-restart-s", type=float, default=60.0, metavar="S", help="seconds of a restart from a copy")
    parser.add_argument("--save-interval", type=int, nargs="+", metavar="STEPS", help="intervals to play, instead of a range")
    parser.add_argument("--days", type=float, default=54.0, help="days of a job")
    parser.add_argument("--draws", type=int, default=40, help="jobs that are played for each interval")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", help="all of it as JSON")
    return parser


def _job(given: argparse.Namespace) -> Job:
    hours = given.gpu_hours if given.gpu_hours is not None else GPU_HOURS[given.failures_like]
    if given.gpus < 1 or given.draws < 1 or not given.days > 0 or not hours > 0:
        raise ValueError("--gpus, --draws, --days and --gpu-hours must be more than 0.")
    return Job(
        mtbf_s=3600 * hours / given.gpus,
        step_s=given.step_s,
        save_stall_s=given.save_stall_s,
        save_s=given.save_s,
        detect_s=given.detect_s,
        restart_s=given.restart_s,
        copy_interval=given.copy_interval,
        copy_stall_s=given.copy_stall_s,
        copy_survives=given.copy_survives,
        copy_restart_s=given.copy_restart_s,
    )


def _told(job: Job, found: dict[int, Outcome], given: argparse.Namespace) -> list[str]:
    best = best_of(found)
    lines = [
        f"{given.gpus:,} devices: a failure every {job.mtbf_s / 3600:.2f} h, {found[best].failures:,.0f} in {given.days:g} days",
        f"{'save every':>16} {'ETTR':>7} {'(90 % between)':>18} {'again':>7} {'saves':>7} {'down':>7}",
    ]
    for number, one in found.items():
        minutes = number * job.step_s / 60
        lines.append(
            f"{number:7,} {minutes:5.1f} min {one.ettr:7.2%} {one.low:8.2%} .. {one.high:6.2%} {one.again:7.2%} {one.saving:7.2%} "
            f"{one.down:7.2%}" + ("   best" if number == best else "")
        )
    formulas = f"Young {young_s(job) / job.step_s:,.0f} steps, Daly {daly_s(job) / job.step_s:,.0f}"
    lines.append(f"best: --save-interval {best} ({formulas}, from the stall of a save alone)")
    return lines
