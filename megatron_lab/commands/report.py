"""Make a page of how a run went, from its record: one HTML file that opens without a network. Of several runs they are compared.

    python tools/report.py RUN_FOLDER [RUN_FOLDER ...] [--output FILE]

It says how the losses went, too. A run makes the page of itself when it ends: `report.html` in its folder.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from megatron.metrics.history import History, read_history
from megatron_lab.commands.parser import ToolParser
from megatron_lab.pages.html import write_page
from megatron_lab.pages.run_page import fell, run_page, runs_of, summary

PROGRAM, REPORT = "report.py", "report.html"


def plan_of_run(history: History) -> tuple[str, str]:
    """HTML of the memory that was planned for the ranks of the last start, and of the grid of these ranks; a line and nothing where
    the job cannot be planned here."""
    from html import escape

    from megatron.config.given import DryRun
    from megatron.config.save import from_dict
    from megatron.data.tokenizer import planned_rows
    from megatron.parallel.topology import Topology
    from megatron_lab.pages.plan_page import grid_of, memory_bars
    from megatron_lab.planner.dry_run import make_plan

    try:
        start = history.starts[-1]
        config, ranks = from_dict(start["config"]), int(start["world_size"])
        plan = make_plan(config, DryRun(ranks, int(start.get("ranks_of_a_node", ranks)), None), planned_rows(config.data))
        return memory_bars(plan), grid_of(plan, Topology.of(config.parallel, ranks))
    except (ValueError, OSError, KeyError, IndexError, TypeError) as error:
        return f'<p class="faint">The job of this run cannot be planned here: {escape(str(error))}</p>', ""


def main(arguments: list[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    if arguments is None:
        os.nice(5)  # a run that goes on comes first
    parser = ToolParser(prog=PROGRAM, description=__doc__)
    parser.add_argument(
        "folders", type=Path, nargs="+", metavar="RUN_FOLDER", help="that of --save, or of --tensorboard-dir without it"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help=f"by default {REPORT} in the folder of the first run")
    parser.add_argument(
        "--no-plan", action="store_true", help="leave out the planned memory and the ranks, which take some seconds"
    )
    parser.add_argument("--expect-lower-loss", action="store_true", help="end with 1 if a training loss did not fall")
    given = parser.parse_args(arguments)
    try:
        runs = runs_of(given.folders, [read_history(folder) for folder in given.folders])
        alone = runs[0].history if len(runs) == 1 else None
        memory, grid = plan_of_run(alone) if alone is not None and not given.no_plan else ("", "")
        folder = runs[0].folder if runs[0].folder.is_dir() else runs[0].folder.parent
        output = given.output or folder / REPORT
        write_page("--output", str(output), run_page(runs, memory, grid))
    except (ValueError, OSError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 1
    for run in runs:
        print("\n".join(f"{run.name}: {line}" if len(runs) > 1 else line for line in summary(run.history)))
    print(f"the report is {output}")
    if given.expect_lower_loss and not all(fell(run.history) for run in runs):
        print(f"{PROGRAM}: error: a training loss did not fall", file=sys.stderr)
        return 1
    return 0
