"""A step that leaves a gradient incomplete is an error: which parameter, and by how much."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn


def complain(rank: int, counts: Iterable[tuple[str, int, int]]) -> NoReturn:
    """Say what is missing.

    Args:
        counts: name of a parameter, gradients that reached it in this step, gradients that should have. Those that agree are fine.

    Raises:
        RuntimeError: always.
    """
    words = []
    for name, found, wanted in counts:
        if found > wanted:
            words.append(f"{found - wanted} gradients too many reached {name}")
        elif found < wanted:
            words.append(f"{name} lacks {wanted - found} gradients" if found else f"no gradient reached {name}")
    raise RuntimeError(f"rank {rank}: the backward passes of this step are incomplete: {'; '.join(words)}")
