"""What a comparison finds, in the terms in which it is told."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What differs, in the order in which one is the cause of the next."""

    PARAMETERS = "parameters"
    """Some are missing, unknown, of another shape."""
    START = "start weights"
    INITIAL = "initial weights"
    FORWARD = "forward"
    COUNT = "token count"
    LOSS = "loss"
    GRADIENT = "gradient"
    NORM = "gradient norm"
    UPDATE = "update"
    REPLICAS = "replicas"
    EVALUATION = "evaluation"
    TRANSFER = "transfer"


@dataclass(frozen=True)
class Finding:
    """One thing that differs."""

    kind: Kind
    step: int
    """Counted from 1; 0 is before the first."""
    place: str
    """Parameter or module, with layer and stage."""
    text: str
    """What is wrong there and what it means, in plain words."""
    relative: float
    """The difference, in parts of the reference."""
    names: tuple[str, ...] = ()
    """Parameters or activations that it is true of, the place's own first."""
    stages: tuple[int, ...] = ()
    group: str = ""
    """The ranks along which it shows (tensor, data, pipeline), if it does along some."""
    ranks: tuple[int, ...] = ()
    """Ranks on which it shows, if not on all."""

    def line(self) -> str:
        """In one line."""
        when = f"step {self.step}" if self.step else "before step 1"
        return f"{self.kind} of {self.place}, {when}: {self.text}"
