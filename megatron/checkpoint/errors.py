"""What a user is told when a checkpoint cannot be written or used."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from torch.distributed.checkpoint.api import CheckpointException  # the process that writes files does without torch

MOST_LISTED = 10
"""Longer lists in messages are cut to this many entries, with the count of the rest."""


class CheckpointError(ValueError):
    """A checkpoint cannot be written, or does not fit the run; the message says what to do."""


class DamagedCheckpointError(CheckpointError):
    """Files of a checkpoint are missing, truncated or altered."""


def listed(entries: list[str], separator: str = ", ") -> str:
    """The entries as text, cut to `MOST_LISTED`."""
    shown = separator.join(entries[:MOST_LISTED])
    return shown if len(entries) <= MOST_LISTED else f"{shown}{separator}and {len(entries) - MOST_LISTED} more"


def ranks_named(ranks: list[int]) -> str:
    """The ranks as text: `rank 3`, or `ranks 3, 4`."""
    return f"rank{'s' * (len(ranks) > 1)} {listed([str(rank) for rank in ranks])}"


def raise_for_user(failed: CheckpointException, doing: str) -> NoReturn:
    """Turn the failures of some ranks, which torch reports to every rank, into one error.

    Args:
        failed: what torch.distributed.checkpoint raised.
        doing: what could not be done, e.g. "cannot save /runs/a/iter_0000100".

    Raises:
        DamagedCheckpointError: a rank found damaged files.
        CheckpointError: ranks failed in a way that a user can act on (`OSError` and `CheckpointError`).
        RuntimeError: anything else, which is a fault of the program, with every rank's trace.
    """
    causes = {rank: cause for rank, (cause, _) in failed.failures.items()}
    first = next(iter(causes.values()))
    if not all(isinstance(cause, (CheckpointError, OSError)) for cause in causes.values()):
        raise RuntimeError(f"{doing}: {failed}") from first
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for rank, cause in sorted(causes.items()):
        ranks_of[str(cause)].append(rank)
    # A disagreement between settings and checkpoint is found by one rank for all; anything else is told with its ranks.
    reasons = [
        text if type(causes[ranks[0]]) is CheckpointError else f"{ranks_named(ranks)}: {text}" for text, ranks in ranks_of.items()
    ]
    damaged = any(isinstance(cause, DamagedCheckpointError) for cause in causes.values())
    kind = DamagedCheckpointError if damaged else CheckpointError
    raise kind(f"{doing}:\n  " + listed(reasons, "\n  ")) from first
