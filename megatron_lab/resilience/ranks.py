"""The ranks of one node: forks of the supervisor, in which everything that a run imports is there already."""

from __future__ import annotations

import atexit
import ctypes
import importlib
import os
import pkgutil
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from megatron.config.extras import PACKAGES

HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals by which the supervisor is asked to stop the job."""
_MODULES = ("torch", "torch._dynamo")  # torch's optimizers import the second
_PACKAGES = (
    *("config", "spec", "parallel", "precision", "tensor_parallel", "pipeline_parallel", "data_parallel", "attention", "moe"),
    *("context_parallel", "model", "optimizer", "checkpoint", "data", "metrics", "memory", "training"),
)
_PACKAGES_AROUND = ("audit", "flight", "monitoring")
_DIES_IN_S = 30.0
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def import_what_runs_need() -> None:
    """Import it once, in the process that forks. Nothing here opens CUDA.

    Raises:
        RuntimeError: something has started a thread, which forks would not have.
    """
    for module in _MODULES:
        importlib.import_module(module)
    for name in (*(f"megatron.{one}" for one in _PACKAGES), *(f"megatron_lab.{one}" for one in _PACKAGES_AROUND)):
        package = importlib.import_module(name)
        for module_ in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            try:
                importlib.import_module(module_.name)
            except ModuleNotFoundError as error:
                # The rules refuse a run that needs a package that is not installed.
                if error.name not in PACKAGES:
                    raise
    if threading.active_count() > 1:
        raise RuntimeError(f"threads run before the ranks are forked: {threading.enumerate()}")


def environment(
    local: int, counts: Sequence[int], node: int, address: str, port: int, restarts: tuple[int, int], run_id: str
) -> dict[str, str]:
    """What torchrun would tell a rank in its environment.

    Args:
        local: number of the rank on its node.
        counts: ranks of each node, in their order.
        node: number of its node.
        restarts: how many there were, and how many there may be.
    """
    first = sum(counts[:node])
    numbers = {
        "RANK": first + local,
        "ROLE_RANK": first + local,
        "LOCAL_RANK": local,
        "GROUP_RANK": node,
        "WORLD_SIZE": sum(counts),
        "ROLE_WORLD_SIZE": sum(counts),
        "LOCAL_WORLD_SIZE": counts[node],
        "GROUP_WORLD_SIZE": len(counts),
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": restarts[0],
        "TORCHELASTIC_MAX_RESTARTS": restarts[1],
    }
    names = {"ROLE_NAME": "default", "MASTER_ADDR": address, "TORCHELASTIC_RUN_ID": run_id, "TORCHELASTIC_USE_AGENT_STORE": "False"}
    return {**names, **{name: str(number) for name, number in numbers.items()}}


def visible_devices(places: Sequence[int], number: int, shown: str | None) -> str | None:
    """CUDA_VISIBLE_DEVICES for ranks at these places of a node; None to leave it as it is.

    Args:
        number: places of the node.
        shown: its value for the supervisor, if any.
    """
    devices = list(map(str, range(number))) if shown is None else [device for device in shown.split(",") if device]
    if list(places) == list(range(len(places))) or len(devices) < number:
        return None
    return ",".join(devices[place] for place in places)


class LocalRanks:
    """The ranks of a start.

    Args:
        program: path of the script.
        argv: its words.
        environments: variables for each rank.
        own: files of the supervisor, which ranks close.
    """

    def __init__(
        self, program: str, argv: Sequence[str], environments: Sequence[Mapping[str, str]], own: Sequence[int] = ()
    ) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
        try:
            self.running = {local: _forked(program, argv, variables, own) for local, variables in enumerate(environments)}
            """Process of each rank that has not ended."""
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)
        self.ended: dict[int, int] = {}
        """Exit codes in the order in which they ended, negative for a signal."""

    def look(self) -> bool:
        """See who has ended; returns whether anybody has since the last look."""
        found = False
        for local, pid in list(self.running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del self.running[local]
                self.ended[local] = os.waitstatus_to_exitcode(status)
                found = True
        return found

    def tell(self, number: int) -> None:
        """Send a signal to every rank."""
        for pid in self.running.values():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> list[int]:
        """End all ranks at once, with what they have started; returns those that do not end: a device or a storage holds them."""
        for pid in self.running.values():
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # one that has no group of its own yet
        until = time.monotonic() + _DIES_IN_S
        ended = dict(self.ended)
        while self.running and time.monotonic() < until:
            if not self.look():
                time.sleep(0.005)
        self.ended = ended  # how the others ended says nothing
        return list(self.running)


def bind_to(parent: int, number: int) -> None:
    """Let this process get a signal when its parent ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:
        os._exit(1)


def name_process(name: str) -> None:
    """What `ps` and `top` show for this process (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def own_signals() -> None:
    """In a fork of the supervisor: signals act as in a fresh Python."""
    signal.set_wakeup_fd(-1)
    for number in (*HEARD, signal.SIGCHLD):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)


def _forked(program: str, argv: Sequence[str], variables: Mapping[str, str], own: Sequence[int]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        for file in own:
            os.close(file)
        _become_rank(program, argv, variables, parent)
    return pid


def _become_rank(program: str, argv: Sequence[str], variables: Mapping[str, str], parent: int) -> NoReturn:
    """Run a script as `python -u` would, and end as it does: never return into the supervisor."""
    code = 1
    try:
        os.setsid()  # Ctrl-C is for the supervisor
        bind_to(parent, signal.SIGKILL)
        own_signals()
        name_process(f"rank {variables['RANK']}")
        os.environ.update(variables)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
        sys.argv, sys.path[0] = [program, *argv], str(Path(program).resolve().parent)
        runpy.run_path(program, run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
    except BaseException:  # noqa: BLE001 - told by the exit code
        traceback.print_exc()
    with suppress(BaseException):
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
