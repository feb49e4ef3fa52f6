"""Program of one rank in the link test of the cluster check: do all ranks reach each other, is an all-reduce correct, and how fast
is each node?

Usage: ``python -m megatron_lab.cluster.links REPORT DEVICE LIMIT``, with the environment variables of a launcher (RANK, WORLD_SIZE,
LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

The program writes JSON lines to the file REPORT. The first lines name each step that it begins ({"at": ...}). The last line
contains the results ({"done": ...}) or the error ({"failed": ...}). The process ends after LIMIT seconds in any case.
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

from megatron.parallel.context import choose_device, get_world_backend

_MESSAGE_BYTES = {"cuda": 1 << 28, "cpu": 1 << 22}
_REPEATS = 5


def measure_links(report: Callable[[dict[str, Any]], None], device_type: str, timeout_s: float) -> None:
    """Run all steps of the link test on this rank, and report progress and results. Rates are in bytes per second: the fastest of
    five repeats.

    Args:
        report: called with {"at": name} at the start of each step, and with {"done": results} at the end.
        device_type: type of device of the rank: cpu or cuda.
        timeout_s: time limit of each collective, in seconds.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank, ranks_per_node = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    results: dict[str, Any] = {"rank": rank}
    report({"at": "opening its device"})
    device = choose_device(device_type, local_rank)
    if device.type == "cuda":
        results["free"], results["memory"] = torch.cuda.mem_get_info(device)
    report({"at": "joining the other ranks"})
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(get_world_backend("nccl" if device.type == "cuda" else "gloo"), timeout=timeout)
    report({"at": "an all-reduce over all ranks"})
    total = torch.full((1 << 10,), rank + 1.0, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    results["sum_is_right"] = bool((total == world_size * (world_size + 1) / 2).all())
    values = torch.zeros(_MESSAGE_BYTES[device.type] // 4, dtype=torch.float32, device=device)
    if ranks_per_node > 1:
        report({"at": "an all-reduce over the ranks of its node"})
        first_rank = rank - local_rank
        group = dist.new_group(
            list(range(first_rank, first_rank + ranks_per_node)), timeout=timeout, use_local_synchronization=True
        )
        results["inside"] = (
            2 * (ranks_per_node - 1) / ranks_per_node * _measure_rate(values, lambda: dist.all_reduce(values, group=group))
        )
    results["between"] = {}
    for round_index, pairs in enumerate(plan_exchange_rounds(world_size // ranks_per_node)):
        peer_node = pairs.get(rank // ranks_per_node)
        if peer_node is not None:
            report({"at": f"an exchange with node {peer_node}"})
            results["between"][peer_node] = _measure_rate(values, _build_exchange(values, peer_node * ranks_per_node + local_rank))
        report({"at": f"the end of round {round_index + 1} of exchanges"})
        dist.barrier()
    report({"at": "a large all-reduce over all ranks"})
    results["all"] = 2 * (world_size - 1) / world_size * _measure_rate(values, lambda: dist.all_reduce(values))
    report({"done": results})


def plan_exchange_rounds(num_nodes: int) -> Iterator[dict[int, int]]:
    """Yield the rounds in which nodes exchange data in pairs, to measure the links between neighbours on a ring of nodes.

    Each node has at most one partner in a round. Over all rounds, each of three or more nodes has two partners. If its exchanges
    with both partners are slow, the node itself is slow.

    Yields:
        for each round, the partner of each node by node index. Nodes without a partner are omitted.
    """
    edges = [(node, (node + 1) % num_nodes) for node in range(num_nodes if num_nodes > 2 else num_nodes - 1)]
    last_edges = [edges.pop()] if num_nodes % 2 and num_nodes > 2 else []
    for round_edges in (edges[::2], edges[1::2], last_edges):
        if round_edges:
            yield {a: b for edge in round_edges for a, b in (edge, edge[::-1])}


def _build_exchange(values: torch.Tensor, peer: int) -> Callable[[], None]:
    received = torch.empty_like(values)

    def action() -> None:
        ops = [dist.P2POp(dist.isend, values, peer), dist.P2POp(dist.irecv, received, peer)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return action


def _measure_rate(values: torch.Tensor, action: Callable[[], Any]) -> float:
    """Return the rate of an action in bytes per second: the bytes of `values` divided by the shortest of several measured
    durations."""

    def time_action() -> float:
        start = time.perf_counter()
        action()
        if values.is_cuda:
            torch.cuda.synchronize(values.device)
        return time.perf_counter() - start

    time_action()  # opens the connections
    return values.nbytes / min(time_action() for _ in range(_REPEATS))


def main(argv: list[str]) -> None:
    """Run this rank's part of the link test, which measures the links between all ranks, and write progress and results to a file.

    Args:
        argv: path of the file, type of the device (cpu or cuda), and time limit in seconds.
    """
    path, device_type, timeout_s = Path(argv[0]), argv[1], float(argv[2])
    signal.setitimer(signal.ITIMER_REAL, timeout_s)  # by default SIGALRM ends the process
    with path.open("a", buffering=1) as file:

        def report(record: dict[str, Any]) -> None:
            file.write(json.dumps(record) + "\n")

        try:
            measure_links(report, device_type, timeout_s)
        except Exception as error:  # noqa: BLE001 - the node reports it
            report({"failed": str(error) or type(error).__name__})
    os._exit(0)  # skips the shutdown of the process group, which might wait for other ranks


if __name__ == "__main__":
    main(sys.argv[1:])
