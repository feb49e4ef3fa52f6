"""Look at all nodes of a job before it starts; say in words what is wrong, and which node has it.

    python tools/check_cluster.py --nodes 16 --ranks-per-node 8 --head node0:29501 -- FLAGS      on every node

FLAGS are those of pretrain_gpt.py. Every node looks at its own files and GPUs: datasets, tokenizer, the save folder and its room,
as many GPUs as ranks, or on a CPU cores enough to start them. Then the nodes meet at the head and compare: versions of torch,
driver and NCCL, kinds of GPU, clocks, and whether all see the same save folder. Then each starts a process for every rank. These
look at the memory of their GPUs, make a sum over all ranks, and measure the links inside each node and to its neighbours, so that
a slow node has a name.

    python tools/check_cluster.py --measure FILE.yaml --ranks-per-node 8 [-- FLAGS]              one node
    torchrun ... tools/check_cluster.py --measure FILE.yaml [-- FLAGS]                           several

writes what the devices and links of this cluster reach, for a plan of step times (docs/planning.md): products, attention, memory,
launches, layers of small models, collectives by size and number of ranks. FLAGS are those of a run whose products are measured too.

    python tools/check_cluster.py --calibrate REPORT... --cluster NAME|FILE --output FILE.yaml

scales a cluster file by what runs with --plan-report found.

Exit status on every node: 0 all is well; 1 something is wrong, which the head tells, or a node that does not reach it; 2 the
command line is wrong. Nothing waits longer than --wait for the nodes to come and --limit for the ranks to be done.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from megatron.config.cli import load
from megatron.config.errors import ConfigError
from megatron.config.given import check_output
from megatron_lab.commands.parser import ToolParser


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = ToolParser(description=__doc__, prog="check_cluster.py")
    flags.add_argument("--nodes", type=_positive, default=1, metavar="N", help="nodes of the job (1)")
    flags.add_argument("--ranks-per-node", type=_positive, metavar="N", help="ranks of a node (required without a launcher)")
    flags.add_argument(
        "--head", type=_place, default=("localhost", 29501), metavar="HOST:PORT", help="where the nodes meet: one of them"
    )
    flags.add_argument(
        "--expect", type=_names, default=[], metavar="A,B,...", help="names of the nodes, to name those that do not come"
    )
    flags.add_argument("--device-bytes", type=_positive, metavar="N", help="memory that the run takes on a GPU, as --dry-run says")
    flags.add_argument("--wait", type=_positive, default=600, metavar="S", help="seconds for all nodes to come (600)")
    flags.add_argument("--limit", type=_positive, default=300, metavar="S", help="seconds for the ranks' part (300)")
    flags.add_argument("--measure", type=Path, metavar="FILE", help="write a cluster file")
    flags.add_argument("--calibrate", type=Path, nargs="+", metavar="REPORT", help="reports of runs with --plan-report")
    flags.add_argument("--cluster", metavar="NAME|FILE", help="cluster file that they calibrate")
    flags.add_argument("--output", type=Path, metavar="FILE", help="where the calibrated one goes")
    flags.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where to measure (auto)")
    flags.add_argument("flags", nargs="*", metavar="-- FLAGS", help="flags of pretrain_gpt.py")
    return flags


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _place(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host, int(port)


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def main(arguments: list[str] | None = None, program: tuple[str, ...] | None = None) -> int:
    """Run the check; returns the exit status.

    Args:
        program: what a rank runs, if not `megatron_lab.cluster.links`.
    """
    if arguments is None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of the blocks that end what was started
    given = parser().parse_args(arguments)
    if given.measure is not None:
        return _measure(given)
    if given.calibrate is not None:
        return _calibrate(given)
    if given.ranks_per_node is None:
        print("check_cluster: --ranks-per-node is needed: how many ranks each node has", file=sys.stderr)
        return 2
    try:
        config = load(given.flags, given.nodes * given.ranks_per_node).config
    except ConfigError as error:
        print(f"check_cluster: {error}", file=sys.stderr)
        return 2

    from megatron_lab.cluster.check import Job, run_check
    from megatron_lab.cluster.meeting import MeetingError
    from megatron_lab.cluster.ranks import PROGRAM

    head, port = given.head
    job = Job(given.nodes, given.ranks_per_node, head, port, given.expect, given.device_bytes, given.wait, given.limit)
    try:
        faults = run_check(job, config, program or PROGRAM)
    except MeetingError as error:
        print(f"check_cluster: {error}", file=sys.stderr)
        return 1
    return 1 if faults else 0


def _measure(given: argparse.Namespace) -> int:
    """Write a cluster file."""
    world_size = int(os.environ.get("WORLD_SIZE", "0")) or given.nodes * (given.ranks_per_node or 0)
    try:
        if not world_size:
            raise ValueError("--measure needs --ranks-per-node: as many as there are GPUs, or processes that train on a CPU")
        check_output("--measure", str(given.measure))
        if given.flags:
            load(given.flags, world_size)
    except ValueError as error:
        print(f"check_cluster: {error}", file=sys.stderr)
        return 2

    from megatron_lab.cluster.cluster_file import measure_into

    for line in measure_into(given.measure, given.device, given.ranks_per_node or 1, given.flags, world_size):
        print(f"check_cluster: {line}", flush=True)
    return 0


def _calibrate(given: argparse.Namespace) -> int:
    """Write a calibrated cluster file."""
    if given.cluster is None or given.output is None:
        print("check_cluster: --calibrate needs --cluster NAME|FILE and --output FILE", file=sys.stderr)
        return 2

    from megatron_lab.cluster.calibration import calibrate_into
    from megatron_lab.planner.cluster import load_cluster

    try:
        check_output("--output", str(given.output))
        lines = calibrate_into(given.output, load_cluster(given.cluster), given.calibrate)
    except ValueError as error:
        print(f"check_cluster: {error}", file=sys.stderr)
        return 2
    for line in lines:
        print(f"check_cluster: {line}")
    return 0
