"""Argument and result of a GPU check, and the exceptions by which a check fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
"""Folder that contains `pretrain_gpt.py` and `megatron_lab`: the root of the repository, or the folder of the installed package."""


class CheckFailed(Exception):
    """Raised by a check that fails. The message says what was measured and what was expected."""


class DoesNotFit(Exception):
    """Raised by a check that needs more memory than the device has, according to the memory plan (the predicted memory of the run).

    The message contains both sizes.
    """


@dataclass(frozen=True)
class Outcome:
    """Result that a check returns if it passes."""

    figure: str
    """Measured values of the check as one line of text for the user."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Measured values for later checks and for the report, by name. They have types that JSON supports."""


@dataclass(frozen=True)
class CheckContext:
    """Argument of every check: the device, a folder for files, and the results of earlier checks."""

    device: str
    """Type of the device: "cuda" or "cpu"."""
    folder: Path
    """Folder to which this check may write files."""
    data: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Measured values (`Outcome.data`) of each earlier check, by the name of the check."""
    send_partial: Callable[[Outcome], None] = lambda outcome: None
    """Function that reports a partial result. The partial result is used if the check does not complete, for example because
    its process dies."""

    @property
    def on_cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device == "cuda"


def require_at_most(value: float, limit: float, label: str) -> str:
    """Check that a measured value is at most `limit`. Return a text with both numbers, for `Outcome.figure`.

    Args:
        label: name of the value in the text.

    Raises:
        CheckFailed: the value is above the limit, or is NaN.
    """
    figure = f"{label} {value:.1e} (at most {limit:.0e})"
    if not value <= limit:
        raise CheckFailed(figure)
    return figure
