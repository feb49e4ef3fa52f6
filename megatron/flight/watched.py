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
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from megatron.config.parallel import ParallelConfig
from megatron.flight.hooks import counted_calls
from megatron.flight.record import FlightRecord
from megatron.flight.watcher import STACKS, Orders
from megatron.parallel.context import ParallelContext
from megatron.spec.operations import Op

_MEMORY = "/dev/shm"
_HEARD_WITHIN_S = 1.0
"""From the moment a rank is asked to end to its end. So all are asked before one of them loses contact with another that ended."""


class Flight:
    """What the loop tells of this rank; it does nothing where nobody watches.

    Args:
        record: None where nobody watches.
    """

    def __init__(self, record: FlightRecord | None = None) -> None:
        self._record = record

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
    store = dist.PrefixStore("flight", dist.distributed_c10d._get_default_store())
    if local == 0:
        folder = Path(tempfile.mkdtemp(prefix="flight-", dir=_MEMORY if os.path.isdir(_MEMORY) else None))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        _start_watcher(Orders(str(folder), ranks, world, warn_s, config.hang_kill_s, "", None, stacks), rank, store)
        store.set(f"folder/{node}", str(folder))
    folder = Path(store.get(f"folder/{node}").decode())
    record = FlightRecord(folder / f"rank-{rank}.record", rank)
    with (folder / f"rank-{rank}.stack").open("w") as file:
        faulthandler.register(STACKS, file, all_threads=True)
        threading.Thread(target=_end_when_asked, args=(record,), daemon=True, name="flight").start()
        try:
            with counted_calls(record):
                yield Flight(record)
            record.phase("ended")
        finally:
            faulthandler.unregister(STACKS)


def stack_folder(save: str | None) -> str | None:
    """Where the stacks of a hang stay: in the folder of the run, if it has one on this node's file systems."""
    return None if save is None or "://" in save else os.path.join(save, "stacks")


def _start_watcher(orders: Orders, rank: int, store: dist.Store) -> None:
    """Start the node's watcher, and tell the others where that of the first node listens."""
    if rank == 0:
        orders = dataclasses.replace(orders, token=secrets.token_hex(16))
    else:
        address, token = store.get("head").decode().split()
        orders = dataclasses.replace(orders, head=address, token=token)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "megatron.flight.watcher"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
        cwd=Path(__file__).resolve().parents[2],
        start_new_session=True,
    )
    assert process.stdin is not None
    with process.stdin:
        process.stdin.write(json.dumps(dataclasses.asdict(orders)).encode())
    if rank == 0:
        assert process.stdout is not None
        port = process.stdout.readline().decode().strip()
        store.set("head", f"{os.environ.get('MASTER_ADDR') or socket.gethostname()}:{port} {orders.token}")


def _end_when_asked(record: FlightRecord) -> None:
    while True:
        time.sleep(1.0)
        code = record.code_asked_for()
        if code:
            time.sleep(_HEARD_WITHIN_S)
            os._exit(code)
