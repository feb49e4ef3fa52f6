"""Messages between pipeline stages: receives are posted early, sends do not block, and shapes are fixed.

A message is a named set of tensors (`Boundary`), the same for every microbatch. The module `exchange` plans when each message is
received. Each message is sent on its own, not in a batch: in a batch, an activation that is ready would wait for a gradient that is
not. Each direction has a separate communicator (see `ParallelContext.get_pipeline_channel`), so a send never waits for a receive.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.parallel.context import ParallelContext
from megatron.spec.operations import Message


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor in a message, and whether the next stage sends back a gradient for the tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = True


Boundary = Mapping[str, TensorSpec]
"""Shapes and dtypes of the tensors of a message between model chunks, by name."""
Tensors = dict[str, torch.Tensor]


class Messenger:
    """Sends and receives the messages of this rank to and from other pipeline stages. Buffers of received messages are allocated
    once and reused."""

    def __init__(self, context: ParallelContext, boundary: Boundary) -> None:
        self._context, self._boundary = context, boundary
        self._stage = context.group("pp").rank
        self._receives: dict[Message, tuple[Tensors, list[dist.Work]]] = {}
        self._sends: dict[Message, tuple[Tensors, list[dist.Work]]] = {}
        self._free_buffers: dict[str, list[torch.Tensor]] = {name: [] for name in boundary}
        self._buffer_pointers: set[int] = set()
        self._connected: set[tuple[int, int]] = set()

    def connect(self, channels: Iterable[tuple[int, int]]) -> None:
        """Send one element through every new channel (source stage, destination stage) of this rank.

        NCCL creates a communicator at its first use and blocks until the other end joins. All ranks process the same list in the
        same order, so ranks cannot wait in a cycle. If channels were connected at their first message, a schedule whose messages
        form a cycle could deadlock.
        """
        for source, destination in channels:
            if self._stage in (source, destination) and (source, destination) not in self._connected:
                self._connected.add((source, destination))
                channel = self._context.get_pipeline_channel(source, destination)
                dummy = torch.zeros(1, device=self._context.device)
                if source == self._stage:
                    dist.send(dummy, channel.ranks[destination], group=channel.process_group)
                else:
                    dist.recv(dummy, channel.ranks[source], group=channel.process_group)

    def post_receive(self, message: Message, source: int) -> None:
        """Start to receive a message from the stage `source`."""
        channel = self._context.get_pipeline_channel(source, self._stage)
        buffers: Tensors = {}
        works = []
        for name, spec in self._get_message_specs(message):
            buffers[name] = buffer = self._acquire_buffer(name, spec)
            works.append(_require_work(dist.irecv(buffer, channel.ranks[source], group=channel.process_group)))
        self._receives[message] = (buffers, works)

    def receive(self, message: Message) -> Tensors:
        """Return the tensors of a message.

        If the message comes from another rank, its receive must have been posted before (`post_receive`), and this method waits
        until the message has arrived. If it comes from another chunk on this rank, the tensors are those that `send` stored.
        """
        buffers, works = self._receives.pop(message)
        for work in works:
            work.wait()
        return buffers

    def send(self, message: Message, destination: int, tensors: Tensors) -> None:
        """Start to send a message to the stage `destination`. The tensors are kept until they have been sent.

        If the destination is this rank's stage, the tensors are stored for `receive`.
        """
        tensors = {name: self._prepare_to_send(tensor) for name, tensor in tensors.items()}
        if destination == self._stage:
            self._receives[message] = (tensors, [])
            return
        channel = self._context.get_pipeline_channel(self._stage, destination)
        works = []
        for name, spec in self._get_message_specs(message):
            tensor = tensors[name]
            assert tensor.shape == spec.shape and tensor.dtype == spec.dtype, (
                f"{name}: {tensor.shape} {tensor.dtype}, agreed {spec}"
            )
            works.append(_require_work(dist.isend(tensor, channel.ranks[destination], group=channel.process_group)))
        self._sends[message] = (tensors, works)
        for sent_message in list(self._sends):  # gloo reports completion only in wait(), see `wait_sent`
            if not all(work.is_completed() for work in self._sends[sent_message][1]):
                break
            del self._sends[sent_message]

    def wait_all(self) -> None:
        """Wait until all posted receives and all sends are complete."""
        for _, works in self._receives.values():
            while works:
                works.pop().wait()
        for message in list(self._sends):
            self.wait_sent(message)

    def wait_sent(self, message: Message) -> None:
        """Wait until the send of a message is complete, and free the message's tensors. The caller chooses a time at which the
        receiver should have the message, so that the wait is short."""
        _tensors, works = self._sends.pop(message, ({}, []))
        for work in works:
            work.wait()

    def recycle(self, buffers: Tensors) -> None:
        """Return the buffers of a received message to the pool of free buffers. No operation may read them any more. Tensors that a
        chunk on this rank sent to another one are ignored."""
        for name, buffer in buffers.items():
            if _get_data_pointer(buffer) in self._buffer_pointers:
                self._free_buffers[name].append(buffer.detach())

    def finish(self) -> None:
        """Wait until all sends are complete, and check that every received message was used."""
        for message in list(self._sends):
            self.wait_sent(message)
        assert not self._receives, f"received messages that no operation used: {list(self._receives)}"

    def _acquire_buffer(self, name: str, spec: TensorSpec) -> torch.Tensor:
        if self._free_buffers[name]:
            return self._free_buffers[name].pop()
        buffer = torch.empty(spec.shape, dtype=spec.dtype, device=self._context.device)
        self._buffer_pointers.add(_get_data_pointer(buffer))
        return buffer

    def _prepare_to_send(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous tensor to send.

        If a chunk passes on a receive buffer, return a copy, because the buffer may be filled again before the send completes.
        """
        if _get_data_pointer(tensor) in self._buffer_pointers:
            return tensor.clone(memory_format=torch.contiguous_format)
        return tensor.contiguous()

    def _get_message_specs(self, message: Message) -> list[tuple[str, TensorSpec]]:
        return [(name, spec) for name, spec in self._boundary.items() if spec.requires_grad or not message.is_gradient]


def _get_data_pointer(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _require_work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the channel's group"
    return work
