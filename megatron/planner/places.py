"""Which ranks of a pipeline stage keep the same, to the byte: a stage may have hundred thousands, which differ in few ways."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron.data_parallel.state_layout import Bytes, OptimizerState, StateLayout, StateMemory, StatePart
from megatron.model.build import Model
from megatron.parallel.context import ParallelContext
from megatron.parallel.topology import GRADIENT_AXES
from megatron.planner.plan import Places

Held = tuple[int, StateMemory]
"""Elements of the model without padding, and what a rank keeps of its state."""


def places_by_content(
    model: Model, layout: StateLayout, context: ParallelContext, state: OptimizerState
) -> dict[Held, list[Places]]:
    """The ranks of a stage, by what they hold.

    Args:
        model: of any rank of the stage, whose context is given.
        layout: how its state is cut.
    """
    found: dict[Held, list[Places]] = {}
    parts = [_Part(part, context, state) for part in layout.parts]
    ranges = list(_alike(parts, context))
    memories: Sequence[StateMemory] = []
    for tensor in range(context.topology.tp):
        if tensor == 0 or any(part.over_tensor for part in parts):
            memories = _memories(parts, layout, state, tensor, ranges)
        parameters = _parameters_held(model, context, tensor)
        for memory, data in zip(memories, ranges, strict=True):
            places = found.setdefault((parameters, memory), [])
            if places and places[-1].tensor == tensor and places[-1].data.stop == data.start:
                data = range(places.pop().data.start, data.stop)
            places.append(Places(tensor, data))
    return found


def parameters_of_stage(model: Model, context: ParallelContext) -> int:
    """Elements that the ranks of a stage hold together, each once and without padding; a tied parameter counts where its first
    chunk is."""
    counted = [entry for entry in model.params if entry.record.chunks[0] in model.chunks]
    total = 0
    for tensor in range(context.topology.tp):
        at = {**context.coordinates, "tp": tensor}
        once = [entry for entry in counted if tensor == 0 or not entry.record.replicated_axes]
        total += sum(entry.record.held_box(context.axis_sizes, at).numel for entry in once)
    return total


def _parameters_held(model: Model, context: ParallelContext, tensor: int) -> int:
    at = {**context.coordinates, "tp": tensor}
    return sum(entry.record.held_box(context.axis_sizes, at).numel for entry in model.params)


class _Part:
    """A part of the state, with what is kept of it at places that follow each other and keep as much."""

    def __init__(self, part: StatePart, context: ParallelContext, state: OptimizerState) -> None:
        group = part.group(context)
        self._tensor_size = context.topology.tp if group is context.group("tp", *GRADIENT_AXES) else 1
        self.over_tensor = self._tensor_size > 1 and group.size > 1
        self._size = group.size
        self._starts = sorted(cut for cut in {0, *part.cuts()} if cut < group.size)
        self.kept = [part.memory(start) for start in self._starts]
        self.alone = np.array([_flat(memory + state.memory([shards])) for memory, shards in self.kept])
        """Of each of `kept`, with the optimizer's part, if that does not depend on other parts."""

    def cuts(self, data_size: int) -> Iterator[int]:
        """Data ranks from which on any tensor rank may keep something else."""
        if len(self._starts) == 1:
            return
        ranks = self._size // self._tensor_size
        for first in range(0, data_size, ranks):
            for start in self._starts:
                yield from (first + start // self._tensor_size, first - (-start // self._tensor_size))

    def numbers(self, tensor: int, data: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of each data rank, which of `kept` it keeps."""
        index = tensor + self._tensor_size * data if self._tensor_size > 1 else data
        return np.searchsorted(self._starts, index % self._size, side="right") - 1


def _alike(parts: Sequence[_Part], context: ParallelContext) -> Iterator[range]:
    """Runs of data ranks that keep the same of every part, on every tensor rank."""
    data = context.gradient_group.size
    cuts = {0, data, *(cut for part in parts for cut in part.cuts(data))}
    return (range(*pair) for pair in itertools.pairwise(sorted(cut for cut in cuts if cut <= data)))


def _memories(
    parts: Sequence[_Part], layout: StateLayout, state: OptimizerState, tensor: int, ranges: Sequence[range]
) -> list[StateMemory]:
    """What ranks keep in all, of each run of data ranks."""
    data = np.array([some.start for some in ranges])
    numbers = [part.numbers(tensor, data) for part in parts]
    if parts and not state.apart:
        rows = [tuple(row) for row in np.stack(numbers, axis=1).tolist()]
        known = {row: layout.memory_of([p.kept[n] for p, n in zip(parts, row, strict=True)], state) for row in dict.fromkeys(rows)}
        return [known[row] for row in rows]
    total = np.array([_flat(StateMemory(buffers=layout.buffers))] * len(ranges))
    for part, mine in zip(parts, numbers, strict=True):
        total += part.alone[mine]
    return [_unflat(row) for row in total.tolist()]


def _flat(memory: StateMemory) -> list[int]:
    parts = (memory.parameters, memory.gradients, memory.mains, memory.moments, memory.buffers)
    return [number for part in parts for number in (part.device, part.host, part.padding)]


def _unflat(numbers: Sequence[int]) -> StateMemory:
    return StateMemory(*(Bytes(*numbers[start : start + 3]) for start in range(0, len(numbers), 3)))
