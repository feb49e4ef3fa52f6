"""Check of a cluster before a run (tools/check_cluster.py).

Every node executes the steps of the check. One node, the head node, compares the results of all nodes and decides whether there is
a problem.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.storage import is_url
from megatron.config.config import Config
from megatron_lab.cluster import verdict
from megatron_lab.cluster.node_exchange import NodeExchange
from megatron_lab.cluster.node_info import NodeInfo, collect_node_info
from megatron_lab.cluster.ranks import PROGRAM, RankEnd, run_ranks
from megatron_lab.cluster.verdict import Verdict

_FILE_VISIBLE_TIMEOUT_S = 10.0
"""Seconds within which a file written by the head must become visible in a shared file system."""
_MARGIN_S = 30.0
"""Seconds that other nodes wait longer than the head, so that they receive its result."""


@dataclass(frozen=True)
class Job:
    """Job for which the cluster is checked: its size, the head node to which all other nodes connect, and how long to wait."""

    num_nodes: int
    ranks_per_node: int
    head: str
    """Name or address of the head node, which compares the results of all nodes."""
    port: int
    """Port of the head node, to which the other nodes connect."""
    expected_hosts: Sequence[str] = ()
    """Host names of all nodes, to name the missing ones; empty if unknown."""
    device_bytes: int | None = None
    """Bytes that the run needs on one GPU; None if unknown."""
    join_timeout_s: float = 600.0
    """Seconds to wait for all nodes to join."""
    ranks_timeout_s: float = 300.0
    """Seconds to wait for the ranks to finish the test of the links between them."""


def run_check(job: Job, config: Config, program: Sequence[str] = PROGRAM) -> list[str]:
    """Check this node and its links to the other nodes. Every node of the job calls the function. The head node prints the results.

    Args:
        program: command that each rank runs.

    Returns:
        messages about problems, equal on every node; empty if no problem was found.

    Raises:
        NodeExchangeError: this node and the head node cannot connect.
    """
    node_info = collect_node_info(config, job.ranks_per_node)
    check = _Check(
        job, config, program, node_info, NodeExchange(job.head, job.port, job.num_nodes, node_info.host, job.join_timeout_s)
    )
    problems = check.check_node_info() or check.check_clocks_and_folder() or check.check_links()
    check.exchange.leave(_MARGIN_S)
    return problems


@dataclass
class _Check:
    """Steps of the cluster check on one node, called in order. Each `check_` method returns messages about problems, equal on every
    node."""

    job: Job
    config: Config
    program: Sequence[str]
    node_info: NodeInfo
    exchange: NodeExchange
    hosts: dict[int, str] = field(default_factory=dict)
    """Unique names of the nodes that have joined, by node index. Only set on the head node."""

    def check_node_info(self) -> list[str]:
        """Check that all nodes join, that no node has found a problem of its own, and that software and hardware versions are equal
        on all nodes."""
        job, result = self.job, Verdict()
        self.exchange.put("facts", asdict(self.node_info))
        if self.exchange.is_head:
            messages = self.exchange.gather("facts", time.monotonic() + job.join_timeout_s)
            info_by_node = {node: NodeInfo(**node_info) for node, node_info in messages.items()}
            host_counts = Counter(node_info.host for node_info in info_by_node.values())
            for node, node_info in info_by_node.items():
                node_info.host += f" (node {node})" if host_counts[node_info.host] > 1 else ""
                self.hosts[node] = node_info.host
            node_infos = list(info_by_node.values())
            result.notes.append(self._format_summary(node_infos))
            result.problems += (
                self._find_missing_nodes(messages, job.join_timeout_s)
                + verdict.list_node_problems(node_infos)
                + verdict.find_version_mismatches(node_infos)
            )
        return self._share_verdict("facts agree", result, job.join_timeout_s)

    def check_clocks_and_folder(self) -> list[str]:
        """Compare the clocks of all nodes. Check that every node sees a file that the head node writes into the save folder."""
        result, marker, is_head = Verdict(), self._get_marker_path(), self.exchange.is_head
        if is_head and marker is not None:
            marker.touch()
        try:
            if is_head:
                self.exchange.broadcast("clock", time.time())
            offset_s = -self.exchange.receive("clock", _MARGIN_S) + time.time()
            self.exchange.put("sees", {"ahead": offset_s, "marker": marker is None or _wait_for_file(marker)})
            if is_head:
                reports = self.exchange.gather("sees", time.monotonic() + _MARGIN_S)
                blind_hosts = [self.hosts[node] for node, report in reports.items() if not report["marker"]]
                result.problems += self._find_missing_nodes(reports, _MARGIN_S)
                result.problems += verdict.find_skewed_clocks(
                    {self.hosts[node]: report["ahead"] for node, report in reports.items()}
                )
                result.problems += verdict.find_unshared_folders(
                    blind_hosts, f"--save {self.config.checkpoint.save}", self.node_info.host
                )
        finally:
            if is_head and marker is not None:
                marker.unlink(missing_ok=True)
        return self._share_verdict("nodes see the same", result, _MARGIN_S)

    def check_links(self) -> list[str]:
        """Check that all ranks reach each other, that an all-reduce gives the correct result, and that no node communicates
        slowly."""
        job, device_type, result = self.job, select_device_type(self.config.parallel.device), Verdict()
        ends = run_ranks(
            self.exchange.index,
            job.ranks_per_node,
            job.num_nodes,
            job.head,
            job.port,
            device_type,
            job.ranks_timeout_s,
            program=self.program,
        )
        self.exchange.put("ends", [end.__dict__ for end in ends])
        if self.exchange.is_head:
            ends_by_node = self.exchange.gather("ends", time.monotonic() + _MARGIN_S)
            by_host = {self.hosts[node]: [RankEnd(**end) for end in ends_by_node[node]] for node in sorted(ends_by_node)}
            result.problems += self._find_missing_nodes(ends_by_node, job.ranks_timeout_s + _MARGIN_S)
            result.problems += verdict.find_link_problems(by_host, job.ranks_timeout_s) + verdict.find_memory_problems(
                by_host, job.device_bytes
            )
            if not result.problems:
                result = verdict.compare_rates(by_host, device_type)
                result.notes += [] if result.problems else ["no problems found"]
        return self._share_verdict("links work", result, job.ranks_timeout_s + _MARGIN_S)

    def _find_missing_nodes(self, reports: Mapping[int, Any], timeout_s: float) -> list[str]:
        return verdict.find_missing_nodes(
            [self.hosts[node] for node in reports], self.job.num_nodes, self.job.expected_hosts, timeout_s
        )

    def _share_verdict(self, key: str, result: Verdict, timeout_s: float) -> list[str]:
        """Send the head node's problems to all nodes, and return them. The head node also prints the problems and notes.

        Args:
            key: name of the message in the exchange between the nodes.
            result: result of a step of the check. It is only used on the head node.
            timeout_s: seconds that the head node may need for its result.
        """
        if not self.exchange.is_head:
            return self.exchange.receive(key, timeout_s + _MARGIN_S)  # type: ignore[no-any-return]
        self.exchange.broadcast(key, result.problems)
        for message in result.notes:
            print(f"check_cluster: {message}", flush=True)
        for message in result.problems:
            print(f"check_cluster: {message}", file=sys.stderr, flush=True)
        return result.problems

    def _get_marker_path(self) -> Path | None:
        save = self.config.checkpoint.save
        if not save or is_url(save) or self.job.num_nodes == 1:
            return None
        return Path(save.removeprefix("file://")) / ".check-shared"

    def _format_summary(self, nodes: list[NodeInfo]) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in nodes[0].versions.items())
        free_bytes = [node.free_space for node in nodes if node.free_space is not None]
        checkpoint_bytes = max(node.room_needed for node in nodes)  # 0 on a node that cannot read the tokenizer
        size = f" of {checkpoint_bytes / 1e9:,.3g} GB" if checkpoint_bytes else ""
        storage = f"; {min(free_bytes) / 1e9:,.0f} GB free for checkpoints{size}" if free_bytes else ""
        return f"{len(nodes)} node{'s' * (len(nodes) > 1)} of {self.job.ranks_per_node} ranks: {versions}{storage}"


def select_device_type(device: str) -> str:
    """Return the type of device that ranks use for a value of --device: "cuda" if the value allows it and a GPU is available,
    otherwise "cpu"."""
    return "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"


def _wait_for_file(path: Path) -> bool:
    """Wait until a file is visible on this node. Return False if it is not visible within 10 seconds."""
    deadline = time.monotonic() + _FILE_VISIBLE_TIMEOUT_S
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
