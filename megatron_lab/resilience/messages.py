"""Messages between the launcher of a node (supervisor) and its helper process that meets the other nodes (envoy). Does not import
torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lab.resilience.job_state import JobLimits, NodeReport, StartPlan


@dataclass(frozen=True)
class RanksRequest:
    """Message from the launcher of a node (supervisor) to its rendezvous process (envoy): this node can run ranks and wants to take
    part in the next start."""

    num_slots: int
    """Number of ranks that this node can run."""


@dataclass(frozen=True)
class RanksEnded:
    """Message from the launcher of a node (supervisor) to its rendezvous process (envoy): the ranks of this node have ended."""

    generation: int
    report: NodeReport
    next_request: RanksRequest | None
    """Request to run ranks again; None if this node does not want new ranks."""


@dataclass(frozen=True)
class StopRequest:
    """Message from the launcher of a node (supervisor) to its rendezvous process (envoy): a stop signal has arrived, so all nodes
    must stop the job with this exit code."""

    code: int


@dataclass(frozen=True)
class LeaveRequest:
    """Message from the launcher of a node (supervisor) to its rendezvous process (envoy): a stop signal has arrived, and only this
    node leaves the job (--leave-on-signal)."""


@dataclass(frozen=True)
class StartCommand:
    """Command from the rendezvous process of a node (envoy) to its launcher (supervisor): start the ranks of this node."""

    generation: int
    node_rank: int
    """Position of this node in the order in which ranks are numbered."""
    plan: StartPlan
    num_spare_slots: int
    """Number of slots (a slot runs one rank) that the job can lose without falling below its minimum number of ranks."""
    reason: str


@dataclass(frozen=True)
class EndRanksCommand:
    """Command from the rendezvous process of a node (envoy) to its launcher (supervisor): end the running ranks of this node, and
    request new ones."""

    reason: str
    saves_first: bool
    """Whether the ranks save a checkpoint before they end."""


@dataclass(frozen=True)
class StopRanksCommand:
    """Command from the rendezvous process of a node (envoy) to its launcher (supervisor): stop the ranks, because the job was asked
    to stop on another node."""


@dataclass(frozen=True)
class JobEnded:
    """Message from the rendezvous process of a node (envoy) to its launcher (supervisor): the job has ended, with this exit code
    and reason."""

    code: int
    reason: str


@dataclass(frozen=True)
class LogMessage:
    """Message from the rendezvous process of a node (envoy) to its launcher (supervisor): write this text to the log."""

    text: str


@dataclass(frozen=True)
class EnvoyConfig:
    """Configuration of the rendezvous process of a node (envoy), from the command line of the node's launcher (supervisor)."""

    name: str
    """Unique name of this node in the job. A restarted supervisor has a new name."""
    address: str
    argv: tuple[str, ...]
    """Flags of the run, as given on the command line."""
    limits: JobLimits
    node_timeout_s: float
    """Seconds without a heartbeat after which a node is considered lost (--lost-after-s)."""
    join_timeout_s: float
    """Seconds after which the job ends if its ranks cannot be started (--join-timeout-s)."""
    joins_at_once: bool
    """Whether this node requests a restart when it joins a running job with fewer nodes than the maximum (--join-at-once)."""


SupervisorMessage = RanksRequest | RanksEnded | StopRequest | LeaveRequest
"""Message from a supervisor to its envoy."""
