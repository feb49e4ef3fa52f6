"""A rank's side: it makes its record, lets its calls be counted, and ends when the watcher asks for it. The first rank of a node
starts the node's watcher."""

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

from megatron.config.launcher import module_start
from megatron.config.parallel import ParallelConfig
from megatron.parallel.collectives import gather_objects
from megatron.parallel.context import ParallelContext
from megatron.parallel.meeting import own_address
from megatron.parallel.torch_private import flight_recorder_dumps, get_default_store
from megatron.spec.operations import Op
from megatron_lab.flight.hooks import counted_calls
from megatron_lab.flight.record import FlightRecord, read_record
from megatron_lab.flight.watcher import CALLS_SUFFIX, STACKS, Orders

_MEMORY, _PREFIX = "/dev/shm", "flight-"
_STARTED_WITHIN_S = 600.0
"""A folder without records may belong to a start that is only this old."""
_LOOK_EVERY_S = 0.5
_GONE_WITHIN_S = 1.0
_HEARD_WITHIN_S = 1.0
"""From the moment a rank is asked to end to its end. So all are asked before one of them loses contact with another that ended."""


class Flight:
    """What the loop tells of this rank; it does nothing where nobody watches.

    Args:
        record: None where nobody watches.
        nodes: name and address of each rank's node.
    """

    def __init__(self, record: FlightRecord | None = None, nodes: Sequence[tuple[str, str]] = ()) -> None:
        self._record, self._nodes = record, nodes

    def phase(self, name: str, iteration: int | None = None) -> None:
        """Say what the rank is about (one of `record.PHASES`)."""
        if self._record is not None:
            self._record.phase(name, iteration)

    @property
    def waited_s(self) -> float:
        """Seconds that the rank has waited for others in all."""
        return 0.0 if self._record is None else self._record.waited_s

    def code_asked_for(self) -> int:
        """The exit code with which the watcher asks the rank to end; 0 as long as it does not."""
        return 0 if self._record is None else self._record.code_asked_for()

    def lost(self, reason: str) -> str | None:
        """Which rank contact is lost with, as far as this node can tell; None if it cannot.

        Args:
            reason: what torch says; it may name the address of the other end.
        """
        if self._record is None:
            return None
        until = time.monotonic() + _GONE_WITHIN_S  # connections end before the process does
        while not (gone := self._gone()) and time.monotonic() < until:
            time.sleep(0.05)
        if gone:
            more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
            return f"rank {gone[0]} (node {self._nodes[gone[0]][0]}){more}, whose process is gone"
        mine = self._nodes[self._record.rank][1]
        there = [rank for rank, (_, address) in enumerate(self._nodes) if address != mine and f"[{address}]" in reason]
        return f"a rank of {there[0]} to {there[-1]} (node {self._nodes[there[0]][0]})" if there else None

    def _gone(self) -> list[int]:
        """Ranks of this node whose process is gone, the one that moved last longest ago first."""
        assert self._record is not None
        found = [read_record(path) for path in self._record.path.parent.glob("rank-*.record")]
        gone = [one for one in found if one is not None and one.process == "gone"]
        return [one.rank for one in sorted(gone, key=lambda one: -one.quiet_s)]

    def operation(self, op: Op) -> None:
        """Say which operation of the schedule it begins."""
        if self._record is not None:
            self._record.operation(op.kind, op.chunk, op.microbatch)


@contextmanager
def watched(context: ParallelContext, config: ParallelConfig, stacks: str | None) -> Iterator[Flight]:
    """Let this rank be watched, if the settings say so. All ranks of the world enter it together; a world of one is not watched.

    Args:
        stacks: folder in which the stacks of a hang stay.
    """
    rank, world, warn_s = context.rank, context.world.size, config.hang_warn_s
    if not warn_s or world == 1:
        yield Flight()
        return
    local = int(os.environ.get("LOCAL_RANK", rank))
    node, ranks = rank - local, int(os.environ.get("LOCAL_WORLD_SIZE", world))
    store = dist.PrefixStore("flight", get_default_store())
    if local == 0:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_MEMORY if os.path.isdir(_MEMORY) else None))
        _sweep(folder.parent)
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        _start_watcher(Orders(str(folder), ranks, world, warn_s, config.hang_kill_s, "", None, stacks), rank, store)
        store.set(f"folder/{node}", str(folder))
    folder = Path(store.get(f"folder/{node}").decode())
    record = FlightRecord(folder / f"rank-{rank}.record", rank)
    nodes = gather_objects((socket.gethostname(), own_address()), context.world)
    with (folder / f"rank-{rank}.stack").open("w") as file:
        faulthandler.register(STACKS, file, all_threads=True)
        threading.Thread(target=_obey, args=(record,), daemon=True, name="flight").start()
        try:
            with counted_calls(record):
                yield Flight(record, nodes)
            record.phase("ended")
        finally:
            faulthandler.unregister(STACKS)


def stack_folder(save: str | None) -> str | None:
    """Where the stacks of a hang stay: in the folder of the run, if it has one on this node's file systems."""
    return None if save is None or "://" in save else os.path.join(save, "stacks")


def _sweep(root: Path) -> None:
    """Remove what starts left that were killed with their watcher, or before they had one."""
    for folder in root.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another start may do the same
            state = folder.stat()
            if state.st_uid != os.getuid() or time.time() - state.st_mtime < _STARTED_WITHIN_S:
                continue
            found = [one for path in folder.glob("rank-*.record") if (one := read_record(path)) is not None]
            if all(one.process == "gone" and one.host == socket.gethostname() for one in found):
                shutil.rmtree(folder)


def _start_watcher(orders: Orders, rank: int, store: dist.Store) -> None:
    """Start the node's watcher, and tell the others where that of the first node listens."""
    if rank == 0:
        orders = dataclasses.replace(orders, token=secrets.token_hex(16))
    else:
        address, token = store.get("head").decode().split()
        orders = dataclasses.replace(orders, head=address, token=token)
    command, environment = module_start("megatron_lab.flight.watcher")
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )
    assert process.stdin is not None
    with process.stdin:
        process.stdin.write(json.dumps(dataclasses.asdict(orders)).encode())
    if rank == 0:
        assert process.stdout is not None
        port = process.stdout.readline().decode().strip()
        store.set("head", f"{os.environ.get('MASTER_ADDR') or socket.gethostname()}:{port} {orders.token}")


def _obey(record: FlightRecord) -> None:
    """Do what the watcher asks for, while the main thread waits for others."""
    while True:
        time.sleep(_LOOK_EVERY_S)
        if record.trace_asked_for():
            _write_trace(record.path.with_suffix(CALLS_SUFFIX))
        code = record.code_asked_for()
        if code:
            time.sleep(_HEARD_WITHIN_S)
            os._exit(code)


def _write_trace(path: Path) -> None:
    """Write the trace of torch's flight recorder: the last calls of NCCL's groups, or those of gloo if NCCL has made none."""
    for dump in flight_recorder_dumps():
        with suppress(RuntimeError, OSError):
            trace = dump()
            if json.loads(trace).get("entries"):
                new = path.with_suffix(".new")
                new.write_bytes(trace)
                new.replace(path)
                return
