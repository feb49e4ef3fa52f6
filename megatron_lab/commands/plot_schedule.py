"""Show a pipeline schedule: a timeline and a table in the terminal, and pictures in files.

For example::

    python tools/plot_schedule.py --schedule zb-v --stages 4 --microbatches 8 --output zb-v.svg
    python tools/plot_schedule.py --compare --stages 8 --microbatches 16 --input-grad-ms 12 --weight-grad-ms 8 --output all.png

Nothing runs and nothing is measured: operations take as long as the flags say.
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
from megatron.spec.operations import Costs
from megatron.spec.schedules import SCHEDULES, make_schedule
from megatron_lab.commands.parser import ToolParser
from megatron_lab.schedule_plots.files import check_output, write_picture
from megatron_lab.schedule_plots.formulas import expected
from megatron_lab.schedule_plots.panel import Panel, milliseconds
from megatron_lab.schedule_plots.table import TimelineRow, draw_table
from megatron_lab.schedule_plots.text import draw_text

_USUAL_VIRTUAL_STAGES = 2
"""Of a schedule that can have any number."""


class Terminal(NamedTuple):
    """What a stream shows: how wide it is, and whether it has colours."""

    width: int
    """Columns: the variable COLUMNS if set, else the terminal's, else 120."""
    colour: bool
    """Only on a terminal, and not if the variable NO_COLOR is set (no-color.org) or TERM is dumb."""
    ascii_only: bool
    """The encoding has no line-drawing characters."""

    @classmethod
    def of(cls, stream: TextIO) -> Terminal:
        """What this stream can show."""
        colour = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        try:
            "─·".encode(stream.encoding or "ascii")
        except UnicodeEncodeError:
            ascii_only = True
        else:
            ascii_only = False
        return cls(shutil.get_terminal_size((120, 24)).columns, colour, ascii_only)


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = ToolParser(
        formatter_class=argparse.HelpFormatter,
        description="Show a pipeline schedule: a timeline and a table in the terminal, and pictures in files.",
        epilog="Times are those of a whole stage: each chunk (virtual stage) of a stage that has v takes 1/v of them. The timeline "
        "is as wide as the terminal, or as COLUMNS says; NO_COLOR=1 leaves colours out.",
    )
    which = flags.add_mutually_exclusive_group(required=True)
    which.add_argument("--schedule", choices=SCHEDULES, help="the schedule to show")
    which.add_argument("--compare", action="store_true", help="show all schedules, one above the other")
    flags.add_argument("--stages", type=_count, required=True, metavar="P", help="pipeline stages (ranks)")
    flags.add_argument("--microbatches", type=_count, required=True, metavar="M", help="microbatches of a step")
    flags.add_argument(
        "--virtual-stages", type=_count, metavar="V", help=f"chunks a stage, for interleaved ({_USUAL_VIRTUAL_STAGES})"
    )
    flags.add_argument("--forward-ms", type=_time, default=10.0, metavar="MS", help="forward of a microbatch on a stage (10)")
    flags.add_argument("--input-grad-ms", type=_time, default=10.0, metavar="MS", help="its input gradient (10)")
    flags.add_argument("--weight-grad-ms", type=_time, default=10.0, metavar="MS", help="its weight gradient (10)")
    flags.add_argument(
        "--recompute-ms",
        type=_time,
        default=0.0,
        metavar="MS",
        help="running layers again ahead of the gradient; 0: all is kept (0). What is run again within backward is a part of the "
        "input gradient",
    )
    flags.add_argument("--p2p-ms", type=_time, default=0.0, metavar="MS", help="a message from one stage to another (0)")
    flags.add_argument(
        "--output",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help=".svg or .png: a figure (needs matplotlib); .json: a trace for ui.perfetto.dev; .txt: the timeline; may be repeated",
    )
    return flags


def main(arguments: list[str] | None = None) -> int:
    """Run the tool; returns the exit code: 0, or 1 if a file could not be written."""
    flags = parser()
    given = flags.parse_args(arguments)
    costs = Costs(given.forward_ms, given.input_grad_ms, given.weight_grad_ms, given.p2p_ms, given.recompute_ms)
    if costs.forward + costs.input_grad + costs.weight_grad == 0:
        flags.error("--forward-ms, --input-grad-ms and --weight-grad-ms are all 0: at least one must take time")
    try:
        for path in given.output:
            check_output(path)
    except (ValueError, ModuleNotFoundError) as error:
        flags.error(f"--output {error}")
    try:
        rows = [
            _row(name, given.stages, given.microbatches, _chunks(name, given.virtual_stages, given.compare), costs)
            for name in (SCHEDULES if given.compare else [given.schedule])
        ]
    except ValueError as error:
        flags.error(f"--virtual-stages {given.virtual_stages}: {error}")
    panels = [row.panel for row in rows]
    print(_about(given.stages, given.microbatches, costs), end="\n\n")
    print(draw_text(panels, **Terminal.of(sys.stdout)._asdict()), end="\n\n")
    print(draw_table(rows))
    return _write(panels, given.output)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, 1 or more, not {text}")
    return int(text)


def _time(text: str) -> float:
    try:
        duration = float(text)
    except ValueError:
        duration = math.nan
    if not 0 <= duration < math.inf:
        raise argparse.ArgumentTypeError(f"must be a time in milliseconds, 0 or more, not {text}")
    return duration


def _chunks(name: str, asked: int | None, compare: bool) -> int:
    """Chunks a stage. Where all schedules are compared, what is asked for is for those that can have any number."""
    only = SCHEDULES[name].chunks_per_stage
    if only is not None and (asked is None or compare):
        return only
    return asked or _USUAL_VIRTUAL_STAGES


def _row(name: str, num_stages: int, num_microbatches: int, chunks_per_stage: int, costs: Costs) -> TimelineRow:
    recomputed = range(num_stages * chunks_per_stage) if costs.recompute else ()
    schedule = make_schedule(name, num_stages, num_microbatches, chunks_per_stage, recomputed=recomputed)
    title = f"{name} (v = {chunks_per_stage})" if chunks_per_stage > 1 else name
    panel = Panel(title, simulate(schedule, costs.divided(chunks_per_stage)))
    return TimelineRow(panel, expected(name, num_stages, num_microbatches, chunks_per_stage, costs))


def _about(num_stages: int, num_microbatches: int, costs: Costs) -> str:
    """What is shown, before the pictures."""
    forward, input_grad, weight_grad, p2p = map(milliseconds, (costs.forward, costs.input_grad, costs.weight_grad, costs.p2p))
    again = f"R = {milliseconds(costs.recompute)} to run layers again, " if costs.recompute else ""
    return (
        f"p = {num_stages} stages, m = {num_microbatches} microbatches. A whole stage takes F = {forward} for a forward, "
        f"I = {input_grad} for an input gradient,\n{again}W = {weight_grad} for a weight gradient, and each of its v chunks 1/v of "
        "these. "
        f"A message takes {p2p}."
    )


def _write(panels: Sequence[Panel], paths: Sequence[Path]) -> int:
    for path in paths:
        try:
            write_picture(panels, path)
        except OSError as error:
            print(f"plot_schedule.py: error: {path} cannot be written ({error.strerror})", file=sys.stderr)
            return 1
        print(f"wrote {path}", file=sys.stderr)
    return 0
