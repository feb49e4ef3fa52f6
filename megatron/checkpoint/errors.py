"""Errors about checkpoints that cannot be written or loaded, and functions that format their messages."""

from __future__ import annotations

MAX_LISTED = 10
"""Maximum number of entries that `format_list` shows. Longer lists end with the number of omitted entries."""


class CheckpointError(ValueError):
    """Error for a checkpoint that cannot be written, or that does not fit the run. The message says what the user can do."""


class MismatchError(CheckpointError):
    """Error for settings that do not fit the checkpoint. A restart does not help: with unchanged settings and checkpoint it fails
    again."""


class DamagedCheckpointError(CheckpointError):
    """Error for files of a checkpoint that are missing, truncated or altered."""


def format_list(items: list[str], separator: str = ", ") -> str:
    """Join items into one string for an error message. After `MAX_LISTED` items, only the number of further ones is given."""
    text = separator.join(items[:MAX_LISTED])
    return text if len(items) <= MAX_LISTED else f"{text}{separator}and {len(items) - MAX_LISTED} more"


def format_ranks(ranks: list[int]) -> str:
    """Format ranks for an error message: `rank 3`, or `ranks 3, 4`."""
    return f"rank{'s' * (len(ranks) > 1)} {format_list([str(rank) for rank in ranks])}"


class TruncatedError(OSError):
    """Error for a file that ends before the requested bytes."""
