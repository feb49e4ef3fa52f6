"""Buffers that are used again and again: for gradients that stay only until they are reduced."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch


class BufferPool:
    """Flat buffers of one dtype.

    A buffer is lent, given back while a reduction still reads it, and lent again once that is through. Where `in_flight` buffers wait
    for their reductions and one more is needed, the oldest is waited for: so the memory is bounded whatever the network's speed, and
    nobody waits before there is need.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, in_flight: int) -> None:
        self._dtype, self._device, self._limit = dtype, device, in_flight
        self._free: list[torch.Tensor] = []
        self._in_flight: deque[tuple[torch.Tensor, Callable[[], object]]] = deque()
        self.buffers: list[torch.Tensor] = []
        """All that there are."""

    def take(self, size: int) -> torch.Tensor:
        """A buffer of at least `size` elements with any content: the smallest free one that is large enough, else a new one, in the
        place of the largest free one if there is any. So in the end there are no more than are needed at once."""
        while not (fitting := [buffer for buffer in self._free if buffer.numel() >= size]) and len(self._in_flight) >= self._limit:
            self._settle()
        if not fitting:
            if self._free:
                self._drop(max(self._free, key=torch.Tensor.numel))
            made = torch.empty(size, dtype=self._dtype, device=self._device)
            self.buffers.append(made)
            return made
        found = min(fitting, key=torch.Tensor.numel)
        self._free = _without(self._free, found)
        return found

    def give_back(self, buffer: torch.Tensor, wait: Callable[[], object]) -> None:
        """Return a buffer that may be written again after `wait()`."""
        self._in_flight.append((buffer, wait))

    def settle(self) -> None:
        """Wait for all that is in flight."""
        while self._in_flight:
            self._settle()

    def _settle(self) -> None:
        buffer, wait = self._in_flight.popleft()
        wait()
        self._free.append(buffer)

    def _drop(self, buffer: torch.Tensor) -> None:
        self._free, self.buffers = _without(self._free, buffer), _without(self.buffers, buffer)


def _without(buffers: list[torch.Tensor], one: torch.Tensor) -> list[torch.Tensor]:
    return [buffer for buffer in buffers if buffer is not one]
