"""Pool of host buffers for activations, with asynchronous copies to the host and back to the device.

Each direction has its own stream. Neither the host nor the other direction waits for it. On a CPU the same methods copy
synchronously within host memory.

Buffers are allocated at their first use and never freed. Their sizes are powers of two, for two reasons. Torch rounds pinned memory
up to powers of two anyway (CachingHostAllocator in c10). And the sizes of tensors differ between microbatches if documents have
different lengths.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

StreamEvent = Any
"""Event recorded on a stream of the device. None on a CPU, where earlier operations are already complete."""


def get_buffer_size(num_bytes: int) -> int:
    """Return the size in bytes of the host buffer for a tensor of `num_bytes` bytes: the next power of two."""
    return 1 << (num_bytes - 1).bit_length()


class HostBuffer:
    """Buffer in host memory for the content of one tensor. It is used again once the tensor is copied back to the device."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        """uint8, one-dimensional."""
        self.read_event: StreamEvent = None
        """Event after which the last copy to the device has read the buffer; None before the first use."""


class HostBufferPool:
    """Pool of reusable buffers in host memory, with methods that copy tensors to the host and back."""

    def __init__(self, device: torch.device) -> None:
        self.num_bytes = 0
        """Total size of all buffers in bytes."""
        self._device = device
        self._free_buffers: defaultdict[int, list[HostBuffer]] = defaultdict(list)

    @functools.cached_property
    def device_module(self) -> Any:
        """Torch module with the streams and events of the device, such as torch.cuda."""
        return torch.get_device_module(self._device)

    @functools.cached_property
    def _to_host_stream(self) -> Any:
        return self.device_module.Stream(self._device)

    @functools.cached_property
    def _to_device_stream(self) -> Any:
        return self.device_module.Stream(self._device)

    def start_copy_to_host(self, source: torch.Tensor) -> HostBuffer:
        """Start to copy a tensor to a host buffer, after the operations queued so far on the current stream.

        The caller must keep `source` alive until its stream has waited for the event that `record_copies_to_host` returns.

        Args:
            source: uint8, one-dimensional.
        """
        size = get_buffer_size(len(source))
        buffer = self._free_buffers[size].pop() if self._free_buffers[size] else self._allocate_buffer(size)
        self._to_host_stream.wait_stream(self.device_module.current_stream(self._device))
        with self.device_module.stream(self._to_host_stream):
            if buffer.read_event is not None:
                self._to_host_stream.wait_event(buffer.read_event)
            self.copy(buffer.memory[: len(source)], source)
        return buffer

    def record_copies_to_host(self) -> StreamEvent:
        """Return an event that completes when all copies to the host that have started so far are complete."""
        return self._to_host_stream.record_event()

    def start_copy_to_device(self, buffers: Sequence[HostBuffer], sizes: Sequence[int]) -> tuple[list[torch.Tensor], StreamEvent]:
        """Start to copy buffers to new tensors on the device, and mark the buffers as free.

        Before this call, the current stream must have waited for the event of `record_copies_to_host`.

        Args:
            sizes: number of bytes in each buffer.

        Returns:
            The uint8 tensors, and an event for the end of the copies. Pass the event to `wait` before the tensors are read or
                freed.
        """
        tensors = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes]
        # Operations queued so far may still read the memory that the allocator reuses for the new tensors. They also have waited
        # for the copies to the host.
        self._to_device_stream.wait_stream(self.device_module.current_stream(self._device))
        with self.device_module.stream(self._to_device_stream):
            for tensor, buffer in zip(tensors, buffers, strict=True):
                self.copy(tensor, buffer.memory[: len(tensor)])
            read_event = self._to_device_stream.record_event()
        for buffer in buffers:
            buffer.read_event = read_event
            self._free_buffers[len(buffer.memory)].append(buffer)
        return tensors, read_event

    def wait(self, event: StreamEvent) -> None:
        """Let the current stream wait for the event of a copy, without making the host wait. None waits for nothing."""
        if event is not None:
            self.device_module.current_stream(self._device).wait_event(event)

    def _allocate_buffer(self, size: int) -> HostBuffer:
        self.num_bytes += size
        return HostBuffer(self.allocate(size))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Start to copy `source` into `target` on the current stream, without making the host wait."""
        target.copy_(source, non_blocking=True)

    def allocate(self, size: int) -> torch.Tensor:
        """Allocate host memory, pinned unless the device is a CPU.

        Args:
            size: number of bytes.
        """
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type != "cpu")
