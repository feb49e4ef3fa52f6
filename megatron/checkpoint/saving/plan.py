"""Who writes what: every box once in the world, spread evenly over the ranks that hold it. Needs neither torch nor processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from megatron.checkpoint.errors import CheckpointError, listed
from megatron.checkpoint.format.dtypes import DTYPES
from megatron.checkpoint.format.manifest import box_key
from megatron.checkpoint.format.safetensors_file import Entry
from megatron.checkpoint.format.tiling import tiles
from megatron.parallel.boxes import Box


class Held(NamedTuple):
    """What a rank holds of a tensor; no boxes where it holds only padding."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: str
    boxes: tuple[Box, ...]


class BoxToWrite(NamedTuple):
    """A box and the tensor that it is a part of."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: str
    box: Box

    @property
    def key(self) -> str:
        """Its name in a file."""
        return box_key(self.name, self.shape, self.box)

    @property
    def entry(self) -> Entry:
        """As it stands in a file."""
        return Entry(self.key, self.dtype, self.box.sizes)


class RankPlan(NamedTuple):
    """What a rank writes."""

    boxes: list[BoxToWrite]
    empty: list[Held]
    """Tensors without elements, which no file holds and the manifest lists."""


def share_out(world: Sequence[Sequence[Held]]) -> list[RankPlan]:
    """Give every box to one of the ranks that hold it: to the one with the fewest bytes so far, large boxes first.

    Args:
        world: what each rank holds.

    Returns:
        what each rank writes, in the order in which it holds it.

    Raises:
        CheckpointError: ranks disagree on a tensor's shape or dtype, a dtype is not supported, or a tensor is not whole.
    """
    tensors = _agreed(world)
    holders: dict[tuple[str, Box], list[int]] = defaultdict(list)
    boxes: dict[str, list[Box]] = {name: [] for name in tensors}
    for rank, held in enumerate(world):
        for tensor in held:
            for box in dict.fromkeys(tensor.boxes):
                if (tensor.name, box) not in holders:
                    boxes[tensor.name].append(box)
                holders[tensor.name, box].append(rank)
    if broken := [name for name, tensor in tensors.items() if not tiles(tensor.shape, boxes[name])]:
        raise CheckpointError(f"the boxes that the ranks hold do not make up whole tensors: {listed(broken)}")
    sizes = {key: key[1].numel * DTYPES[tensors[key[0]].dtype].itemsize for key in holders}
    load, writers = [0] * len(world), {}
    for key in sorted(holders, key=lambda key: (len(holders[key]) > 1, -sizes[key])):
        rank = min(holders[key], key=lambda rank: load[rank])
        writers[key] = rank
        load[rank] += sizes[key]
    plans = []
    for rank, held in enumerate(world):
        mine = dict.fromkeys((tensor[:3], box) for tensor in held for box in tensor.boxes if writers[tensor.name, box] == rank)
        plans.append(RankPlan([BoxToWrite(*tensor, box) for tensor, box in mine], []))
    if plans:
        plans[0].empty.extend(tensor._replace(boxes=()) for name, tensor in tensors.items() if not boxes[name])
    return plans


def _agreed(world: Sequence[Sequence[Held]]) -> dict[str, Held]:
    """Every tensor in the world, as the first rank that holds it describes it."""
    found: dict[str, Held] = {}
    problems: list[str] = []
    for rank, held in enumerate(world):
        for tensor in held:
            name, shape, dtype, _ = tensor
            first = found.setdefault(name, tensor)
            if (first.shape, first.dtype) != (shape, dtype):
                problems.append(f"{name} is {shape} {dtype} on rank {rank}, {first.shape} {first.dtype} before")
            if dtype not in DTYPES:
                problems.append(f"{name} is {dtype}, a checkpoint holds {', '.join(DTYPES)}")
    if problems:
        raise CheckpointError(f"tensors cannot be saved: {listed(problems, '; ')}")
    return found
