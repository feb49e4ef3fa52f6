"""Messages between a supervisor and its envoy. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lab.resilience.job_state import JobLimits, NodeReport, StartPlan


@dataclass(frozen=True)
class RanksRequest:
    """Message of a supervisor without ranks: this node wants to take part in the next start."""

    num_slots: int
    """Number of ranks that this node can run."""


@dataclass(frozen=True)
class RanksEnded:
    """Message of a supervisor: the ranks of this node have ended."""

    generation: int
    report: NodeReport
    next_request: RanksRequest | None
    """Request to take part in the next start; None if the supervisor does not want new ranks."""


@dataclass(frozen=True)
class StopRequest:
    """Message of a supervisor that received a stop signal: stop the job on all nodes, with this exit code."""

    code: int


@dataclass(frozen=True)
class LeaveRequest:
    """Message of a supervisor that received a stop signal: only this node leaves the job (--leave-on-signal)."""


@dataclass(frozen=True)
class StartCommand:
    """Command to the supervisor: start the ranks of this node."""

    generation: int
    node_rank: int
    """Position of this node in the order of the nodes."""
    plan: StartPlan
    num_spare_slots: int
    """Number of slots (a slot runs one rank) that the job can lose and still have its minimum number of ranks."""
    reason: str


@dataclass(frozen=True)
class EndRanksCommand:
    """Command to the supervisor: end the ranks of the last start if they still run, and request new ranks."""

    reason: str
    saves_first: bool
    """Whether the ranks save a checkpoint before they end."""


@dataclass(frozen=True)
class StopRanksCommand:
    """Command to the supervisor: stop the ranks, because another node was asked to stop the job."""


@dataclass(frozen=True)
class JobEnded:
    """Message to the supervisor: the job has ended, with this exit code and reason."""

    code: int
    reason: str


@dataclass(frozen=True)
class LogMessage:
    """Message to the supervisor: write this text to the log."""

    text: str


@dataclass(frozen=True)
class EnvoyConfig:
    """Configuration of an envoy, from the command line of its supervisor."""

    name: str
    """Name of this node. No other supervisor process ever has the same name."""
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
