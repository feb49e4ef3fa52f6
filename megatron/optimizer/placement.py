"""Where main parameters and moments lie, on the device or in host memory; and the update there.

Host memory is for offloading: ZeRO-Offload (Ren et al. 2021, section 4). The update computes little for each parameter, and its
state is most of the memory, so only gradients and rounded weights cross between device and host. Gradients cross while backward
goes on, each group's as soon as it is reduced, into memory that keeps them until the update. New weights are rounded on the host
into one of two buffers, and cross from there while the next ones are updated and rounded into the other. Each way has a stream of
its own. The host waits for gradients to arrive, and for a buffer to be free if it is ahead; for nothing else.

Another placement (disk) would read main parameters and moments when its update begins and write them after it.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron.optimizer.rule import KeptState, Target, Update, Updater, UpdateRule
from megatron.optimizer.statistics import WholeNumbers
from megatron.parallel.boxes import FlatPiece, aligned
from megatron.parallel.collectives import Pending
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import Shard, ShardGroup
from megatron.parallel.state_shape import ELEMENTS
from megatron.parallel.torch_private import foreach_copy_, foreach_lerp_
from megatron.spec.groups import GroupOf

if TYPE_CHECKING:
    from megatron.optimizer.matrices import QKClip

# Elements that a thread updates before it rounds them to the model's dtype: so few that `main` is then still in its cache (Adam
# touches 4 MiB), so many that the calls cost little. In one thread in bfloat16 the whole step takes so many times the update alone:
# 1.23 (1.1 on a machine with other work); with a quarter 1.43 (1.45); with all updated before any is rounded 1.25 (1.4).
_BATCH = 2**18


@dataclass(frozen=True)
class MainSpan:
    """Elements [start, stop) of one of several main parameters."""

    index: int
    start: int
    stop: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This span of a flat tensor that belongs to its main parameter."""
        return tensor[self.start : self.stop]


class StatePlacement(ABC):
    """Some shards of one group that one rule updates, with their main parameters and moments in one place. It sets these of the
    shards.

    Args:
        main_params: the main parameter of each shard, flat.
        grads: the gradients in the same memory as the main parameters; complete after `fetch`.
        group_of: gives the group of each parameter.
        numbers: those of whole parameters.
        ema_decay: that of the average of the weights, if one is kept.
        qk_clip: scales what makes scores of attention too large, if anything does.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        main_params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        rule: UpdateRule,
        group_of: GroupOf,
        context: ParallelContext,
        numbers: WholeNumbers,
        ema_decay: float | None,
        qk_clip: QKClip | None,
    ) -> None:
        self.shards, self.main_params = list(shards), list(main_params)
        dtypes = {(shard.weights.dtype, shard.grad.dtype) for shard in self.shards}
        assert len(dtypes) == 1, f"shards that are updated together have several dtypes: {dtypes}"
        device = self.main_params[0].device
        make_states(self.shards, self.main_params, rule, context)
        if ema_decay is not None:
            room = torch.zeros(room_for(self.main_params), dtype=self.main_params[0].dtype, device=device)
            for shard, average in zip(self.shards, flat_views(room, self.main_params), strict=True):
                shard.average = average
        rounds_here = self.main_params[0] is not self.shards[0].weights and device.type == "cpu"
        limit = _BATCH * torch.get_num_threads() if rounds_here and rule.elementwise else math.inf

        def target(span: MainSpan) -> Target:
            shard = self.shards[span.index]

            elementwise = {name for name in shard.moments if shard.state_shape(name) is ELEMENTS}
            moments = {name: span.of(one) if name in elementwise else one for name, one in shard.moments.items()}
            counted = range(max(shard.counted.start, span.start) - span.start, min(shard.counted.stop, span.stop) - span.start)
            made = Target(
                span.of(shard.main),
                span.of(grads[span.index]),
                moments,
                shard.record,
                group_of(shard.record),
                FlatPiece(shard.piece.start + span.start, shard.piece.start + span.stop),
                counted,
                numbers.cuts_of(shard.record.name),
                numbers.of(shard.record.name),
            )
            self.targets.append(made)
            return made

        self.rule = rule
        self.targets: list[Target] = []
        """What the rule is given."""
        self._batches: list[tuple[Updater, Callable[[], None], Callable[[], None], Callable[[], None]]] = []
        """Targets that are updated together, clipped, averaged, and then written to the weights."""
        for spans in batches([main.numel() for main in self.main_params], limit):
            some = [target(span) for span in spans]
            clip = (lambda: None) if qk_clip is None else qk_clip.clipper(some)
            self._batches.append((rule.make(some, context), clip, self._averager(spans, ema_decay), self.writer(spans)))
        self.num_rounds = max(numbers.rounds_of(shard.record.name for shard in self.shards), int(rule.works_with_stage))
        """In how many rounds the rule asks for numbers of whole parameters."""

    def update(self, update: Update) -> Iterator[None]:
        """Make one update; yields at the end of each round in which the rule asks for numbers of whole parameters. The weights
        follow, in the order of the current stream."""
        self.fetch()
        for step, clip, average, write in self._batches:
            yield from step(update) or ()
            clip()
            average()
            write()
        self.finish()

    def write(self) -> None:
        """Copy the main parameters to the weights as they are."""
        for *_, write in self._batches:
            write()
        self.finish()

    def fetch(self) -> None:  # noqa: B027
        """Make sure that the gradients can be read. On the device they always can."""

    @abstractmethod
    def writer(self, spans: Sequence[MainSpan]) -> Callable[[], None]:
        """A function that begins to copy these spans of the main parameters to the weights."""

    def finish(self) -> None:  # noqa: B027
        """Let all that is issued from now on see the weights that were written. On the device the order of the stream does."""

    def _averager(self, spans: Sequence[MainSpan], decay: float | None) -> Callable[[], None]:
        """A function that takes these spans of the main parameters, just updated, into their average."""
        if decay is None:
            return lambda: None
        _, main_params = self._of(spans)
        averages = [span.of(average) for span in spans if (average := self.shards[span.index].average) is not None]
        return lambda: foreach_lerp_(averages, main_params, 1.0 - decay)

    def _of(self, spans: Sequence[MainSpan]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The weights and the main parameters of these spans."""
        found = [(self.shards[span.index], span) for span in spans]
        return [span.of(shard.weights) for shard, span in found], [span.of(shard.main) for shard, span in found]


