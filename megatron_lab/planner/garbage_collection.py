"""Rare garbage collection, for programs that only plan.

The schedule of a large job consists of hundreds of thousands of small objects. Python would search them repeatedly for unused
reference cycles. This search took a third of the time of a plan and freed almost nothing.
"""

from __future__ import annotations

import gc

_THRESHOLD = 5_000_000
"""Number of new objects after which Python collects garbage among them (default 700). They take some hundreds of MB."""


def collect_garbage_rarely() -> None:
    """Make Python's search for unused reference cycles rare in this process. Objects outside of reference cycles are still freed at
    once."""
    gc.set_threshold(_THRESHOLD)
