"""What the ends of ranks mean: which are restarted, which are not, and which place is to blame. Needs no torch."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron.training.signals import DIVERGED, LOST_CONTACT, REFUSED
from megatron_lab.resilience.roll import Life, NodeReport

HANG = 86
"""Exit code of ranks that stood still, all of them, whoever was to blame."""
_FINAL = {
    REFUSED: "the settings are wrong, or do not go with the checkpoint",
    DIVERGED: "the numbers are not finite, or loss spikes come again",
}
"""Exit codes that the next start would end with too."""
_SHARED = {LOST_CONTACT: "it lost contact with another rank", HANG: "it stood still"}
"""Exit codes that say nothing of the rank's own place."""


def judge(ended: Mapping[int, int], running: int, stop_code: int, *, stopping: bool) -> NodeReport | None:
    """What a node reports of its ranks; None as long as others must be waited for.

    Args:
        ended: exit codes of the ranks that have ended, in the order in which they did; negative for a signal.
        running: number of ranks that have not ended.
        stop_code: exit code of ranks that were asked to stop (--exit-signal-code).
        stopping: whether the job was asked to stop, or a rank has ended as if it was.
    """
    for code, words in _FINAL.items():
        if code in ended.values():
            return NodeReport("refused", code, words)
    failed = blamed(ended, stop_code)
    if failed is not None and not stopping:
        return NodeReport("failed", _status(ended[failed]), how(ended[failed]))
    if running:
        return None
    if not any(ended.values()):
        return NodeReport("done", 0, "done")
    # Ranks that leave before training take the others' contact with them, and one that only starts dies of the signal.
    asked = (stop_code, -signal.SIGTERM, -signal.SIGUSR1, -signal.SIGKILL)
    stopped = any(code in asked for code in ended.values())
    code = stop_code if stopped else next(code for code in ended.values() if code)
    return NodeReport("stopped", code, "stopped")


def stops(ended: Mapping[int, int], stop_code: int) -> bool:
    """Whether a rank has ended as one that was asked to stop: the others may be about to."""
    return bool(stop_code) and stop_code in ended.values()


def blamed(ended: Mapping[int, int], stop_code: int) -> int | None:
    """The rank that failed first: one that a signal ended, since the others lose contact with it, else the first with a code of its
    own, else the first at all."""
    failed = [rank for rank, code in ended.items() if code not in (0, stop_code)]
    failed.sort(key=lambda rank: 0 if ended[rank] < 0 else 1 if ended[rank] not in _SHARED else 2)
    return failed[0] if failed else None


def is_of_its_place(code: int) -> bool:
    """Whether a rank's end may be the fault of its place."""
    return code not in _SHARED


def how(code: int) -> str:
    """How a rank ended, in words."""
    if code >= 0:
        return f"ended with exit code {code}" + (f" ({_SHARED[code]})" if code in _SHARED else "")
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def _status(code: int) -> int:
    """An exit status for a code: as of a shell for a signal."""
    return code if code >= 0 else 128 - code


@dataclass
class NodePlaces:
    """The places of a node for ranks, each with its device, and which of them are broken.

    A place whose rank fails twice in a row, with no step between, is left out. It is tried again in the first start after one that
    made a step, and left out again if its rank fails before a step there.
    """

    number: int
    _strikes: dict[int, int] = field(default_factory=dict)
    _out: set[int] = field(default_factory=set)

    def available(self) -> list[int]:
        """Places that can be taken."""
        return [place for place in range(self.number) if place not in self._out]

    def ended(self, life: Life, failed: Sequence[int], may_lose: int) -> list[int]:
        """A start has ended.

        Args:
            failed: places whose ranks are to blame.
            may_lose: places that the job can do without.

        Returns:
            places that are left out from now on.
        """
        if life.has_steps:
            self._strikes = dict.fromkeys(self._out, 1)
            self._out.clear()
        lost: list[int] = []
        for place in failed:
            self._strikes[place] = self._strikes.get(place, 0) + 1
            if self._strikes[place] > 1 and len(lost) < may_lose:
                lost.append(place)
        self._out.update(lost)
        return lost

    def leave_out(self, place: int) -> None:
        """Leave a place out whose rank cannot be ended: its device is taken."""
        self._out.add(place)
