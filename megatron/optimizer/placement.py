"""Storage of main parameters and optimizer states, on the device or in host memory, and their update there.

Host memory serves offloading as in ZeRO-Offload (Ren et al. 2021, section 4). The update computes little per parameter, and
optimizer states take most of the memory. So only gradients and updated weights are copied between device and host:

- Gradients are copied to the host during backward, as soon as a group's gradients are reduced. They stay in a host buffer until the
  update.
- The host casts updated main parameters to the model's dtype into one of two buffers. The copy to the device runs while the next
  parameters are updated and cast into the other buffer.

Each direction has its own stream. The host waits only for gradients, and for a free buffer if it is ahead of the copies.

A placement on disk could be added in the same form: read main parameters and states at the start of its update, and write them at
the end.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron.optimizer.rule import StateSpec, Target, Update, Updater, UpdateRule
from megatron.optimizer.statistics import ParamStatistics
from megatron.parallel.collectives import Pending
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import Shard, ShardGroup
from megatron.parallel.state_shape import PER_ELEMENT
from megatron.parallel.tensor_slice import FlatRange, align_numel
from megatron.parallel.torch_private import foreach_copy_, foreach_lerp_
from megatron.spec.groups import GroupLookup

if TYPE_CHECKING:
    from megatron.optimizer.matrices import QKClip

# Elements that a thread updates before it casts them to the model's dtype. So few that the main parameters are still in the
# thread's cache (Adam touches 4 MiB), so many that the calls cost little. Measured in bfloat16 on one thread: time of update and
# cast relative to the update alone. In parentheses: on a machine with other load.
#   2**18 elements                     1.23 (1.1)
#   2**16 elements                     1.43 (1.45)
#   all updated before any is cast     1.25 (1.4)
_BATCH_ELEMENTS = 2**18


@dataclass(frozen=True)
class ParamSpan:
    """Consecutive elements [start, stop) of a flat main parameter: an update processes main parameters in batches of such spans."""

    param_index: int
    start: int
    stop: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements of this span from a flat tensor with one value per element of the main parameter."""
        return tensor[self.start : self.stop]


