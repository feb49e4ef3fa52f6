"""How the ranks of a job find each other: through a store at MASTER_ADDR:MASTER_PORT, that of the launcher or of the first rank; or
at the place that --init-method names, a port of the first rank's node or a file.

A store of torchrun's, or a file, outlives the ranks that are started again, with the addresses of those that have ended, for which
new ranks would wait (torch 2.11 to 2.13). So each start of all ranks gets a name of its own, and its keys that name as a prefix:

1. The first rank makes the name and writes it into the store.
2. Every other rank reads it and enters itself under it. Where its place is taken, by the rank of the start before, it waits for
   another name.
3. When all are entered, the first rank opens the meeting. Until then it says for whom it waits.
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

from megatron.config.launcher import Launched, Place, read_place

TELL_AFTER_S, TELL_EVERY_S = 10.0, 60.0
_MOST_NAMED = 12
_PAUSES_S = (0.002, 0.2)
"""Between two looks: at first, and later."""


def meet(job: Launched, timeout_s: float, init_method: str = "env://") -> dist.Store:
    """Wait for all ranks of the job; returns a store of this start of theirs.

    Args:
        init_method: where they meet, as in --init-method.

    Raises:
        ValueError: the launcher's variables are not sound, the store cannot be reached, or ranks did not come.
    """
    place = read_place(init_method)
    assert place is not None, "a rule says so before"
    until = time.monotonic() + timeout_s
    if place.file:
        store, where = _file_store(place.file, job, timeout_s), place.file
    else:
        store, where = _tcp_store(place, job, timeout_s)
    if job.rank == 0:
        return dist.PrefixStore(_open(store, job, until), store)
    # Who has found the store of an agent, or a file, does not know yet whether the first rank is there.
    slow = f"rank {job.rank} waits for the first rank, and for all others, to meet at {where}"
    with told_if_slow(slow, speaks=bool(place.file) and job.local_rank == 0):
        return dist.PrefixStore(_enter(store, job, until), store)


def _tcp_store(place: Place, job: Launched, timeout_s: float) -> tuple[dist.Store, str]:
    """The store at a port of the first rank's node, and where it is."""
    host, port = (place.host, place.port) if place.host else address(os.environ, job)
    _check_rank(job)
    server = job.rank == 0 and (bool(place.host) or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True")
    named = f"--init-method tcp://{host}:{port}" if place.host else "MASTER_ADDR and MASTER_PORT"
    with told_if_slow(f"waiting for the first rank, at {host}:{port}", speaks=job.local_rank == 0):
        try:
            timeout = datetime.timedelta(seconds=timeout_s)
            return dist.TCPStore(host, port, None, server, timeout, wait_for_workers=False, multi_tenant=True), f"{host}:{port}"
        except (RuntimeError, ValueError) as error:
            doing = "cannot open" if server else "did not reach"
            raise ValueError(
                f"rank {job.rank} {doing} the store of the job at {host}:{port}: {str(error).splitlines()[0]}. "
                f"{named} must name the node of rank 0, as the others see it, and a port that is free there."
            ) from error


_FILE_BEGINS = b"\x09\x00\x00\x00refcount/"
"""The first bytes of torch's file stores."""


def _file_store(path: str, job: Launched, timeout_s: float) -> dist.Store:
    """The store in a file, which may be there from an earlier run: what that left is under another name.

    Raises:
        ValueError: there cannot be such a file, or it is something else, which stays as it is.
    """
    _check_rank(job)
    folder = os.path.dirname(path)
    problem = None
    if os.path.isdir(path):
        problem = "it is a folder"
    elif not os.path.isdir(folder):
        problem = f"there is no folder {folder} on this node. It must be one that all nodes share"
    elif not os.access(path if os.path.exists(path) else folder, os.R_OK | os.W_OK):
        problem = "permission denied"
    elif os.path.exists(path):
        with open(path, "rb") as file:
            begins = file.read(len(_FILE_BEGINS))
        if begins and not _FILE_BEGINS.startswith(begins):
            problem = "the file holds something else, which stays as it is. Name a file that is not there yet"
    if problem is not None:
        raise ValueError(f"rank {job.rank} cannot meet the others by --init-method file://{path}: {problem}.")
    store = dist.FileStore(path, -1)  # never removed by a rank that leaves while others still read it
    store.set_timeout(datetime.timedelta(seconds=timeout_s))
    return store


def address(variables: Mapping[str, str], job: Launched) -> tuple[str, int]:
    """Where the ranks meet.

    Raises:
        ValueError: a variable of the launcher is missing, or not sound.
    """
    host, port = variables.get("MASTER_ADDR", ""), variables.get("MASTER_PORT", "")
    for name, value, good, what in (
        ("MASTER_ADDR", host, bool(host.strip()), "the name or address of the node of rank 0"),
        ("MASTER_PORT", port, port.isascii() and port.isdigit() and 0 < int(port[:6]) < 1 << 16, "a port, from 1 to 65535"),
    ):
        if not good:
            found = f"is {value[:40]!r}" if name in variables else "is not set"
            raise ValueError(f"{name} in the environment {found}. It must be {what}. A launcher such as torchrun sets it.")
    _check_rank(job)
    return host, int(port)


def _check_rank(job: Launched) -> None:
    if not 0 <= job.rank < job.world_size:
        raise ValueError(
            f"RANK in the environment is '{job.rank}'. It must be a number from 0 to {job.world_size - 1}, below WORLD_SIZE. "
            "A launcher such as torchrun sets it."
        )


def own_address() -> str:
    """This node's address, as the way to the first node shows it; its name where there is no such way."""
    try:
        return address_towards(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    except (OSError, KeyError, ValueError):
        return socket.gethostname()


def address_towards(host: str, port: int) -> str:
    """This host as others reach it: the address of the way to one of them, or its name where that is itself.

    Raises:
        OSError: there is no such way.
    """
    with socket.socket(socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0], socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        found = str(probe.getsockname()[0])
    alone = host in ("localhost", "127.0.0.1", "::1")
    return found if alone or not found.startswith("127.") else socket.gethostname()


def _open(store: dist.Store, job: Launched, until: float) -> str:
    """The first rank's part."""
    name = secrets.token_hex(8) + _of_size(job)
    store.set("meeting", name)
    tell_at = time.monotonic() + TELL_AFTER_S
    pauses = _pauses()
    while store.add(f"{name}/count", 0) < job.world_size - 1:
        now = time.monotonic()
        if now > min(tell_at, until):
            missing = [rank for rank in range(1, job.world_size) if not store.check([f"{name}/{rank}"])]
            more = f" and {len(missing) - _MOST_NAMED:,} more" if len(missing) > _MOST_NAMED else ""
            named = ", ".join(map(str, missing[:_MOST_NAMED]))
            who = f"rank{'s' * (len(missing) > 1)} {named}{more} of {job.world_size:,}"
            if missing and now > until:
                raise ValueError(f"{who} did not start in time (--distributed-timeout-minutes). Look on their nodes.")
            if missing:
                _tell(f"waiting for {who} to start")
            tell_at = now + TELL_EVERY_S
        time.sleep(next(pauses))
    store.set(f"{name}/open", "1")
    return name


def _enter(store: dist.Store, job: Launched, until: float) -> str:
    """The part of all other ranks."""
    me, entered, pauses = secrets.token_hex(8), "", _pauses()
    while time.monotonic() < until:
        name = store.get("meeting").decode() if store.check(["meeting"]) else ""
        if not name.endswith(_of_size(job)):  # of an earlier start with fewer ranks, whose places are not all taken
            name = ""
        if name and name != entered and store.compare_set(f"{name}/{job.rank}", "", me).decode() == me:
            entered = name
            store.add(f"{name}/count", 1)
        if not name or name != entered:
            time.sleep(next(pauses))
            continue
        try:  # not for long: the first rank may be started again
            store.wait([f"{name}/open"], datetime.timedelta(seconds=2))
        except RuntimeError:
            continue
        return name
    raise ValueError(
        f"rank {job.rank}: not all ranks of {job.world_size:,} started in time (--distributed-timeout-minutes), or another process "
        "has this rank's number."
    )


def _of_size(job: Launched) -> str:
    """The end of the names of starts with so many ranks."""
    return f"-of-{job.world_size}"


def _pauses() -> Iterator[float]:
    pause, most = _PAUSES_S
    while True:
        yield pause
        pause = min(1.5 * pause, most)


@contextmanager
def told_if_slow(text: str, *, speaks: bool) -> Iterator[None]:
    """Say what is waited for, if the block takes long."""
    timer = threading.Timer(TELL_AFTER_S, _tell, (text,))
    timer.daemon = True
    if speaks:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _tell(text: str) -> None:
    sys.stderr.write(f"pretrain_gpt.py: {text}\n")
    sys.stderr.flush()
