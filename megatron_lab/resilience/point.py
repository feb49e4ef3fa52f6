"""The place where nodes meet: who serves the store."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch.distributed as dist

from megatron_lab.resilience.book import Book, OwnBook, StoreBook, connected, is_here, serve
from megatron_lab.resilience.ranks import name_process, own_signals
from megatron_lab.resilience.roll import Roll, from_text, to_text

_FOUND_WITHIN_S = 2.0
_LINGERS_S = 30.0
"""A store that a node serves ends with the job, or when no node has beaten for so long."""


def make_book(meet: tuple[str, int] | None, run_id: str) -> Book:
    """The book of a job; of several nodes, with a store that this host serves where nobody does and it is the host to do so."""
    if meet is None:
        return OwnBook()
    host, port = meet
    if is_here(host):
        try:
            connected(host, port, _FOUND_WITHIN_S)
        except RuntimeError:
            _serve_apart(port, run_id)
    return StoreBook(host, port, run_id)


def serve_until_told(port: int) -> int:
    """Serve a store until SIGTERM or Ctrl-C."""
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    try:
        store = serve(port)
    except RuntimeError as error:
        sys.stderr.write(f"supervisor: --serve {port}: {str(error).splitlines()[0]}\n")
        return 1
    sys.stderr.write(f"supervisor: serving a store on port {store.port}\n")
    signal.sigwait(ends)
    return 0


def _serve_apart(port: int, run_id: str) -> None:
    """Serve the store in a process of its own, which outlives this node's ranks and supervisor as long as other nodes beat."""
    if os.fork():
        time.sleep(0.2)
        return
    code = 1
    try:
        os.setsid()
        own_signals()
        name_process("store")
        for stream in range(3):
            os.dup2(os.open(os.devnull, os.O_RDWR), stream)
        os.closerange(3, 1024)
        store = dist.PrefixStore(run_id, serve(port))
        seen, until = -1, time.monotonic() + _LINGERS_S
        while time.monotonic() < until:
            time.sleep(1.0)
            roll = from_text(store.compare_set("roll", "", to_text(Roll())).decode())
            beats = store.add("beats", 0)
            if roll.phase == "over" and not roll.members:
                break
            if beats != seen:
                seen, until = beats, time.monotonic() + _LINGERS_S
        code = 0
    finally:
        os._exit(code)
