"""Gradients are counted: to know when those of a microbatch are complete, and that a step leaves none out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn


class WriteCount:
    """How often the parameters of a bucket got a gradient in a step.

    Args:
        uses: how often each gets one in a microbatch.
    """

    def __init__(self, uses: Sequence[int]) -> None:
        self.uses = list(uses)
        self.start()

    def start(self) -> None:
        """A new step."""
        self.writes = [0] * len(self.uses)
        self.rounds = 0
        """Microbatches of which all gradients are there."""
        self._behind = len(self.uses)

    def add(self, number: int) -> bool:
        """Count one; returns whether the gradients of one microbatch more are complete now.

        With late weight gradients, those that are not late are microbatches ahead of the others.
        """
        self.writes[number] += 1
        if self.writes[number] != self.uses[number] * (self.rounds + 1):
            return False
        self._behind -= 1
        if self._behind:
            return False
        self.rounds += 1
        self._behind = sum(writes < uses * (self.rounds + 1) for writes, uses in zip(self.writes, self.uses, strict=True))
        return True


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
