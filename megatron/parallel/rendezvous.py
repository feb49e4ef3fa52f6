"""Rendezvous of the ranks of a job.

The ranks find each other by a key-value store of torch. The store is at MASTER_ADDR:MASTER_PORT, where the launcher or the first
rank serves it, or at the location that --init-method names: a port of the first rank's node, or a file.

A store of torchrun, or a file, outlives ranks that are restarted. It then still contains the addresses of the ranks that have
ended, and new ranks would wait for those (torch 2.11 to 2.13). Therefore each start of the job gets a new name, which is the prefix
of all its keys:

1. The first rank generates the name and writes it to the store.
2. Every other rank reads the name and registers under it. If its rank is already registered, the name belongs to the previous
start, and the rank waits for a new name.
3. When all ranks are registered, the first rank opens the rendezvous. Until then it logs which ranks are missing.
"""

from __future__ import annotations

import datetime
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist

from megatron.config.launcher import ProcessInfo, Rendezvous, parse_init_method

FIRST_LOG_AFTER_S, LOG_EVERY_S = 10.0, 60.0
_MAX_LISTED_RANKS = 12
_POLL_INTERVALS_S = (0.002, 0.2)
"""First and maximum interval between two queries of the store."""


def rendezvous(job: ProcessInfo, timeout_s: float, init_method: str = "env://") -> dist.Store:
    """Wait until all ranks of the job have started, and return a key-value store for these ranks. A restart of the job gets another
    store.

    Args:
        job: rank and world size of this process, as set by the launcher.
        init_method: location of the rendezvous, as in --init-method.

    Raises:
        ValueError: the launcher's environment variables are invalid, the store cannot be reached, or ranks are missing after the
            timeout.
    """
    location = parse_init_method(init_method)
    assert location is not None, "the settings were checked before"
    deadline = time.monotonic() + timeout_s
    if location.file:
        store, store_name = _open_file_store(location.file, job, timeout_s), location.file
    else:
        store, store_name = _connect_tcp_store(location, job, timeout_s)
    if job.rank == 0:
        return dist.PrefixStore(_open_as_first_rank(store, job, deadline), store)
    # The store of torchrun's agent, or a file, may exist although the first rank has not started yet.
    message = f"rank {job.rank} waits for rank 0 and all other ranks at {store_name}"
    with log_if_slow(message, is_enabled=bool(location.file) and job.local_rank == 0):
        return dist.PrefixStore(_join(store, job, deadline), store)


