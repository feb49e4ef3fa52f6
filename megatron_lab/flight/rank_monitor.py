"""Hang monitoring of a rank, in the rank's own process: write its flight record, count its communication calls, and end the process
when the watcher requests it.

The flight record is a file with the rank's current activity, which the watcher process of the node reads. The first rank of each
node starts that process.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
import traceback
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
from megatron_lab.flight.record import FlightRecord, RankFiles, open_files, read_record
from megatron_lab.flight.watcher import MAIN_THREAD_HEADER, STACK_SIGNAL, WatcherConfig

logger = logging.getLogger(__name__)
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
        node_files: files of the ranks of this node.
    """

    def __init__(
        self, record: FlightRecord | None = None, nodes: Sequence[tuple[str, str]] = (), node_files: Sequence[RankFiles] = ()
    ) -> None:
        self._record, self._nodes, self._node_files = record, nodes, node_files

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
        snapshots = [read_record(Path(files.record)) for files in self._node_files]
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
    if not hasattr(os, "memfd_create"):
        if rank == 0:
            logger.warning("ranks that hang are not found on this operating system, only on Linux (--hang-warn-s)")
        yield Flight()
        return
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    first_local_rank, num_local_ranks = rank - local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    store = dist.PrefixStore("flight", get_default_store())
    files = RankFiles.create(rank)
    record = FlightRecord(files.record, rank)
    gathered = gather_objects((socket.gethostname(), get_node_address(), files), context.world)
    nodes = [(host, address) for host, address, _ in gathered]
    node_files = [files for _, _, files in gathered[first_local_rank : first_local_rank + num_local_ranks]]
    if local_rank == 0:
        _start_watcher(
            WatcherConfig(tuple(node_files), num_local_ranks, world_size, warn_s, config.hang_kill_s, "", None, stack_folder),
            rank,
            store,
        )
    opened_files = open_files(node_files)
    if local_rank == 0 and (num_hidden := num_local_ranks - len(opened_files)):
        logger.warning(
            f"{num_hidden} ranks of node {socket.gethostname()} are not watched for hangs (--hang-warn-s): this process cannot "
            "open their files in /proc. Start all ranks of a node by one user in one container"
        )
    with open(files.stack, "a") as file:
        faulthandler.register(STACK_SIGNAL, file, all_threads=True)
        threading.Thread(target=_poll_requests, args=(record, files), daemon=True, name="flight").start()
        try:
            with count_calls(record):
                yield Flight(record, nodes, opened_files)
            record.set_phase("ended")
        finally:
            faulthandler.unregister(STACK_SIGNAL)
            for opened in (files, *opened_files):
                opened.close()


def get_stack_folder(save: str | None) -> str | None:
    """Return the folder for the stack traces of a hang, which is inside the save folder. Return None if there is no save folder, or
    if it is a URL.

    Args:
        save: value of --save.
    """
    return None if save is None or "://" in save else os.path.join(save, "stacks")


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
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    assert process.stdin is not None
    with process.stdin:
        process.stdin.write(json.dumps(dataclasses.asdict(watcher_config)).encode())
    assert process.stdout is not None
    port = process.stdout.readline().decode().strip()  # the watcher has opened the files of the ranks
    if rank == 0:
        store.set("head", f"{os.environ.get('MASTER_ADDR') or socket.gethostname()}:{port} {watcher_config.token}")


def _poll_requests(record: FlightRecord, files: RankFiles) -> None:
    """Execute the requests that the hang watcher writes into this rank's flight record: write the stacks and a trace of calls, or
    exit. Never returns.

    A separate thread runs this function, because the main thread may be waiting for other ranks.

    Args:
        files: files of this rank.
    """
    while True:
        time.sleep(_POLL_INTERVAL_S)
        if record.consume_trace_request():
            Path(files.stack).write_text(_format_stacks())
            record.report_stacks()
            _write_trace(files.calls)
            record.report_trace()
        code = record.get_requested_exit_code()
        if code:
            time.sleep(_EXIT_DELAY_S)
            os._exit(code)


def _format_stacks() -> str:
    """Format the stacks of all threads except the calling one, the main thread's last. The format is that of `faulthandler`, with
    the names of the threads.

    The function reads no source files, because they may be on the file system that does not answer.
    """
    names = {thread.ident: f" [{thread.name}]" for thread in threading.enumerate()}
    main_ident = threading.main_thread().ident
    stacks = []
    for ident, innermost_frame in sorted(sys._current_frames().items(), key=lambda item: item[0] == main_ident):
        if ident != threading.get_ident():
            header = MAIN_THREAD_HEADER if ident == main_ident else "Thread"
            calls = [
                f'  File "{frame.f_code.co_filename}", line {line} in {frame.f_code.co_name}\n'
                for frame, line in traceback.walk_stack(innermost_frame)
            ]
            stacks.append(f"{header} 0x{ident:016x}{names.get(ident, '')} (most recent call first):\n{''.join(calls)}")
    return "\n".join(stacks)


def _write_trace(path: str) -> None:
    """Write the content of torch's flight recorder to a file: the last calls of the NCCL groups, or of the gloo groups if there are
    no NCCL calls."""
    for dump in find_flight_recorder_dumps():
        with suppress(RuntimeError, OSError):
            trace = dump()
            if json.loads(trace).get("entries"):
                Path(path).write_bytes(trace)
                return
