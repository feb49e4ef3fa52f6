"""Shared state of a job: its nodes, which of them train, and what happens when ranks end or nodes are lost. Does not import torch.

All nodes read and change one `JobState`, which is kept in a store (`state_store.py`). Each change is a pure function from one state
to the next. Phases:

gathering   The ranks are not running, or are ending. Nodes become ready, until the first node starts the ranks by a plan.
running     The nodes in `order` run their ranks. Other ready nodes are spares.
over        The job has ended with the exit code `code`.

A *round* is one gathering phase, which ends with a start of ranks. `generation` counts the starts.
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
    """Limits of a job from the command line, equal on all nodes: numbers of nodes and ranks, and number of restarts."""

    nodes: tuple[int, int]
    """Minimum and maximum number of nodes that train."""
    ranks: tuple[int, int]
    """Minimum number of slots that must be available (a slot runs one rank), and maximum number of ranks that train."""
    max_restarts: int
    """Maximum number of consecutive restarts without a newer checkpoint."""
    last_call_s: float
    """Seconds to wait for further nodes when at least the minimum but not the maximum number of nodes is ready. The wait starts
    again whenever a node joins."""


@dataclass(frozen=True)
class NodeOffer:
    """What a node contributes to the job: the number of ranks that it can run, and its address."""

    places: int
    """Number of ranks that the node can run (its slots)."""
    address: str
    """Address at which ranks of other nodes reach the node."""


@dataclass(frozen=True)
class NodeReport:
    """How the ranks of a node ended: the type of end, such as "failed", the exit code, and the reason as text."""

    kind: EndType
    code: int
    words: str


@dataclass(frozen=True)
class RankProgress:
    """Iterations that the ranks of a node have reached since they were last started."""

    start_iteration: int | None = None
    """Iteration of the checkpoint from which the ranks continue; None before they have loaded it."""
    last_iteration: int | None = None
    """Last iteration that the ranks have finished; None before the first."""

    @property
    def has_steps(self) -> bool:
        """Whether the ranks have finished a training step since they were last started."""
        return self.start_iteration is not None and self.last_iteration is not None and self.last_iteration > self.start_iteration


@dataclass(frozen=True)
class StartPlan:
    """Plan for starting the ranks of a job once: number of ranks on each node, and flags of the ranks. Ranks are numbered in the
    order of the nodes."""

    counts: Mapping[str, int]
    """Number of ranks on each node, by name of the node. The order of the nodes is that of their ranks."""
    flags: tuple[str, ...]
    """Flags that are appended to the user's command line for the ranks."""
    address: str
    """Address of the node with rank 0, at which the ranks connect to each other (MASTER_ADDR)."""
    port: int
    notes: tuple[str, ...] = ()
    """Log lines that explain how the layout differs from the one that the user requested."""

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return sum(self.counts.values())


