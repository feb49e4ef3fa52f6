"""Processes of the ranks of one node, forked from a launcher (supervisor) that has already imported all modules of a run."""

from __future__ import annotations

import atexit
import ctypes
import importlib
import multiprocessing.util
import os
import pkgutil
import runpy
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from megatron.config.optional_packages import PACKAGES
from megatron.training.signals import EXIT_INTERRUPTED, PROGRESS_FILE_VARIABLE, read_progress_file
from megatron_lab.resilience.job_state import RankProgress

_MODULES = ("torch", "torch._dynamo")  # torch's optimizers import torch._dynamo
_PACKAGES = (
    *("config", "spec", "parallel", "precision", "tensor_parallel", "pipeline_parallel", "data_parallel", "attention", "moe"),
    *("context_parallel", "model", "optimizer", "checkpoint", "data", "metrics", "memory", "training"),
)
_LAB_PACKAGES = ("audit", "flight", "monitoring")
_KILL_TIMEOUT_S = 30.0
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def import_run_modules() -> None:
    """Import all modules of a run in this process, so that ranks forked from it start fast. None of the modules initializes CUDA
    when it is imported.

    Raises:
        RuntimeError: a module has started a thread. Forked ranks would not have the thread.
    """
    for module in _MODULES:
        importlib.import_module(module)
    for package_name in (*(f"megatron.{x}" for x in _PACKAGES), *(f"megatron_lab.{x}" for x in _LAB_PACKAGES)):
        package = importlib.import_module(package_name)
        for module_info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            try:
                importlib.import_module(module_info.name)
            except ModuleNotFoundError as error:
                # Optional packages may be missing. The rules for settings refuse a run that needs a missing one.
                if error.name not in PACKAGES:
                    raise
    if threading.active_count() > 1:
        raise RuntimeError(
            "importing the modules of the run has started threads, which the ranks forked from this process would not have: "
            f"{threading.enumerate()}. Use torchrun, or remove the import that starts them"
        )


def build_environment(
    local_rank: int, ranks_per_node: Sequence[int], node_rank: int, address: str, port: int, restarts: tuple[int, int], run_id: str
) -> dict[str, str]:
    """Return the environment variables of a rank, by name. They are those that torchrun would set.

    Args:
        ranks_per_node: number of ranks of each node, in the order in which ranks are numbered.
        node_rank: position of the rank's node in this order.
        address: host on which the ranks meet (MASTER_ADDR).
        port: port on which the ranks meet (MASTER_PORT).
        restarts: number of restarts so far, and the maximum.
    """
    first_rank = sum(ranks_per_node[:node_rank])
    integers = {
        "RANK": first_rank + local_rank,
        "ROLE_RANK": first_rank + local_rank,
        "LOCAL_RANK": local_rank,
        "GROUP_RANK": node_rank,
        "WORLD_SIZE": sum(ranks_per_node),
        "ROLE_WORLD_SIZE": sum(ranks_per_node),
        "LOCAL_WORLD_SIZE": ranks_per_node[node_rank],
        "GROUP_WORLD_SIZE": len(ranks_per_node),
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": restarts[0],
        "TORCHELASTIC_MAX_RESTARTS": restarts[1],
    }
    texts = {"ROLE_NAME": "default", "MASTER_ADDR": address, "TORCHELASTIC_RUN_ID": run_id, "TORCHELASTIC_USE_AGENT_STORE": "False"}
    return {**texts, **{name: str(value) for name, value in integers.items()}}


