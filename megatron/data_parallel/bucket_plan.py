"""Which parameters lie where in which bucket, and how a bucket is cut into one slice for each rank of its group. Pure arithmetic.

Parameters are packed in the reverse order of their declaration, which is about the order in which backward completes them. A bucket
holds parameters of one pipeline chunk whose gradients are partial over the same axes. Vectors have buckets of their own, since some
schedules defer the gradients of matrices. The layout is the same whatever is sharded and scheduled, so that neither changes a sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from megatron.parallel.boxes import FlatPiece, aligned
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import DividedParam, ParamEntry


def default_bucket_size(data_size: int) -> int:
    """The default number of elements in a bucket. Many ranks then still send long messages: it grows with the data ranks until each
    of 1,024 sends 0.6 MB. No more, since a bucket that holds most of a model cannot be reduced while backward goes on."""
    return min(max(40_000_000, 1_000_000 * data_size), 160_000_000)


@dataclass(frozen=True)
class Placed:
    """A parameter's place in a bucket."""

    entry: ParamEntry
    start: int
    numel: int


@dataclass(frozen=True)
class BucketPlan:
    """Parameters that are reduced and gathered together, in one contiguous buffer of equal slices."""

    axes: tuple[str, ...]
    """Axes over which the gradients are summed. The ranks along them hold a slice each, if the bucket is sharded."""
    num_slices: int
    tied: bool
    """Whether the first and the last pipeline stage both hold the parameters, so that their gradients are added."""
    params: tuple[Placed, ...]
    slice_size: int

    @property
    def size(self) -> int:
        """Number of elements of the buffer, padding included."""
        return self.num_slices * self.slice_size

    def pieces(self, index: int) -> list[tuple[Placed, FlatPiece]]:
        """The content of slice `index`: its parameters, and which of their elements."""
        low, high = index * self.slice_size, (index + 1) * self.slice_size
        found = []
        for placed in self.params:
            start, stop = max(low, placed.start), min(high, placed.start + placed.numel)
            if start < stop:
                found.append((placed, FlatPiece(start - placed.start, stop - placed.start)))
        return found

    def divided(self, main_dtype: torch.dtype, *, sharded: bool) -> list[DividedParam]:
        """Its parameters, as slices cut them if they do.

        Args:
            main_dtype: dtype of the main parameters.
            sharded: whether each rank updates its slice only.
        """
        found = []
        for placed in self.params:
            inside = range(placed.start // self.slice_size + 1, -(-(placed.start + placed.numel) // self.slice_size))
            if not sharded:
                found.append(DividedParam(placed.entry.record, main_dtype, tied_apart=self.tied))
                continue
            cuts, first = tuple(index * self.slice_size - placed.start for index in inside), placed.start // self.slice_size
            found.append(DividedParam(placed.entry.record, main_dtype, cuts, self.axes, self.num_slices, first, self.tied))
        return found


def plan_buckets(
    entries: Iterable[ParamEntry],
    context: ParallelContext,
    *,
    bucket_size: int | None,
) -> list[BucketPlan]:
    """Plan buckets, in the order in which backward completes them. Parameters may be on the meta device.

    Args:
        bucket_size: most elements in a bucket, unless one parameter has more; None for a default that grows with the data group.
    """
    limit = bucket_size or default_bucket_size(context.topology.dp)
    open_buckets: dict[tuple[object, ...], list[ParamEntry]] = {}
    planned: list[list[ParamEntry]] = []
    for entry in reversed(list(entries)):
        record = entry.record
        kind = (
            *(context.group(*record.partial_over).ranks, entry.chunk, is_tied_apart(entry, context), record.kind == "vector"),
            record.by_counts is None,  # of another dtype
        )
        held = open_buckets.get(kind)
        if held is None or sum(e.param.numel() for e in held) + entry.param.numel() > limit:
            held = open_buckets[kind] = []
            planned.append(held)
        held.append(entry)
    return [_lay_out(held, context) for held in planned]


def is_tied_apart(entry: ParamEntry, context: ParallelContext) -> bool:
    """Whether another pipeline stage holds the parameter too."""
    return entry.record.tied and entry.held_elsewhere and context.pipeline_ends.size > 1


def _lay_out(entries: Sequence[ParamEntry], context: ParallelContext) -> BucketPlan:
    axes = entries[0].record.partial_over
    ranks = context.group(*axes).size
    placed, slice_size = _in_a_row(entries, ranks)
    return BucketPlan(axes, ranks, is_tied_apart(entries[0], context), tuple(placed), slice_size)


def _in_a_row(entries: Sequence[ParamEntry], ranks: int) -> tuple[list[Placed], int]:
    """Place parameters one after the other; slices may cut them anywhere."""
    placed, end = [], 0
    for entry in entries:
        start = aligned(end)
        end = start + entry.param.numel()
        placed.append(Placed(entry, start, entry.param.numel()))
    return placed, aligned(-(-end // ranks))
