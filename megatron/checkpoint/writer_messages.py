"""Messages between the training process of a rank and its writer process (`writer_main.py`), and names of the files by which writer
processes report to each other.

Needs no torch.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron.checkpoint.save_folder import Retention
from megatron.checkpoint.save_plan import SavePlan


class WriterSetup(NamedTuple):
    """First message to a writer process: the files that each save writes. The slices lie in the shared memory as
    `SavePlan.get_buffer_ranges` returns."""

    location: str
    """Path or URL of the save folder."""
    plan: SavePlan
    num_ranks: int
    retention: Retention


class SaveRequest(NamedTuple):
    """Message to a writer process: write the slices in the shared memory to the rank's files of a checkpoint."""

    iteration: int
    token: str
    small_files: dict[str, bytes] | None
    """Contents of `config.json` and `state.json`, for the writer that commits the checkpoint of all ranks. None for all other
    writers."""
    failed_iterations: tuple[int, ...] = ()
    """Iterations whose saves have failed. Rank 0's writer process, which commits checkpoints, removes their files."""


class FailureMark(NamedTuple):
    """Message to a new writer process: write a failure mark, because the previous writer process died during a save.

    The failure mark is a file that tells the writer process of rank 0 not to wait for the files of this rank.
    """

    iteration: int
    token: str
    failure: str


class RanksFinished(NamedTuple):
    """Message to the writer process of rank 0, which commits checkpoints: every rank has written its files or failed."""

    failure: str | None
    """Reasons why ranks could not write their files. None if all ranks have written them."""


class Shutdown(NamedTuple):
    """Last message to a writer process: remove the files of failed saves, then end."""

    failed_iterations: tuple[int, ...] = ()
    """Iterations whose saves have failed. Rank 0's writer process removes their files."""
    token: str = ""


Message = WriterSetup | SaveRequest | FailureMark | RanksFinished | Shutdown


class SaveProgress(NamedTuple):
    """Reply of a writer process during a save. It shows the training process that the writer is not stuck."""

    activity: str
    """Current activity of the writer, such as "the write of its files". It becomes part of log lines."""
    has_advanced: bool
    """Whether the writer has made progress since its last report: a new activity, or more data on the disk."""


class RankResult(NamedTuple):
    """Reply of a writer process: the files of its rank are written, or could not be written. Training may then fill the shared
    memory again."""

    failure: str | None
    """Reason why the files could not be written. None if they were written."""


class CommitResult(NamedTuple):
    """Reply of rank 0's writer process, which commits checkpoints: the checkpoint is complete, or has failed."""

    iteration: int
    failure: str | None
    """Reason why there is no checkpoint. None if the checkpoint is complete."""
    content_digest: str
    duration_s: float
    """Seconds from the receipt of the `SaveRequest` to this reply."""


class LogLine(NamedTuple):
    """Reply of a writer process with a line for the log: a problem that does not affect the checkpoint, such as old checkpoints
    that cannot be removed."""

    text: str


Reply = SaveProgress | RankResult | CommitResult | LogLine


def get_rank_manifest_name(rank: int) -> str:
    """Return the name of the manifest that a rank writes for its files: a JSON file with their tensors, slices and checksums."""
    return f"rank_{rank:05d}.part.json"


def get_failure_mark_name(rank: int) -> str:
    """Return the name of the file in which a rank says why it could not write its files."""
    return f"rank_{rank:05d}.failed"
