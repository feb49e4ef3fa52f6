"""Decision which nodes of a cluster have a problem, from the information that the cluster check has collected. The module contains
only functions without side effects. Their messages name the hosts."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_lab.cluster.node_info import NodeInfo
from megatron_lab.cluster.ranks import RankEnd

MAX_CLOCK_SKEW_S = 2.0
"""Maximum difference of a clock in seconds. With a larger one, logs and checkpoints of different nodes are hard to put in
order."""
MIN_RATE_SHARE = 0.5
"""A node below this share of the median rate is slow."""
MIN_FREE_SHARE = 0.9
"""Share of a GPU's memory that is free if no other process uses it (a CUDA context takes about 1 %)."""


@dataclass
class Verdict:
    """Result of one step of the cluster check: problems, which fail the check, and notes, which are only printed."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def find_missing_nodes(hosts: Collection[str], num_nodes: int, expected_hosts: Sequence[str], timeout_s: float) -> list[str]:
    """Return a message if some nodes of the job have not answered; otherwise an empty list.

    Args:
        hosts: names of the nodes that have answered.
        num_nodes: number of nodes of the job.
        expected_hosts: names of all nodes; empty if unknown.
        timeout_s: seconds that the head node has waited.
    """
    if len(hosts) >= num_nodes:
        return []
    arrived = {host.partition(".")[0] for host in hosts}
    absent = [name for name in expected_hosts if name.partition(".")[0] not in arrived]
    details = f"missing: {format_names(absent)}" if absent else f"these are: {format_names(sorted(hosts))}"
    return [f"{len(hosts)} of {num_nodes} nodes answered within {timeout_s:.0f} s; {details}"]


def find_version_mismatches(nodes: Sequence[NodeInfo]) -> list[str]:
    """Return a message for each software or hardware version that differs between nodes. The message names the nodes with less
    common versions."""
    problems = []
    for name in dict.fromkeys(name for node in nodes for name in node.versions):
        hosts_by_version: dict[str, list[str]] = {}
        for node in nodes:
            hosts_by_version.setdefault(node.versions.get(name, "none"), []).append(node.host)
        if len(hosts_by_version) > 1:
            common_version = max(hosts_by_version, key=lambda version: len(hosts_by_version[version]))
            deviations = [
                f"{version} on {format_names(version_hosts)}"
                for version, version_hosts in hosts_by_version.items()
                if version != common_version
            ]
            problems.append(
                f"{name} is {common_version} on {format_names(hosts_by_version[common_version])}, but {', '.join(deviations)}"
            )
    return problems


def list_node_problems(nodes: Sequence[NodeInfo]) -> list[str]:
    """Return the problems that nodes have found on their own, without contact to other nodes. Each problem is listed once, with the
    names of its nodes."""
    hosts_by_problem: dict[str, list[str]] = {}
    for node in nodes:
        for problem in node.faults:
            hosts_by_problem.setdefault(problem, []).append(node.host)
    return [
        f"{'all nodes' if len(problem_hosts) == len(nodes) > 1 else format_names(problem_hosts)}: {problem}"
        for problem, problem_hosts in hosts_by_problem.items()
    ]


def find_skewed_clocks(offsets_s: Mapping[str, float]) -> list[str]:
    """Return a message for each node whose clock differs from the median of all clocks by more than the permitted difference.

    Args:
        offsets_s: seconds by which each node's clock is ahead of the head node's clock, by host name.
    """
    median = statistics.median(offsets_s.values())
    skews = {host: offset - median for host, offset in offsets_s.items() if abs(offset - median) > MAX_CLOCK_SKEW_S}
    return [
        f"{host}: its clock is {abs(skew):.1f} s {'ahead' if skew > 0 else 'behind'}; is NTP running?"
        for host, skew in skews.items()
    ]


def find_unshared_folders(blind_hosts: Sequence[str], folder: str, head: str) -> list[str]:
    """Return a message if some nodes do not see the file that the head node has written into the save folder; otherwise an empty
    list.

    Args:
        blind_hosts: names of these nodes.
        folder: flag and path of the folder.
        head: name of the head node.
    """
    if not blind_hosts:
        return []
    return [
        f"{format_names(blind_hosts)}: {folder} is not the folder that {head} writes to; it must lie on a file system that all "
        "nodes share"
    ]


def find_link_problems(ends_by_host: Mapping[str, Sequence[RankEnd]], timeout_s: float) -> list[str]:
    """Return messages about ranks that failed the link test (which measures the links between all ranks), and about a wrong
    all-reduce.

    If no rank failed but some did not finish, name the unfinished ranks that began the fewest steps, because the other ranks wait
    for them.

    Args:
        ends_by_host: how each rank ended, by host name.
        timeout_s: seconds that the head node has waited.
    """
    named_ends = [(end, f"rank {end.rank} on {host}") for host, host_ends in ends_by_host.items() for end in host_ends]
    ranks_by_failure: dict[str, list[str]] = {}
    for end, name in named_ends:
        if end.failed is not None:
            ranks_by_failure.setdefault(f"failed at {end.at}: {end.failed}", []).append(name)
    unfinished = [(end, name) for end, name in named_ends if end.failed is None and end.found is None]
    if ranks_by_failure:
        return [f"{format_names(ranks)} {failure}" for failure, ranks in ranks_by_failure.items()]
    if unfinished:
        min_steps = min(end.places for end, _ in unfinished)
        slowest = [(end, name) for end, name in unfinished if end.places == min_steps]
        waiting = f"; {len(unfinished) - len(slowest)} more wait" if len(unfinished) > len(slowest) else ""
        return [
            f"{format_names([name for _, name in slowest])} did not get past {slowest[0][0].at} within {timeout_s:.0f} s{waiting}"
        ]
    if not all(end.found and end.found["sum_is_right"] for end, _ in named_ends):
        return ["an all-reduce over all ranks gave a wrong result: a GPU, a link or a driver corrupts data"]
    return []


def find_memory_problems(ends_by_host: Mapping[str, Sequence[RankEnd]], required_bytes: int | None) -> list[str]:
    """Return a message for each GPU that another process uses or whose free memory is too small.

    Args:
        ends_by_host: how each rank ended in the link test, by host name. Ranks report the free memory of their GPU.
        required_bytes: bytes that the run needs on one GPU; None if unknown.
    """
    problems = []
    for host, host_ends in ends_by_host.items():
        for end in host_ends:
            if end.found is None or "memory" not in end.found:
                continue
            free, memory = end.found["free"], end.found["memory"]
            description = f"rank {end.rank} on {host}: its GPU has {free / 1e9:.1f} of {memory / 1e9:.1f} GB free"
            if required_bytes is not None and free < required_bytes:
                problems.append(f"{description}, but the run needs {required_bytes / 1e9:.1f} GB")
            elif free < MIN_FREE_SHARE * memory:
                problems.append(f"{description}: another process uses it")
    return problems


def compare_rates(ends_by_host: Mapping[str, Sequence[RankEnd]], device_type: str) -> Verdict:
    """Compare the communication rates of the nodes, and report slow nodes. On GPUs, a slow node is a problem. On CPUs, which other
    programs share, it is only a note.

    Args:
        ends_by_host: how each rank ended in the link test, with its measured rates, by host name.
    """
    hosts = list(ends_by_host)
    intra_node_rates = {
        host: min(end.found["inside"] for end in host_ends if end.found)
        for host, host_ends in ends_by_host.items()
        if _has_measurement(host_ends, "inside")
    }
    inter_node_rates: dict[str, dict[str, float]] = {host: {} for host in hosts}
    for host, host_ends in ends_by_host.items():
        for end in host_ends:
            for peer, rate in (end.found or {}).get("between", {}).items():
                name = hosts[int(peer)]
                inter_node_rates[host][name] = inter_node_rates[host].get(name, 0.0) + rate
    max_inter_node_rates = {
        host: max(rates_by_host.values()) for host, rates_by_host in inter_node_rates.items() if rates_by_host
    }  # the best rate of each node, because a fast node may have a slow neighbour
    verdict = Verdict()
    for link, rates_by_host in (("inside a node", intra_node_rates), ("between nodes", max_inter_node_rates)):
        if not rates_by_host:
            continue
        median, slowest = statistics.median(rates_by_host.values()), min(rates_by_host, key=lambda host: rates_by_host[host])
        verdict.notes.append(
            f"{link}: {_format_rate(median)} (median), slowest {slowest} with {_format_rate(rates_by_host[slowest])}"
        )
        slow = [
            f"{host}: slow {link}, {_format_rate(rate)}" for host, rate in rates_by_host.items() if rate < MIN_RATE_SHARE * median
        ]
        (verdict.problems if device_type == "cuda" else verdict.notes).extend(slow)
    all_reduce_rates = [end.found["all"] for host_ends in ends_by_host.values() for end in host_ends if end.found]
    if all_reduce_rates:
        verdict.notes.append(f"a large all-reduce over all ranks: {_format_rate(min(all_reduce_rates))} a rank")
    return verdict


def _has_measurement(ends: Iterable[RankEnd], name: str) -> bool:
    return any(end.found is not None and name in end.found for end in ends)


def _format_rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s"


def format_names(names: Sequence[str]) -> str:
    """Format names as text: at most six, then the number of the remaining names."""
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
