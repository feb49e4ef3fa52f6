"""The indexes of the passes that are being read."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from megatron.data.orders.sample_order import PassIndex

_NUM_KEPT = 2  # reading ahead crosses the end of an epoch


class KeptPasses:
    """Builds the index of a pass at its first use and keeps the two used last.

    Threads that want the same pass wait for the one that builds it; others read on.
    """

    def __init__(self, build: Callable[[int], PassIndex]) -> None:
        self._build = build
        self._lock = threading.Lock()
        self._slots: OrderedDict[int, _Slot] = OrderedDict()

    def get(self, pass_number: int) -> PassIndex:
        """The index of a pass."""
        with self._lock:
            slot = self._slots.get(pass_number)
            if slot is None:
                while len(self._slots) >= _NUM_KEPT:  # before building, to keep the peak of memory down
                    self._slots.popitem(last=False)
                slot = self._slots[pass_number] = _Slot()
            self._slots.move_to_end(pass_number)
        with slot.lock:
            if slot.index is None:
                slot.index = self._build(pass_number)
            return slot.index


class _Slot:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.index: PassIndex | None = None
