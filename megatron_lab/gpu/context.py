"""Argument and result of a GPU check, and the exceptions by which a check fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
"""Folder that contains `pretrain_gpt.py` and `megatron_lab`: the root of the repository, or the folder of the installed package."""


class CheckFailed(Exception):
    """Raised by a check that fails. The message contains the measured and the allowed value."""


class DoesNotFit(Exception):
    """Raised by a check if, according to the memory plan, it needs more memory than the device has.

    The message contains both sizes.
    """


@dataclass(frozen=True)
class Outcome:
    """Result that a check returns if it passes."""

    figure: str
    """Measured values as one line of text for the user."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Values for later checks and for the report, of types that JSON supports."""


@dataclass(frozen=True)
class CheckContext:
    """Argument of every check: the device, a folder for files, and the results of earlier checks."""

    device: str
    """ "cuda" or "cpu"."""
    folder: Path
    """Folder for the files of this check."""
    data: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """`Outcome.data` of each earlier check, by the name of the check."""
    send_partial: Callable[[Outcome], None] = lambda outcome: None
    """Function that reports a partial result. If the check does not complete, for example because its process dies, that result is
    used."""

    @property
    def on_cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device == "cuda"


def require_at_most(value: float, limit: float, label: str) -> str:
    """Check a measured value against its limit. Return a text with both, for `Outcome.figure`.

    Args:
        label: name of the value, for the text.

    Raises:
        CheckFailed: the value is above the limit, or is NaN.
    """
    figure = f"{label} {value:.1e} (at most {limit:.0e})"
    if not value <= limit:
        raise CheckFailed(figure)
    return figure
