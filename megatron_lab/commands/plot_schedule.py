"""Show a pipeline schedule: a timeline and a table in the terminal, and pictures in files.

For example::

    python tools/plot_schedule.py --schedule zb-v --stages 4 --microbatches 8 --output zb-v.svg
    python tools/plot_schedule.py --compare --stages 8 --microbatches 16 --input-grad-ms 12 --weight-grad-ms 8 --output all.png

The tool simulates the schedule. It runs and measures nothing: the flags set the duration of the operations.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from megatron.pipeline_parallel.simulate import simulate
from megatron.spec.operations import OpCosts
from megatron.spec.schedules import SCHEDULES, build_schedule
from megatron_lab.commands.parser import ToolParser
from megatron_lab.schedule_plots.files import check_output, write_picture
from megatron_lab.schedule_plots.formulas import compute_expected
from megatron_lab.schedule_plots.panel import Panel, format_ms
from megatron_lab.schedule_plots.table import TimelineRow, format_table
from megatron_lab.schedule_plots.text import render_text
from megatron_lab.terminal import get_terminal_width

_MAX_OPS = 1_000_000
_DEFAULT_VIRTUAL_STAGES = 2
"""Chunks per stage of a schedule that allows any number."""


class Terminal(NamedTuple):
    """Properties of an output stream that decide how the timeline is printed."""

    width: int
    """Number of columns: the variable COLUMNS if it is set, otherwise the width of the terminal, or 120 without a terminal."""
    uses_colour: bool
    """Whether colours are used: only on a terminal, and not if the variable NO_COLOR is set (no-color.org) or TERM is dumb."""
    ascii_only: bool
    """Whether lines are drawn with ASCII characters only, because the stream's encoding lacks the characters for drawing lines."""

    @classmethod
    def of(cls, stream: TextIO) -> Terminal:
        """Detect width, colours and characters of an output stream, such as stdout."""
        colour = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        try:
            "─·".encode(stream.encoding or "ascii")
        except UnicodeEncodeError:
            ascii_only = True
        else:
            ascii_only = False
        return cls(shutil.get_terminal_size((120, 24)).columns, colour, ascii_only)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = ToolParser(
        formatter_class=argparse.HelpFormatter,
        description="Show a pipeline schedule: a timeline and a table in the terminal, and pictures in files.",
        epilog="Times are those of a full stage: if a stage has v chunks (virtual stages), each takes 1/v of them. The timeline "
        "has the width of the terminal, or of the variable COLUMNS; NO_COLOR=1 disables colours.",
    )
    schedules = parser.add_mutually_exclusive_group(required=True)
    schedules.add_argument("--schedule", choices=SCHEDULES, help="Show this schedule.")
    schedules.add_argument("--compare", action="store_true", help="Show all schedules below each other.")
    parser.add_argument(
        "--stages", type=_parse_count, required=True, metavar="P", help="Set the number of pipeline stages (ranks)."
    )
    parser.add_argument(
        "--microbatches", type=_parse_count, required=True, metavar="M", help="Set the number of microbatches per step."
    )
    parser.add_argument(
        "--virtual-stages",
        type=_parse_count,
        metavar="V",
        help=f"Set the number of chunks per stage of the interleaved schedule (default {_DEFAULT_VIRTUAL_STAGES}).",
    )
    parser.add_argument(
        "--forward-ms",
        type=_parse_duration,
        default=10.0,
        metavar="MS",
        help="Set the time of a microbatch's forward on a stage (default 10).",
    )
    parser.add_argument(
        "--input-grad-ms", type=_parse_duration, default=10.0, metavar="MS", help="Set the time of its input gradient (default 10)."
    )
    parser.add_argument(
        "--weight-grad-ms",
        type=_parse_duration,
        default=10.0,
        metavar="MS",
        help="Set the time of its weight gradient (default 10).",
    )
    parser.add_argument(
        "--recompute-ms",
        type=_parse_duration,
        default=0.0,
        metavar="MS",
        help="Set the time to recompute layers before the gradient arrives; 0 keeps all activations (default 0). Recomputation "
        "within backward is part of the input gradient.",
    )
    parser.add_argument(
        "--p2p-ms",
        type=_parse_duration,
        default=0.0,
        metavar="MS",
        help="Set the time of a message from one stage to another (default 0).",
    )
    parser.add_argument(
        "--output",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="Write a file: .svg or .png a figure (needs matplotlib), .json a trace for ui.perfetto.dev, .txt the timeline; "
        "may be repeated.",
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the tool and return the exit status: 0, or 1 if a file could not be written."""
    parser = build_parser()
    args = parser.parse_args(arguments)
    if (num_ops := args.stages * args.microbatches * (args.virtual_stages or 1)) > _MAX_OPS:
        parser.error(
            f"--stages {args.stages} x --microbatches {args.microbatches} x --virtual-stages {args.virtual_stages or 1} are "
            f"{num_ops:,} forward passes, more than {_MAX_OPS:,}, which no picture shows: give smaller numbers"
        )
    costs = OpCosts(args.forward_ms, args.input_grad_ms, args.weight_grad_ms, args.p2p_ms, args.recompute_ms)
    if costs.forward + costs.input_grad + costs.weight_grad == 0:
        parser.error("--forward-ms, --input-grad-ms and --weight-grad-ms are all 0: at least one must take time")
    try:
        for path in args.output:
            check_output(path)
    except (ValueError, ModuleNotFoundError) as error:
        parser.error(f"--output {error}")
    try:
        rows = [
            _build_row(
                name, args.stages, args.microbatches, _choose_chunks_per_stage(name, args.virtual_stages, args.compare), costs
            )
            for name in (SCHEDULES if args.compare else [args.schedule])
        ]
    except ValueError as error:
        parser.error(f"--virtual-stages {args.virtual_stages}: {error}")
    panels = [row.panel for row in rows]
    print(_format_description(args.stages, args.microbatches, costs), end="\n\n")
    print(render_text(panels, **Terminal.of(sys.stdout)._asdict()), end="\n\n")
    print(format_table(rows, get_terminal_width()))
    return _write_pictures(panels, args.output)


def _parse_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, 1 or more, not {text}")
    return int(text)


def _parse_duration(text: str) -> float:
    try:
        duration = float(text)
    except ValueError:
        duration = math.nan
    if not 0 <= duration < math.inf:
        raise argparse.ArgumentTypeError(f"must be a time in milliseconds, 0 or more, not {text}")
    return duration


def _choose_chunks_per_stage(name: str, virtual_stages: int | None, compare: bool) -> int:
    """Return the number of model chunks per stage for a schedule.

    With --compare, the value of --virtual-stages applies only to schedules that allow any number of chunks.

    Args:
        name: name of the schedule.
        virtual_stages: value of --virtual-stages; None if it is not set.
        compare: whether --compare is set.
    """
    fixed_chunks = SCHEDULES[name].chunks_per_stage
    if fixed_chunks is not None and (virtual_stages is None or compare):
        return fixed_chunks
    return virtual_stages or _DEFAULT_VIRTUAL_STAGES


def _build_row(name: str, num_stages: int, num_microbatches: int, chunks_per_stage: int, costs: OpCosts) -> TimelineRow:
    recomputed_chunks = range(num_stages * chunks_per_stage) if costs.recompute else ()
    schedule = build_schedule(name, num_stages, num_microbatches, chunks_per_stage, recomputed_chunks=recomputed_chunks)
    title = f"{name} (v = {chunks_per_stage})" if chunks_per_stage > 1 else name
    panel = Panel(title, simulate(schedule, costs.divide_by_chunks(chunks_per_stage)))
    return TimelineRow(panel, compute_expected(name, num_stages, num_microbatches, chunks_per_stage, costs))


def _format_description(num_stages: int, num_microbatches: int, costs: OpCosts) -> str:
    """Return the text above the timelines: number of pipeline stages, number of microbatches, and durations of the forward,
    backward and p2p operations."""
    forward, input_grad, weight_grad, p2p = map(format_ms, (costs.forward, costs.input_grad, costs.weight_grad, costs.p2p))
    recompute_text = f"R = {format_ms(costs.recompute)} to recompute layers, " if costs.recompute else ""
    return (
        f"p = {num_stages} stages, m = {num_microbatches} microbatches. A whole stage takes F = {forward} for a forward, "
        f"I = {input_grad} for an input gradient, "
        f"{recompute_text}W = {weight_grad} for a weight gradient, and each of its v chunks 1/v of these. A message takes {p2p}."
    )


def _write_pictures(panels: Sequence[Panel], paths: Sequence[Path]) -> int:
    for path in paths:
        try:
            write_picture(panels, path)
        except OSError as error:
            print(f"plot_schedule.py: error: {path} cannot be written ({error.strerror})", file=sys.stderr)
            return 1
        print(f"wrote {path}", file=sys.stderr)
    return 0
