"""Buffers that are used again and again: for gradients that stay only until they are reduced."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

# With one microbatch's reductions as long as its forward and backward, which is the most that can be hidden, fewer than four in
# flight make backward wait: at 9 buckets and 4 microbatches a step takes (simulated) 1.25 times the computation with 2, 1.17 with
# 3, 1.11 with 4 and with any number.
_MOST_IN_FLIGHT = 4
# Elements. Buckets grow with the data group (`default_bucket_size`), but what passes through should not outgrow what is sharded.
_MOST_ELEMENTS = 160_000_000


class BufferPool:
    """Flat buffers of one dtype.

    A buffer is lent, given back while a reduction still reads it, and lent again once that is through. Where too many wait for
    their reductions and one more is needed, the oldest is waited for: so the memory is bounded whatever the network's speed, and
    nobody waits before there is need.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._free: list[torch.Tensor] = []
        self._in_flight: deque[tuple[torch.Tensor, Callable[[], object]]] = deque()
        self.buffers: list[torch.Tensor] = []
        """All that there are."""

    def take(self, size: int) -> torch.Tensor:
        """A buffer of at least `size` elements with any content: the smallest free one that is large enough, else a new one, in the
        place of the largest free one if there is any. So in the end there are no more than are needed at once."""
        while not (fitting := [buffer for buffer in self._free if buffer.numel() >= size]) and self._is_full(size):
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

    def _is_full(self, size: int) -> bool:
        waiting = sum(buffer.numel() for buffer, _ in self._in_flight)
        return bool(self._in_flight) and (len(self._in_flight) >= _MOST_IN_FLIGHT or waiting + size > _MOST_ELEMENTS)

    def _settle(self) -> None:
        buffer, wait = self._in_flight.popleft()
        wait()
        self._free.append(buffer)

    def _drop(self, buffer: torch.Tensor) -> None:
        self._free, self.buffers = _without(self._free, buffer), _without(self.buffers, buffer)


def _without(buffers: list[torch.Tensor], one: torch.Tensor) -> list[torch.Tensor]:
    return [buffer for buffer in buffers if buffer is not one]
