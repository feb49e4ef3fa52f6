"""Messages between a rank and its writer process (`writer_main.py`), and names of the files by which writers report to each other.

Needs no torch.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron.checkpoint.save_folder import Retention
from megatron.checkpoint.save_plan import SavePlan


class WriterSetup(NamedTuple):
    """First message to a writer process: the files that each save writes. `SavePlan.buffer_ranges` returns where each slice is in
    the shared memory."""

    location: str
    """Path or URL of the save folder."""
    plan: SavePlan
    num_ranks: int
    retention: Retention


class SaveRequest(NamedTuple):
    """Message to a writer process: write the shared memory, which training has filled, as one checkpoint."""

    iteration: int
    token: str
    small_files: dict[str, bytes] | None
    """Contents of `config.json` and `state.json`, for the writer that commits the checkpoint of all ranks. None for all other
    writers."""
    failed_iterations: tuple[int, ...] = ()
    """Iterations whose saves have failed. The writer that commits checkpoints removes their files."""


class FailureMark(NamedTuple):
    """Message to a new writer process: write a failure mark, because the previous writer process died during a save. The writer
    that commits checkpoints finds the mark."""

    iteration: int
    token: str
    failure: str


class RanksFinished(NamedTuple):
    """Message to the writer that commits checkpoints: every rank has reported whether its files are written."""

    failure: str | None
    """Reasons of the ranks that could not write their files. None if all ranks have written them."""


class Shutdown(NamedTuple):
    """Last message to a writer process."""

    failed_iterations: tuple[int, ...] = ()
    """Iterations whose saves have failed, as in `SaveRequest`."""
    token: str = ""


Message = WriterSetup | SaveRequest | FailureMark | RanksFinished | Shutdown


class SaveProgress(NamedTuple):
    """Reply of a writer process during a save. It shows the training process that the writer is not stuck."""

    activity: str
    """Current activity of the writer, such as "the write of its files". It becomes part of log lines."""
    has_advanced: bool
    """Whether the writer has made progress since its last report: a new activity, or more data on the disk."""


class RankResult(NamedTuple):
    """Reply of a writer process when the files of its rank are written or have failed. Training may then fill the shared memory
    again."""

    failure: str | None
    """Reason for a failed write. None if the files were written."""


class CommitResult(NamedTuple):
    """Reply of the writer that commits checkpoints: the checkpoint is complete, or has failed."""

    iteration: int
    failure: str | None
    """Reason for the failure. None if the checkpoint is complete."""
    content_digest: str
    duration_s: float
    """Seconds from the receipt of the `SaveRequest` to this reply."""


class LogLine(NamedTuple):
    """Reply of a writer process with a line for the log, about a problem after the checkpoint was complete."""

    text: str


Reply = SaveProgress | RankResult | CommitResult | LogLine


def rank_manifest_name(rank: int) -> str:
    """Return the name of a rank's manifest: the file that lists the data files of the rank."""
    return f"rank_{rank:05d}.part.json"


def failure_mark_name(rank: int) -> str:
    """Return the name of the file with the reason why a rank could not write its files."""
    return f"rank_{rank:05d}.failed"
