"""Where the mains and moments of some shards live, and how gradients come there and new weights get back.

Here: on the device. `offload` has host memory. Another home (disk) would bring mains and moments in when its update begins and take
them out after it; nothing else moves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron.config.training import OptimizerConfig
from megatron.optimizer.rules import Target, Update, Updater, UpdateRule, as_seen
from megatron.parallel.collectives import Pending
from megatron.parallel.context import ParallelContext
from megatron.parallel.shards import Granularity, Shard, ShardGroup

# Each view of a flat buffer starts at a multiple of this many elements, so that vector kernels are aligned.
ALIGN = 64


@dataclass(frozen=True)
class Block:
    """Elements [start, stop) of one of a home's shards."""

    index: int
    start: int
    stop: int

    def of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The block of one of the flat tensors that stand for the shards."""
        return tensors[self.index][self.start : self.stop]


class Home(ABC):
    """Some shards of one group.

    Args:
        offloaded: whether the shards were chosen for host memory.
    """

    def __init__(self, shards: Sequence[Shard], *, offloaded: bool) -> None:
        self.shards, self.offloaded = list(shards), offloaded
        dtypes = {(shard.weights.dtype, shard.grad.dtype) for shard in self.shards}
        assert len(dtypes) == 1, f"the shards of a group have several dtypes: {dtypes}"
        self.mains: list[torch.Tensor] = []
        self.grads: list[torch.Tensor] = []
        """Beside the mains; complete after `fetch`."""
        self.main_buffers: list[torch.Tensor] = []
        """Memory of the mains; none where they are the weights."""
        self.moment_buffers: list[torch.Tensor] = []
        self.grad_buffers: list[torch.Tensor] = []
        """Memory of the gradients; none where they are the shards' own."""

    def moments(self) -> list[torch.Tensor]:
        """A moment of each shard: zeros beside the mains, in one buffer."""
        made = flat_views(self.mains, self.mains[0].dtype, self.mains[0].device)
        self.moment_buffers.append(made[0].zero_())
        return made[1]

    @abstractmethod
    def fetch(self) -> None:
        """See to it that `grads` can be read."""

    @abstractmethod
    def writer(self, blocks: Sequence[Block]) -> Callable[[], None]:
        """What begins to carry these blocks of the mains to the weights."""

    @abstractmethod
    def finish(self) -> None:
        """Have whatever is issued from now on see the weights that were written."""


class OnDevice(Home):
    """Mains on the device of the weights: the weights themselves where dtypes agree, else copies.

    Offloaded shards are here too where the device's memory is the host's.
    """

    def __init__(self, shards: Sequence[Shard], *, offloaded: bool = False) -> None:
        super().__init__(shards, offloaded=offloaded)
        self._apart = self.shards[0].weights.dtype != self.shards[0].grad.dtype
        if self._apart:
            buffer, self.mains = copies_of_weights(self.shards, self.shards[0].weights.device)
            self.main_buffers.append(buffer)
        else:
            self.mains = [shard.weights for shard in self.shards]
        self.grads = [shard.grad for shard in self.shards]

    def fetch(self) -> None:
        """They lie there."""

    def writer(self, blocks: Sequence[Block]) -> Callable[[], None]:
        """Rounds to the model's dtype, where they are apart."""
        if not self._apart:
            return _nothing
        whole = [shard.weights for shard in self.shards]
        weights, mains = [block.of(whole) for block in blocks], [block.of(self.mains) for block in blocks]
        return lambda: torch._foreach_copy_(weights, mains)

    def finish(self) -> None:
        """All is in the order of the stream."""


def _nothing() -> None: ...


