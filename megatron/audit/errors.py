"""What is raised when a run finds that it is wrong."""

from __future__ import annotations

from collections.abc import Sequence

MOST_LINES = 8
"""Findings that an error tells in full."""


class AuditError(RuntimeError):
    """Replicas differ, or a gradient was not summed or counted as its record says. Raised on every rank with the same words."""


def raise_audit(head: str, findings: Sequence[str], advice: str) -> None:
    """Say what was found; nothing if there is nothing.

    Raises:
        AuditError: there are findings. Every rank must come here with the same ones.
    """
    if not findings:
        return
    more = [f"and {len(findings) - MOST_LINES} more"] if len(findings) > MOST_LINES else []
    raise AuditError("\n  ".join([head, *findings[:MOST_LINES], *more, advice]))


def ranks_in_words(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 1 and 2`."""
    shown = [str(rank) for rank in ranks[:MOST_LINES]]
    if len(ranks) > MOST_LINES:
        return f"ranks {', '.join(shown)} and {len(ranks) - MOST_LINES} more"
    return f"rank {shown[0]}" if len(shown) == 1 else f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
