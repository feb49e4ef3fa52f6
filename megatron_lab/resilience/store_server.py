"""Server of the store through which the nodes of a job share its state: start of the server, and connection to it."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch.distributed as dist

from megatron_lab.resilience.job_state import JobState, from_json, to_json
from megatron_lab.resilience.ranks import reset_signal_handlers, set_process_name
from megatron_lab.resilience.state_store import LocalStateStore, StateStore, TCPStateStore, connect, is_local_host, serve_store

_CONNECT_TIMEOUT_S = 2.0
_IDLE_TIMEOUT_S = 30.0
"""Seconds without a heartbeat of any node after which a store process of a node exits. It also exits when the job has ended."""


def open_state_store(address: tuple[str, int] | None, run_id: str) -> StateStore:
    """Connect to the store through which the nodes of a job share its state.

    If the job has several nodes, the store is on a server at `address`. If no server answers there and the address belongs to this
    host, start one.

    Args:
        address: host and port of the server (--meet); None for a job with one node, which needs no server.
        run_id: name that separates this job from other jobs on the same server.
    """
    if address is None:
        return LocalStateStore()
    host, port = address
    if is_local_host(host):
        try:
            connect(host, port, _CONNECT_TIMEOUT_S)
        except RuntimeError:
            _fork_store_server(port, run_id)
    return TCPStateStore(host, port, run_id)


def serve_until_signal(port: int) -> int:
    """Serve the store in which the nodes of a job meet (--serve), until SIGTERM or Ctrl-C. Return the exit code."""
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        store = serve_store(port)
    except RuntimeError as error:
        sys.stderr.write(f"supervisor: --serve {port}: {str(error).splitlines()[0]}\n")
        return 1
    sys.stderr.write(f"supervisor: serving a store on port {store.port}\n")
    signal.sigwait(signals)
    return 0


def _fork_store_server(port: int, run_id: str) -> None:
    """Start a separate process that serves the store through which the nodes share the job's state.

    It outlives the ranks and the supervisor of this node as long as other nodes send heartbeats.
    """
    if os.fork():
        time.sleep(0.2)
        return
    code = 1
    try:
        os.setsid()
        reset_signal_handlers()
        set_process_name("store")
        for stream in range(3):
            os.dup2(os.open(os.devnull, os.O_RDWR), stream)
        os.closerange(3, 1024)
        store = dist.PrefixStore(run_id, serve_store(port))
        last_heartbeats, deadline = -1, time.monotonic() + _IDLE_TIMEOUT_S
        while time.monotonic() < deadline:
            time.sleep(1.0)
            state = from_json(store.compare_set("roll", "", to_json(JobState())).decode())
            heartbeats = store.add("beats", 0)
            if state.phase == "over" and not state.members:
                break
            if heartbeats != last_heartbeats:
                last_heartbeats, deadline = heartbeats, time.monotonic() + _IDLE_TIMEOUT_S
        code = 0
    finally:
        os._exit(code)
