"""Write a report of a run, or a comparison of several runs, from their history: one HTML file that opens without network access.

    python tools/report.py RUN_FOLDER [RUN_FOLDER ...] [--plan] [--output FILE]

The tool also prints a summary of the losses. At its end, each run writes its own report without --plan: `report.html` in its
folder.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from megatron.metrics.history import History, read_history
from megatron_lab.commands.parser import ToolParser
from megatron_lab.pages.html import write_page
from megatron_lab.pages.run_facts import is_loss_lower, name_runs, summarize
from megatron_lab.pages.run_page import build_run_page

PROGRAM, REPORT = "report.py", "report.html"


def build_plan_html(history: History) -> tuple[str, str]:
    """Return two parts of a run's report as HTML: bars of the planned memory, and the grid of all ranks, coloured by planned
    memory. Both describe the last start of the run.

    If the job cannot be planned on this machine, the first text gives the reason, and the second is empty.
    """
    # The planner imports torch and its compiler, which takes seconds. The end of a run waits for its report, which has no plan.
    from html import escape

    from megatron.config.parsed_flags import DryRun
    from megatron.config.save import from_dict
    from megatron.data.tokenizer import predict_embedding_rows
    from megatron.parallel.topology import Topology
    from megatron_lab.pages.plan_page import build_grid, build_memory_bars
    from megatron_lab.planner.dry_run import build_plan

    try:
        start = history.starts[-1]
        config, ranks = from_dict(start["config"]), int(start["world_size"])
        plan = build_plan(
            config, DryRun(ranks, int(start.get("ranks_of_a_node", ranks)), None), predict_embedding_rows(config.data)
        )
        return build_memory_bars(plan), build_grid(plan, Topology.of(config.parallel, ranks))
    except (ValueError, OSError, KeyError, IndexError, TypeError) as error:
        return f'<p class="faint">The job of this run cannot be planned here: {escape(str(error))}</p>', ""


def main(arguments: list[str] | None = None) -> int:
    """Write the report of the runs that the command line names. Returns the exit status: 0, or 1 for an error or (with
    --expect-lower-loss) a loss that did not fall."""
    if arguments is None:
        os.nice(5)  # give way to a run on this machine
    parser = ToolParser(prog=PROGRAM, description=__doc__)
    parser.add_argument(
        "folders",
        type=Path,
        nargs="+",
        metavar="RUN_FOLDER",
        help="Folder of --save, or of --tensorboard-dir if the run has no --save.",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help=f"Write the page to FILE (default {REPORT} in the folder of the first run)."
    )
    parser.add_argument(
        "--plan",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="Add the planned memory and the grid of the ranks. This takes some seconds, because it imports torch.",
    )
    parser.add_argument("--expect-lower-loss", action="store_true", help="Exit with status 1 if a training loss did not fall.")
    args = parser.parse_args(arguments)
    if args.plan and len(args.folders) > 1:
        parser.error("--plan shows the plan of a single run: give one RUN_FOLDER, or leave --plan out")
    try:
        runs = name_runs(args.folders, [read_history(folder) for folder in args.folders])
        memory, grid = build_plan_html(runs[0].history) if args.plan else ("", "")
        folder = runs[0].folder if runs[0].folder.is_dir() else runs[0].folder.parent
        output = args.output or folder / REPORT
        write_page("--output", str(output), build_run_page(runs, memory, grid))
    except (ValueError, OSError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 1
    for run in runs:
        print("\n".join(f"{run.name}: {line}" if len(runs) > 1 else line for line in summarize(run.history)))
    print(f"the report is {output}")
    if args.expect_lower_loss and not all(is_loss_lower(run.history) for run in runs):
        print(f"{PROGRAM}: error: a training loss did not fall", file=sys.stderr)
        return 1
    return 0
