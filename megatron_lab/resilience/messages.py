"""What a supervisor and its envoy say to each other. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lab.resilience.roll import JobLimits, NodeReport, StartPlan


@dataclass(frozen=True)
class Enter:
    """The supervisor has no ranks and wants some."""

    places: int


@dataclass(frozen=True)
class Ended:
    """Its ranks have ended."""

    generation: int
    report: NodeReport
    enters: Enter | None
    """Whether it wants others at once."""


@dataclass(frozen=True)
class Stop:
    """It was asked to stop the job, which ends with this code."""

    code: int


@dataclass(frozen=True)
class Leave:
    """It was asked to take this node out of the job."""


@dataclass(frozen=True)
class Start:
    """To the supervisor: start these ranks."""

    generation: int
    node: int
    plan: StartPlan
    may_lose: int
    """Places that the job can do without."""
    why: str


@dataclass(frozen=True)
class Halt:
    """To the supervisor: end the ranks of the last start, if they run, and enter again."""

    why: str
    gentle: bool


@dataclass(frozen=True)
class StopRanks:
    """To the supervisor: another node was asked to stop the job."""


@dataclass(frozen=True)
class Over:
    """To the supervisor: the job has ended."""

    code: int
    words: str


@dataclass(frozen=True)
class Say:
    """To the supervisor: a line for the log."""

    text: str


@dataclass(frozen=True)
class EnvoyOrders:
    """What an envoy needs to know."""

    name: str
    """This node's, which no other process ever has."""
    address: str
    argv: tuple[str, ...]
    limits: JobLimits
    lost_after_s: float
    """Seconds without a beat after which a node is taken for lost."""
    gives_up_after_s: float
    """Seconds after which a round that cannot close ends the job."""
    at_once: bool
    """Whether a restart is asked for when this node comes to a job that runs."""


Wish = Enter | Ended | Stop | Leave
"""What a supervisor may say."""
