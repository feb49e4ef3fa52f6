"""Ranks of one node in the link test: start them, wait within the time limit, and collect their results or the last step they
reached."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = (sys.executable, "-m", "megatron_lab.cluster.links")
_START_STEP = "its start"


@dataclass(frozen=True)
class RankEnd:
    """Result of one rank in the link test, which measures the links between all ranks. Sent as JSON."""

    rank: int
    found: dict[str, Any] | None
    """Measured values of the rank by name, such as "inside" (the all-reduce rate within its node); None if the rank did not
    finish."""
    at: str
    """Name of the last step of the test that the rank began, such as "joining the other ranks"."""
    places: int
    """Number of steps of the test that the rank began."""
    failed: str | None = None
    """Message of the error that ended the rank's test; None if the test succeeded."""


def run_ranks(
    node_index: int,
    ranks_per_node: int,
    num_nodes: int,
    head: str,
    port: int,
    device: str,
    timeout_s: float,
    program: Sequence[str] = PROGRAM,
) -> list[RankEnd]:
    """Run the link test, which measures the links between all ranks, with the ranks of this node. Return how each rank ended.

    All rank processes have ended when the function returns. If SIGTERM arrives, the function first ends them and then lets the
    signal take effect.

    Args:
        node_index: index of this node.
        head: name or address of the node that serves the store in which the ranks meet.
        port: port of that store.
        device: type of device of the ranks: cpu or cuda.
        timeout_s: seconds after the call at which all running ranks are killed and no more are started.
        program: command of a rank, which takes the arguments of `megatron_lab.cluster.links`.
    """
    with _defer_sigterm() as received, tempfile.TemporaryDirectory(prefix="check-cluster-") as folder:
        reports = [Path(folder) / str(local_rank) for local_rank in range(ranks_per_node)]
        processes: list[subprocess.Popen[bytes]] = []
        deadline = time.monotonic() + timeout_s

        def may_continue() -> bool:
            return not received and time.monotonic() < deadline

        try:
            for local_rank, report in enumerate(reports):
                if not may_continue():
                    break
                variables = {
                    "RANK": node_index * ranks_per_node + local_rank,
                    "LOCAL_RANK": local_rank,
                    "WORLD_SIZE": num_nodes * ranks_per_node,
                    "LOCAL_WORLD_SIZE": ranks_per_node,
                    "MASTER_ADDR": head,
                    "MASTER_PORT": port,
                    "TORCHELASTIC_USE_AGENT_STORE": True,  # the head serves the store already
                }
                processes.append(_start_process([*program, str(report), device, str(timeout_s)], variables))
            while may_continue() and any(process.poll() is None for process in processes):
                time.sleep(0.05)
        finally:
            for process in processes:  # kill all before waiting for the first: running processes slow down its end
                process.kill()
            for process in processes:
                process.wait()
        return [_read_report(node_index * ranks_per_node + local_rank, report) for local_rank, report in enumerate(reports)]


@contextmanager
def _defer_sigterm() -> Iterator[list[int]]:
    """Delay the effect of SIGTERM to the end of the block. Otherwise SIGTERM could arrive while a process is being started, and
    that process would keep running.

    Yields:
        empty list, to which the signal's number is added when SIGTERM arrives.
    """
    received: list[int] = []
    # None means that the handler was not installed from Python. It cannot be restored.
    previous_handler = signal.signal(signal.SIGTERM, lambda signum, _: received.append(signum)) or signal.SIG_DFL
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
        if received:
            signal.raise_signal(signal.SIGTERM)


def _start_process(command: list[str], variables: Mapping[str, object]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return subprocess.Popen(command, env={**environment, "PYTHONPATH": path}, stdin=subprocess.DEVNULL, start_new_session=True)


def _read_report(rank: int, report: Path) -> RankEnd:
    text = report.read_text() if report.exists() else ""
    records = [
        json.loads(text_line) for text_line in text[: text.rfind("\n") + 1].splitlines()
    ]  # a killed rank may leave an incomplete last line
    steps = [record["at"] for record in records if "at" in record] or [_START_STEP]
    last = records[-1] if records else {}
    return RankEnd(rank, last.get("done"), steps[-1], len(steps), last.get("failed"))
