"""A node's ranks of the test of the links: start them, wait no longer than allowed, and say what each found or where it stood."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = (sys.executable, "-m", "tools.cluster.links")
_NOT_STARTED = "its start"


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended; JSON-able by its `__dict__`."""

    rank: int
    found: dict[str, Any] | None
    """What it measured; None where it did not get to the end."""
    at: str
    """The last place that it came to."""
    places: int
    """How many it came to."""
    failed: str | None = None
    """Why it failed, if it said so."""


def run_ranks(
    index: int, num_ranks: int, num_nodes: int, head: str, port: int, device: str, limit_s: float, program: Sequence[str] = PROGRAM
) -> list[RankEnd]:
    """Test the links with the ranks of one node. Nothing of them is left afterwards.

    Args:
        index: number of the node.
        num_ranks: of a node.
        head: where the store of the meeting is, at `port`.
        device: kind of device.
        limit_s: seconds until all ranks are killed.
        program: what to run; takes the arguments of `tools.cluster.links`.
    """
    with tempfile.TemporaryDirectory(prefix="check-cluster-") as folder:
        reports = [Path(folder) / str(local) for local in range(num_ranks)]
        processes: list[subprocess.Popen[bytes]] = []
        deadline = time.monotonic() + limit_s
        try:
            for local, report in enumerate(reports):
                variables = {
                    "RANK": index * num_ranks + local,
                    "LOCAL_RANK": local,
                    "WORLD_SIZE": num_nodes * num_ranks,
                    "LOCAL_WORLD_SIZE": num_ranks,
                    "MASTER_ADDR": head,
                    "MASTER_PORT": port,
                    "TORCHELASTIC_USE_AGENT_STORE": True,  # the store is there already
                }
                environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
                path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
                processes.append(
                    subprocess.Popen(
                        [*program, str(report), device, str(limit_s)],
                        env={**environment, "PYTHONPATH": path},
                        stdin=subprocess.DEVNULL,
                        start_new_session=True,
                    )
                )
            while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [_read(index * num_ranks + local, report) for local, report in enumerate(reports)]


def _read(rank: int, report: Path) -> RankEnd:
    text = report.read_text() if report.exists() else ""
    lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]  # it may have been killed in mid-line
    places = [line["at"] for line in lines if "at" in line] or [_NOT_STARTED]
    last = lines[-1] if lines else {}
    return RankEnd(rank, last.get("done"), places[-1], len(places), last.get("failed"))