@dataclass(frozen=True)
class JobState:
    """State of a job, which all its nodes share: its nodes, which of them train, and how their ranks ended.

    The ranks of all nodes start together, and start again after a failure. `generation` counts these starts.
    """

    generation: int = 0
    """Number of times that the ranks of the job have been started."""
    phase: Phase = "gathering"
    members: Mapping[str, NodeOffer] = field(default_factory=dict)
    """All nodes of the job that are not lost, by name, with their numbers of ranks and addresses."""
    ready: tuple[str, ...] = ()
    """Names of the nodes without running ranks that wait until the ranks are started again, in the order in which the nodes
    joined."""
    order: tuple[str, ...] = ()
    """Names of the nodes that took part in the most recent start of the ranks, in the order in which their ranks are
    numbered."""
    plan: StartPlan | None = None
    """Plan by which the ranks were last started; None before the first start."""
    reports: Mapping[str, NodeReport] = field(default_factory=dict)
    """End of the ranks of each node (exit codes and reasons), by name of the node. Nodes whose ranks still run are missing."""
    told: bool = False
    """Whether a node has requested all nodes to stop the job."""
    gentle: bool = False
    """Whether running ranks may save a checkpoint before they end for a restart."""
    why: str = ""
    """Reason for the last restart, for the log."""
    state_at: int = -1
    """Highest iteration of a checkpoint from which ranks have started."""
    stale: int = 0
    """Number of restarts after failures since the ranks first started from the checkpoint of iteration `state_at`. When ranks that
    started from a newer checkpoint fail, the number becomes 1."""
    code: int = 0
    """Exit code of the job once it has ended. Until then, exit code of the first failure since the ranks last started from a newer
    checkpoint."""
    words: str = ""
    """Reason for the end of the job, for the log."""
    batch: int | None = None
    """Global batch size with which the ranks were first started. Restarts keep it. None before the first start."""

    def add_node(self, name: str, offer: NodeOffer, limits: JobLimits, *, requests_restart: bool = False) -> JobState:
        """Return the state after adding a node whose ranks are not running. The node waits until the ranks of the job are started
        again.

        Args:
            name: name of the node.
            offer: number of ranks that the node can run, and its address.
            requests_restart: restart the job now to include this node, unless the job already has its maximum number of nodes.
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
            name: name of the node.
            generation: `JobState.generation` with which these ranks were started. A report about earlier ranks is ignored.
            report: how the ranks ended.
            progress: iterations that these ranks have reached.
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
        """Return the state after a node was lost together with its ranks.

        Args:
            name: name of the lost node.
            progress: iterations that the ranks have reached, on the node that reports the loss.
        """
        if name not in self.members:
            return self
        members = {member: offer for member, offer in self.members.items() if member != name}
        state = replace(self, members=members, ready=tuple(member for member in self.ready if member != name))
        return state._evaluate_reports(progress, limits) if self.phase == "running" else state

    def remove_leaving_node(self, name: str) -> JobState:
        """Return the state after a node has left the job by request. If its ranks are running, all ranks save a checkpoint, end,
        and restart without the node."""
        if name not in self.members or self.phase == "over":
            return self
        members = {member: offer for member, offer in self.members.items() if member != name}
        state = replace(self, members=members, ready=tuple(member for member in self.ready if member != name))
        return state._open_round(f"{name} leaves", saves_first=True) if self.phase == "running" and name in self.order else state

    def request_stop(self, code: int) -> JobState:
        """Return the state in which the job stops with this exit code. Running ranks first save a checkpoint."""
        if self.phase == "gathering":
            return self.end_job(code, "stopped before the ranks were started")
        return replace(self, told=True) if self.phase == "running" else self

    def end_job(self, code: int, reason: str) -> JobState:
        """Return the state after the job has ended with this exit code and reason. A job that has ended before keeps its exit code
        and reason."""
        return self if self.phase == "over" else replace(self, phase="over", code=code, words=reason)

    def can_start(self, limits: JobLimits, quiet_s: float) -> bool:
        """Return whether the ranks can be started on the nodes that are ready.

        The minimum number of nodes must be ready, and they must be able to run the minimum number of ranks. If further nodes may
        still become ready, `ready` must not have changed for `last_call_s` seconds.

        Args:
            quiet_s: seconds since `ready` last changed.
        """
        num_slots = sum(self.members[name].places for name in self.ready)
        if self.phase != "gathering" or len(self.ready) < limits.nodes[0] or num_slots < limits.ranks[0]:
            return False
        has_all_nodes = set(self.ready) == set(self.members) and (self.generation > 0 or len(self.ready) >= limits.nodes[1])
        return has_all_nodes or quiet_s >= limits.last_call_s

    def order_nodes(self, max_nodes: int) -> tuple[str, ...]:
        """Return the ready nodes in the order in which their ranks are numbered. Nodes whose ranks were started last keep their
        positions, and new nodes take the positions of lost nodes.

        Args:
            max_nodes: maximum number of nodes that train.
        """
        newcomers = [name for name in self.ready if name not in self.order]
        previous_order = [name if name in self.ready else newcomers.pop(0) if newcomers else None for name in self.order]
        return tuple(name for name in (*previous_order, *newcomers) if name is not None)[:max_nodes]

    def start_ranks(self, plan: StartPlan, batch: int | None) -> JobState:
        """Return the state in which the nodes of a plan run their ranks. Ready nodes that are not in the plan become spare nodes.

        Args:
            batch: global batch size of the job. It is only stored at the first start of the ranks.
        """
        order = tuple(name for name, count in plan.counts.items() if count)
        spares = tuple(name for name in self.ready if name not in order)
        start = replace(self, generation=self.generation + 1, phase="running", order=order, ready=spares, plan=plan)
        return replace(start, reports={}, gentle=False, batch=batch if self.batch is None else self.batch)

    def _evaluate_reports(self, progress: RankProgress, limits: JobLimits) -> JobState:
        """Return the state that follows from the reports of nodes whose ranks have ended: the job continues, restarts or ends.

        Args:
            progress: iterations that the ranks have reached.
        """
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
        """Return the state after a failure. The nodes gather to restart the ranks, or the job ends after too many restarts without
        a newer checkpoint.

        Args:
            reason: description of the failure.
            code: exit code of the failed ranks.
            progress: iterations that the ranks have reached.
        """
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
    """Convert the state of a job to JSON text, in which form the nodes share it."""
    return json.dumps(dataclasses.asdict(state))


def from_json(text: str) -> JobState:
    """Parse the state of a job from the JSON text that `to_json` has returned."""
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
