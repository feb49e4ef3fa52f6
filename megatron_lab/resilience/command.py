"""Command line of the supervisor, the launcher that restarts ranks: its own flags, the script to run, and the flags of the script.
Does not import torch."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
from collections.abc import Sequence

from megatron.config.parsed_flags import find_launcher_flags
from megatron_lab.command_line import CommandLineParser


def parse_command_line(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line of the supervisor, the launcher that restarts ranks.

    Returns:
        the supervisor's own flags, the script (`program`) and the flags of the script (`flags`).

    Raises:
        SystemExit: with code 2 for an invalid command line, with code 0 after ``--help``.
    """
    parser = CommandLineParser(
        prog="python -m megatron_lab.resilience.supervisor",
        description="Start the ranks of a node, and restart them in place when some are lost (docs/survival.md).",
    )
    add = parser.add_argument
    add("--nproc-per-node", type=_parse_positive, default=1, metavar="N", help="ranks that this node can run, each on a device (1)")
    add(
        "--nnodes", type=_parse_range, default=(1, 1), metavar="N|MIN:MAX", help="nodes that train; additional nodes are spares (1)"
    )
    add(
        "--elastic",
        type=_parse_range,
        metavar="MIN:MAX",
        help="minimum number of devices that must be available, and maximum number of ranks that train (all devices of the nodes)",
    )
    add(
        "--max-restarts",
        type=_parse_non_negative,
        default=3,
        metavar="N",
        help="maximum number of consecutive restarts without a newer checkpoint (3)",
    )
    add(
        "--meet",
        type=_parse_address,
        metavar="HOST:PORT",
        help="store in which several nodes meet; HOST serves it if no other process does",
    )
    add("--run-id", default="job", metavar="NAME", help="name that separates this job from others in one store (job)")
    add("--local-addr", metavar="HOST", help="name or address of this node for other nodes; detected by default")
    add(
        "--join-at-once",
        action="store_true",
        help="when joining a job that runs with fewer nodes than MAX: request a restart at once",
    )
    add("--leave-on-signal", action="store_true", help="on a signal, only this node leaves the job; the job continues")
    add("--last-call-s", type=float, default=30.0, metavar="S", help="seconds to wait for further nodes when MIN are ready (30)")
    add(
        "--join-timeout-s",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds after which the job ends if fewer than MIN nodes have joined (600)",
    )
    add(
        "--lost-after-s",
        type=float,
        default=5.0,
        metavar="S",
        help="seconds without a heartbeat after which a node counts as lost (5)",
    )
    add("--serve", type=_parse_positive, metavar="PORT", help="only serve a store for --meet on this port, until SIGTERM")
    add("program", nargs="?", help="script, such as pretrain_gpt.py; if the file does not exist, that of the installed package")
    add("flags", nargs=argparse.REMAINDER, help="flags of the script")
    args = parser.parse_args(argv)
    num_nodes, ranks_per_node = args.nnodes, args.nproc_per_node
    args.elastic = args.elastic or (num_nodes[0] * ranks_per_node, num_nodes[1] * ranks_per_node)
    if args.serve is None and args.program is None:
        parser.error("the script is missing, such as pretrain_gpt.py")
    if args.program == "pretrain_gpt.py" and not os.path.isfile(args.program):
        installed = importlib.util.find_spec("pretrain_gpt")
        args.program = args.program if installed is None else installed.origin
    if args.serve is None and not os.path.isfile(args.program):
        parser.error(f"script {args.program} not found")
    if {"--dry-run", "--plan"}.intersection(args.flags):
        parser.error(f"a plan needs no ranks: python {args.program} --dry-run --world-size {args.elastic[1]} ...")
    if launcher_flags := find_launcher_flags(args.flags):
        parser.error(
            f"{launcher_flags[0]} is for runs without another launcher. Remove it: the supervisor takes --nproc-per-node N before "
            "the script"
        )
    if num_nodes[1] > 1 and args.meet is None:
        parser.error(f"--nnodes {num_nodes[1]} needs --meet HOST:PORT, the same on all nodes")
    return args


def _parse_positive(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,6}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _parse_non_negative(text: str) -> int:
    return 0 if text == "0" else _parse_positive(text)


def _parse_range(text: str) -> tuple[int, int]:
    min_text, _, max_text = text.partition(":")
    bounds = _parse_positive(min_text), _parse_positive(max_text or min_text)
    if bounds[0] > bounds[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is not a range MIN:MAX, because {bounds[0]} is above {bounds[1]}")
    return bounds


def _parse_address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT with a port from 1 to 65535")
    return host.strip("[]"), int(port)
