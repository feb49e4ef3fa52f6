"""Simple noise scale of the gradient, in sequences (--log-gradient-noise; McCandlish et al. 2018, appendix A.1).

The noise scale is the largest useful batch size. Below it, the progress per step grows about in proportion to the batch size; above
it, the gain fades. It is estimated from the squared gradient norms of two batches: the full batch of B sequences, and its first
microbatch of b sequences. The first microbatch contains the same samples in every layout. Its gradient is available during backward
without additional work, because a parameter's gradient is first written in a step by the first microbatch.

The squared norms are reduced together with the other scalars of the step, so the host does not wait again. Each context-parallel
rank holds a partial gradient of the first microbatch. The context-parallel ranks reduce-scatter the partial gradients in chunks,
and each rank squares its part of the sum.

Only the weight matrices of the layers that are divided over tensor-parallel ranks are measured (`ParamRecord.measures_noise`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from megatron.data_parallel.provider import ShardProvider
from megatron.optimizer.statistics import compute_squared_norms
from megatron.parallel.accumulate import GradSink
from megatron.parallel.collectives import reduce_scatter
from megatron.parallel.context import Group, ParallelContext
from megatron.parallel.params import Shard
from megatron.parallel.topology import DATA_AXES

_CHUNK_ELEMENTS = 1 << 20
"""Maximum number of gradient elements that context ranks reduce-scatter at once. It bounds the temporary memory, which is a
rank's share of the chunk."""


@dataclass(frozen=True)
class NoiseEstimate:
    """Unbiased estimates of the noise and of the signal in the gradient, from a single step. Their ratio would be biased, so
    `compute_noise_scale` sums the estimates of many steps before it divides."""

    covariance_trace: float
    """Noise: trace of the covariance matrix of the gradient of one sequence."""
    squared_norm: float
    """Signal: squared norm of the true gradient, without noise."""

    @classmethod
    def of(cls, small: float, big: float, small_batch: int, big_batch: int) -> NoiseEstimate:
        """Estimate noise and signal from the squared norms of two mean gradients: of a small and of a big batch.

        Source: McCandlish et al. 2018, equations A.2 and A.3.

        Args:
            small: squared norm of the small batch's gradient.
            big: squared norm of the big batch's gradient.
            small_batch: number of sequences in the small batch.
            big_batch: number of sequences in the big batch.
        """
        square = (big_batch * big - small_batch * small) / (big_batch - small_batch)
        trace = (small - big) / (1.0 / small_batch - 1.0 / big_batch)
        return cls(trace, square)


def compute_noise_scale(estimates: Sequence[NoiseEstimate]) -> float | None:
    """Return the simple noise scale in sequences: the sum of the estimated noise over the sum of the estimated signal. Return None
    if there are too few steps to separate the gradient from its noise."""
    square = sum(estimate.squared_norm for estimate in estimates)
    return sum(estimate.covariance_trace for estimate in estimates) / square if square > 0.0 else None


class GradientNoiseMeter:
    """Meter of the squared gradient norm of a step's first microbatch. It reads the gradient of each parameter when backward first
    writes it in the step.

    Args:
        providers: objects that hold this rank's parameters and gradients.
        shards: parameter shards that this rank counts in the gradient norm. `compute_local_squared_norms` expects the norms of the
            shards in this order.
    """

    def __init__(self, providers: Iterable[ShardProvider], shards: Sequence[Shard], context: ParallelContext) -> None:
        device, self._context_group = context.device, context.context_group
        self.has_first_microbatch = all(context.coordinates[axis] == 0 for axis in DATA_AXES)
        """Whether this rank computes the first microbatch of a step, or its share of that microbatch."""
        measured_sinks = [
            sink
            for provider in providers
            for record, sink in provider.iter_grad_sinks()
            if self.has_first_microbatch and record.measures_noise
        ]
        for sink_index, sink in enumerate(measured_sinks):
            sink.on_write = partial(self._on_write, sink_index, sink, sink.on_write)
        self._first_sq_sums = torch.zeros(len(measured_sinks), dtype=torch.float64, device=device)
        measured_shards = [index for index, shard in enumerate(shards) if shard.record.measures_noise]
        self._measured_shards = torch.tensor(measured_shards, dtype=torch.long, device=device)
        self._is_pending = [False] * len(measured_sinks)

    def start(self, *, enabled: bool) -> None:
        """Prepare the meter for a step. If `enabled` is False, nothing is measured in the step."""
        self._is_pending = [enabled] * len(self._is_pending)

    def compute_local_squared_norms(self, shard_squared_norms: torch.Tensor) -> list[torch.Tensor]:
        """Return what this rank adds to two squared gradient norms: that of the first microbatch and that of the full batch. The
        sum over all ranks is the squared norm. Both values are float64 scalars.

        Args:
            shard_squared_norms: squared norms of the full batch's gradient, one per shard.
        """
        return [self._first_sq_sums.sum(), shard_squared_norms.index_select(0, self._measured_shards).sum()]

    def _on_write(self, sink_index: int, sink: GradSink, next_on_write: Callable[[], None]) -> None:
        if self._is_pending[sink_index]:
            self._is_pending[sink_index] = False
            assert sink.main_grad is not None, "it was just written"
            sq_sums = [
                compute_squared_norms([chunk], self._first_sq_sums.device)
                for chunk in _reduce_scatter_chunks(sink.main_grad, self._context_group)
            ]
            self._first_sq_sums[sink_index] = torch.cat(sq_sums).sum()
        next_on_write()


def _reduce_scatter_chunks(grad: torch.Tensor, group: Group) -> Iterator[torch.Tensor]:
    """Sum a gradient over the ranks of `group`, with one reduce-scatter for each chunk of the flattened gradient. Yield this rank's
    part of each sum.

    Over all ranks, the yielded parts contain each element once. A chunk is padded with zeros to a multiple of the number of ranks.
    """
    if group.size == 1:
        yield grad
        return
    for chunk in grad.flatten().split(_CHUNK_ELEMENTS // group.size * group.size):
        padding = -len(chunk) % group.size
        yield reduce_scatter(F.pad(chunk, (0, padding)) if padding else chunk, group)
