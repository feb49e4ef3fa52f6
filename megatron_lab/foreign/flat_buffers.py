"""Where Megatron-Core's distributed optimizer has the elements of each parameter in its flat buffers.

A chunk of the model has one buffer. Its parameters lie there from the last to the first, each from a multiple of 64 elements on, in
buckets that follow each other (Megatron-Core, core/distributed/param_and_grad_buffer.py). Its checkpoints hold the buckets one by
one (`dp_reshardable`), or joined without the padding at their ends (distrib_optim.pt of the format `torch`); no names are there. So
whoever reads them compares the main parameters found with the weights.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.parallel.boxes import aligned

MAIN = "param"
"""Name of the main parameters there, beside exp_avg and exp_avg_sq."""


@dataclass(frozen=True)
class FlatParam:
    """A parameter of one rank, in the order in which the model declares them."""

    name: str
    shape: tuple[int, ...]
    alone: bool = False
    """Whether it has a bucket of its own: a word embedding that two stages share."""

    @property
    def numel(self) -> int:
        total = 1
        for size in self.shape:
            total *= size
        return total


@dataclass
class FlatBucket:
    """Parameters that follow each other, and the elements that they take with the padding between them."""

    starts: dict[str, int] = field(default_factory=dict)
    numel: int = 0


def lay_out(params: Sequence[FlatParam], most: int | None) -> list[FlatBucket]:
    """The buckets of a buffer.

    Args:
        params: those of the chunk on this rank.
        most: a bucket is closed when it has so many elements (None: never).
    """
    buckets = [FlatBucket()]
    for param in reversed(params):
        bucket = buckets[-1]
        start = aligned(bucket.numel)
        if param.alone and bucket.starts:
            bucket.numel = start
            buckets.append(bucket := FlatBucket())
            start = 0
        bucket.starts[param.name], bucket.numel = start, start + param.numel
        if param.alone or (most is not None and bucket.numel >= most):
            buckets.append(FlatBucket())
    return [bucket for bucket in buckets if bucket.starts]


def refill(params: Sequence[FlatParam], numels: Sequence[int]) -> list[FlatBucket]:
    """The buckets of a buffer whose sizes are known.

    Raises:
        ValueError: the parameters do not fill them.
    """
    buckets, rest = [], [*params]
    for numel in numels:
        bucket = FlatBucket(numel=numel)
        at = 0
        while rest and aligned(at) + rest[-1].numel <= numel:
            param = rest.pop()
            bucket.starts[param.name] = aligned(at)
            at = aligned(at) + param.numel
        if aligned(at) != aligned(numel):
            raise ValueError(f"its parameters take {at:,} of {numel:,} elements of a bucket")
        buckets.append(bucket)
    if rest:
        raise ValueError(f"it has no place for {len(rest)} of its parameters, of which the last is {rest[-1].name}")
    return buckets


def most_elements(args: Namespace, stage: int, chunk: int, numel: int) -> int | None:
    """Elements at which the run closed its buckets; None where it had one for the whole chunk.

    Args:
        args: of the run.
        stage: pipeline stage.
        chunk: number of the chunk on the stage.
        numel: elements of the parameters of the chunk.
    """
    given: dict[str, Any] = vars(args)
    if not given.get("overlap_grad_reduce") or stage > 0 or chunk > 0 or given.get("overlap_param_gather_with_optimizer_step"):
        return None
    if number := given.get("ddp_num_buckets"):
        return numel // int(number)
    if given.get("ddp_bucket_size"):
        return int(given["ddp_bucket_size"])
    return max(40_000_000, 1_000_000 * int(given.get("data_parallel_size") or 1) * int(given.get("context_parallel_size") or 1))


def places(buckets: Sequence[FlatBucket]) -> Iterator[tuple[str, int]]:
    """(parameter, its start) where the buckets are joined without the padding at their ends."""
    before = 0
    for bucket in buckets:
        for name, start in bucket.starts.items():
            yield name, before + start
        before += bucket.numel
