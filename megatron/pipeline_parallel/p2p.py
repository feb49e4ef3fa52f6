"""Messages between pipeline stages: receives are posted early, sends do not block, shapes are agreed once.

A message is a named set of tensors (`Boundary`), the same for every microbatch. `exchange` plans which message is received when.
Messages are not batched: a batch would make an activation that is ready wait for a gradient that is not. Each direction has a
communicator of its own (see `ParallelContext.pipeline_channel`), so a send never waits for a receive.
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
    """Shape and dtype of a tensor that travels, and whether a gradient travels back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = True


Boundary = Mapping[str, TensorSpec]
Tensors = dict[str, torch.Tensor]


class Messenger:
    """Sends and receives this rank's messages. Buffers of received messages are allocated once and reused."""

    def __init__(self, context: ParallelContext, boundary: Boundary) -> None:
        self._context, self._boundary = context, boundary
        self._stage = context.group("pp").index
        self._arriving: dict[Message, tuple[Tensors, list[dist.Work]]] = {}
        self._leaving: dict[Message, tuple[Tensors, list[dist.Work]]] = {}
        self._free: dict[str, list[torch.Tensor]] = {name: [] for name in boundary}
        self._own: set[int] = set()
        self._connected: set[tuple[int, int]] = set()

    def connect(self, channels: Iterable[tuple[int, int]]) -> None:
        """Send one element through every new channel (source, destination) of this rank.

        NCCL makes a communicator at its first use, and waits there for the other end. All ranks go through the same list in the
        same order, so no ranks wait in a circle. In the order of first use they could, in schedules in which messages go round.
        """
        for source, destination in channels:
            if self._stage in (source, destination) and (source, destination) not in self._connected:
                self._connected.add((source, destination))
                channel = self._context.pipeline_channel(source, destination)
                nothing = torch.zeros(1, device=self._context.device)
                if source == self._stage:
                    dist.send(nothing, channel.ranks[destination], group=channel.process_group)
                else:
                    dist.recv(nothing, channel.ranks[source], group=channel.process_group)

    def post(self, message: Message, source: int) -> None:
        """Begin to receive from a stage."""
        channel = self._context.pipeline_channel(source, self._stage)
        buffers: Tensors = {}
        works = []
        for name, spec in self._travelling(message):
            buffers[name] = buffer = self._buffer(name, spec)
            works.append(_started(dist.irecv(buffer, channel.ranks[source], group=channel.process_group)))
        self._arriving[message] = (buffers, works)

    def receive(self, message: Message) -> Tensors:
        """Wait for a message that was posted, or that a chunk on this rank sent."""
        buffers, works = self._arriving.pop(message)
        for work in works:
            work.wait()
        return buffers

    def send(self, message: Message, destination: int, tensors: Tensors) -> None:
        """Begin to send to a stage; the tensors are kept until they have left."""
        tensors = {name: self._apart(tensor) for name, tensor in tensors.items()}
        if destination == self._stage:
            self._arriving[message] = (tensors, [])
            return
        channel = self._context.pipeline_channel(self._stage, destination)
        works = []
        for name, spec in self._travelling(message):
            tensor = tensors[name]
            assert tensor.shape == spec.shape and tensor.dtype == spec.dtype, (
                f"{name}: {tensor.shape} {tensor.dtype}, agreed {spec}"
            )
            works.append(_started(dist.isend(tensor, channel.ranks[destination], group=channel.process_group)))
        self._leaving[message] = (tensors, works)
        for older in list(self._leaving):  # gloo does not know it before it is asked to wait: see `settle`
            if not all(work.is_completed() for work in self._leaving[older][1]):
                break
            del self._leaving[older]

    def wait(self) -> None:
        """Wait until everything posted has arrived and everything sent has left."""
        for _, works in self._arriving.values():
            while works:
                works.pop().wait()
        for message in list(self._leaving):
            self.settle(message)

    def settle(self, message: Message) -> None:
        """Free a sent message that must have arrived."""
        _tensors, works = self._leaving.pop(message, ({}, []))
        for work in works:
            work.wait()

    def recycle(self, buffers: Tensors) -> None:
        """Take back the buffers of a received message that nothing reads any more. Tensors sent on this rank are left alone."""
        for name, buffer in buffers.items():
            if _memory(buffer) in self._own:
                self._free[name].append(buffer.detach())

    def finish(self) -> None:
        """Wait until everything sent has left."""
        for message in list(self._leaving):
            self.settle(message)
        assert not self._arriving, f"messages that nobody took: {list(self._arriving)}"

    def _buffer(self, name: str, spec: TensorSpec) -> torch.Tensor:
        if self._free[name]:
            return self._free[name].pop()
        buffer = torch.empty(spec.shape, dtype=spec.dtype, device=self._context.device)
        self._own.add(_memory(buffer))
        return buffer

    def _apart(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor to send. A copy if a chunk passes on one of our buffers, which may be filled again before this has left."""
        if _memory(tensor) in self._own:
            return tensor.clone(memory_format=torch.contiguous_format)
        return tensor.contiguous()

    def _travelling(self, message: Message) -> list[tuple[str, TensorSpec]]:
        return [(name, spec) for name, spec in self._boundary.items() if spec.requires_grad or not message.is_gradient]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the channel's group"
    return work
