"""SIGTERM asks the run to save and exit; the loop looks at the request between two steps.

Schedulers send SIGTERM some time before they kill a job. Only some ranks may have received it when the loop looks, so the
ranks agree on the answer with a reduction; that is the loop's part.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Self


class ExitSignal:
    """Notes a signal instead of dying of it, inside a `with` block of the main thread.

    Args:
        number: The signal.
    """

    def __init__(self, number: signal.Signals = signal.SIGTERM) -> None:
        self._number = number
        self._requested = False

    @property
    def requested(self) -> bool:
        """Whether the signal came since the block was entered."""
        return self._requested

    def __enter__(self) -> Self:
        self._requested = False
        # None stands for a handler that was not installed from Python; it cannot be put back.
        self._previous = signal.signal(self._number, self._note) or signal.SIG_DFL
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        signal.signal(self._number, self._previous)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._requested = True  # nothing more: a handler that prints or saves can interrupt another print or save
