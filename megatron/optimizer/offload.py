"""Mains and moments in host memory, and the update there.

ZeRO-Offload (Ren et al. 2021, section 4): the update computes little for each parameter, and its state is most of the memory.
Only gradients and rounded weights cross between device and host.

Gradients cross while backward goes on, each group's as soon as it is reduced, into memory that keeps them until the update. New
weights are rounded on the host into one of two buffers, and cross from there while the next ones are updated and rounded into the
other. Each way has a stream of its own. The host waits for gradients to arrive, and for a buffer to be free if it is ahead; for
nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megatron.optimizer.homes import Block, Home, copies_of_weights, flat_views, room_for, views_like
from megatron.parallel.collectives import Pending
from megatron.parallel.shards import Shard, ShardGroup


def choose_offloaded(sizes: Sequence[int], fraction: float) -> set[int]:
    """Indices of the shards that go to host memory: whole ones, whose elements come near to the fraction.

    The largest first, as long as they fit; then one is added or taken back as long as that comes nearer.
    """
    missing = fraction * sum(sizes)
    chosen: set[int] = set()
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        if 0 < sizes[index] <= missing:
            chosen.add(index)
            missing -= sizes[index]
    while sizes:
        changes = [-size if index in chosen else size for index, size in enumerate(sizes)]
        best = min(range(len(sizes)), key=lambda index: abs(missing - changes[index]))
        if abs(missing - changes[best]) >= abs(missing):
            break
        chosen ^= {best}
        missing -= changes[best]
    return chosen


class Link:
    """The ways between one device and host memory. On the CPU device the streams are torch's dummies, and copies happen at once."""

    def __init__(self, device: torch.device) -> None:
        self.pins = device.type != "cpu"
        """Whether what crosses must lie in pinned host memory for that to go on beside other work."""
        self._device, self._streams = device, torch.get_device_module(device)
        self._down, self._up = self._streams.Stream(device), self._streams.Stream(device)
        self.buffers = [torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)]
        """The two buffers for weights on their way."""
        self._sent = [self._streams.Event(), self._streams.Event()]
        """When the weights in each buffer have left it."""
        self._next = 0

    def reserve(self, num_bytes: int) -> None:
        """Have room for so many bytes of weights at once. Not while any are on their way."""
        if self.buffers[0].numel() < num_bytes:
            self.buffers = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.pins) for _ in self.buffers]

    def bring(self, pending: Pending, grads: Sequence[torch.Tensor], arrived: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Begin to copy gradients to the host once they are complete; returns what waits for them there."""
        event = self._streams.Event()
        self._down.wait_stream(self._streams.current_stream(self._device))
        with self._streams.stream(self._down):
            pending.wait()
            torch._foreach_copy_(list(arrived), list(grads), non_blocking=True)
            event.record(self._down)
        return event.synchronize

    def send(self, mains: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> None:
        """Round mains to the dtype of the weights, and begin to copy them there. They may change again on return."""
        which, self._next = self._next, 1 - self._next
        self._sent[which].synchronize()
        staged = views_like(self.buffers[which], weights)
        torch._foreach_copy_(staged, list(mains))
        self._up.wait_stream(self._streams.current_stream(self._device))  # which may still read the old weights
        with self._streams.stream(self._up):
            torch._foreach_copy_(list(weights), staged, non_blocking=True)
            self._sent[which].record(self._up)

    def finish(self) -> None:
        """Let the current stream wait for all that was sent."""
        self._streams.current_stream(self._device).wait_stream(self._up)


class OnHost(Home):
    """Mains in host memory, beside the weights also where dtypes agree.

    Mains and moments take no part in any copy, so they are not pinned: torch rounds pinned memory up to a power of two.
    """

    def __init__(self, group: ShardGroup, shards: Sequence[Shard], link: Link) -> None:
        """Takes the place of whoever wants to know when the group is reduced."""
        super().__init__(shards, offloaded=True)
        self._link = link
        buffer, self.mains = copies_of_weights(self.shards)
        self.main_buffers.append(buffer)
        self._sources = [shard.grad for shard in self.shards]
        buffer, self.grads = flat_views(self._sources, self._sources[0].dtype, pinned=link.pins)
        self.grad_buffers.append(buffer)
        self._wait: Callable[[], None] | None = None
        assert group.reduced is None, "somebody else listens to the group"
        group.reduced = self._bring

    def fetch(self) -> None:
        """Wait for the gradients. Where nobody said when they were reduced, they are taken as they are now."""
        if self._wait is None:
            self._bring(Pending(self._sources[0]))
        assert self._wait is not None
        self._wait()
        self._wait = None

    def writer(self, blocks: Sequence[Block]) -> Callable[[], None]:
        """Sends them."""
        whole = [shard.weights for shard in self.shards]
        weights, mains = [block.of(whole) for block in blocks], [block.of(self.mains) for block in blocks]
        self._link.reserve(room_for(weights))
        return lambda: self._link.send(mains, weights)

    def finish(self) -> None:
        """The weights are on the device before anything that is issued from now on."""
        self._link.finish()

    def _bring(self, pending: Pending) -> None:
        self._wait = self._link.bring(pending, self._sources, self.grads)
