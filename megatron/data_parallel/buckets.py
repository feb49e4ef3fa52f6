"""Gradients in contiguous buckets, summed over the data ranks (and whatever else a parameter's record names).

Parameters are packed in the reverse order of their declaration, which is about the order in which backward completes them. A bucket
holds parameters whose gradients are partial over the same axes. It is complete when every parameter was written as often as its
uses and the number of microbatches say; with overlap its reduction starts then, while backward goes on, else all start at the end.
Buckets and their boundaries are the same either way, and so are the results, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

import torch

from megatron.config.parallel import ParallelConfig
from megatron.parallel.accumulate import GradSink
from megatron.parallel.boxes import Piece
from megatron.parallel.collectives import Pending, all_reduce, start_all_reduce
from megatron.parallel.context import Group, ParallelContext
from megatron.parallel.params import ParamEntry, ParamRecord, ParamTable

# Each parameter starts at a multiple of this many elements, so that vector kernels are aligned.
_ALIGN = 64


def default_bucket_size(data_size: int) -> int:
    """Elements: large enough that many ranks still send long messages."""
    return max(40_000_000, 1_000_000 * data_size)


def main_grad_dtype(dtype: torch.dtype) -> torch.dtype:
    """Gradients of 16-bit parameters are summed in float32."""
    return torch.promote_types(dtype, torch.float32)


@dataclass
class Bucket:
    """Parameters that are reduced together: one contiguous buffer, one group."""

    group: Group
    tied: bool
    buffer: torch.Tensor
    entries: list[ParamEntry] = field(default_factory=list)
    views: list[torch.Tensor] = field(default_factory=list)
    writes_left: list[int] = field(default_factory=list)
    """Gradients that each parameter still waits for in this step."""
    num_incomplete: int = 0
    pending: Pending | None = None


class GradBuckets:
    """All gradients of this rank's parameters, and their reduction."""

    def __init__(self, table: ParamTable, context: ParallelContext, config: ParallelConfig) -> None:
        self._context, self._overlap = context, config.overlap_grad_reduce
        size = config.ddp_bucket_size or default_bucket_size(context.topology.dp)
        self.buckets: list[Bucket] = [self._allocate(entries) for entries in _plan(table, context, size)]
        self._sinks: list[GradSink] = []
        self._reduces_early = False
        for bucket in self.buckets:
            for place, (entry, view) in enumerate(zip(bucket.entries, bucket.views, strict=True)):
                sink = GradSink(view, partial(self._wrote, bucket, place))
                entry.param.grad_sink = sink  # type: ignore[attr-defined]
                self._sinks.append(sink)

    def start_step(self, num_microbatches: int, *, reduces: bool = True) -> None:
        """Forget the last step's gradients and expect this many microbatches.

        Args:
            reduces: whether complete buckets may be reduced; False leaves each rank's own gradients (do not call `finish` then).
        """
        self._reduces_early = reduces and self._overlap
        for sink in self._sinks:
            sink.written = False
        for bucket in self.buckets:
            bucket.writes_left = [num_microbatches * entry.uses_per_microbatch for entry in bucket.entries]
            bucket.num_incomplete = len(bucket.entries)

    def finish(self) -> None:
        """Start what is left to reduce, wait for all, and join tied parameters of different stages.

        Raises:
            RuntimeError: a parameter got no gradient, or one too many.
        """
        for bucket in self.buckets:
            if bucket.num_incomplete:
                self._complain(bucket)
            if bucket.pending is None:
                self._reduce(bucket)
        for bucket in self.buckets:
            assert bucket.pending is not None
            bucket.pending.wait()
            bucket.pending = None
        for bucket in self.buckets:
            if bucket.tied:  # sums commute: first over the data ranks, then over the two stages
                all_reduce(bucket.buffer, self._context.pipeline_ends)

    def gradients(self) -> Iterable[tuple[ParamEntry, torch.Tensor]]:
        """Every parameter with its main gradient."""
        for bucket in self.buckets:
            yield from zip(bucket.entries, bucket.views, strict=True)

    def counts(self, record: ParamRecord) -> bool:
        """Whether this rank counts the parameter's elements in global norms: one rank in the world does for each element."""
        place = self._context.coordinates
        replicated = ("cp", "dp", *record.replicated_axes)
        first_holder = len(record.chunks) == 1 or self._context.pipeline_ends.index == 0
        return first_holder and all(place[axis] == 0 for axis in replicated)

    def piece(self, entry: ParamEntry) -> Piece:
        """The part of a parameter that this rank updates: all of it."""
        return Piece(0, entry.param.numel())

    def _allocate(self, entries: list[ParamEntry]) -> Bucket:
        dtype = main_grad_dtype(entries[0].param.dtype)
        starts, end = [], 0
        for entry in entries:
            starts.append(end)
            end += -(-entry.param.numel() // _ALIGN) * _ALIGN
        record = entries[0].record
        buffer = torch.zeros(end, dtype=dtype, device=self._context.device)
        bucket = Bucket(self._context.group(*record.partial_over), _tied_apart(entries[0], self._context), buffer, entries)
        for entry, start in zip(entries, starts, strict=True):
            bucket.views.append(buffer[start : start + entry.param.numel()].view(entry.param.shape))
        return bucket

    def _wrote(self, bucket: Bucket, place: int) -> None:
        bucket.writes_left[place] -= 1
        if bucket.writes_left[place] < 0:
            self._complain(bucket)
        if bucket.writes_left[place] == 0:
            bucket.num_incomplete -= 1
            if bucket.num_incomplete == 0 and self._reduces_early:
                self._reduce(bucket)

    def _reduce(self, bucket: Bucket) -> None:
        bucket.pending = start_all_reduce(bucket.buffer, bucket.group)

    def _complain(self, bucket: Bucket) -> NoReturn:
        words = []
        for entry, left in zip(bucket.entries, bucket.writes_left, strict=True):
            if left < 0:
                words.append(f"{-left} gradients too many reached {entry.record.name}")
            elif left > 0:
                silent = not entry.param.grad_sink.written  # type: ignore[attr-defined]
                words.append(
                    f"no gradient reached {entry.record.name}" if silent else f"{entry.record.name} lacks {left} gradients"
                )
        raise RuntimeError(f"rank {self._context.rank}: the backward passes of this step are incomplete: {'; '.join(words)}")


def _tied_apart(entry: ParamEntry, context: ParallelContext) -> bool:
    """Whether another pipeline stage holds the parameter too."""
    return len(entry.record.chunks) > 1 and len(entry.holders) < len(entry.record.chunks) and context.pipeline_ends.size > 1


def _plan(table: ParamTable, context: ParallelContext, size: int) -> list[list[ParamEntry]]:
    """Entries of each bucket: of one kind, at most `size` elements unless one parameter has more."""
    open_buckets: dict[tuple[tuple[int, ...], bool], list[ParamEntry]] = {}
    planned: list[list[ParamEntry]] = []
    for entry in reversed(list(table)):
        kind = (context.group(*entry.record.partial_over).ranks, _tied_apart(entry, context))
        held = open_buckets.get(kind)
        if held is None or sum(e.param.numel() for e in held) + entry.param.numel() > size:
            held = []
            open_buckets[kind] = held
            planned.append(held)
        held.append(entry)
    return planned
