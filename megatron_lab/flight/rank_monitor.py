"""Hang monitoring of a rank, in the rank's own process: write its flight record, count its communication calls, and end the process
when the watcher requests it.

The flight record is a file with the rank's current activity, which the watcher process of the node reads. The first rank of each
node starts that process.
"""

from __future__ import annotations

import atexit
import dataclasses
import faulthandler
import json
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from megatron.config.launcher import build_module_command
from megatron.config.parallel import ParallelConfig
from megatron.parallel.collectives import gather_objects
from megatron.parallel.context import ParallelContext
from megatron.parallel.rendezvous import get_node_address
from megatron.parallel.torch_private import find_flight_recorder_dumps, get_default_store
from megatron.spec.operations import Op
from megatron_lab.flight.hooks import count_calls
from megatron_lab.flight.record import FlightRecord, read_record
from megatron_lab.flight.watcher import CALLS_SUFFIX, STACK_SIGNAL, WatcherConfig

_MEMORY_FOLDER, _FOLDER_PREFIX = "/dev/shm", "flight-"
_MIN_STALE_AGE_S = 600.0
"""Age in seconds up to which a folder without records may belong to a run that is starting."""
_POLL_INTERVAL_S = 0.5
_EXIT_TIMEOUT_S = 1.0
_EXIT_DELAY_S = 1.0
"""Seconds between the request to end and the end of a rank. All ranks receive the request before one of them loses contact with
a rank that has ended."""


class Flight:
    """Interface through which the training loop writes this rank's flight record, the file that the hang watcher of the node reads.
    All methods do nothing if the run is not monitored.

    Args:
        record: flight record of this rank; None if the run is not monitored.
        nodes: host name and address of each rank's node, by rank.
    """

    def __init__(self, record: FlightRecord | None = None, nodes: Sequence[tuple[str, str]] = ()) -> None:
        self._record, self._nodes = record, nodes

    def set_phase(self, name: str, iteration: int | None = None) -> None:
        """Record which phase of the run begins.

        Args:
            name: one of `record.PHASES`, such as "evaluating".
            iteration: iteration to record; None to keep the recorded one.
        """
        if self._record is not None:
            self._record.set_phase(name, iteration)

    @property
    def waited_s(self) -> float:
        """Total seconds that the rank has waited for other ranks."""
        return 0.0 if self._record is None else self._record.waited_s

    def get_requested_exit_code(self) -> int:
        """Return the exit code with which the hang watcher requests this rank to exit; 0 if it has made no such request."""
        return 0 if self._record is None else self._record.get_requested_exit_code()

    def find_lost_rank(self, reason: str) -> str | None:
        """Describe the rank with which this rank has lost contact. Return None if it cannot be identified from this node.

        Args:
            reason: text of torch's error, which may contain the address of the lost rank.
        """
        if self._record is None:
            return None
        deadline = time.monotonic() + _EXIT_TIMEOUT_S  # the connections of a process close before it is gone
        while not (gone_ranks := self._find_gone_ranks()) and time.monotonic() < deadline:
            time.sleep(0.05)
        if gone_ranks:
            suffix = f" and {len(gone_ranks) - 1} more" if len(gone_ranks) > 1 else ""
            return f"rank {gone_ranks[0]} (node {self._nodes[gone_ranks[0]][0]}){suffix}, whose process is gone"
        local_address = self._nodes[self._record.rank][1]
        remote_ranks = [
            rank for rank, (_, address) in enumerate(self._nodes) if address != local_address and f"[{address}]" in reason
        ]
        return (
            f"one of the ranks {remote_ranks[0]} to {remote_ranks[-1]} (node {self._nodes[remote_ranks[0]][0]})"
            if remote_ranks
            else None
        )

    def _find_gone_ranks(self) -> list[int]:
        """Return the ranks of this node whose process has ended, first the rank that has been inactive for the longest time."""
        assert self._record is not None
        snapshots = [read_record(path) for path in self._record.path.parent.glob("rank-*.record")]
        gone = [snapshot for snapshot in snapshots if snapshot is not None and snapshot.process == "gone"]
        return [snapshot.rank for snapshot in sorted(gone, key=lambda snapshot: -snapshot.quiet_s)]

    def start_op(self, op: Op) -> None:
        """Record the start of an operation of the pipeline schedule, such as the forward of a microbatch."""
        if self._record is not None:
            self._record.start_op(op.type, op.chunk, op.microbatch)


