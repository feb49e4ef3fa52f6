"""How often Python looks for garbage in a program that only plans: seldom.

A schedule of a large job is hundreds of thousands of small objects, which Python would look through again and again for cycles that
nobody uses any more. That took a third of a plan and found next to nothing.
"""

from __future__ import annotations

import gc

_OBJECTS = 5_000_000
"""New objects after which Python looks for garbage among them; by default 700. They take some hundreds of MB."""


def collect_seldom() -> None:
    """Let this process look for garbage seldom. What no cycle holds is freed at once, as ever."""
    gc.set_threshold(_OBJECTS)
