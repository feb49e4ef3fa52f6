"""The command line of the supervisor: its own flags, the script, and its words. Needs no torch."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
from collections.abc import Sequence


def settings(words: Sequence[str]) -> argparse.Namespace:
    """The supervisor's own flags, the script, and its words.

    Raises:
        SystemExit: 2 if they are wrong, 0 after ``--help``.
    """
    parser = argparse.ArgumentParser(
        prog="python -m megatron_lab.resilience.supervisor",
        description="Start the ranks of a node, and start them again in place when some are lost (docs/survival.md).",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nproc-per-node", type=_number, default=1, metavar="N", help="ranks that this node can run, each on a device (1)")
    add("--nnodes", type=_range, default=(1, 1), metavar="N|MIN:MAX", help="nodes that train; further ones are spares (1)")
    add(
        "--elastic",
        type=_range,
        metavar="MIN:MAX",
        help="fewest places that must be there, most ranks that train (all of the nodes)",
    )
    add("--max-restarts", type=_natural, default=3, metavar="N", help="restarts in a row without a newer state (3)")
    add("--meet", type=_address, metavar="HOST:PORT", help="store in which several nodes meet; served by HOST if nobody else does")
    add("--run-id", default="job", metavar="NAME", help="tells jobs in one store apart (job)")
    add("--local-addr", metavar="HOST", help="this node's name or address for the others; by default found out")
    add(
        "--join-at-once", action="store_true", help="coming to a job that runs with fewer nodes than MAX: ask for a restart at once"
    )
    add("--leave-on-signal", action="store_true", help="a signal takes this node out of the job, which goes on, and stops no other")
    add("--last-call-s", type=float, default=30.0, metavar="S", help="wait so long for further nodes once MIN are there (30)")
    add("--join-timeout-s", type=float, default=600.0, metavar="S", help="give up if MIN nodes do not come in this time (600)")
    add("--lost-after-s", type=float, default=5.0, metavar="S", help="a node that was not heard for so long is lost (5)")
    add("--serve", type=_number, metavar="PORT", help="only serve a store for --meet on this port, until SIGTERM")
    add("program", nargs="?", help="script, such as pretrain_gpt.py (that of the installed package, if none is here)")
    add("flags", nargs=argparse.REMAINDER, help="its flags")
    found = parser.parse_args(words)
    nodes, ranks = found.nnodes, found.nproc_per_node
    found.elastic = found.elastic or (nodes[0] * ranks, nodes[1] * ranks)
    if found.serve is None and found.program is None:
        parser.error("the script is missing, such as pretrain_gpt.py")
    if found.program == "pretrain_gpt.py" and not os.path.isfile(found.program):
        installed = importlib.util.find_spec("pretrain_gpt")
        found.program = found.program if installed is None else installed.origin
    if found.serve is None and not os.path.isfile(found.program):
        parser.error(f"there is no script {found.program}")
    if {"--dry-run", "--plan"}.intersection(found.flags):
        parser.error(f"a plan needs no ranks: python {found.program} --dry-run --world-size {found.elastic[1]} ...")
    if nodes[1] > 1 and found.meet is None:
        parser.error(f"--nnodes {nodes[1]} needs --meet HOST:PORT, the same on all nodes")
    return found


def _number(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,6}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


def _natural(text: str) -> int:
    return 0 if text == "0" else _number(text)


def _range(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    found = _number(least), _number(most or least)
    if found[0] > found[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: MIN is above MAX")
    return found


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r} is no HOST:PORT")
    return host.strip("[]"), int(port)
