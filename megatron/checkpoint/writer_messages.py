"""The messages between a rank and the process that writes for it (`writer_main.py`), and the files by which the writers tell each
other how they have ended. Needs no torch."""

from __future__ import annotations

from typing import NamedTuple

from megatron.checkpoint.rank_parts import RankPart
from megatron.checkpoint.save_folder import Retention


class Begin(NamedTuple):
    """Sent once: what each save writes. The data lies in the shared memory as `RankPart.places` says."""

    location: str
    """The save folder, as a path or URL."""
    part: RankPart
    num_ranks: int
    retention: Retention


class Save(NamedTuple):
    """The shared memory is filled: write it."""

    iteration: int
    token: str
    files: dict[str, bytes] | None
    """`config.json` and `state.json`, for the process that makes a checkpoint of the parts of all ranks; None for the others."""
    failed: tuple[int, ...] = ()
    """Iterations whose saves have failed. The process that makes checkpoints removes what they left."""


class Mark(NamedTuple):
    """The process before has ended in a save: tell the one that waits for the parts."""

    iteration: int
    token: str
    failure: str


class PartsEnded(NamedTuple):
    """To the process that waits for the parts: every rank reports that its part is written, or why it will not come."""

    failure: str | None


class End(NamedTuple):
    """There will be no other message."""

    failed: tuple[int, ...] = ()
    """See `Save`."""
    token: str = ""


Message = Begin | Save | Mark | PartsEnded | End


class Alive(NamedTuple):
    """The process goes on with a save."""

    doing: str
    """What it does, or waits for."""
    further: bool
    """Whether it has come further: what it does is new, or more is on the disk than before."""


class PartWritten(NamedTuple):
    """This rank's part is on the disk, or could not be written. The shared memory may be filled again."""

    failure: str | None


class Committed(NamedTuple):
    """The checkpoint is complete, or will not be."""

    iteration: int
    failure: str | None
    content_digest: str
    seconds: float
    """Seconds since the memory was filled."""


class Note(NamedTuple):
    """A line for the log: something went wrong after the checkpoint was complete."""

    text: str


Reply = Alive | PartWritten | Committed | Note


def part_file(rank: int) -> str:
    """Name of the file in which a rank describes the part that it has written."""
    return f"rank_{rank:05d}.part.json"


def failure_mark(rank: int) -> str:
    """Name of the file with the reason why a rank could not write its part."""
    return f"rank_{rank:05d}.failed"
