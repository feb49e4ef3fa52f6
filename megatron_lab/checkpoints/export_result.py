"""Result of exporting weights to a Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Export:
    """Result of exporting weights to a Hugging Face folder, for the summary and the model card."""

    folder: Path
    family: str
    dtype: str
    num_parameters: int
    num_bytes: int
    """Size of the exported weights in bytes."""
    max_memory_bytes: int
    """Peak memory of weights during the export, in bytes. Parameters are converted one at a time, so it is the size of the largest
    parameter as read from the source, plus the size of the tensors to which it is converted."""
    notes: list[str]
    """Sentences for the user about what was left out or converted in a special way, such as settings that config.json cannot
    express."""
    verification: str | None
    """Result of the comparison with transformers, as a sentence. None if there was no comparison."""
