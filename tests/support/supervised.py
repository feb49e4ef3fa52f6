"""Jobs under supervisors of this tree, as many as the test has nodes, or under its launcher for one node: their ranks, what they
say, and how they end."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megatron_lab.resilience import supervisor
from megatron_lab.verification.local_ranks import find_free_port
from tests.support.cli import ROOT, fork_program
from tests.support.runs import arguments, at_iteration, complete_checkpoints, read_metrics

MARK = "TEST_SUPERVISED"


def writers_to(file: Path) -> dict[int, str]:
    """Processes whose standard output or error is a file, as those of all forks of a process are, with their names."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(file) in (os.readlink(folder / "fd/1"), os.readlink(folder / "fd/2")):
                found[int(folder.name)] = (folder / "comm").read_text().strip()
    return found


class Node:
    """A supervisor or another launcher, forked from the test's process, in which torch is imported already.

    Args:
        said: file for what it and its ranks write.
        words: its command line.
        step_s: seconds that each step of its ranks sleeps.
        launcher: called with the command line.
    """

    def __init__(
        self,
        said: Path,
        words: Sequence[str],
        step_s: float = 0.0,
        launcher: Callable[[Sequence[str]], int | None] = supervisor.main,
    ) -> None:
        self.said_in = said
        self.signals = 0
        """How many it and its ranks were sent from here."""
        self._code: int | None = None

        def supervise() -> int | None:
            os.environ.pop("OMP_NUM_THREADS", None)
            os.environ |= {"GLOO_SOCKET_IFNAME": "lo", MARK: str(said)}
            sys.path.insert(0, "")
            os.chdir(ROOT)
            if step_s:
                at_iteration(None, lambda _: time.sleep(step_s))
            return launcher(words)

        self.pid = fork_program(supervise, said, said)

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None as long as it runs."""
        if self._code is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def tell(self, number: int) -> None:
        os.kill(self.pid, number)
        self.signals += 1

    def said(self) -> str:
        return self.said_in.read_text()

    def wait_for(self, what: str | Callable[[], bool], timeout: float = 90.0) -> None:
        """Until a text was said, or something is the case."""
        until = time.monotonic() + timeout
        while not (what in self.said() if isinstance(what, str) else what()):
            assert time.monotonic() < until, f"not in {timeout:g} s: {what}\n{self.said()[-4000:]}"
            assert self.poll() is None, f"ended with {self.poll()} before {what}\n{self.said()[-4000:]}"
            time.sleep(0.02)

    def ranks(self) -> dict[int, int]:
        """Process of each of its ranks, by their number in the world."""
        found = {}
        with contextlib.suppress(OSError):
            for child in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split():
                with contextlib.suppress(OSError):
                    name = Path(f"/proc/{child}/comm").read_text().split()
                    if name[0] == "rank":
                        found[int(name[1])] = int(child)
        return found

    def kill_rank(self, rank: int, after: int | None = None) -> int:
        """SIGKILL to one of its ranks, once it is there; returns its process.

        Args:
            after: process that had its number before.
        """
        self.wait_for(lambda: self.ranks().get(rank, after) != after)
        pid = self.ranks()[rank]
        os.kill(pid, signal.SIGKILL)
        self.signals += 1
        return pid

    def ended(self, timeout: float = 90.0) -> int:
        """Its exit code, once it has ended."""
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            assert time.monotonic() < until, f"it had not ended after {timeout:g} s\n{self.said()[-6000:]}"
            time.sleep(0.02)
        return code


class Job:
    """All supervisors of a test, in a folder of its own; nothing of them is left behind.

    Args:
        step_s: seconds that each step sleeps, so that a run without an end takes little processor time while the test waits.
    """

    def __init__(self, folder: Path, step_s: float = 0.0) -> None:
        self.folder, self.step_s = folder, step_s
        folder.mkdir(parents=True, exist_ok=True)
        self.nodes: list[Node] = []
        self.port = find_free_port()
        self.store: Node | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for node in self.nodes:
            if node.poll() is None:
                node.tell(signal.SIGKILL)
                node.ended()
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def node(self, *own: str, **settings: Any) -> Node:
        """Start a supervisor for a tiny run that saves in this folder.

        Args:
            own: its flags.
            settings: of the run, beside `arguments`.
        """
        save = self.folder / "save"
        run = {"save": save, "load": save, "metrics_file": self.folder / "metrics", **settings}
        self.nodes.append(Node(self.folder / f"node-{len(self.nodes)}", [*own, "pretrain_gpt.py", *arguments(**run)], self.step_s))
        return self.nodes[-1]

    def serve(self) -> Node:
        """Serve a store apart from all nodes."""
        self.store = Node(self.folder / "store", ["--serve", str(self.port)])
        self.nodes.append(self.store)
        self.store.wait_for("serving a store")
        return self.store

    @property
    def meet(self) -> tuple[str, str]:
        """Flags with which nodes meet."""
        return "--meet", f"127.0.0.1:{self.port}"

    @property
    def save(self) -> Path:
        return self.folder / "save"

    def saved(self) -> int:
        """Iteration of the newest checkpoint; 0 without one."""
        return max((int(name.removeprefix("iter_")) for name in complete_checkpoints(self.save)), default=0)

    def left(self) -> list[int]:
        """Processes that any of the supervisors has left behind."""
        marks = {f"{MARK}={node.said_in}".encode() for node in self.nodes}
        found = {pid for node in self.nodes for pid in writers_to(node.said_in)}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if marks.intersection((folder / "environ").read_bytes().split(b"\0")):
                    found.add(int(folder.name))
        return sorted(found)

    def assert_nothing_left(self, within_s: float = 20.0) -> None:
        """All processes of the job end by themselves; the store, which is for other jobs too, when it is asked to."""
        if self.store is not None and self.store.poll() is None:
            self.store.tell(signal.SIGTERM)
            assert self.store.ended() == 0
        until = time.monotonic() + within_s
        while left := self.left():
            names = [Path(f"/proc/{pid}/status").read_text()[:400] for pid in left if Path(f"/proc/{pid}").exists()]
            assert time.monotonic() < until, f"left behind: {left} {names}"
            time.sleep(0.05)


def check_samples(metrics: Path, batch: int, last: int, repeated: int) -> None:
    """No sample is lost, and a restart repeats at most so many steps.

    Args:
        batch: samples of a step.
        last: the last iteration.
        repeated: steps between two saves.
    """
    lines = [line for line in read_metrics(metrics) if "lm_loss" in line]
    assert lines[-1]["iteration"] == last, [line["iteration"] for line in lines[-20:]]
    before = 0
    for line in lines:
        iteration = line["iteration"]
        assert line["consumed_samples"] == batch * iteration
        assert before - repeated < iteration <= before + 1, f"iteration {iteration} after {before}"
        before = iteration
