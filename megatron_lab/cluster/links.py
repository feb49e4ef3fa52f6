"""One rank's part of the test of the links: do all ranks reach each other, is a sum right, and how fast is each node.

A program: ``python -m megatron_lab.cluster.links REPORT DEVICE LIMIT``, with the variables of a launcher (RANK, WORLD_SIZE,
LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT). Writes lines of JSON to the file REPORT: first the places that it comes to
({"at": ...}), last what it found ({"done": ...}) or why it failed ({"failed": ...}). Ends after LIMIT seconds, whatever happens.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.parallel.context import choose_device, world_backend

_BYTES = {"cuda": 1 << 28, "cpu": 1 << 22}
_REPEATS = 5


def measure(report: Callable[[dict[str, Any]], None], wanted: str, limit_s: float) -> None:
    """Everything, in order. Rates are in bytes a second and of the fastest of five tries.

    Args:
        report: gets every line.
        wanted: kind of device.
        limit_s: for each collective.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local, per_node = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    found: dict[str, Any] = {"rank": rank}
    report({"at": "its device"})
    device = choose_device(wanted, local)
    if device.type == "cuda":
        found["free"], found["memory"] = torch.cuda.mem_get_info(device)
    report({"at": "joining the other ranks"})
    timeout = datetime.timedelta(seconds=limit_s)
    dist.init_process_group(world_backend("nccl" if device.type == "cuda" else "gloo"), timeout=timeout)
    report({"at": "a sum over all ranks"})
    total = torch.full((1 << 10,), rank + 1.0, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    found["sum_is_right"] = bool((total == size * (size + 1) / 2).all())
    values = torch.zeros(_BYTES[device.type] // 4, dtype=torch.float32, device=device)
    if per_node > 1:
        report({"at": "a sum over the ranks of its node"})
        first = rank - local
        group = dist.new_group(list(range(first, first + per_node)), timeout=timeout, use_local_synchronization=True)
        found["inside"] = 2 * (per_node - 1) / per_node * _rate(values, lambda: dist.all_reduce(values, group=group))
    found["between"] = {}
    for number, pairs in enumerate(rounds(size // per_node)):
        other = pairs.get(rank // per_node)
        if other is not None:
            report({"at": f"an exchange with node {other}"})
            found["between"][other] = _rate(values, _exchange(values, other * per_node + local))
        report({"at": f"the end of round {number + 1} of exchanges"})
        dist.barrier()
    report({"at": "a large sum over all ranks"})
    found["all"] = 2 * (size - 1) / size * _rate(values, lambda: dist.all_reduce(values))
    report({"done": found})


def rounds(num_nodes: int) -> Iterator[dict[int, int]]:
    """Who exchanges with whom: neighbours on a ring, in rounds in which each node has one partner at most.

    Every node has two partners in all, if there are three nodes or more; so a node that is slow with both is slow itself.
    """
    edges = [(node, (node + 1) % num_nodes) for node in range(num_nodes if num_nodes > 2 else num_nodes - 1)]
    last = [edges.pop()] if num_nodes % 2 and num_nodes > 2 else []
    for chosen in (edges[::2], edges[1::2], last):
        if chosen:
            yield {a: b for pair in chosen for a, b in (pair, pair[::-1])}


def _exchange(values: torch.Tensor, peer: int) -> Callable[[], None]:
    received = torch.empty_like(values)

    def action() -> None:
        ops = [dist.P2POp(dist.isend, values, peer), dist.P2POp(dist.irecv, received, peer)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return action


def _rate(values: torch.Tensor, action: Callable[[], Any]) -> float:
    """Bytes of `values` over the time of the action."""

    def timed() -> float:
        began = time.perf_counter()
        action()
        if values.is_cuda:
            torch.cuda.synchronize(values.device)
        return time.perf_counter() - began

    timed()  # makes the connections
    return values.nbytes / min(timed() for _ in range(_REPEATS))


def main(arguments: list[str]) -> None:
    """Run, and write what happens."""
    path, wanted, limit = Path(arguments[0]), arguments[1], float(arguments[2])
    signal.setitimer(signal.ITIMER_REAL, limit)  # its default is to end the process
    with path.open("a", buffering=1) as file:

        def report(line: dict[str, Any]) -> None:
            file.write(json.dumps(line) + "\n")

        try:
            measure(report, wanted, limit)
        except Exception as error:  # noqa: BLE001 - told by the node
            report({"failed": str(error) or type(error).__name__})
    os._exit(0)  # not through the process group's shutdown, in which others might be waited for


if __name__ == "__main__":
    main(sys.argv[1:])
