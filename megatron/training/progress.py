"""How far a run has come: a few integers and what it has read, which with the weights and moments are its whole state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron.data.history import Phase

_COUNTS = ("iteration", "consumed_samples", "updated_samples", "skipped_iterations")


@dataclass
class Progress:
    """Counts since the start of the run, across restarts."""

    iteration: int = 0
    """Steps done, skipped ones included."""
    consumed_samples: int = 0
    """Samples read: the place in the order of data and in the batch-size ramp."""
    updated_samples: int = 0
    """Samples of the steps that made an update: the place in the schedules of learning rate and weight decay."""
    skipped_iterations: int = 0
    """Steps without an update."""

    phases: list[Phase] = field(default_factory=list)
    """Data settings since the start of the run; filled on ranks that read samples."""

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {name: getattr(self, name) for name in _COUNTS} | {"phases": [phase.to_json() for phase in self.phases]}

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> Progress:
        """From a checkpoint."""
        return cls(
            **{name: int(state[name]) for name in _COUNTS}, phases=[Phase.from_json(saved) for saved in state.get("phases", ())]
        )