@contextmanager
def watch_rank(context: ParallelContext, config: ParallelConfig, stack_folder: str | None) -> Iterator[Flight]:
    """Monitor this rank for hangs while the context is active. All ranks enter the context together.

    Without --hang-warn-s, or with a single rank, there is no monitoring.

    Args:
        stack_folder: folder to which stack traces are copied when a hang is found; None to copy none.

    Yields:
        interface through which the training loop records the activity of the rank.
    """
    rank, world_size, warn_s = context.rank, context.world.size, config.hang_warn_s
    if not warn_s or world_size == 1:
        yield Flight()
        return
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    first_local_rank, num_local_ranks = rank - local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    store = dist.PrefixStore("flight", get_default_store())
    if local_rank == 0:
        folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=_MEMORY_FOLDER if os.path.isdir(_MEMORY_FOLDER) else None))
        _remove_stale_folders(folder.parent)
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        _start_watcher(
            WatcherConfig(str(folder), num_local_ranks, world_size, warn_s, config.hang_kill_s, "", None, stack_folder), rank, store
        )
        store.set(f"folder/{first_local_rank}", str(folder))
    folder = Path(store.get(f"folder/{first_local_rank}").decode())
    record = FlightRecord(folder / f"rank-{rank}.record", rank)
    nodes = gather_objects((socket.gethostname(), get_node_address()), context.world)
    with (folder / f"rank-{rank}.stack").open("w") as file:
        faulthandler.register(STACK_SIGNAL, file, all_threads=True)
        threading.Thread(target=_poll_requests, args=(record,), daemon=True, name="flight").start()
        try:
            with count_calls(record):
                yield Flight(record, nodes)
            record.set_phase("ended")
        finally:
            faulthandler.unregister(STACK_SIGNAL)


def get_stack_folder(save: str | None) -> str | None:
    """Return the folder for the stack traces of a hang, which is inside the save folder. Return None if there is no save folder, or
    if it is a URL.

    Args:
        save: value of --save.
    """
    return None if save is None or "://" in save else os.path.join(save, "stacks")


def _remove_stale_folders(root: Path) -> None:
    """Remove folders of flight records that earlier runs on this node have left, because they were killed together with their
    watcher or before it started.

    Args:
        root: folder that contains the folders of all runs.
    """
    for folder in root.glob(f"{_FOLDER_PREFIX}*"):
        with suppress(OSError):  # another run may remove the folder at the same time
            stat = folder.stat()
            if stat.st_uid != os.getuid() or time.time() - stat.st_mtime < _MIN_STALE_AGE_S:
                continue
            snapshots = [snapshot for path in folder.glob("rank-*.record") if (snapshot := read_record(path)) is not None]
            if all(snapshot.process == "gone" and snapshot.host == socket.gethostname() for snapshot in snapshots):
                shutil.rmtree(folder)


def _start_watcher(watcher_config: WatcherConfig, rank: int, store: dist.Store) -> None:
    """Start the watcher process of this node, which monitors the node's ranks for hangs.

    The first rank of the run publishes the address of its watcher in the store. The other nodes read this address.

    Args:
        rank: global rank of the caller, the first rank of its node.
    """
    if rank == 0:
        watcher_config = dataclasses.replace(watcher_config, token=secrets.token_hex(16))
    else:
        address, token = store.get("head").decode().split()
        watcher_config = dataclasses.replace(watcher_config, first_node_address=address, token=token)
    command, environment = build_module_command("megatron_lab.flight.watcher")
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )
    assert process.stdin is not None
    with process.stdin:
        process.stdin.write(json.dumps(dataclasses.asdict(watcher_config)).encode())
    if rank == 0:
        assert process.stdout is not None
        port = process.stdout.readline().decode().strip()
        store.set("head", f"{os.environ.get('MASTER_ADDR') or socket.gethostname()}:{port} {watcher_config.token}")


def _poll_requests(record: FlightRecord) -> None:
    """Execute the requests that the hang watcher writes into this rank's flight record: write a trace of calls, or exit. Never
    returns.

    A separate thread runs this function, because the main thread may be waiting for other ranks.
    """
    while True:
        time.sleep(_POLL_INTERVAL_S)
        if record.consume_trace_request():
            _write_trace(record.path.with_suffix(CALLS_SUFFIX))
        code = record.get_requested_exit_code()
        if code:
            time.sleep(_EXIT_DELAY_S)
            os._exit(code)


def _write_trace(path: Path) -> None:
    """Write the content of torch's flight recorder to a file: the last calls of the NCCL groups, or of the gloo groups if there are
    no NCCL calls."""
    for dump in find_flight_recorder_dumps():
        with suppress(RuntimeError, OSError):
            trace = dump()
            if json.loads(trace).get("entries"):
                new = path.with_suffix(".new")
                new.write_bytes(trace)
                new.replace(path)
                return
