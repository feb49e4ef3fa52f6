"""Errors and wording for checkpoints that cannot be written or used."""

from __future__ import annotations

MOST_LISTED = 10
"""Longer lists in messages are cut to this many entries, with the count of the rest."""


class CheckpointError(ValueError):
    """A checkpoint cannot be written, or does not fit the run. The message says what to do."""


class MismatchError(CheckpointError):
    """The settings do not go with the checkpoint: another start with the same would find the same."""


class DamagedCheckpointError(CheckpointError):
    """Files of a checkpoint are missing, truncated or altered."""


def listed(entries: list[str], separator: str = ", ") -> str:
    """The entries as text, cut to `MOST_LISTED`."""
    shown = separator.join(entries[:MOST_LISTED])
    return shown if len(entries) <= MOST_LISTED else f"{shown}{separator}and {len(entries) - MOST_LISTED} more"


def ranks_named(ranks: list[int]) -> str:
    """The ranks as text: `rank 3`, or `ranks 3, 4`."""
    return f"rank{'s' * (len(ranks) > 1)} {listed([str(rank) for rank in ranks])}"


class TruncatedError(OSError):
    """A file ends before the bytes that were asked for."""
