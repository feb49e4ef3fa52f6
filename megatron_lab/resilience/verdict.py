"""Interpretation of the exit codes of ranks: whether ranks are restarted, and which slot caused a failure. Does not import torch.

A slot of a node runs one rank, and has its own device.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron.config.launcher import EXIT_SIGNALS
from megatron.training.signals import EXIT_DIVERGED, EXIT_INTERRUPTED, EXIT_LOST_CONTACT, EXIT_REFUSED
from megatron_lab.resilience.job_state import NodeReport, RankProgress

EXIT_HANG = 86
"""Exit code of all ranks after a hang, whichever rank caused it."""
_FINAL_CODES = {
    EXIT_REFUSED: "the settings are invalid, or do not fit the checkpoint",
    EXIT_DIVERGED: "the loss or a gradient is not finite, or loss spikes recur",
}
"""Exit codes of errors that a restart would repeat."""
_SHARED_CODES = {EXIT_LOST_CONTACT: "it lost contact with another rank", EXIT_HANG: "the run hung"}
"""Exit codes that do not show which slot failed."""


def build_report(exit_codes: Mapping[int, int], num_running: int, stop_code: int, *, is_stopping: bool) -> NodeReport | None:
    """Build the report that a node sends to the other nodes when its ranks have ended, from their exit codes.

    Args:
        exit_codes: exit codes by local rank, in the order in which the ranks ended; negative for a signal.
        num_running: number of ranks that have not ended.
        stop_code: exit code of ranks that were asked to stop (--exit-signal-code).
        is_stopping: whether the job was asked to stop, or a rank has ended with `stop_code`.

    Returns:
        the report; None if the node must wait for more ranks to end.
    """
    for code, reason in _FINAL_CODES.items():
        if code in exit_codes.values():
            return NodeReport("refused", code, reason)
    failed_rank = find_failed_rank(exit_codes, stop_code)
    if failed_rank is not None and not is_stopping:
        return NodeReport("failed", to_exit_status(exit_codes[failed_rank]), describe_exit(exit_codes[failed_rank]))
    if num_running:
        return None
    if not any(exit_codes.values()):
        return NodeReport("done", 0, "done")
    # A rank that stops before training makes other ranks lose contact, and the signal itself kills a rank that is still starting.
    stop_codes = (stop_code, EXIT_INTERRUPTED, -signal.SIGKILL, *(-signum for signum in EXIT_SIGNALS))
    was_stopped = any(code in stop_codes for code in exit_codes.values())
    code = stop_code if was_stopped else next(code for code in exit_codes.values() if code)
    return NodeReport("stopped", code, "stopped")


def has_stopped_rank(exit_codes: Mapping[int, int], stop_code: int) -> bool:
    """Return whether a rank has ended with the exit code of a requested stop. If so, the other ranks may be about to end too.

    Args:
        exit_codes: exit codes of ended ranks, by local rank.
        stop_code: exit code of ranks that were asked to stop (--exit-signal-code).
    """
    return bool(stop_code) and stop_code in exit_codes.values()


def find_failed_rank(exit_codes: Mapping[int, int], stop_code: int) -> int | None:
    """Return the local rank that probably failed first; None if no rank failed.

    A rank that was ended by a signal has priority, because the other ranks then lose contact with it. Next comes a rank whose exit
    code stands for neither lost contact nor a hang. Last comes any other failed rank.

    Args:
        exit_codes: exit codes by local rank, in the order in which the ranks ended; negative for a signal.
        stop_code: exit code of ranks that were asked to stop (--exit-signal-code).
    """
    failed_ranks = [rank for rank, code in exit_codes.items() if code not in (0, stop_code)]
    failed_ranks.sort(key=lambda rank: 0 if exit_codes[rank] < 0 else 1 if exit_codes[rank] not in _SHARED_CODES else 2)
    return failed_ranks[0] if failed_ranks else None


def is_slot_failure(code: int) -> bool:
    """Return whether a failure with this exit code may be the fault of the slot (the place for one rank, with its device). Lost
    contact and hangs are not, because other ranks may cause them."""
    return code not in _SHARED_CODES


def describe_exit(code: int) -> str:
    """Describe as text how a rank ended, for example "was ended by SIGKILL".

    Args:
        code: exit code; negative for a signal.
    """
    if code >= 0:
        return f"ended with exit code {code}" + (f" ({_SHARED_CODES[code]})" if code in _SHARED_CODES else "")
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def to_exit_status(code: int) -> int:
    """Convert an exit code of Python's os module, which is negative for a signal, to that of a shell: 128 + number of the
    signal."""
    return code if code >= 0 else 128 - code


@dataclass
class NodeSlots:
    """Slots of a node (a slot runs one rank on its own device), with those that are excluded because their ranks fail repeatedly.

    A slot is excluded when its rank fails twice in a row, and no training step was finished between the failures. After the other
    ranks have finished a step, the next start tries the slot again. It is excluded again if its rank then fails before the first
    step.
    """

    num_slots: int
    _failure_counts: dict[int, int] = field(default_factory=dict)
    _excluded: set[int] = field(default_factory=set)

    def get_available(self) -> list[int]:
        """Return the indices of the slots that are not excluded."""
        return [slot for slot in range(self.num_slots) if slot not in self._excluded]

    def record_end(self, progress: RankProgress, failed_slots: Sequence[int], num_spare_slots: int) -> list[int]:
        """Record the end of the ranks of this node, and exclude slots whose ranks have failed repeatedly.

        Args:
            progress: iterations that the ranks have reached.
            failed_slots: slots whose ranks failed first, not because of other ranks.
            num_spare_slots: maximum number of slots to exclude: those that the job can lose without falling below its minimum
                number of ranks.

        Returns:
            slots that are excluded from now on.
        """
        if progress.has_steps:
            self._failure_counts = dict.fromkeys(self._excluded, 1)
            self._excluded.clear()
        newly_excluded: list[int] = []
        for slot in failed_slots:
            self._failure_counts[slot] = self._failure_counts.get(slot, 0) + 1
            if self._failure_counts[slot] > 1 and len(newly_excluded) < num_spare_slots:
                newly_excluded.append(slot)
        self._excluded.update(newly_excluded)
        return newly_excluded

    def exclude(self, slot: int) -> None:
        """Exclude a slot whose rank cannot be ended. The rank still uses the device of the slot."""
        self._excluded.add(slot)
