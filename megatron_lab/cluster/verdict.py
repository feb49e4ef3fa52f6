"""Finds what is wrong with a cluster from the facts that its nodes reported. Pure functions; the words name hosts."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_lab.cluster.facts import NodeFacts
from megatron_lab.cluster.ranks import RankEnd

LARGEST_SKEW_S = 2.0
"""Clocks that differ by more make logs and checkpoints of different nodes hard to put in order."""
SLOW = 0.5
"""A node with less than this share of the median rate is slow."""
FREE = 0.9
"""Share of a GPU's memory that is free where no other process uses it (a CUDA context takes about 1 %)."""


@dataclass
class Verdict:
    """Of a check."""

    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def missing(hosts: Collection[str], num_nodes: int, expected: Sequence[str], limit_s: float) -> list[str]:
    """Nodes that did not come.

    Args:
        hosts: those that came.
        expected: names of all, if they are known.
    """
    if len(hosts) >= num_nodes:
        return []
    came = {host.partition(".")[0] for host in hosts}
    absent = [name for name in expected if name.partition(".")[0] not in came]
    which = f"not there: {listed(absent)}" if absent else f"there: {listed(sorted(hosts))}"
    return [f"{len(hosts)} of {num_nodes} nodes came within {limit_s:.0f} s; {which}"]


def disagreements(nodes: Sequence[NodeFacts]) -> list[str]:
    """Versions that are not the same everywhere: the rarer ones are named with their nodes."""
    found = []
    for name in dict.fromkeys(name for node in nodes for name in node.versions):
        hosts: dict[str, list[str]] = {}
        for node in nodes:
            hosts.setdefault(node.versions.get(name, "none"), []).append(node.host)
        if len(hosts) > 1:
            most = max(hosts, key=lambda version: len(hosts[version]))
            others = [f"{version} on {listed(who)}" for version, who in hosts.items() if version != most]
            found.append(f"{name} is {most} on {listed(hosts[most])}, but {', '.join(others)}")
    return found


def own_faults(nodes: Sequence[NodeFacts]) -> list[str]:
    """What nodes found by themselves: each fault once."""
    hosts: dict[str, list[str]] = {}
    for node in nodes:
        for fault in node.faults:
            hosts.setdefault(fault, []).append(node.host)
    return [f"{'all nodes' if len(who) == len(nodes) > 1 else listed(who)}: {fault}" for fault, who in hosts.items()]


def skewed(ahead_s: Mapping[str, float]) -> list[str]:
    """Clocks that differ from most.

    Args:
        ahead_s: of each host, against the head's clock.
    """
    middle = statistics.median(ahead_s.values())
    off = {host: ahead - middle for host, ahead in ahead_s.items() if abs(ahead - middle) > LARGEST_SKEW_S}
    return [f"{host}: its clock is {abs(by):.1f} s {'ahead' if by > 0 else 'behind'}; is NTP running?" for host, by in off.items()]


def apart(blind: Sequence[str], folder: str, head: str) -> list[str]:
    """Nodes that do not see in a folder what the head wrote there."""
    if not blind:
        return []
    return [f"{listed(blind)}: {folder} is not the folder that {head} writes to; it must lie on a file system that all nodes share"]


def link_faults(ends: Mapping[str, Sequence[RankEnd]], limit_s: float) -> list[str]:
    """Ranks that failed; or that were not done: those that came least far, for whom the others wait."""
    every = [(end, f"rank {end.rank} on {host}") for host, some in ends.items() for end in some]
    failed: dict[str, list[str]] = {}
    for end, name in every:
        if end.failed is not None:
            failed.setdefault(f"failed at {end.at}: {end.failed}", []).append(name)
    late = [(end, name) for end, name in every if end.failed is None and end.found is None]
    if failed:
        return [f"{listed(who)} {words}" for words, who in failed.items()]
    if late:
        least = min(end.places for end, _ in late)
        last = [(end, name) for end, name in late if end.places == least]
        waiting = f"; {len(late) - len(last)} more wait" if len(late) > len(last) else ""
        return [f"{listed([name for _, name in last])} did not get past {last[0][0].at} within {limit_s:.0f} s{waiting}"]
    if not all(end.found and end.found["sum_is_right"] for end, _ in every):
        return ["a sum over all ranks came out wrong: a GPU, a link or a driver changes what it carries"]
    return []


def memory_faults(ends: Mapping[str, Sequence[RankEnd]], needed: int | None) -> list[str]:
    """GPUs in use by others, or too small.

    Args:
        needed: bytes that the run takes on one.
    """
    found = []
    for host, some in ends.items():
        for end in some:
            if end.found is None or "memory" not in end.found:
                continue
            free, memory = end.found["free"], end.found["memory"]
            has = f"rank {end.rank} on {host}: its GPU has {free / 1e9:.1f} of {memory / 1e9:.1f} GB free"
            if needed is not None and free < needed:
                found.append(f"{has}, but the run takes {needed / 1e9:.1f} GB")
            elif free < FREE * memory:
                found.append(f"{has}: another process uses it")
    return found


def speeds(ends: Mapping[str, Sequence[RankEnd]], device: str) -> Verdict:
    """Rates of the nodes, and which of them are slow. On a CPU, which other programs share, slow is a note and no fault."""
    hosts = list(ends)
    inside = {host: min(end.found["inside"] for end in some if end.found) for host, some in ends.items() if _has(some, "inside")}
    between: dict[str, dict[str, float]] = {host: {} for host in hosts}
    for host, some in ends.items():
        for end in some:
            for other, rate in (end.found or {}).get("between", {}).items():
                name = hosts[int(other)]
                between[host][name] = between[host].get(name, 0.0) + rate
    best = {host: max(rates.values()) for host, rates in between.items() if rates}  # a sound node may have a slow neighbour
    verdict = Verdict()
    for what, rates in (("inside a node", inside), ("between nodes", best)):
        if not rates:
            continue
        middle, slowest = statistics.median(rates.values()), min(rates, key=lambda host: rates[host])
        verdict.notes.append(f"{what}: {_rate(middle)} (median), slowest {slowest} with {_rate(rates[slowest])}")
        slow = [f"{host}: slow {what}, {_rate(rate)}" for host, rate in rates.items() if rate < SLOW * middle]
        (verdict.faults if device == "cuda" else verdict.notes).extend(slow)
    whole = [end.found["all"] for some in ends.values() for end in some if end.found]
    if whole:
        verdict.notes.append(f"a large sum over all ranks: {_rate(min(whole))} a rank")
    return verdict


def _has(ends: Iterable[RankEnd], name: str) -> bool:
    return any(end.found is not None and name in end.found for end in ends)


def _rate(bytes_a_second: float) -> str:
    return f"{bytes_a_second / 1e9:.3g} GB/s"


def listed(names: Sequence[str]) -> str:
    """The first few of some names."""
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
