"""Layout of the flat buffers of Megatron-Core's distributed optimizer: the offset of each parameter.

Each model chunk has one buffer, divided into consecutive buckets. The buffer contains the parameters in reverse order of their
declaration, and each parameter starts at a multiple of 64 elements (Megatron-Core, core/distributed/param_and_grad_buffer.py). A
checkpoint stores the buckets separately (`dp_reshardable`), or joined without the padding at the end of each bucket
(distrib_optim.pt of the format `torch`).

Neither format stores parameter names. Readers therefore compare the main parameters with the weights to verify the assumed layout.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.parallel.tensor_slice import align_numel

MAIN_PARAM = "param"
"""Name of the main parameters in the optimizer state, next to `exp_avg` and `exp_avg_sq`."""


@dataclass(frozen=True)
class FlatParam:
    """Name and local shape of a parameter on one rank. The functions of this module take lists of `FlatParam` in the order in which
    Megatron-Core declares the parameters."""

    name: str
    shape: tuple[int, ...]
    has_separate_bucket: bool = False
    """Whether Megatron-Core puts the parameter alone into a bucket (part) of the flat buffer: true for a word embedding that
    two pipeline stages share."""

    @property
    def numel(self) -> int:
        """Number of elements of the parameter on the rank."""
        total = 1
        for size in self.shape:
            total *= size
        return total


@dataclass
class FlatBucket:
    """Part of a flat buffer that holds consecutive parameters.

    Args:
        offsets: offset of each parameter in the bucket, in elements, by parameter name.
        numel: number of elements of the bucket, including the padding between parameters.
    """

    offsets: dict[str, int] = field(default_factory=dict)
    numel: int = 0


def plan_buckets(params: Sequence[FlatParam], bucket_size: int | None) -> list[FlatBucket]:
    """Return the buckets into which Megatron-Core divides the flat buffer of a model chunk. The last declared parameter comes
    first.

    Args:
        params: parameters of the model chunk on this rank, in declaration order.
        bucket_size: minimum number of elements of a bucket, after which the next bucket starts; None for a single bucket.
    """
    buckets = [FlatBucket()]
    for param in reversed(params):
        bucket = buckets[-1]
        offset = align_numel(bucket.numel)
        if param.has_separate_bucket and bucket.offsets:
            bucket.numel = offset
            buckets.append(bucket := FlatBucket())
            offset = 0
        bucket.offsets[param.name], bucket.numel = offset, offset + param.numel
        if param.has_separate_bucket or (bucket_size is not None and bucket.numel >= bucket_size):
            buckets.append(FlatBucket())
    return [bucket for bucket in buckets if bucket.offsets]


def fill_buckets(params: Sequence[FlatParam], numels: Sequence[int]) -> list[FlatBucket]:
    """Assign the parameters of a model chunk to buckets of known sizes. The last declared parameter comes first.

    Args:
        params: parameters of the model chunk on this rank, in declaration order.
        numels: number of elements of each bucket.

    Raises:
        ValueError: the parameters do not exactly fill the buckets.
    """
    buckets, remaining = [], [*params]
    for numel in numels:
        bucket = FlatBucket(numel=numel)
        end = 0
        while remaining and align_numel(end) + remaining[-1].numel <= numel:
            param = remaining.pop()
            bucket.offsets[param.name] = align_numel(end)
            end = align_numel(end) + param.numel
        if align_numel(end) != align_numel(numel):
            raise ValueError(
                f"a bucket of the saved optimizer state has {numel:,} elements, but the parameters of the model that belong into "
                f"it have only {end:,}: the checkpoint was written with other settings or for another model. Import only the "
                "weights (--weights-only)"
            )
        buckets.append(bucket)
    if remaining:
        raise ValueError(
            f"the saved optimizer state is too short: it has no values for {len(remaining)} parameters of the model, such as "
            f"{remaining[-1].name}. The checkpoint was written with other settings or for another model. Import only the weights "
            "(--weights-only)"
        )
    return buckets


def infer_bucket_size(args: Namespace, stage: int, chunk: int, numel: int) -> int | None:
    """Return the minimum number of elements of a bucket with which Megatron-Core divided the buffer of a model chunk; None if the
    chunk has a single bucket.

    Args:
        args: arguments of the run.
        stage: pipeline stage.
        chunk: index of the model chunk on the stage.
        numel: number of elements of the chunk's parameters.
    """
    args_dict: dict[str, Any] = vars(args)
    if (
        not args_dict.get("overlap_grad_reduce")
        or stage > 0
        or chunk > 0
        or args_dict.get("overlap_param_gather_with_optimizer_step")
    ):
        return None
    if num_buckets := args_dict.get("ddp_num_buckets"):
        return numel // int(num_buckets)
    if args_dict.get("ddp_bucket_size"):
        return int(args_dict["ddp_bucket_size"])
    return max(
        40_000_000, 1_000_000 * int(args_dict.get("data_parallel_size") or 1) * int(args_dict.get("context_parallel_size") or 1)
    )


def iter_joined_offsets(buckets: Sequence[FlatBucket]) -> Iterator[tuple[str, int]]:
    """Yield the name and the offset (in elements) of each parameter in a flat buffer that stores its buckets joined, without the
    padding at the end of each bucket."""
    bucket_offset = 0
    for bucket in buckets:
        for name, offset in bucket.offsets.items():
            yield name, bucket_offset + offset
        bucket_offset += bucket.numel
