"""The roll of a job: which nodes there are, which of them train, and what follows when ranks end or nodes are lost. Needs no torch.

All nodes read and change one roll, which lies in a store (`book.py`). A change is a pure function from a roll to the next.

gathering   No ranks run. Nodes enter, and the first of them closes the round with a plan.
running     The nodes in `order` run their ranks. Others that have entered are spares.
over        The job has ended with `code`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megatron.training.signals import LOST_CONTACT

Phase = Literal["gathering", "running", "over"]
Kind = Literal["done", "stopped", "refused", "failed"]


@dataclass(frozen=True)
class JobLimits:
    """What the user asked for; the same on all nodes."""

    nodes: tuple[int, int]
    """Fewest and most nodes that train."""
    ranks: tuple[int, int]
    """Fewest places for ranks that must be there, and most ranks that train."""
    max_restarts: int
    """Restarts in a row without a newer state."""
    last_call_s: float
    """Seconds without a newcomer after which a round closes that has enough nodes, but not all."""


@dataclass(frozen=True)
class Seat:
    """What a node offers."""

    places: int
    """Ranks that it can run."""
    address: str
    """Where ranks of other nodes reach it."""


@dataclass(frozen=True)
class NodeReport:
    """How the ranks of a node ended."""

    kind: Kind
    code: int
    words: str


@dataclass(frozen=True)
class Life:
    """What the ranks have made between two restarts."""

    began: int | None = None
    """The iteration of the state from which they began; None if they did not come so far."""
    finished: int | None = None
    """The last iteration that they finished."""

    @property
    def has_steps(self) -> bool:
        """Whether they finished a step."""
        return self.began is not None and self.finished is not None and self.finished > self.began


@dataclass(frozen=True)
class StartPlan:
    """Who runs which ranks, and how. Ranks are numbered through the nodes in their order."""

    counts: Mapping[str, int]
    """Number of ranks on each node, in the nodes' order."""
    flags: tuple[str, ...]
    """Words behind the user's command line."""
    address: str
    """Where rank 0 opens the store of the ranks."""
    port: int
    notes: tuple[str, ...] = ()
    """What changed and why, for the log."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(self.counts.values())


@dataclass(frozen=True)
class Roll:
    """The state of the job."""

    generation: int = 0
    """Number of starts so far."""
    phase: Phase = "gathering"
    members: Mapping[str, Seat] = field(default_factory=dict)
    """All living nodes."""
    ready: tuple[str, ...] = ()
    """Members without ranks that wait for the next start, in the order in which they came."""
    order: tuple[str, ...] = ()
    """Nodes of the last start, in the order of their ranks."""
    plan: StartPlan | None = None
    """The last start's."""
    reports: Mapping[str, NodeReport] = field(default_factory=dict)
    """How nodes of this start ended so far."""
    told: bool = False
    """Whether a node was asked to stop the job."""
    gentle: bool = False
    """Whether ranks that run though the round is open may save before they end."""
    why: str = ""
    """Why the last round was opened."""
    state_at: int = -1
    """Iteration of the newest state from which a start began."""
    stale: int = 0
    """Restarts in a row without a newer state than that."""
    code: int = 0
    """Exit code: the first failure's since there was a newer state, or the job's when it is over."""
    words: str = ""
    """Why the job is over."""
    batch: int | None = None
    """Global batch size of the first start."""

    def entered(self, name: str, seat: Seat, limits: JobLimits, *, at_once: bool = False) -> Roll:
        """A node has no ranks, and wants some.

        Args:
            at_once: it asks for a restart with it, if more nodes may train.
        """
        if self.phase == "over":  # a job of the same name is over, and a new one begins once all have seen that
            return self if self.members else Roll().entered(name, seat, limits)
        if self.phase == "running" and name in self.order and name in self.members and name not in self.reports:
            return self  # an echo of what it said before this start
        ready = self.ready if name in self.ready else (*self.ready, name)
        found = replace(self, members={**self.members, name: seat}, ready=ready)
        grows = at_once and self.phase == "running" and name not in self.order and len(self.order) < limits.nodes[1]
        if not grows or self.told:
            return found
        return found._opened(f"{name} joins", gentle=True)

    def reported(self, name: str, generation: int, report: NodeReport, life: Life, limits: JobLimits) -> Roll:
        """The ranks of a node have ended.

        Args:
            life: theirs.
        """
        if generation != self.generation or name not in self.order:
            return self
        if self.phase == "gathering" and report.kind == "failed" and self.code == LOST_CONTACT:  # here is the cause
            return replace(self, code=report.code, why=report.words)
        if self.phase != "running":
            return self
        return replace(self, reports={**self.reports, name: report})._resolved(life, limits)

    def lost(self, name: str, life: Life, limits: JobLimits) -> Roll:
        """A node is gone, with its ranks.

        Args:
            life: that of the ranks which run on the node that tells it.
        """
        if name not in self.members:
            return self
        members = {other: seat for other, seat in self.members.items() if other != name}
        found = replace(self, members=members, ready=tuple(other for other in self.ready if other != name))
        return found._resolved(life, limits) if self.phase == "running" else found

    def leaving(self, name: str) -> Roll:
        """A node goes, and the job is to go on without it. Ranks that run save before."""
        if name not in self.members or self.phase == "over":
            return self
        members = {other: seat for other, seat in self.members.items() if other != name}
        found = replace(self, members=members, ready=tuple(other for other in self.ready if other != name))
        return found._opened(f"{name} leaves", gentle=True) if self.phase == "running" and name in self.order else found

    def asked_to_stop(self, code: int) -> Roll:
        """A node was asked to stop the job, which ends with this code. Ranks that run save before."""
        if self.phase == "gathering":
            return self.ended(code, "stopped before its ranks were started")
        return replace(self, told=True) if self.phase == "running" else self

    def ended(self, code: int, words: str) -> Roll:
        """The job is over."""
        return self if self.phase == "over" else replace(self, phase="over", code=code, words=words)

    def can_close(self, limits: JobLimits, quiet_s: float) -> bool:
        """Whether the round may close with the nodes that are ready.

        Args:
            quiet_s: seconds since the last change of who is ready.
        """
        places = sum(self.members[name].places for name in self.ready)
        if self.phase != "gathering" or len(self.ready) < limits.nodes[0] or places < limits.ranks[0]:
            return False
        all_known = set(self.ready) == set(self.members) and (self.generation > 0 or len(self.ready) >= limits.nodes[1])
        return all_known or quiet_s >= limits.last_call_s

    def seated(self, most: int) -> tuple[str, ...]:
        """The nodes that are ready, in the order of their ranks: each keeps its place, and newcomers take those of lost ones.

        Args:
            most: nodes that train.
        """
        new = [name for name in self.ready if name not in self.order]
        found = [name if name in self.ready else new.pop(0) if new else None for name in self.order]
        return tuple(name for name in (*found, *new) if name is not None)[:most]

    def closed(self, plan: StartPlan, batch: int | None) -> Roll:
        """The round is closed: the nodes of the plan start their ranks, the others that are ready are spares."""
        order = tuple(name for name, count in plan.counts.items() if count)
        spares = tuple(name for name in self.ready if name not in order)
        start = replace(self, generation=self.generation + 1, phase="running", order=order, ready=spares, plan=plan)
        return replace(start, reports={}, gentle=False, batch=batch if self.batch is None else self.batch)

    def _resolved(self, life: Life, limits: JobLimits) -> Roll:
        """What follows from the reports so far."""
        kinds = {report.kind for report in self.reports.values()}
        gone = [name for name in self.order if name not in self.members and name not in self.reports]
        awaited = [name for name in self.order if name in self.members and name not in self.reports]
        if "refused" in kinds:
            refused = next(report for report in self.reports.values() if report.kind == "refused")
            return self.ended(refused.code, f"{refused.words}: not started again")
        if self.told or "stopped" in kinds:
            if awaited:
                return self
            if self.told or not gone:
                stopped = [report.code for report in self.reports.values() if report.kind == "stopped"]
                return self.ended((stopped or [report.code for report in self.reports.values()] or [1])[0], "stopped as asked")
        failed = next((report for report in self.reports.values() if report.kind == "failed"), None)
        if failed is not None:
            return self._again(failed.words, failed.code, life, limits)
        if gone:
            return self._again(f"{', '.join(gone)} is lost", 1, life, limits)
        return self if awaited else self.ended(0, "done")

    def _again(self, why: str, code: int, life: Life, limits: JobLimits) -> Roll:
        """Open the next round after a failure, unless there were too many."""
        newer = life.began is not None and life.began > self.state_at
        stale = 1 if newer else self.stale + 1
        first = code if newer or not self.code else self.code
        found = replace(self, stale=stale, code=first, state_at=life.began if newer and life.began is not None else self.state_at)
        if stale > limits.max_restarts:
            tries = f"started again {limits.max_restarts} times without a newer state (--max-restarts)"
            return found.ended(first, f"{why}: {tries if limits.max_restarts else '--max-restarts 0'}. Giving up")
        return found._opened(why)

    def _opened(self, why: str, *, gentle: bool = False) -> Roll:
        return replace(self, phase="gathering", why=why, gentle=gentle, reports={})


def to_text(roll: Roll) -> str:
    """The roll as the store keeps it."""
    return json.dumps(dataclasses.asdict(roll))


def from_text(text: str) -> Roll:
    """A roll from the result of `to_text`."""
    found: dict[str, Any] = json.loads(text)
    plan = found["plan"]
    return Roll(
        **{
            **found,
            **{name: _names(found[name]) for name in ("ready", "order")},
            "members": {name: Seat(**seat) for name, seat in found["members"].items()},
            "reports": {name: NodeReport(**report) for name, report in found["reports"].items()},
            "plan": plan and StartPlan(**{**plan, "flags": _names(plan["flags"]), "notes": _names(plan["notes"])}),
        }
    )


def _names(found: Sequence[str]) -> tuple[str, ...]:
    return tuple(found)
