"""Buffers in host memory for activations, and the copies to them and back.

Each way has a stream of its own, and neither the host nor the other way waits for it. On a CPU the same calls copy at once, from
one place of the same memory to another.

Buffers are allocated at their first use and kept. Their sizes are powers of two: torch rounds pinned memory up to these anyway
(c10's CachingHostAllocator), and with documents, sizes differ from microbatch to microbatch.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

Mark = Any
"""A place in a stream, as an event of the device's type; None on the CPU, where everything before it has been done."""


def buffer_size(num_bytes: int) -> int:
    """Bytes of the buffer that takes so many."""
    return 1 << (num_bytes - 1).bit_length()


class HostBuffer:
    """A buffer in use, or free for its next one."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        """uint8."""
        self.read: Mark = None
        """After this its last content has been read."""


class HostMemory:
    """The buffers of one rank."""

    def __init__(self, device: torch.device) -> None:
        self.num_bytes = 0
        """Bytes of all buffers."""
        self._device = device
        self._free: defaultdict[int, list[HostBuffer]] = defaultdict(list)

    @functools.cached_property
    def streams(self) -> Any:
        """The device's module with streams and events."""
        return torch.get_device_module(self._device)

    @functools.cached_property
    def _down(self) -> Any:
        return self.streams.Stream(self._device)

    @functools.cached_property
    def _up(self) -> Any:
        return self.streams.Stream(self._device)

    def move(self, source: torch.Tensor) -> HostBuffer:
        """Begin to copy bytes to the host, once they are computed. The source must live until `moved()`.

        Args:
            source: uint8, one-dimensional.
        """
        size = buffer_size(len(source))
        buffer = self._free[size].pop() if self._free[size] else self._make(size)
        self._down.wait_stream(self.streams.current_stream(self._device))
        with self.streams.stream(self._down):
            if buffer.read is not None:
                self._down.wait_event(buffer.read)
            self.copy(buffer.memory[: len(source)], source)
        return buffer

    def moved(self) -> Mark:
        """The end of all copies to the host that have begun."""
        return self._down.record_event()

    def bring(self, buffers: Sequence[HostBuffer], sizes: Sequence[int]) -> tuple[list[torch.Tensor], Mark]:
        """Begin to copy back, into new memory of the device; then the buffers are free. Computation has waited for `moved()`.

        Args:
            sizes: bytes in each buffer.

        Returns:
            the bytes, and the end of the copies: `wait` for it before the bytes are read or given free.
        """
        bytes_back = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes]
        # What was computed so far may still read the memory that the new tensors got; and it has waited for the copies away.
        self._up.wait_stream(self.streams.current_stream(self._device))
        with self.streams.stream(self._up):
            for tensor, buffer in zip(bytes_back, buffers, strict=True):
                self.copy(tensor, buffer.memory[: len(tensor)])
            brought = self._up.record_event()
        for buffer in buffers:
            buffer.read = brought
            self._free[len(buffer.memory)].append(buffer)
        return bytes_back, brought

    def wait(self, mark: Mark) -> None:
        """Whatever is computed from now on waits for a mark."""
        if mark is not None:
            self.streams.current_stream(self._device).wait_event(mark)

    def _make(self, size: int) -> HostBuffer:
        self.num_bytes += size
        return HostBuffer(self.allocate(size))

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Begin a copy on the current stream."""
        to.copy_(source, non_blocking=True)

    def allocate(self, size: int) -> torch.Tensor:
        """New memory of so many bytes."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type != "cpu")
