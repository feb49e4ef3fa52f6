"""Shared state of a job: its nodes, which of them train, and what happens when ranks end or nodes are lost. Does not import torch.

All nodes read and change one `JobState`, which is kept in a store (`state_store.py`). Each change is a pure function from one state
to the next. Phases:

gathering   No new ranks start. Nodes become ready, until the first node starts the ranks according to a plan.
running     The nodes in `order` run their ranks. Other ready nodes are spares.
over        The job has ended with the exit code `code`.

A *round* is one gathering phase, which ends with a start of ranks; `generation` counts the starts.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megatron.training.signals import EXIT_LOST_CONTACT

Phase = Literal["gathering", "running", "over"]
EndType = Literal["done", "stopped", "refused", "failed"]
"""How the ranks of a node ended: finished, stopped by request, refused because of their settings, or failed."""


@dataclass(frozen=True)
class JobLimits:
    """Limits of the job from the command line, equal on all nodes: how many nodes and ranks it may have, and how often it may
    restart."""

    nodes: tuple[int, int]
    """Minimum and maximum number of nodes that train."""
    ranks: tuple[int, int]
    """Minimum number of slots that must be available (a slot runs one rank), and maximum number of ranks that train."""
    max_restarts: int
    """Maximum number of consecutive restarts without a newer checkpoint."""
    last_call_s: float
    """Seconds to wait for further nodes when the minimum number of nodes is ready but the maximum is not. The wait starts again
    whenever a node joins."""


@dataclass(frozen=True)
class NodeOffer:
    """What a node contributes to the job: number of slots and address."""

    places: int
    """Number of ranks that the node can run (its slots)."""
    address: str
    """Address at which ranks of other nodes reach the node."""


@dataclass(frozen=True)
class NodeReport:
    """How the ranks of a node ended: type of the end, exit code, and reason as text."""

    kind: EndType
    code: int
    words: str


@dataclass(frozen=True)
class RankProgress:
    """How far the ranks of a node have trained since their last start."""

    start_iteration: int | None = None
    """Iteration of the checkpoint from which the ranks started; None if they have not loaded it."""
    last_iteration: int | None = None
    """Last iteration that the ranks finished."""

    @property
    def has_steps(self) -> bool:
        """Whether the ranks have finished a step."""
        return self.start_iteration is not None and self.last_iteration is not None and self.last_iteration > self.start_iteration


@dataclass(frozen=True)
class StartPlan:
    """Plan of one start of the ranks: how many ranks each node runs, and the flags that they get. Ranks are numbered in the order
    of the nodes."""

    counts: Mapping[str, int]
    """Number of ranks on each node, in the order of the nodes."""
    flags: tuple[str, ...]
    """Flags to append to the user's command line."""
    address: str
    """Address of the node on which rank 0 opens the store of the ranks (MASTER_ADDR)."""
    port: int
    notes: tuple[str, ...] = ()
    """Log lines that explain how the layout differs from the requested one."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(self.counts.values())


@dataclass(frozen=True)
class JobState:
    """State of a job, which all its nodes share: its nodes, which of them train, and how the last start ended."""

    generation: int = 0
    """Number of starts of ranks so far."""
    phase: Phase = "gathering"
    members: Mapping[str, NodeOffer] = field(default_factory=dict)
    """All nodes of the job that are not lost, with their slots and addresses."""
    ready: tuple[str, ...] = ()
    """Nodes without ranks that wait for the next start, in the order in which they joined."""
    order: tuple[str, ...] = ()
    """Nodes of the last start, in the order of their ranks."""
    plan: StartPlan | None = None
    """Plan of the last start."""
    reports: Mapping[str, NodeReport] = field(default_factory=dict)
    """Reports of those nodes of the last start whose ranks have ended."""
    told: bool = False
    """Whether a node has requested to stop the job."""
    gentle: bool = False
    """Whether running ranks may save a checkpoint before they end for the next start."""
    why: str = ""
    """Reason for the last restart, for the log."""
    state_at: int = -1
    """Highest iteration of a checkpoint from which ranks have started."""
    stale: int = 0
    """Number of consecutive restarts without a checkpoint newer than `state_at`."""
    code: int = 0
    """Exit code of the job when it has ended. Until then, exit code of the first failure since the last start from a newer
    checkpoint."""
    words: str = ""
    """Reason for the end of the job, for the log."""
    batch: int | None = None
    """Global batch size of the first start. Later starts keep it."""

    def add_node(self, name: str, offer: NodeOffer, limits: JobLimits, *, requests_restart: bool = False) -> JobState:
        """Return the state after adding a node that has no ranks yet and waits for the next start.

        Args:
            name: name of the node.
            offer: number of slots of the node, and its address.
            requests_restart: do not wait, but restart the job now with this node, unless the job already has its maximum number of
                nodes.
        """
        if self.phase == "over":  # an earlier job with this run id has ended; the new one begins when all its nodes have left
            return self if self.members else JobState().add_node(name, offer, limits)
        if self.phase == "running" and name in self.order and name in self.members and name not in self.reports:
            return self  # a repeated request from before this start
        ready = self.ready if name in self.ready else (*self.ready, name)
        state = replace(self, members={**self.members, name: offer}, ready=ready)
        needs_restart = (
            requests_restart and self.phase == "running" and name not in self.order and len(self.order) < limits.nodes[1]
        )
        if not needs_restart or self.told:
            return state
        return state._open_round(f"{name} joins", saves_first=True)

    def add_report(self, name: str, generation: int, report: NodeReport, progress: RankProgress, limits: JobLimits) -> JobState:
        """Return the state after the ranks of a node have ended.

        Args:
            generation: number of the start to which these ranks belonged.
            report: how the ranks ended.
            progress: progress of these ranks.
        """
        if generation != self.generation or name not in self.order:
            return self
        if self.phase == "gathering" and report.kind == "failed" and self.code == EXIT_LOST_CONTACT:
            # This report names the cause of the lost contact.
            return replace(self, code=report.code, why=report.words)
        if self.phase != "running":
            return self
        return replace(self, reports={**self.reports, name: report})._evaluate_reports(progress, limits)

    def remove_lost_node(self, name: str, progress: RankProgress, limits: JobLimits) -> JobState:
        """Return the state without a node that was lost together with its ranks.

        Args:
            progress: progress of the ranks on the node that reports the loss.
        """
        if name not in self.members:
            return self
        members = {member: offer for member, offer in self.members.items() if member != name}
        state = replace(self, members=members, ready=tuple(member for member in self.ready if member != name))
        return state._evaluate_reports(progress, limits) if self.phase == "running" else state

    def remove_leaving_node(self, name: str) -> JobState:
        """Return the state without a node that leaves the job. The job continues without the node, and running ranks save a
        checkpoint before they end."""
        if name not in self.members or self.phase == "over":
            return self
        members = {member: offer for member, offer in self.members.items() if member != name}
        state = replace(self, members=members, ready=tuple(member for member in self.ready if member != name))
        return state._open_round(f"{name} leaves", saves_first=True) if self.phase == "running" and name in self.order else state

    def request_stop(self, code: int) -> JobState:
        """Return the state in which the job stops with this exit code. Running ranks save a checkpoint before they end."""
        if self.phase == "gathering":
            return self.end_job(code, "stopped before the ranks were started")
        return replace(self, told=True) if self.phase == "running" else self

    def end_job(self, code: int, reason: str) -> JobState:
        """Return the state of the ended job. A job that has already ended keeps its exit code and reason."""
        return self if self.phase == "over" else replace(self, phase="over", code=code, words=reason)

    def can_start(self, limits: JobLimits, quiet_s: float) -> bool:
        """Return whether ranks can start on the nodes that are ready.

        At least the minimum numbers of nodes and slots must be ready. If further nodes may still become ready, `last_call_s`
        seconds must have passed without a change.

        Args:
            quiet_s: seconds since `ready` last changed.
        """
        num_slots = sum(self.members[name].places for name in self.ready)
        if self.phase != "gathering" or len(self.ready) < limits.nodes[0] or num_slots < limits.ranks[0]:
            return False
        has_all_nodes = set(self.ready) == set(self.members) and (self.generation > 0 or len(self.ready) >= limits.nodes[1])
        return has_all_nodes or quiet_s >= limits.last_call_s

    def order_nodes(self, max_nodes: int) -> tuple[str, ...]:
        """Return the ready nodes in the order in which their ranks are numbered. Nodes of the last start keep their positions, and
        new nodes take the positions of lost nodes.

        Args:
            max_nodes: maximum number of nodes that train.
        """
        newcomers = [name for name in self.ready if name not in self.order]
        previous_order = [name if name in self.ready else newcomers.pop(0) if newcomers else None for name in self.order]
        return tuple(name for name in (*previous_order, *newcomers) if name is not None)[:max_nodes]

    def start_ranks(self, plan: StartPlan, batch: int | None) -> JobState:
        """Return the state in which the nodes of the plan run their ranks. Other ready nodes become spare nodes."""
        order = tuple(name for name, count in plan.counts.items() if count)
        spares = tuple(name for name in self.ready if name not in order)
        start = replace(self, generation=self.generation + 1, phase="running", order=order, ready=spares, plan=plan)
        return replace(start, reports={}, gentle=False, batch=batch if self.batch is None else self.batch)

    def _evaluate_reports(self, progress: RankProgress, limits: JobLimits) -> JobState:
        """Return the state that follows from the reports of the nodes so far: the job continues, restarts or ends."""
        end_types = {report.kind for report in self.reports.values()}
        lost_nodes = [name for name in self.order if name not in self.members and name not in self.reports]
        running_nodes = [name for name in self.order if name in self.members and name not in self.reports]
        if "refused" in end_types:
            refused = next(report for report in self.reports.values() if report.kind == "refused")
            return self.end_job(refused.code, f"{refused.words}: the ranks are not restarted")
        if self.told or "stopped" in end_types:
            if running_nodes:
                return self
            if self.told or not lost_nodes:
                stop_codes = [report.code for report in self.reports.values() if report.kind == "stopped"]
                return self.end_job(
                    (stop_codes or [report.code for report in self.reports.values()] or [1])[0], "stopped as requested"
                )
        failed = next((report for report in self.reports.values() if report.kind == "failed"), None)
        if failed is not None:
            return self._restart(failed.words, failed.code, progress, limits)
        if lost_nodes:
            return self._restart(f"{', '.join(lost_nodes)} {'is' if len(lost_nodes) == 1 else 'are'} lost", 1, progress, limits)
        return self if running_nodes else self.end_job(0, "done")

    def _restart(self, reason: str, code: int, progress: RankProgress, limits: JobLimits) -> JobState:
        """Return the state after a failure: the nodes gather for a restart, or the job ends if there were too many restarts without
        a newer checkpoint."""
        has_newer_checkpoint = progress.start_iteration is not None and progress.start_iteration > self.state_at
        num_restarts = 1 if has_newer_checkpoint else self.stale + 1
        first_code = code if has_newer_checkpoint or not self.code else self.code
        state = replace(
            self,
            stale=num_restarts,
            code=first_code,
            state_at=progress.start_iteration if has_newer_checkpoint and progress.start_iteration is not None else self.state_at,
        )
        if num_restarts > limits.max_restarts:
            limit_message = f"restarted {limits.max_restarts} times without a newer checkpoint (--max-restarts)"
            return state.end_job(first_code, f"{reason}: {limit_message if limits.max_restarts else '--max-restarts 0'}. Giving up")
        return state._open_round(reason)

    def _open_round(self, reason: str, *, saves_first: bool = False) -> JobState:
        return replace(self, phase="gathering", why=reason, gentle=saves_first, reports={})


def to_json(state: JobState) -> str:
    """Convert a state to the JSON text that the store holds."""
    return json.dumps(dataclasses.asdict(state))


def from_json(text: str) -> JobState:
    """Parse a state from the text that `to_json` returned."""
    values: dict[str, Any] = json.loads(text)
    plan = values["plan"]
    return JobState(
        **{
            **values,
            **{name: _to_tuple(values[name]) for name in ("ready", "order")},
            "members": {name: NodeOffer(**offer) for name, offer in values["members"].items()},
            "reports": {name: NodeReport(**report) for name, report in values["reports"].items()},
            "plan": plan and StartPlan(**{**plan, "flags": _to_tuple(plan["flags"]), "notes": _to_tuple(plan["notes"])}),
        }
    )


def _to_tuple(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(names)
