"""A command in processes of its own that a time limit ends, with everything that it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_MARK = "MEGATRON_CHECK_GPU"


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    seconds: float
    code: int | None
    """Its exit status, negative for a signal; None if the time limit came first."""
    out: str
    err: str


def run(command: Sequence[str], limit: float, folder: Path, environment: Mapping[str, str] | None = None) -> Ended:
    """Run a command in the repository's root; when this returns, nothing that it started is left.

    Args:
        limit: seconds.
        folder: where its output is kept.
    """
    mark, began = uuid.uuid4().hex, time.monotonic()
    files = folder / f"out-{mark}", folder / f"err-{mark}"
    with files[0].open("wb") as out, files[1].open("wb") as err:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {}), _MARK: mark},
        )
        code: int | None
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_marked(mark)
            process.wait()
    texts = [file.read_text(errors="replace") for file in files]
    return Ended(time.monotonic() - began, code, *texts)


def end_marked(mark: str) -> None:
    """End all processes that were started with this mark in their environment, whatever group or session they went to."""
    while found := [one for one in Path("/proc").iterdir() if one.name.isdigit() and _has(one, mark)]:
        for one in found:
            try:
                os.kill(int(one.name), signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)


def _has(process: Path, mark: str) -> bool:
    try:  # of a process that has ended and waits for its parent, it is empty
        return f"{_MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
