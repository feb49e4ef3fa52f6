"""Where main parameters and moments lie, on the device or in host memory; and the update there.

Host memory is for offloading: ZeRO-Offload (Ren et al. 2021, section 4). The update computes little for each parameter, and its
state is most of the memory, so only gradients and rounded weights cross between device and host. Gradients cross while backward
goes on, each group's as soon as it is reduced, into memory that keeps them until the update. New weights are rounded on the host
into one of two buffers, and cross from there while the next ones are updated and rounded into the other. Each way has a stream of
its own. The host waits for gradients to arrive, and for a buffer to be free if it is ahead; for nothing else.

Another placement (disk) would read main parameters and moments when its update begins and write them after it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from megatron.optimizer.rules import Target, Update, Updater, UpdateRule, as_seen
from megatron.parallel.collectives import Pending
from megatron.parallel.context import ParallelContext
from megatron.parallel.shards import Shard, ShardGroup

# Each view of a flat buffer starts at a multiple of this many elements, so that vector kernels are aligned.
ALIGN = 64
# Elements that a thread updates before it rounds them to the model's dtype: so few that `main` is then still in its cache (Adam
# touches 4 MiB), so many that the calls cost little. In one thread in bfloat16 the whole step takes so many times the update alone:
# 1.23 (1.1 on a machine with other work); with a quarter 1.43 (1.45); with all updated before any is rounded 1.25 (1.4).
_BATCH = 2**18


@dataclass
class HeldState:
    """Memory that an optimizer keeps, by purpose."""

    mains: list[torch.Tensor] = field(default_factory=list)
    """Main parameters that are not the weights themselves."""
    moments: list[torch.Tensor] = field(default_factory=list)
    buffers: list[torch.Tensor] = field(default_factory=list)
    """Host memory that gradients and weights pass through."""


@dataclass(frozen=True)
class MainSpan:
    """Elements [start, stop) of one of several main parameters."""

    index: int
    start: int
    stop: int

    def of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """This span of the flat tensor that belongs to its main parameter."""
        return tensors[self.index][self.start : self.stop]


@dataclass(frozen=True)
class _Batch:
    """Targets that are updated together and then written to the weights."""

    updater: Updater
    write: Callable[[], None]


class StatePlacement(ABC):
    """Some shards of one group that one rule updates, with their main parameters and moments in one place.

    Args:
        mains: the main parameter of each shard, flat.
        grads: the gradients in the same memory as the main parameters; complete after `fetch`.
        held: memory of main parameters that are not the weights, and of gradients that are not the shards' own.
        offloaded: whether the shards were chosen for host memory.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        mains: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        held: HeldState,
        rule: UpdateRule,
        context: ParallelContext,
        *,
        offloaded: bool,
    ) -> None:
        self.shards, self.mains, self.offloaded, self.held = list(shards), list(mains), offloaded, held
        dtypes = {(shard.weights.dtype, shard.grad.dtype) for shard in self.shards}
        assert len(dtypes) == 1, f"shards that are updated together have several dtypes: {dtypes}"
        self._moments: dict[str, list[torch.Tensor]] = {}
        for name in rule.moments:
            buffer, self._moments[name] = flat_views(self.mains, self.mains[0].dtype, self.mains[0].device)
            held.moments.append(buffer.zero_())
        rounds_here = bool(held.mains) and self.mains[0].device.type == "cpu"
        limit = _BATCH * torch.get_num_threads() if rounds_here and not rule.sees_whole else None

        def target(span: MainSpan) -> Target:
            def seen(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
                return as_seen(span.of(tensors), rule, self.shards[span.index], context)

            moments = {name: seen(tensors) for name, tensors in self._moments.items()}
            return Target(seen(self.mains), seen(grads), moments, self.shards[span.index].record)

        self._batches = [
            _Batch(rule.make([target(span) for span in spans], context), self.writer(spans))
            for spans in batches([main.numel() for main in self.mains], limit)
        ]

    def update(self, update: Update) -> None:
        """Make one update. The weights follow, in the order of the current stream."""
        self.fetch()
        for batch in self._batches:
            batch.updater.step(update)
            batch.write()
        self.finish()

    def write(self) -> None:
        """Copy the main parameters to the weights as they are."""
        for batch in self._batches:
            batch.write()
        self.finish()

    def moments(self, index: int) -> dict[str, torch.Tensor]:
        """The moments of one of the shards, by name."""
        return {name: tensors[index] for name, tensors in self._moments.items()}

    @abstractmethod
    def fetch(self) -> None:
        """Make sure that the gradients can be read."""

    @abstractmethod
    def writer(self, spans: Sequence[MainSpan]) -> Callable[[], None]:
        """A function that begins to copy these spans of the main parameters to the weights."""

    @abstractmethod
    def finish(self) -> None:
        """Let everything that is issued from now on see the weights that were written."""


class OnDevice(StatePlacement):
    """Main parameters on the device of the weights: the weights themselves where dtypes agree, else copies.

    Offloaded shards are here too if the device's memory is the host's.
    """

    def __init__(self, shards: Sequence[Shard], rule: UpdateRule, context: ParallelContext, *, offloaded: bool = False) -> None:
        held, mains = HeldState(), [shard.weights for shard in shards]
        if shards[0].weights.dtype != shards[0].grad.dtype:
            buffer, mains = copies_of_weights(shards, shards[0].weights.device)
            held.mains.append(buffer)
        super().__init__(shards, mains, [shard.grad for shard in shards], held, rule, context, offloaded=offloaded)

    def fetch(self) -> None:
        """Do nothing: the gradients are on the device."""

    def writer(self, spans: Sequence[MainSpan]) -> Callable[[], None]:
        """A function that rounds main parameters to the model's dtype, where they are not the weights."""
        if not self.held.mains:
            return lambda: None
        whole = [shard.weights for shard in self.shards]
        weights, mains = [span.of(whole) for span in spans], [span.of(self.mains) for span in spans]
        return lambda: torch._foreach_copy_(weights, mains)

    def finish(self) -> None:
        """Do nothing: all happens in the order of the stream."""


class OnHost(StatePlacement):
    """Main parameters in host memory; they are copies even where dtypes agree.

    Main parameters and moments take no part in any copy, so they are not pinned: torch rounds pinned memory up to a power of two.
    """

    def __init__(self, group: ShardGroup, shards: Sequence[Shard], rule: UpdateRule, context: ParallelContext, link: Link) -> None:
        self._link = link
        self._wait: Callable[[], None] | None = None
        self._sources = [shard.grad for shard in shards]
        copies, mains = copies_of_weights(shards)
        buffer, self._grads = flat_views(self._sources, self._sources[0].dtype, pinned=link.pins)
        held = HeldState(mains=[copies], buffers=[buffer])
        super().__init__(shards, mains, self._grads, held, rule, context, offloaded=True)
        group.on_reduced.append(self._bring)

    def fetch(self) -> None:
        """Wait for the gradients. Without notice of their reduction, they are taken as they are now."""
        if self._wait is None:
            self._bring(Pending(self._sources[0]))
        assert self._wait is not None
        self._wait()
        self._wait = None

    def writer(self, spans: Sequence[MainSpan]) -> Callable[[], None]:
        """A function that sends the spans to the device."""
        whole = [shard.weights for shard in self.shards]
        weights, mains = [span.of(whole) for span in spans], [span.of(self.mains) for span in spans]
        self._link.reserve(room_for(weights))
        return lambda: self._link.send(mains, weights)

    def finish(self) -> None:
        """Let everything that is issued from now on wait for the weights."""
        self._link.finish()

    def _bring(self, pending: Pending) -> None:
        self._wait = self._link.bring(pending, self._sources, self._grads)


class Link:
    """Copies between one device and host memory, one stream each way. On the CPU device copies happen at once."""

    def __init__(self, device: torch.device) -> None:
        self.pins = device.type != "cpu"
        """Whether host memory must be pinned for copies to go on beside other work."""
        self._device, self._streams = device, torch.get_device_module(device)
        self._down, self._up = self._streams.Stream(device), self._streams.Stream(device)
        self.buffers = [torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)]
        """The two buffers for weights on their way to the device."""
        self._sent = [self._streams.Event(), self._streams.Event()]
        """Events: when the weights in each buffer have left it."""
        self._next = 0

    def reserve(self, num_bytes: int) -> None:
        """Make room for this many bytes of weights at once. Not to be called while any are on their way."""
        if self.buffers[0].numel() < num_bytes:
            self.buffers = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.pins) for _ in self.buffers]

    def bring(self, pending: Pending, grads: Sequence[torch.Tensor], arrived: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Begin to copy gradients to the host once they are complete; returns a function that waits for them there."""
        event = self._streams.Event()
        self._down.wait_stream(self._streams.current_stream(self._device))
        with self._streams.stream(self._down):
            pending.wait()
            torch._foreach_copy_(list(arrived), list(grads), non_blocking=True)
            event.record(self._down)
        return event.synchronize

    def send(self, mains: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> None:
        """Round main parameters to the dtype of the weights, and begin to copy them there. They may change again on return."""
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


def choose_offloaded(sizes: Sequence[int], fraction: float) -> set[int]:
    """Indices of the shards that go to host memory: whole ones, with about this fraction of all elements.

    The largest are taken first, as long as they fit. Then one is added or taken back as long as that comes nearer.
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


def batches(sizes: Sequence[int], limit: int | None) -> list[list[MainSpan]]:
    """MainSpans of flat tensors, in order, in batches of at most `limit` elements.

    Args:
        limit: a multiple of 64, as all cuts are, so that vector kernels see the same vectors; None for one batch of whole tensors.
    """
    if limit is None:
        whole = [MainSpan(index, 0, size) for index, size in enumerate(sizes) if size]
        return [whole] if whole else []
    made: list[list[MainSpan]] = []
    room = 0
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            if room == 0:
                made.append([])
                room = limit
            stop = min(start + room, size)
            made[-1].append(MainSpan(index, start, stop))
            room -= -(-(stop - start) // ALIGN) * ALIGN
            start = stop
    return made


def flat_views(
    like: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device | None = None, *, pinned: bool = False
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One buffer, and views of it with the lengths of these flat tensors.

    Args:
        device: None for host memory.
    """
    starts, end = _starts(like)
    buffer = torch.empty(end, dtype=dtype, device=device, pin_memory=pinned)
    return buffer, [buffer[start : start + tensor.numel()] for start, tensor in zip(starts, like, strict=True)]


def room_for(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of a buffer that holds these tensors, each of them aligned."""
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
