"""What an export of weights has written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Export:
    """The result of an export."""

    folder: Path
    family: str
    dtype: str
    num_parameters: int
    num_bytes: int
    """Bytes of the weights."""
    peak_bytes: int
    """The most bytes of weights held at a time: the largest parameter in its own dtype and in that of the files, or in parts."""
    notes: list[str]
    """Notes for the user."""
    checked: str | None
    """The sentence that `check` returned."""
