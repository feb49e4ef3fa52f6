"""The plan of a run's saves, kept: it is made again only when a rank holds other boxes than before."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import NamedTuple

from megatron.checkpoint.dtypes import bytes_of, dtype_name
from megatron.checkpoint.global_tensor import GlobalTensor
from megatron.checkpoint.saving.part import Part, part_of
from megatron.checkpoint.saving.plan import BoxToWrite, Held, RankPlan, share_out
from megatron.parallel.context import Group


class Assignment(NamedTuple):
    """What the first rank tells each rank before a save."""

    token: str
    """Of the run, in the names of what it has not finished."""
    plan: RankPlan | None
    """What this rank writes; None: as before."""


class PartPlanner:
    """Plans with one round of messages, of which each rank's is small when nothing has changed.

    Args:
        group: the ranks that save.
        max_file_bytes: begin another data file where one would become larger.
    """

    def __init__(self, group: Group, max_file_bytes: int | None = None) -> None:
        self._group, self._max_file_bytes = group, max_file_bytes
        self.token = secrets.token_hex(4)  # the first rank's is the run's
        self._held: list[Held] | None = None
        self._part = Part(group.index, ())
        self._world: list[list[Held]] = []

    def unless_known(self, held: list[Held]) -> list[Held] | None:
        """What this rank holds, None if that is what it held before."""
        return None if held == self._held else held

    def assign(self, shares: list[list[Held] | None]) -> list[Assignment]:
        """On the first rank: what every rank writes.

        Args:
            shares: what each rank's `unless_known` returned.

        Raises:
            CheckpointError: the boxes are not whole tensors; see `share_out`.
        """
        if all(share is None for share in shares):
            return [Assignment(self.token, None)] * len(shares)
        before = self._world or [[]] * len(shares)
        self._world = [old if new is None else new for old, new in zip(before, shares, strict=True)]
        return [Assignment(self.token, plan) for plan in share_out(self._world)]

    def take(self, held: list[Held], assignment: Assignment) -> Part:
        """On every rank: what it writes."""
        self.token = assignment.token
        if assignment.plan is not None:
            self._part = part_of(self._group.index, assignment.plan, self._max_file_bytes)
        self._held = held
        return self._part


def described(tensors: list[GlobalTensor]) -> list[Held]:
    """What a rank holds, without the elements."""
    return [
        Held(tensor.name, tensor.global_shape, dtype_name(tensor.local.dtype), tuple(placed.box for placed in tensor.boxes))
        for tensor in tensors
    ]


def reader_of(tensors: list[GlobalTensor]) -> Callable[[BoxToWrite], memoryview]:
    """What gives the bytes of a box that this rank holds; from a device it is copied when it is asked for."""
    parts = {(tensor.name, placed.box): (tensor, placed) for tensor in tensors for placed in tensor.boxes}

    def data_of(box: BoxToWrite) -> memoryview:
        tensor, placed = parts[box.name, box.box]
        return bytes_of(tensor.part(placed))

    return data_of
