"""A node's ranks of the test of the links: start them, wait no longer than allowed, and say what each found or where it stood."""

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
    """Test the links with the ranks of one node. Nothing of them is left afterwards, nor if SIGTERM comes, which is obeyed then.

    Args:
        index: number of the node.
        num_ranks: of a node.
        head: where the store of the meeting is, at `port`.
        device: kind of device.
        limit_s: seconds, from before the first start, until no rank is started any more and all are killed.
        program: what to run; takes the arguments of `megatron_lab.cluster.links`.
    """
    with _sigterm_waits() as came, tempfile.TemporaryDirectory(prefix="check-cluster-") as folder:
        reports = [Path(folder) / str(local) for local in range(num_ranks)]
        processes: list[subprocess.Popen[bytes]] = []
        deadline = time.monotonic() + limit_s

        def goes_on() -> bool:
            return not came and time.monotonic() < deadline

        try:
            for local, report in enumerate(reports):
                if not goes_on():
                    break
                variables = {
                    "RANK": index * num_ranks + local,
                    "LOCAL_RANK": local,
                    "WORLD_SIZE": num_nodes * num_ranks,
                    "LOCAL_WORLD_SIZE": num_ranks,
                    "MASTER_ADDR": head,
                    "MASTER_PORT": port,
                    "TORCHELASTIC_USE_AGENT_STORE": True,  # the store is there already
                }
                processes.append(_started([*program, str(report), device, str(limit_s)], variables))
            while goes_on() and any(process.poll() is None for process in processes):
                time.sleep(0.05)
        finally:
            for process in processes:  # all before the first is waited for: while they run, each has to share the cores
                process.kill()
            for process in processes:
                process.wait()
        return [_read(index * num_ranks + local, report) for local, report in enumerate(reports)]


@contextmanager
def _sigterm_waits() -> Iterator[list[int]]:
    """Obey SIGTERM at the end of the block: in the middle of a start it would leave a process behind that nobody knows.

    Yields:
        what is not empty once the signal came.
    """
    came: list[int] = []
    # None stands for a handler that was not installed from Python; it cannot be put back.
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number)) or signal.SIG_DFL
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, before)
        if came:
            signal.raise_signal(signal.SIGTERM)


def _started(command: list[str], variables: Mapping[str, object]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return subprocess.Popen(command, env={**environment, "PYTHONPATH": path}, stdin=subprocess.DEVNULL, start_new_session=True)


def _read(rank: int, report: Path) -> RankEnd:
    text = report.read_text() if report.exists() else ""
    lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]  # it may have been killed in mid-line
    places = [line["at"] for line in lines if "at" in line] or [_NOT_STARTED]
    last = lines[-1] if lines else {}
    return RankEnd(rank, last.get("done"), places[-1], len(places), last.get("failed"))
