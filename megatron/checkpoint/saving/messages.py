"""What training and the process that writes tell each other. Needs no torch."""

from __future__ import annotations

from typing import NamedTuple

from megatron.checkpoint.saving.part import Part


class Begin(NamedTuple):
    """Sent once: what is written at every save. The data lies in the shared memory in the order of the files and their boxes."""

    location: str
    """The save folder."""
    part: Part
    num_ranks: int
    keep_last: int | None
    save_retain_interval: int | None


class Save(NamedTuple):
    """The shared memory is filled: write it."""

    iteration: int
    token: str
    files: dict[str, bytes] | None
    """`config.json` and `state.json`, for the process that makes a checkpoint of the parts of all ranks; None for the others."""


class AllWritten(NamedTuple):
    """For the process that waits for the parts: every rank says that its part is written."""


class GiveUp(NamedTuple):
    """For the process that waits for the parts: one will not come."""

    reason: str


class End(NamedTuple):
    """There will be no other message."""


Message = Begin | Save | AllWritten | GiveUp | End


class Alive(NamedTuple):
    """The save goes on: more is on the disk than before, or the parts of other ranks are waited for."""


class PartWritten(NamedTuple):
    """This rank's part is on the disk, or could not be written; the shared memory may be filled anew."""

    iteration: int
    failure: str | None


class Committed(NamedTuple):
    """The checkpoint is complete, or will not be."""

    iteration: int
    failure: str | None
    content_digest: str
    seconds: float
    """Since the memory was filled."""


class Note(NamedTuple):
    """Something went wrong after the checkpoint was complete."""

    text: str


Reply = Alive | PartWritten | Committed | Note


def part_file(rank: int) -> str:
    """Name of the file in which a rank describes the part that it has written."""
    return f"rank_{rank:05d}.part.json"


def failure_mark(rank: int) -> str:
    """Name of the file in which a rank says why it could not write its part."""
    return f"rank_{rank:05d}.failed"