def _connect_tcp_store(location: Rendezvous, job: ProcessInfo, timeout_s: float) -> tuple[dist.Store, str]:
    """Connect to the job's key-value store, which the first rank or the launcher serves at a TCP port. Return the store and its
    address as "host:port".

    Raises:
        ValueError: the store cannot be opened or reached, or the launcher's environment variables are invalid.
    """
    host, port = (location.host, location.port) if location.host else read_master_address(os.environ, job)
    _check_rank(job)
    is_server = job.rank == 0 and (bool(location.host) or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True")
    source = f"--init-method tcp://{host}:{port}" if location.host else "MASTER_ADDR and MASTER_PORT"
    with log_if_slow(f"waiting for rank 0 at {host}:{port}", is_enabled=job.local_rank == 0):
        try:
            timeout = datetime.timedelta(seconds=timeout_s)
            return dist.TCPStore(host, port, None, is_server, timeout, wait_for_workers=False, multi_tenant=True), f"{host}:{port}"
        except (RuntimeError, ValueError) as error:
            failed_action = "cannot open" if is_server else "did not reach"
            raise ValueError(
                f"rank {job.rank} {failed_action} the key-value store of the job at {host}:{port}: {str(error).splitlines()[0]}. "
                f"{source} must name the node of rank 0, by an address that all nodes can reach, and a port that is free there."
            ) from error


_FILE_STORE_HEADER = b"\x09\x00\x00\x00refcount/"
"""First bytes of the files of torch's FileStore."""


def _open_file_store(path: str, job: ProcessInfo, timeout_s: float) -> dist.Store:
    """Open the key-value store in a file that all nodes share. The file may exist from an earlier run, whose keys have another
    prefix.

    Raises:
        ValueError: the file cannot be created or opened, or an existing file is not a store. An existing file is then left
            unchanged.
    """
    _check_rank(job)
    folder = os.path.dirname(path)
    problem = None
    if os.path.isdir(path):
        problem = "it is a folder. Give the path of a file"
    elif not os.path.isdir(folder):
        problem = f"there is no folder {folder} on this node. Give the path of a file in a folder that all nodes share"
    elif os.path.exists(path) and not os.path.isfile(path):
        problem = "it is not a regular file. Give the path of a file that does not exist yet"
    elif not os.access(path if os.path.exists(path) else folder, os.R_OK | os.W_OK):
        problem = "permission denied. Give the path of a file that this user can read and write"
    elif os.path.exists(path):
        with open(path, "rb") as file:
            header = file.read(len(_FILE_STORE_HEADER))
        if header and not _FILE_STORE_HEADER.startswith(header):
            problem = (
                "the file exists, and is not a rendezvous file of torch. It was not changed. Name a file that does not exist yet"
            )
    if problem is not None:
        raise ValueError(f"rank {job.rank} cannot join the rendezvous at --init-method file://{path}: {problem}.")
    store = dist.FileStore(path, -1)  # world size -1: no rank deletes the file while others still read it
    store.set_timeout(datetime.timedelta(seconds=timeout_s))
    return store


def read_master_address(environment: Mapping[str, str], job: ProcessInfo) -> tuple[str, int]:
    """Return the host and port of the rendezvous from the launcher's environment variables.

    Raises:
        ValueError: an environment variable of the launcher is missing or invalid.
    """
    host, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    for name, value, is_valid, expected in (
        ("MASTER_ADDR", host, bool(host.strip()), "the name or address of the node of rank 0"),
        ("MASTER_PORT", port, port.isascii() and port.isdigit() and 0 < int(port[:6]) < 1 << 16, "a port, from 1 to 65535"),
    ):
        if not is_valid:
            problem = f"is {value[:40]!r}" if name in environment else "is not set"
            raise ValueError(
                f"{name} in the environment {problem}. It must be {expected}. Start the run with torchrun, which sets it."
            )
    _check_rank(job)
    return host, int(port)


def _check_rank(job: ProcessInfo) -> None:
    if not 0 <= job.rank < job.world_size:
        raise ValueError(
            f"RANK in the environment is '{job.rank}'. It must be a number from 0 to {job.world_size - 1}, below WORLD_SIZE. "
            "Start the run with torchrun, which sets it."
        )


def get_node_address() -> str:
    """Return the address under which the node at MASTER_ADDR can reach this node. Without a route to that node, return the host
    name."""
    try:
        return find_address_towards(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    except (OSError, KeyError, ValueError):
        return socket.gethostname()


def find_address_towards(host: str, port: int) -> str:
    """Return the address under which `host` can reach this node: the local end of the route to `host`.

    If this is a loopback address although `host` is not, return the host name.

    Raises:
        OSError: there is no route to the host.
    """
    with socket.socket(socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0], socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # selects the route, without sending a packet
        address = str(probe.getsockname()[0])
    is_local_host = host in ("localhost", "127.0.0.1", "::1")
    return address if is_local_host or not address.startswith("127.") else socket.gethostname()


def _open_as_first_rank(store: dist.Store, job: ProcessInfo, deadline: float) -> str:
    """Run the first rank's side of the rendezvous. The rank writes a new name for this start of the job, waits until all ranks have
    registered, and opens the rendezvous.

    Returns:
        The name, which is the prefix of the start's keys in the store.
    """
    name = secrets.token_hex(8) + _get_size_suffix(job)
    store.set("meeting", name)
    next_log_s = time.monotonic() + FIRST_LOG_AFTER_S
    poll_intervals = _poll_intervals()
    while store.add(f"{name}/count", 0) < job.world_size - 1:
        now_s = time.monotonic()
        if now_s > min(next_log_s, deadline):
            missing = [rank for rank in range(1, job.world_size) if not store.check([f"{name}/{rank}"])]
            unlisted = f" and {len(missing) - _MAX_LISTED_RANKS:,} more" if len(missing) > _MAX_LISTED_RANKS else ""
            listed = ", ".join(map(str, missing[:_MAX_LISTED_RANKS]))
            missing_ranks = f"rank{'s' * (len(missing) > 1)} {listed}{unlisted} of {job.world_size:,}"
            if missing and now_s > deadline:
                raise ValueError(
                    f"{missing_ranks} did not start in time (--distributed-timeout-minutes). Check the nodes of these ranks, or "
                    "raise this time."
                )
            if missing:
                _log(f"waiting for {missing_ranks} to start")
            next_log_s = now_s + LOG_EVERY_S
        time.sleep(next(poll_intervals))
    store.set(f"{name}/open", "1")
    return name


def _join(store: dist.Store, job: ProcessInfo, deadline: float) -> str:
    """Run the side of every rank but the first. The rank registers under the name that the first rank wrote for this start of the
    job, and waits until the rendezvous is open.

    Returns:
        The name, which is the prefix of the start's keys in the store.
    """
    token, joined_name, poll_intervals = secrets.token_hex(8), "", _poll_intervals()
    while time.monotonic() < deadline:
        name = store.get("meeting").decode() if store.check(["meeting"]) else ""
        if not name.endswith(_get_size_suffix(job)):  # from an earlier start with another world size
            name = ""
        if name and name != joined_name and store.compare_set(f"{name}/{job.rank}", "", token).decode() == token:
            joined_name = name
            store.add(f"{name}/count", 1)
        if not name or name != joined_name:
            time.sleep(next(poll_intervals))
            continue
        try:  # a short timeout: the first rank may be restarted under a new name
            store.wait([f"{name}/open"], datetime.timedelta(seconds=2))
        except RuntimeError:
            continue
        return name
    raise ValueError(
        f"rank {job.rank}: not all ranks of {job.world_size:,} started in time (--distributed-timeout-minutes), or another process "
        "has the same rank. Check the nodes, and that each process has a different RANK."
    )


def _get_size_suffix(job: ProcessInfo) -> str:
    """Return the suffix of the start names of a job with this world size. The first rank gives each start of the job a name. The
    other ranks ignore a name with another suffix, because it is from an earlier start with another world size."""
    return f"-of-{job.world_size}"


def _poll_intervals() -> Iterator[float]:
    interval, max_interval = _POLL_INTERVALS_S
    while True:
        yield interval
        interval = min(1.5 * interval, max_interval)


@contextmanager
def log_if_slow(message: str, *, is_enabled: bool) -> Iterator[None]:
    """Log a message if the `with` block takes longer than `FIRST_LOG_AFTER_S` seconds.

    Args:
        is_enabled: whether this process logs; False for ranks that stay silent.
    """
    timer = threading.Timer(FIRST_LOG_AFTER_S, _log, (message,))
    timer.daemon = True
    if is_enabled:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _log(message: str) -> None:
    sys.stderr.write(f"pretrain_gpt.py: {message}\n")
    sys.stderr.flush()