class StatePlacement(ABC):
    """Storage of main parameters and optimizer states, either all on the device or all in host memory, and their update there.

    One object covers the shards of one shard group that have the same update rule. The constructor sets `main_param`, `moments` and
    `average` of the shards.

    Args:
        main_params: main parameter of each shard, flat.
        grads: gradients in the same memory as the main parameters, complete after `wait_for_grads`.
        get_group: returns the parameter group of a parameter.
        statistics: buffers for sums over full parameters (such as norms), which some rules need.
        ema_decay: decay of the moving average of the weights; None for no average.
        qk_clip: scales down query and key weights whose attention logits are too large; None without --qk-clip.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        main_params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        rule: UpdateRule,
        get_group: GroupLookup,
        context: ParallelContext,
        statistics: ParamStatistics,
        ema_decay: float | None,
        qk_clip: QKClip | None,
    ) -> None:
        self.shards, self.main_params = list(shards), list(main_params)
        dtypes = {(shard.weights.dtype, shard.grad.dtype) for shard in self.shards}
        assert len(dtypes) == 1, f"shards in one placement must have one dtype, not {dtypes}"
        device = self.main_params[0].device
        allocate_states(self.shards, self.main_params, rule, context)
        if ema_decay is not None:
            buffer = torch.zeros(compute_buffer_numel(self.main_params), dtype=self.main_params[0].dtype, device=device)
            for shard, average in zip(self.shards, build_flat_views(buffer, self.main_params), strict=True):
                shard.average = average
        casts_on_host = self.main_params[0] is not self.shards[0].weights and device.type == "cpu"
        max_elements = _BATCH_ELEMENTS * torch.get_num_threads() if casts_on_host and rule.elementwise else math.inf

        def add_target(span: ParamSpan) -> Target:
            shard = self.shards[span.param_index]

            per_element_names = {name for name in shard.moments if shard.get_state_shape(name) is PER_ELEMENT}
            states = {name: span.of(state) if name in per_element_names else state for name, state in shard.moments.items()}
            norm_range = range(
                max(shard.norm_range.start, span.start) - span.start, min(shard.norm_range.stop, span.stop) - span.start
            )
            target = Target(
                span.of(shard.main_param),
                span.of(grads[span.param_index]),
                states,
                shard.record,
                get_group(shard.record),
                FlatRange(shard.flat_range.start + span.start, shard.flat_range.start + span.stop),
                norm_range,
                statistics.shard_boundaries(shard.record.name),
                statistics.of(shard.record.name),
            )
            self.targets.append(target)
            return target

        self.rule = rule
        self.targets: list[Target] = []
        """Inputs of the update rule."""
        self._batches: list[tuple[Updater, Callable[[], None], Callable[[], None], Callable[[], None]]] = []
        """For each batch of targets, the functions that update the targets, apply QK-clip, update the moving averages, and copy the
        main parameters to the model's weights."""
        for spans in split_into_batches([main.numel() for main in self.main_params], max_elements):
            batch_targets = [add_target(span) for span in spans]
            clip = (lambda: None) if qk_clip is None else qk_clip.build_clip(batch_targets)
            self._batches.append(
                (rule.make(batch_targets, context), clip, self._build_averaging(spans, ema_decay), self.build_copy(spans))
            )
        self.num_rounds = max(statistics.count_rounds(shard.record.name for shard in self.shards), int(rule.has_stage_update))
        """Number of times that `update` yields: rounds of statistics, or one for an update that all ranks of a stage compute
        together."""

    def update(self, update: Update) -> Iterator[None]:
        """Update the shards once. The method is a generator. It yields each time this rank has added its contributions to sums over
        full parameters, so that the caller can all-reduce these sums.

        The new weights are ready for work that is issued to the current stream afterwards.
        """
        self.wait_for_grads()
        for step, clip, average, copy in self._batches:
            yield from step(update) or ()
            clip()
            average()
            copy()
        self.wait_for_copies()

    def copy_main_to_model_params(self) -> None:
        """Copy the current main parameters to the model's weights."""
        for *_, copy in self._batches:
            copy()
        self.wait_for_copies()

    def wait_for_grads(self) -> None:  # noqa: B027
        """Wait until the gradients can be read. Gradients on the device need no wait."""

    @abstractmethod
    def build_copy(self, spans: Sequence[ParamSpan]) -> Callable[[], None]:
        """Return a function that starts to copy these spans of the main parameters to the model's weights."""

    def wait_for_copies(self) -> None:  # noqa: B027
        """Ensure that work issued after this call reads the copied weights. On the device, the order of operations in the stream
        ensures this."""

    def _build_averaging(self, spans: Sequence[ParamSpan], decay: float | None) -> Callable[[], None]:
        """Return a function that updates the moving averages from these spans of the main parameters."""
        if decay is None:
            return lambda: None
        _, main_params = self._get_span_tensors(spans)
        averages = [span.of(average) for span in spans if (average := self.shards[span.param_index].average) is not None]
        return lambda: foreach_lerp_(averages, main_params, 1.0 - decay)

    def _get_span_tensors(self, spans: Sequence[ParamSpan]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return views of the model's weights and views of the main parameters, for these ranges of the main parameters."""
        shard_spans = [(self.shards[span.param_index], span) for span in spans]
        return [span.of(shard.weights) for shard, span in shard_spans], [span.of(shard.main_param) for shard, span in shard_spans]


class OnDevice(StatePlacement):
    """Main parameters and optimizer states on the device of the weights. If the dtypes agree, the weights themselves are the main
    parameters; otherwise the main parameters are copies.

    Offloaded shards also use this class if the device's memory is the host's memory.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        rule: UpdateRule,
        get_group: GroupLookup,
        context: ParallelContext,
        statistics: ParamStatistics,
        ema_decay: float | None,
        qk_clip: QKClip | None = None,
    ) -> None:
        self._has_copies = shards[0].weights.dtype != shards[0].grad.dtype
        weights = [shard.weights for shard in shards]
        main_params = copy_weights(shards, weights[0].device) if self._has_copies else weights
        super().__init__(
            shards, main_params, [shard.grad for shard in shards], rule, get_group, context, statistics, ema_decay, qk_clip
        )

    def build_copy(self, spans: Sequence[ParamSpan]) -> Callable[[], None]:
        """Return a function that casts main parameters to the model's dtype. It does nothing if the main parameters are the
        weights."""
        if not self._has_copies:
            return lambda: None
        weights, main_params = self._get_span_tensors(spans)
        return lambda: foreach_copy_(weights, main_params)


class OnHost(StatePlacement):
    """Main parameters and optimizer states in host memory. Main parameters are copies even if the dtypes agree.

    Their memory is not pinned, because they are never copied to the device themselves. Torch also rounds the size of pinned memory
    up to a power of two.
    """

    def __init__(
        self,
        group: ShardGroup,
        shards: Sequence[Shard],
        rule: UpdateRule,
        get_group: GroupLookup,
        context: ParallelContext,
        statistics: ParamStatistics,
        ema_decay: float | None,
        transfer: HostTransfer,
        qk_clip: QKClip | None = None,
    ) -> None:
        self._transfer = transfer
        self._wait_for_copy: Callable[[], None] | None = None
        self._device_grads = [shard.grad for shard in shards]
        buffer = torch.empty(
            compute_buffer_numel(self._device_grads), dtype=self._device_grads[0].dtype, pin_memory=transfer.uses_pinned_memory
        )
        self._host_grads = build_flat_views(buffer, self._device_grads)
        super().__init__(shards, copy_weights(shards), self._host_grads, rule, get_group, context, statistics, ema_decay, qk_clip)
        group.on_reduced.append(self._start_copy)

    def wait_for_grads(self) -> None:
        """Wait until the gradients are in host memory. If no reduction has started their copy to the host, copy the current
        gradients first."""
        if self._wait_for_copy is None:
            self._start_copy(Pending(self._device_grads[0]))
        assert self._wait_for_copy is not None
        self._wait_for_copy()
        self._wait_for_copy = None

    def build_copy(self, spans: Sequence[ParamSpan]) -> Callable[[], None]:
        """Return a function that casts these spans of the main parameters to the model's dtype and starts to copy them to the
        device."""
        weights, main_params = self._get_span_tensors(spans)
        self._transfer.reserve(compute_buffer_numel(weights) * weights[0].itemsize)
        return lambda: self._transfer.copy_to_device(main_params, weights)

    @property
    def staging_buffers(self) -> list[torch.Tensor]:
        """Host buffers for gradients and for weights on their way to the device."""
        return [*self._host_grads, *self._transfer.buffers]

    def wait_for_copies(self) -> None:
        """Let the current stream wait for the copies of weights to the device."""
        self._transfer.wait_for_copies()

    def _start_copy(self, pending: Pending) -> None:
        self._wait_for_copy = self._transfer.copy_grads_to_host(pending, self._device_grads, self._host_grads)


class HostTransfer:
    """Asynchronous copies between one device and host memory, with one stream per direction. On the CPU device, copies are
    synchronous."""

    def __init__(self, device: torch.device) -> None:
        self.uses_pinned_memory = device.type != "cpu"
        """Whether host buffers must be pinned so that copies overlap other work."""
        self._device, self._streams = device, torch.get_device_module(device)
        self._to_host_stream, self._to_device_stream = self._streams.Stream(device), self._streams.Stream(device)
        self.buffers = [torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)]
        """Two host buffers for weights on their way to the device."""
        self._buffer_free = [self._streams.Event(), self._streams.Event()]
        """For each buffer, the event after which its weights are on the device and the buffer can be reused."""
        self._next_buffer = 0

    def reserve(self, num_bytes: int) -> None:
        """Make each host buffer for weights at least `num_bytes` large. No copy of weights may be in flight."""
        if self.buffers[0].numel() < num_bytes:
            self.buffers = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.uses_pinned_memory) for _ in self.buffers]

    def copy_grads_to_host(
        self, pending: Pending, device_grads: Sequence[torch.Tensor], host_grads: Sequence[torch.Tensor]
    ) -> Callable[[], None]:
        """Start to copy gradients to the host after their reduction `pending`. Return a function that waits for the copies."""
        event = self._streams.Event()
        self._to_host_stream.wait_stream(self._streams.current_stream(self._device))
        with self._streams.stream(self._to_host_stream):
            pending.wait()
            foreach_copy_(list(host_grads), list(device_grads), non_blocking=True)
            event.record(self._to_host_stream)
        return event.synchronize

    def copy_to_device(self, main_params: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> None:
        """Cast main parameters to the dtype of the weights and start to copy them to the device.

        When this function returns, the main parameters may be changed again.
        """
        buffer_index, self._next_buffer = self._next_buffer, 1 - self._next_buffer
        self._buffer_free[buffer_index].synchronize()
        staging = build_flat_views(self.buffers[buffer_index].view(weights[0].dtype), weights)
        foreach_copy_(staging, list(main_params))
        self._to_device_stream.wait_stream(self._streams.current_stream(self._device))  # it may still read the old weights
        with self._streams.stream(self._to_device_stream):
            foreach_copy_(list(weights), staging, non_blocking=True)
            self._buffer_free[buffer_index].record(self._to_device_stream)

    def wait_for_copies(self) -> None:
        """Let the current stream wait for all copies of weights to the device."""
        self._streams.current_stream(self._device).wait_stream(self._to_device_stream)


def select_offloaded(sizes: Mapping[str, int], fraction: float) -> set[str]:
    """Select the shards whose state is in host memory, so that they have about the requested fraction of all elements. Shards are
    not divided.

    First, select the largest shards as long as they fit. Then add or remove single shards as long as the selected share comes
    closer to the fraction. Among shards of equal size, the first name counts as the largest. This makes the selection
    deterministic, because states of equally large shards may have different sizes.

    Args:
        sizes: number of elements of each shard by the name of its parameter, in any order.
        fraction: requested share of all elements.
    """
    remaining = fraction * sum(sizes.values())
    offloaded: set[str] = set()
    names = sorted(sizes, key=lambda name: (-sizes[name], name))
    for name in names:
        if 0 < sizes[name] <= remaining:
            offloaded.add(name)
            remaining -= sizes[name]
    while names:
        changes = {name: -sizes[name] if name in offloaded else sizes[name] for name in names}
        best = min(names, key=lambda name: abs(remaining - changes[name]))
        if abs(remaining - changes[best]) >= abs(remaining):
            break
        offloaded ^= {best}
        remaining -= changes[best]
    return offloaded


def split_into_batches(sizes: Sequence[int], max_elements: float) -> list[list[ParamSpan]]:
    """Divide flat tensors into batches of at most `max_elements` elements. A batch is a list of spans: consecutive elements of one
    tensor each.

    Args:
        sizes: number of elements of each tensor.
        max_elements: a multiple of 64, or infinity for one batch. Spans start at multiples of 64, so that vector instructions
            process the same groups of elements as without the split.
    """
    batches: list[list[ParamSpan]] = []
    remaining = 0.0
    for param_index, size in enumerate(sizes):
        start = 0
        while start < size:
            if remaining == 0:
                batches.append([])
                remaining = max_elements
            stop = int(min(start + remaining, size))
            batches[-1].append(ParamSpan(param_index, start, stop))
            remaining -= align_numel(stop - start)
            start = stop
    return batches


def copy_weights(shards: Sequence[Shard], device: torch.device | None = None) -> list[torch.Tensor]:
    """Return copies of the weights in the dtype of the gradients, in one buffer.

    Args:
        device: device of the copies; None for host memory.
    """
    weights = [shard.weights for shard in shards]
    views = build_flat_views(torch.empty(compute_buffer_numel(weights), dtype=shards[0].grad.dtype, device=device), weights)
    for view, weight in zip(views, weights, strict=True):
        view.copy_(weight)
    return views


def allocate_states(
    shards: Sequence[Shard], main_params: Sequence[torch.Tensor], rule: UpdateRule, context: ParallelContext
) -> None:
    """Set the main parameters of shards and allocate their optimizer states as zeros: one buffer for each state name, shape and
    dtype."""
    shards_by_state: dict[StateSpec, list[Shard]] = {}
    for shard, main in zip(shards, main_params, strict=True):
        shard.main_param, shard.moments, shard.state_shapes = main, {}, {}
        for state in rule.states(shard.record):
            shards_by_state.setdefault(state, []).append(shard)
    for state, state_shards in shards_by_state.items():
        sizes = [state.compute_max_numel(shard.record, context.axis_sizes, shard.main_param.numel()) for shard in state_shards]
        offsets = list(itertools.accumulate((align_numel(size) for size in sizes), initial=0))
        buffer = torch.zeros(offsets[-1], dtype=state.dtype or main_params[0].dtype, device=main_params[0].device)
        for shard, offset, size in zip(state_shards, offsets, sizes, strict=False):
            shard.moments[state.name] = buffer[offset : offset + size]
            shard.state_shapes[state.name] = state.shape


def compute_buffer_numel(tensors: Sequence[torch.Tensor]) -> int:
    """Return the number of elements of a buffer for these flat tensors, each padded to the alignment of tensors in buffers."""
    return sum(align_numel(tensor.numel()) for tensor in tensors)


def build_flat_views(buffer: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of a buffer with the lengths of these flat tensors, at the offsets that `compute_buffer_numel` assumes."""
    offsets = itertools.accumulate((align_numel(tensor.numel()) for tensor in like), initial=0)
    return [buffer[offset : offset + tensor.numel()] for offset, tensor in zip(offsets, like, strict=False)]
