"""Check all nodes of a job before it starts, and report what is wrong on which node.

    python tools/check_cluster.py --nodes 16 --ranks-per-node 8 --head node0:29501 -- FLAGS      on every node

FLAGS are those of pretrain_gpt.py. First, each node checks its own files and devices: datasets, tokenizer, free space in the save
folder, and one GPU per rank, or on a CPU enough cores to start the ranks. Second, the nodes connect to the head node and compare
versions of torch, driver and NCCL, types of GPU, clocks, and whether all see the same save folder. Third, each node starts one
process per rank. The processes check the memory of their GPUs, compute a sum over all ranks, and measure the links inside each node
and to its neighbours, so that the report can name a slow node.

    python tools/check_cluster.py --measure FILE.yaml --ranks-per-node 8 [-- FLAGS]              one node
    torchrun ... tools/check_cluster.py --measure FILE.yaml [-- FLAGS]                           several nodes

measures the speed of the devices and links of this cluster and writes a cluster file for predictions of step times
(docs/planning.md): matrix products, attention, memory, kernel launches, layers of small models, and collectives by size and number
of ranks. FLAGS are those of a run whose matrix products are measured too.

    python tools/check_cluster.py --calibrate REPORT... --cluster NAME|FILE --output FILE.yaml

scales a cluster file by the measurements of runs with --plan-report.

Exit status on every node: 0 no problem; 1 a problem, which the head node reports, or a node that cannot reach the head; 2 invalid
command line. The tool waits at most --wait seconds for the nodes and --limit seconds for the ranks.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from megatron.config.cli import load
from megatron.config.errors import ConfigError
from megatron.config.regular_file import check_output
from megatron_lab.commands.parser import ToolParser


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = ToolParser(description=__doc__, prog="check_cluster.py")
    parser.add_argument(
        "--nodes", type=_parse_positive, default=1, metavar="N", help="Set the number of nodes of the job (default 1)."
    )
    parser.add_argument(
        "--ranks-per-node",
        type=_parse_positive,
        metavar="N",
        help="Set the number of ranks per node (required without a launcher).",
    )
    parser.add_argument(
        "--head",
        type=_parse_address,
        default=("localhost", 29501),
        metavar="HOST:PORT",
        help="Set the address of one of the nodes, to which all connect (default localhost:29501).",
    )
    parser.add_argument(
        "--expect",
        type=_parse_names,
        default=[],
        metavar="A,B,...",
        help="Give the names of the nodes, so that the report can name missing ones.",
    )
    parser.add_argument(
        "--device-bytes",
        type=_parse_positive,
        metavar="N",
        help="Set the memory that the run needs per GPU, as --dry-run prints it.",
    )
    parser.add_argument(
        "--wait", type=_parse_positive, default=600, metavar="S", help="Wait at most S seconds for all nodes (default 600)."
    )
    parser.add_argument(
        "--limit", type=_parse_positive, default=300, metavar="S", help="Wait at most S seconds for the ranks (default 300)."
    )
    parser.add_argument("--measure", type=Path, metavar="FILE", help="Measure this cluster and write a cluster file.")
    parser.add_argument(
        "--calibrate",
        type=Path,
        nargs="+",
        metavar="REPORT",
        help="Calibrate a cluster file by reports of runs with --plan-report.",
    )
    parser.add_argument("--cluster", metavar="NAME|FILE", help="Select the cluster file to calibrate.")
    parser.add_argument("--output", type=Path, metavar="FILE", help="Write the calibrated cluster file to FILE.")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="Measure on this device (default auto).")
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="Flags of pretrain_gpt.py.")
    return parser


def _parse_positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, not {text!r}")
    return int(text)


def _parse_address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"must be a host and a port, as in node1:29500, not {text!r}")
    return host, int(port)


def _parse_names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def main(arguments: list[str] | None = None, program: tuple[str, ...] | None = None) -> int:
    """Check a cluster, or write a cluster file (--measure, --calibrate). Return the exit status.

    Args:
        arguments: command line without the program's name; None for that of this process.
        program: command that each rank runs to test the links; by default `python -m megatron_lab.cluster.links`.
    """
    if arguments is None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwind the context managers that end started processes
    args = build_parser().parse_args(arguments)
    if args.measure is not None:
        return _write_measured_cluster(args)
    if args.calibrate is not None:
        return _write_calibrated_cluster(args)
    if args.ranks_per_node is None:
        print("check_cluster: --ranks-per-node is needed: how many ranks each node has", file=sys.stderr)
        return 2
    try:
        config = load(args.flags, args.nodes * args.ranks_per_node).config
    except ConfigError as error:
        print(f"check_cluster: {error}", file=sys.stderr)
        return 2

    from megatron_lab.cluster.check import Job, run_check
    from megatron_lab.cluster.node_exchange import NodeExchangeError
    from megatron_lab.cluster.ranks import PROGRAM

    head, port = args.head
    job = Job(args.nodes, args.ranks_per_node, head, port, args.expect, args.device_bytes, args.wait, args.limit)
    try:
        problems = run_check(job, config, program or PROGRAM)
    except NodeExchangeError as error:
        print(f"check_cluster: {error}", file=sys.stderr)
        return 1
    return 1 if problems else 0


def _write_measured_cluster(args: argparse.Namespace) -> int:
    """Run --measure: measure the speed of this cluster's devices and links and write them to a cluster file. Return the exit
    status."""
    world_size = int(os.environ.get("WORLD_SIZE", "0")) or args.nodes * (args.ranks_per_node or 0)
    try:
        if not world_size:
            raise ValueError(
                "--measure needs --ranks-per-node N: the number of GPUs of a node, or of processes that train on the CPU of a node"
            )
        check_output("--measure", str(args.measure))
        if args.flags:
            load(args.flags, world_size)
    except ValueError as error:
        print(f"check_cluster: {error}", file=sys.stderr)
        return 2

    from megatron_lab.cluster.cluster_file import write_measured_cluster

    for message in write_measured_cluster(args.measure, args.device, args.ranks_per_node or 1, args.flags, world_size):
        print(f"check_cluster: {message}", flush=True)
    return 0


def _write_calibrated_cluster(args: argparse.Namespace) -> int:
    """Run --calibrate: scale the speeds in a cluster file so that predictions fit the step times in the reports of measured runs.

    Write the new cluster file and return the exit status.
    """
    if args.cluster is None or args.output is None:
        print("check_cluster: --calibrate needs --cluster NAME|FILE and --output FILE", file=sys.stderr)
        return 2

    from megatron_lab.cluster.calibration import write_calibrated_cluster
    from megatron_lab.planner.cluster import load_cluster

    try:
        check_output("--output", str(args.output))
        messages = write_calibrated_cluster(args.output, load_cluster(args.cluster), args.calibrate)
    except ValueError as error:
        print(f"check_cluster: {error}", file=sys.stderr)
        return 2
    for message in messages:
        print(f"check_cluster: {message}")
    return 0