class OnDevice(StatePlacement):
    """Main parameters on the device of the weights: the weights themselves where dtypes agree, else copies.

    Offloaded shards are here too if the device's memory is the host's.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        rule: UpdateRule,
        group_of: GroupOf,
        context: ParallelContext,
        numbers: WholeNumbers,
        ema_decay: float | None,
        qk_clip: QKClip | None = None,
    ) -> None:
        self._copies = shards[0].weights.dtype != shards[0].grad.dtype
        weights = [shard.weights for shard in shards]
        main_params = copies_of_weights(shards, weights[0].device) if self._copies else weights
        super().__init__(
            shards, main_params, [shard.grad for shard in shards], rule, group_of, context, numbers, ema_decay, qk_clip
        )

    def writer(self, spans: Sequence[MainSpan]) -> Callable[[], None]:
        """A function that rounds main parameters to the model's dtype, where they are not the weights."""
        if not self._copies:
            return lambda: None
        weights, main_params = self._of(spans)
        return lambda: foreach_copy_(weights, main_params)


class OnHost(StatePlacement):
    """Main parameters in host memory; they are copies even where dtypes agree.

    Main parameters and moments take no part in any copy, so they are not pinned: torch rounds pinned memory up to a power of two.
    """

    def __init__(
        self,
        group: ShardGroup,
        shards: Sequence[Shard],
        rule: UpdateRule,
        group_of: GroupOf,
        context: ParallelContext,
        numbers: WholeNumbers,
        ema_decay: float | None,
        link: Link,
        qk_clip: QKClip | None = None,
    ) -> None:
        self._link = link
        self._wait: Callable[[], None] | None = None
        self._sources = [shard.grad for shard in shards]
        room = torch.empty(room_for(self._sources), dtype=self._sources[0].dtype, pin_memory=link.pins)
        self._grads = flat_views(room, self._sources)
        super().__init__(shards, copies_of_weights(shards), self._grads, rule, group_of, context, numbers, ema_decay, qk_clip)
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
        weights, main_params = self._of(spans)
        self._link.reserve(room_for(weights) * weights[0].itemsize)
        return lambda: self._link.send(main_params, weights)

    @property
    def staging(self) -> list[torch.Tensor]:
        """Memory that gradients and weights pass through."""
        return [*self._grads, *self._link.buffers]

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
            foreach_copy_(list(arrived), list(grads), non_blocking=True)
            event.record(self._down)
        return event.synchronize

    def send(self, main_params: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> None:
        """Round main parameters to the dtype of the weights, and begin to copy them there. They may change again on return."""
        which, self._next = self._next, 1 - self._next
        self._sent[which].synchronize()
        staged = flat_views(self.buffers[which].view(weights[0].dtype), weights)
        foreach_copy_(staged, list(main_params))
        self._up.wait_stream(self._streams.current_stream(self._device))  # which may still read the old weights
        with self._streams.stream(self._up):
            foreach_copy_(list(weights), staged, non_blocking=True)
            self._sent[which].record(self._up)

    def finish(self) -> None:
        """Let the current stream wait for all that was sent."""
        self._streams.current_stream(self._device).wait_stream(self._up)


def choose_offloaded(sizes: Mapping[str, int], fraction: float) -> set[str]:
    """The shards that go to host memory: whole ones, with about this fraction of all elements.

    The largest are taken first, as long as they fit. Then one is added or taken back as long as that comes nearer. Of equal ones
    the first by name counts as the largest: their states may have unequal lengths, so it matters which is taken.

    Args:
        sizes: elements of each, by the name of its parameter, in any order.
    """
    missing = fraction * sum(sizes.values())
    chosen: set[str] = set()
    names = sorted(sizes, key=lambda name: (-sizes[name], name))
    for name in names:
        if 0 < sizes[name] <= missing:
            chosen.add(name)
            missing -= sizes[name]
    while names:
        changes = {name: -sizes[name] if name in chosen else sizes[name] for name in names}
        best = min(names, key=lambda name: abs(missing - changes[name]))
        if abs(missing - changes[best]) >= abs(missing):
            break
        chosen ^= {best}
        missing -= changes[best]
    return chosen


def batches(sizes: Sequence[int], limit: float) -> list[list[MainSpan]]:
    """MainSpans of flat tensors, in order, in batches of at most `limit` elements.

    Args:
        limit: a multiple of 64, as all cuts are, so that vector kernels see the same vectors; infinite for one batch.
    """
    made: list[list[MainSpan]] = []
    room = 0.0
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            if room == 0:
                made.append([])
                room = limit
            stop = int(min(start + room, size))
            made[-1].append(MainSpan(index, start, stop))
            room -= aligned(stop - start)
            start = stop
    return made


def copies_of_weights(shards: Sequence[Shard], device: torch.device | None = None) -> list[torch.Tensor]:
    """Copies of the weights in the gradients' dtype, in one buffer.

    Args:
        device: None for host memory.
    """
    weights = [shard.weights for shard in shards]
    views = flat_views(torch.empty(room_for(weights), dtype=shards[0].grad.dtype, device=device), weights)
    for view, one in zip(views, weights, strict=True):
        view.copy_(one)
    return views


def make_states(shards: Sequence[Shard], main_params: Sequence[torch.Tensor], rule: UpdateRule, context: ParallelContext) -> None:
    """Give shards their main parameters, and zeros for what the rule keeps of them: one buffer for each name, shape and dtype."""
    kept: dict[KeptState, list[Shard]] = {}
    for shard, main in zip(shards, main_params, strict=True):
        shard.main, shard.moments, shard.state_shapes = main, {}, {}
        for state in rule.states(shard.record):
            kept.setdefault(state, []).append(shard)
    for state, owners in kept.items():
        sizes = [state.room(shard.record, context.axis_sizes, shard.main.numel()) for shard in owners]
        starts = list(itertools.accumulate((aligned(size) for size in sizes), initial=0))
        room = torch.zeros(starts[-1], dtype=state.dtype or main_params[0].dtype, device=main_params[0].device)
        for shard, start, size in zip(owners, starts, sizes, strict=False):
            shard.moments[state.name] = room[start : start + size]
            shard.state_shapes[state.name] = state.shape


def room_for(tensors: Sequence[torch.Tensor]) -> int:
    """Elements of a buffer that holds these flat tensors, each of them aligned."""
    return sum(aligned(tensor.numel()) for tensor in tensors)


def flat_views(buffer: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of a buffer with the lengths of these flat tensors, as `room_for` lays them out."""
    starts = itertools.accumulate((aligned(tensor.numel()) for tensor in like), initial=0)
    return [buffer[start : start + tensor.numel()] for start, tensor in zip(starts, like, strict=False)]
