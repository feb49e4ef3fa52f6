"""The steps of a cluster check as every node goes through them. One node, the head, compares the results and judges."""

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
from megatron_lab.cluster.facts import NodeFacts, node_facts
from megatron_lab.cluster.meeting import Meeting
from megatron_lab.cluster.ranks import PROGRAM, RankEnd, run_ranks
from megatron_lab.cluster.verdict import Verdict

_SEEN_S = 10.0
"""Time in which a file of the head must be seen through a shared file system."""
_MARGIN_S = 30.0
"""How much longer than the head a node waits for its words."""


@dataclass(frozen=True)
class Job:
    """What is to be started, and how long to wait for it."""

    nodes: int
    ranks_per_node: int
    head: str
    port: int
    expected: Sequence[str] = ()
    """Names of the nodes, if they are known."""
    device_bytes: int | None = None
    """What the run takes on a GPU, if it is known."""
    wait_s: float = 600.0
    """For all nodes to come."""
    limit_s: float = 300.0
    """For the ranks to be done."""


def run_check(job: Job, config: Config, program: Sequence[str] = PROGRAM) -> list[str]:
    """This node's part. The head prints what is found.

    Args:
        program: what a rank runs.

    Returns:
        the faults, the same on every node.

    Raises:
        MeetingError: this node and the head do not find each other.
    """
    facts = node_facts(config, job.ranks_per_node)
    check = _Check(job, config, program, facts, Meeting(job.head, job.port, job.nodes, facts.host, job.wait_s))
    faults = check.facts_agree() or check.nodes_see_the_same() or check.links_work()
    check.meeting.leave(_MARGIN_S)
    return faults


@dataclass
class _Check:
    job: Job
    config: Config
    program: Sequence[str]
    facts: NodeFacts
    meeting: Meeting
    hosts: dict[int, str] = field(default_factory=dict)
    """For the head: the names of the nodes that came, by number; no two are the same."""

    def facts_agree(self) -> list[str]:
        """All nodes come, none finds a fault of its own, and versions are the same."""
        job, found = self.job, Verdict()
        self.meeting.put("facts", asdict(self.facts))
        if self.meeting.is_head:
            said = self.meeting.gather("facts", time.monotonic() + job.wait_s)
            nodes = {node: NodeFacts(**facts) for node, facts in said.items()}
            often = Counter(facts.host for facts in nodes.values())
            for node, facts in nodes.items():
                facts.host += f" (node {node})" if often[facts.host] > 1 else ""
                self.hosts[node] = facts.host
            every = list(nodes.values())
            found.notes.append(self._summary(every))
            found.faults += self._missing(said, job.wait_s) + verdict.own_faults(every) + verdict.disagreements(every)
        return self._told("facts agree", found, job.wait_s)

    def nodes_see_the_same(self) -> list[str]:
        """Clocks, and the save folder, in which the head leaves a file for the others to find."""
        found, marker, head = Verdict(), self._marker(), self.meeting.is_head
        if head and marker is not None:
            marker.touch()
        try:
            if head:
                self.meeting.tell("clock", time.time())
            ahead = -self.meeting.hear("clock", _MARGIN_S) + time.time()
            self.meeting.put("sees", {"ahead": ahead, "marker": marker is None or _appears(marker)})
            if head:
                said = self.meeting.gather("sees", time.monotonic() + _MARGIN_S)
                blind = [self.hosts[node] for node, sees in said.items() if not sees["marker"]]
                found.faults += self._missing(said, _MARGIN_S)
                found.faults += verdict.skewed({self.hosts[node]: sees["ahead"] for node, sees in said.items()})
                found.faults += verdict.apart(blind, f"--save {self.config.checkpoint.save}", self.facts.host)
        finally:
            if head and marker is not None:
                marker.unlink(missing_ok=True)
        return self._told("nodes see the same", found, _MARGIN_S)

    def links_work(self) -> list[str]:
        """Every rank reaches every other, sums are right, no node is slow."""
        job, device, found = self.job, device_kind(self.config.parallel.device), Verdict()
        ends = run_ranks(
            self.meeting.index, job.ranks_per_node, job.nodes, job.head, job.port, device, job.limit_s, program=self.program
        )
        self.meeting.put("ends", [end.__dict__ for end in ends])
        if self.meeting.is_head:
            said = self.meeting.gather("ends", time.monotonic() + _MARGIN_S)
            by_host = {self.hosts[node]: [RankEnd(**end) for end in said[node]] for node in sorted(said)}
            found.faults += self._missing(said, job.limit_s + _MARGIN_S)
            found.faults += verdict.link_faults(by_host, job.limit_s) + verdict.memory_faults(by_host, job.device_bytes)
            if not found.faults:
                found = verdict.speeds(by_host, device)
                found.notes += [] if found.faults else ["all is well"]
        return self._told("links work", found, job.limit_s + _MARGIN_S)

    def _missing(self, said: Mapping[int, Any], limit_s: float) -> list[str]:
        return verdict.missing([self.hosts[node] for node in said], self.job.nodes, self.job.expected, limit_s)

    def _told(self, topic: str, found: Verdict, patience_s: float) -> list[str]:
        """The head's verdict, on every node. The head prints it."""
        if not self.meeting.is_head:
            return self.meeting.hear(topic, patience_s + _MARGIN_S)  # type: ignore[no-any-return]
        self.meeting.tell(topic, found.faults)
        for line in found.notes:
            print(f"check_cluster: {line}", flush=True)
        for line in found.faults:
            print(f"check_cluster: {line}", file=sys.stderr, flush=True)
        return found.faults

    def _marker(self) -> Path | None:
        save = self.config.checkpoint.save
        if not save or is_url(save) or self.job.nodes == 1:
            return None
        return Path(save.removeprefix("file://")) / ".check-shared"

    def _summary(self, nodes: list[NodeFacts]) -> str:
        what = ", ".join(f"{name} {version}" for name, version in nodes[0].versions.items())
        spaces = [node.free_space for node in nodes if node.free_space is not None]
        needed = max(node.room_needed for node in nodes)  # unknown on a node that cannot read the tokenizer
        size = f" of {needed / 1e9:,.3g} GB" if needed else ""
        room = f"; {min(spaces) / 1e9:,.0f} GB free for checkpoints{size}" if spaces else ""
        return f"{len(nodes)} node{'s' * (len(nodes) > 1)} of {self.job.ranks_per_node} ranks: {what}{room}"


def device_kind(device: str) -> str:
    """The kind of device that the ranks will choose by --device."""
    return "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"


def _appears(marker: Path) -> bool:
    """Whether the file is there, at once or soon."""
    end = time.monotonic() + _SEEN_S
    while not marker.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True
