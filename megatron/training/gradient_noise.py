"""--log-gradient-noise: the simple noise scale of the gradient (McCandlish et al. 2018, appendix A.1), in sequences.

It says how large a batch is useful: with fewer sequences than it a step learns about as much more as the batch is larger, with
more the gain fades. It is estimated from the squares of the gradient of two batches: the whole one, of B sequences, and its first
microbatch, of b. The first microbatch is the same at every layout, and while backward goes on its gradient is there by itself, when
a weight's gradient is written for the first time in a step. Its squares travel with the step's sums, so the host waits for nothing
more. Context ranks share the first microbatch, and each has written a summand of its gradient: they add them up first, piece by
piece, and each takes the squares of its part of the sum.

Only the matrices of the layers that tensor ranks divide take part (`ParamRecord.tells_noise`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from megatron.data_parallel.provider import Provider
from megatron.optimizer.statistics import square_sums
from megatron.parallel.accumulate import GradSink
from megatron.parallel.collectives import reduce_scatter
from megatron.parallel.context import Group, ParallelContext
from megatron.parallel.params import Shard
from megatron.parallel.topology import DATA_AXES

_AT_ONCE = 1 << 20
"""Elements of a gradient that context ranks add up at once, or a few less: a rank's part of them is all that it takes."""


@dataclass(frozen=True)
class NoiseEstimate:
    """Unbiased estimates from one step. Their ratio is not: sums of many steps are divided (`noise_scale`)."""

    trace: float
    """Trace of the covariance of one sequence's gradient: the noise."""
    square: float
    """Square of the true gradient: the signal."""

    @classmethod
    def of(cls, small: float, big: float, small_batch: int, big_batch: int) -> NoiseEstimate:
        """From the squares of the mean gradient over a small and a big batch (equations A.2 and A.3)."""
        square = (big_batch * big - small_batch * small) / (big_batch - small_batch)
        trace = (small - big) / (1.0 / small_batch - 1.0 / big_batch)
        return cls(trace, square)


def noise_scale(estimates: Sequence[NoiseEstimate]) -> float | None:
    """The noise scale in sequences; None where the steps are too few to tell the gradient from its noise."""
    square = sum(one.square for one in estimates)
    return sum(one.trace for one in estimates) / square if square > 0.0 else None


class GradientNoise:
    """Measures the squares of a step's first microbatch while its gradient is written.

    Args:
        shards: those that this rank counts, in the order of the squares that `sums` takes.
    """

    def __init__(self, providers: Iterable[Provider], shards: Sequence[Shard], context: ParallelContext) -> None:
        device, self._sharers = context.device, context.context_group
        self.has_first = all(context.coordinates[axis] == 0 for axis in DATA_AXES)
        """Whether the first microbatch of a step is this rank's, or its part of it."""
        watched = [sink for provider in providers for record, sink in provider.sinks() if self.has_first and record.tells_noise]
        for number, sink in enumerate(watched):
            sink.on_write = partial(self._wrote, number, sink, sink.on_write)
        self._squares = torch.zeros(len(watched), dtype=torch.float64, device=device)
        counted = [index for index, shard in enumerate(shards) if shard.record.tells_noise]
        self._counted = torch.tensor(counted, dtype=torch.long, device=device)
        self._waiting = [False] * len(watched)

    def start(self, *, measures: bool) -> None:
        """Begin a step."""
        self._waiting = [measures] * len(self._waiting)

    def sums(self, counted_squares: torch.Tensor) -> list[torch.Tensor]:
        """This rank's share of the squares of the first microbatch's gradient and of the whole one's: float64 scalars."""
        return [self._squares.sum(), counted_squares.index_select(0, self._counted).sum()]

    def _wrote(self, number: int, sink: GradSink, counted: Callable[[], None]) -> None:
        if self._waiting[number]:
            self._waiting[number] = False
            assert sink.main_grad is not None, "it was just written"
            squares = [square_sums([part], self._squares.device) for part in _parts_of_sum(sink.main_grad, self._sharers)]
            self._squares[number] = torch.cat(squares).sum()
        counted()


def _parts_of_sum(grad: torch.Tensor, sharers: Group) -> Iterator[torch.Tensor]:
    """This rank's parts of the sum of the ranks' gradients: all ranks together have each element once, and zeros beside them."""
    if sharers.size == 1:
        yield grad
        return
    for piece in grad.flatten().split(_AT_ONCE // sharers.size * sharers.size):
        missing = -len(piece) % sharers.size
        yield reduce_scatter(F.pad(piece, (0, missing)) if missing else piece, sharers)