def flat_views(
    like: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device | None = None, *, pinned: bool = False
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One buffer, and for each flat tensor a view of it of the same length.

    Args:
        device: None for host memory.
    """
    starts, end = _starts(like)
    buffer = torch.empty(end, dtype=dtype, device=device, pin_memory=pinned)
    return buffer, [buffer[start : start + tensor.numel()] for start, tensor in zip(starts, like, strict=True)]


def room_for(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of a buffer that holds these, each of them aligned."""
    return _starts(tensors)[1] * tensors[0].itemsize


def views_like(buffer: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views into a buffer of bytes, as `room_for` lays them out."""
    typed = buffer[: room_for(tensors)].view(tensors[0].dtype)
    return [typed[start : start + tensor.numel()] for start, tensor in zip(_starts(tensors)[0], tensors, strict=True)]


def copies_of_weights(shards: Sequence[Shard], device: torch.device | None = None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Copies of the weights in the gradients' dtype: one buffer, and its views.

    Args:
        device: None for host memory.
    """
    buffer, views = flat_views([shard.weights for shard in shards], shards[0].grad.dtype, device)
    for view, shard in zip(views, shards, strict=True):
        view.copy_(shard.weights)
    return buffer, views


def _starts(tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.numel() // ALIGN) * ALIGN
    return starts, end


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


# Elements that a thread updates before it rounds them to the model's dtype: so few that the mains are then still in its cache (Adam
# touches 4 MiB), so many that the calls cost little. In one thread in bfloat16 the whole step takes so many times the update alone:
# 1.23 (1.1 on a machine with other work); with a quarter 1.43 (1.45); with all updated before any is rounded 1.25 (1.4).
_BATCH = 2**18


@dataclass(frozen=True)
class _Batch:
    """What is updated together and then written to the weights."""

    updater: Updater
    write: Callable[[], None]


class Part:
    """The shards of one home and what updates them."""

    def __init__(self, home: Home, rule: UpdateRule, config: OptimizerConfig, context: ParallelContext) -> None:
        self.home = home
        self._moments = {name: home.moments() for name in rule.moments(config)}
        rounds_here = bool(home.main_buffers) and home.mains[0].device.type == "cpu"
        cut = rule.granularity is Granularity.ELEMENTS and rounds_here
        blocks = batches([main.numel() for main in home.mains], _BATCH * torch.get_num_threads() if cut else None)
        self._batches = [
            _Batch(rule.make([self._target(block, rule, context) for block in some], config, context), home.writer(some))
            for some in blocks
        ]

    def update(self, update: Update) -> None:
        """One update; the weights follow, in the order of the current stream."""
        self.home.fetch()
        for batch in self._batches:
            batch.updater.step(update)
            batch.write()
        self.home.finish()

    def write(self) -> None:
        """Carry the mains to the weights as they are."""
        for batch in self._batches:
            batch.write()
        self.home.finish()

    def moments(self, index: int) -> dict[str, torch.Tensor]:
        """State of one of the home's shards, by name."""
        return {name: tensors[index] for name, tensors in self._moments.items()}

    def _target(self, block: Block, rule: UpdateRule, context: ParallelContext) -> Target:
        shard = self.home.shards[block.index]

        def seen(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
            return as_seen(block.of(tensors), rule.granularity, shard.record, shard.piece, context)

        moments = {name: seen(tensors) for name, tensors in self._moments.items()}
        return Target(seen(self.home.mains), seen(self.home.grads), moments, shard.record)


def batches(sizes: Sequence[int], limit: int | None) -> list[list[Block]]:
    """Blocks of flat tensors, in order, in batches of at most `limit` elements.

    Args:
        limit: a multiple of 64, as all cuts are, so that vector kernels see the same vectors; None for one batch of whole tensors.
    """
    if limit is None:
        whole = [Block(index, 0, size) for index, size in enumerate(sizes) if size]
        return [whole] if whole else []
    made: list[list[Block]] = []
    room = 0
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            if room == 0:
                made.append([])
                room = limit
            stop = min(start + room, size)
            made[-1].append(Block(index, start, stop))
            room -= -(-(stop - start) // ALIGN) * ALIGN
            start = stop
    return made