def create_progress_file() -> int:
    """Create the file in which the ranks of this node report their progress, and put its path into the environment of this process.

    Returns:
        file descriptor of the file, which forked ranks inherit. The file has no name, so it disappears with the last process that
            has it open.
    """
    fd, name = tempfile.mkstemp(prefix="life-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    os.unlink(name)
    os.environ[PROGRESS_FILE_VARIABLE] = f"/dev/fd/{fd}"
    return fd


def read_progress() -> RankProgress:
    """Read the progress of the ranks of this node from the file that `create_progress_file` has created."""
    iterations = read_progress_file(os.environ[PROGRESS_FILE_VARIABLE])
    return RankProgress() if iterations is None else RankProgress(*iterations)


def select_visible_devices(slots: Sequence[int], num_slots: int, current_value: str | None) -> str | None:
    """Return the value of CUDA_VISIBLE_DEVICES for the ranks of this node. Return None if the variable need not change.

    Args:
        slots: indices of the slots that run ranks. Each slot has its own device.
        num_slots: number of slots of the node, including excluded ones.
        current_value: current value of the variable; None if it is not set.
    """
    devices = (
        list(map(str, range(num_slots))) if current_value is None else [device for device in current_value.split(",") if device]
    )
    if list(slots) == list(range(len(slots))) or len(devices) < num_slots:
        return None
    return ",".join(devices[slot] for slot in slots)


class LocalRanks:
    """Running and ended processes of the ranks of this node. The constructor starts all ranks.

    Args:
        program: path of the script that every rank runs.
        argv: arguments of the script.
        environments: environment variables of each rank, by local rank.
        fds_to_close: file descriptors of the parent process, which the ranks must close.
        streams: file descriptors for stdout and stderr of each rank, by local rank. By default they are those of the parent.
    """

    def __init__(
        self,
        program: str,
        argv: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        fds_to_close: Sequence[int] = (),
        streams: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self.running_pids = {
                local_rank: _fork_rank(program, argv, variables, fds_to_close, None if streams is None else streams[local_rank])
                for local_rank, variables in enumerate(environments)
            }
            """Process id of each rank that has not ended, by local rank."""
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
        self.exit_codes: dict[int, int] = {}
        """Exit code of each ended rank by local rank, in the order in which the ranks ended; negative for a signal."""

    def poll(self) -> bool:
        """Store the exit codes of ranks that have ended since the last call. Return whether any rank has ended."""
        has_new = False
        for local_rank, pid in list(self.running_pids.items()):
            ended_pid, status = os.waitpid(pid, os.WNOHANG)
            if ended_pid:
                del self.running_pids[local_rank]
                self.exit_codes[local_rank] = os.waitstatus_to_exitcode(status)
                has_new = True
        return has_new

    def send_signal(self, signum: int) -> None:
        """Send a signal to every running rank of this node."""
        for pid in self.running_pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signum)

    def kill(self) -> list[int]:
        """Kill all ranks of this node, and the processes that they have started.

        Returns:
            local ranks that do not end within a time limit although they were killed, because a device or a storage blocks them in
            the kernel.
        """
        for pid in self.running_pids.values():
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # a rank that has not created its process group yet
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        exit_codes = dict(self.exit_codes)
        while self.running_pids and time.monotonic() < deadline:
            if not self.poll():
                time.sleep(0.005)
        self.exit_codes = exit_codes  # the exit codes of killed ranks mean nothing
        return list(self.running_pids)


def exit_with_parent(parent_pid: int, signum: int) -> None:
    """Make this process receive a signal when its parent process ends (Linux). If the parent has already ended, exit at once.

    Args:
        parent_pid: PID of the parent.
        signum: signal to receive.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signum))
    if os.getppid() != parent_pid:
        os._exit(1)


def set_process_name(name: str) -> None:
    """Set the name that `ps` and `top` show for this process (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def reset_signal_handlers() -> None:
    """Restore Python's default signal handlers in a process that was forked from a launcher with its own handlers. Signals that the
    launcher ignores stay ignored."""
    signal.set_wakeup_fd(-1)
    for signum in signal.valid_signals():
        if callable(signal.getsignal(signum)):
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _fork_rank(
    program: str,
    argv: Sequence[str],
    variables: Mapping[str, str],
    fds_to_close: Sequence[int],
    streams: tuple[int, int] | None,
) -> int:
    parent_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        for target_fd, fd in enumerate(streams or (), start=1):
            os.dup2(fd, target_fd)
        for fd in fds_to_close:
            os.close(fd)
        _become_rank(program, argv, variables, parent_pid)
    return pid


def _become_rank(program: str, argv: Sequence[str], variables: Mapping[str, str], parent_pid: int) -> NoReturn:
    """Turn this forked process into a rank: run a script as `python -u` would, and exit with the script's exit code. Never returns.

    Args:
        program: path of the script.
        argv: arguments of the script.
        variables: environment variables of the rank.
        parent_pid: PID of the parent. The rank ends with it.
    """
    code = 1
    atexit._clear()  # the exit functions of the parent may end its processes and delete its files
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]  # as in every process of multiprocessing
    try:
        os.setsid()  # Ctrl-C must only reach the launcher
        exit_with_parent(parent_pid, signal.SIGKILL)
        reset_signal_handlers()
        set_process_name(f"rank {variables['RANK']}")
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
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the exit functions would print a traceback
    except BaseException:  # noqa: BLE001 - the exit code reports it
        traceback.print_exc()
    with suppress(BaseException):
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
