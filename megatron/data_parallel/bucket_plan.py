"""Plan of buckets: the parameters of each bucket, their offsets, and the slice of each rank. Pure arithmetic.

Parameters are packed in the reverse order of their declaration, which is about the order in which backward completes them. A bucket
holds parameters of one pipeline chunk whose gradients are partial over the same axes. Vectors have separate buckets, since some
schedules defer the gradients of matrices. The plan does not depend on the sharding strategy or on the schedule, so neither changes
the order of a summation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamEntry, ParamPartition
from megatron.parallel.tensor_slice import FlatRange, align_numel


def get_default_bucket_size(data_size: int) -> int:
    """Return the default number of elements in a bucket: 1 million per data rank, but at least 40 million and at most 160 million.

    The size grows with the number of data ranks so that messages stay long: at the maximum, each of 1,024 ranks sends messages of
    0.6 MB. It is limited because a bucket that holds most of a model cannot be reduced while backward continues.

    Args:
        data_size: number of data ranks.
    """
    return min(max(40_000_000, 1_000_000 * data_size), 160_000_000)


@dataclass(frozen=True)
class BucketParam:
    """Parameter of a bucket, and its position in the bucket's flat buffer (offset and size in elements)."""

    entry: ParamEntry
    offset: int
    numel: int


@dataclass(frozen=True)
class BucketPlan:
    """Plan of a bucket: which parameters are reduced and gathered together, and their offsets in one contiguous buffer. The buffer
    is divided into slices of equal size."""

    axes: tuple[str, ...]
    """Axes of the rank grid over which the gradients are summed, such as "dp". If the bucket is sharded, each rank along these
    axes owns one slice."""
    num_slices: int
    tied: bool
    """Whether the first and the last pipeline stage both hold the parameters, so that their gradients are added."""
    params: tuple[BucketParam, ...]
    slice_size: int

    @property
    def size(self) -> int:
        """Number of elements of the buffer, padding included."""
        return self.num_slices * self.slice_size

    def get_params_in_slice(self, slice_index: int) -> list[tuple[BucketParam, FlatRange]]:
        """Return the parameters that overlap a slice, each with the range of its elements in the slice."""
        slice_start, slice_end = slice_index * self.slice_size, (slice_index + 1) * self.slice_size
        ranges = []
        for bucket_param in self.params:
            start, stop = max(slice_start, bucket_param.offset), min(slice_end, bucket_param.offset + bucket_param.numel)
            if start < stop:
                ranges.append((bucket_param, FlatRange(start - bucket_param.offset, stop - bucket_param.offset)))
        return ranges

    def get_param_partitions(self, main_dtype: torch.dtype, *, sharded: bool) -> list[ParamPartition]:
        """Return for each parameter of the bucket which ranks update which of its elements.

        Args:
            main_dtype: dtype of the main parameters.
            sharded: whether each rank updates only its slice; otherwise every rank updates all elements.
        """
        partitions = []
        for bucket_param in self.params:
            inner_slices = range(
                bucket_param.offset // self.slice_size + 1, -(-(bucket_param.offset + bucket_param.numel) // self.slice_size)
            )
            if not sharded:
                partitions.append(ParamPartition(bucket_param.entry.record, main_dtype, is_tied_across_stages=self.tied))
                continue
            boundaries, first_slice = (
                tuple(index * self.slice_size - bucket_param.offset for index in inner_slices),
                bucket_param.offset // self.slice_size,
            )
            partitions.append(
                ParamPartition(
                    bucket_param.entry.record, main_dtype, boundaries, self.axes, self.num_slices, first_slice, self.tied
                )
            )
        return partitions


def plan_buckets(
    entries: Iterable[ParamEntry],
    context: ParallelContext,
    *,
    bucket_size: int | None,
) -> list[BucketPlan]:
    """Divide parameters into buckets, in the order in which backward completes the buckets. Parameters may be on the meta device.

    Args:
        bucket_size: maximum number of elements in a bucket, unless one parameter has more; None for a default that grows with the
            number of data ranks.
    """
    max_numel = bucket_size or get_default_bucket_size(context.topology.dp)
    open_buckets: dict[tuple[object, ...], list[ParamEntry]] = {}
    buckets: list[list[ParamEntry]] = []
    for entry in reversed(list(entries)):
        record = entry.record
        key = (
            *(
                context.group(*record.partial_axes).ranks,
                entry.chunk,
                is_tied_across_stages(entry, context),
                record.param_type == "vector",
            ),
            record.count_update is None,  # parameters with count updates have another dtype
        )
        bucket = open_buckets.get(key)
        if bucket is None or sum(e.param.numel() for e in bucket) + entry.param.numel() > max_numel:
            bucket = open_buckets[key] = []
            buckets.append(bucket)
        bucket.append(entry)
    return [_plan_bucket(bucket, context) for bucket in buckets]


def is_tied_across_stages(entry: ParamEntry, context: ParallelContext) -> bool:
    """Return whether another pipeline stage holds the parameter too, as with a tied embedding."""
    return entry.record.tied and entry.is_shared_across_stages and context.pipeline_ends.size > 1


def _plan_bucket(entries: Sequence[ParamEntry], context: ParallelContext) -> BucketPlan:
    axes = entries[0].record.partial_axes
    num_ranks = context.group(*axes).size
    params, slice_size = _pack_params(entries, num_ranks)
    return BucketPlan(axes, num_ranks, is_tied_across_stages(entries[0], context), tuple(params), slice_size)


def _pack_params(entries: Sequence[ParamEntry], num_ranks: int) -> tuple[list[BucketParam], int]:
    """Pack parameters one after the other into a buffer of `num_ranks` slices. A slice boundary may lie inside a parameter.

    Returns:
        the parameters with their offsets, and the size of a slice in elements.
    """
    params, end = [], 0
    for entry in entries:
        start = align_numel(end)
        end = start + entry.param.numel()
        params.append(BucketParam(entry, start, entry.param.numel()))
    return params, align_numel(-(-end // num_ranks))
