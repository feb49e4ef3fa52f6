"""Arguments, results and exceptions of checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
"""The folder of `pretrain_gpt.py` and `megatron_lab`: the root of the repository, or where the package is installed."""


class CheckFailed(Exception):
    """Failure of a check. The message has the measured value and the allowed one."""


class DoesNotFit(Exception):
    """The device is too small for a check, by the plan. The message has both sizes."""


@dataclass(frozen=True)
class Outcome:
    """The result of a check that passed."""

    figure: str
    """The measured values, on one line."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Values for other checks and for the report, of types that JSON has."""


@dataclass(frozen=True)
class CheckContext:
    """The device of a check, a folder of its own, and the results of the checks before it."""

    device: str
    """ "cuda" or "cpu"."""
    folder: Path
    data: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """`Outcome.data` of earlier checks, by the check's name."""
    send_partial: Callable[[Outcome], None] = lambda outcome: None
    """Report what is known so far. It counts if the check does not reach its end."""

    @property
    def on_cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device == "cuda"


def require_at_most(value: float, limit: float, what: str) -> str:
    """Return a figure that names a value and its limit.

    Raises:
        CheckFailed: the value is above the limit or not a number.
    """
    figure = f"{what} {value:.1e} (at most {limit:.0e})"
    if not value <= limit:
        raise CheckFailed(figure)
    return figure
