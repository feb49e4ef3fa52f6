"""The provider of what no step changes: the model's own weights beside LoRA's adapters.

Every data rank holds them whole, in the model's dtype. They have no gradient, no main parameters and no state of an optimizer, so
nothing of them is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from megatron.data_parallel.bucket import Fill
from megatron.data_parallel.bucket_plan import is_tied_apart
from megatron.data_parallel.provider import HeldTensors, Inspect, Provider
from megatron.parallel.accumulate import GradSink
from megatron.parallel.boxes import FlatPiece
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamEntry, ParamRecord
from megatron.parallel.shards import Shard


class FrozenParams(Provider):
    """Parameters that stay as they are.

    Args:
        entries: the parameters, on the meta device or with values.
        fill: initial values of parameters on the meta device.
    """

    def __init__(self, entries: Iterable[ParamEntry], context: ParallelContext, fill: Fill) -> None:
        self._context, self.groups = context, []
        self.frozen = [self._give(entry, fill) for entry in entries]

    def start_step(self, num_microbatches: int, *, inspect: Inspect | None = None) -> None:
        """See `Provider`: nothing is written."""

    def finish_gradients(self) -> None:
        """See `Provider`: nothing is summed."""

    def sinks(self) -> Iterator[tuple[ParamRecord, GradSink]]:
        """See `Provider`."""
        return iter(())

    def held(self) -> HeldTensors:
        """See `Provider`."""
        return HeldTensors([shard.weights for shard in self.frozen], [], [])

    def _give(self, entry: ParamEntry, fill: Fill) -> Shard:
        """Memory for a parameter, with its values or, where it had none, initial ones."""
        values = torch.empty(entry.param.shape, dtype=entry.param.dtype, device=self._context.device)
        if not entry.param.is_meta:
            values.copy_(entry.param.detach())
        elif not values.is_meta:
            fill(values.view(-1), entry.record, entry.record.boxes(FlatPiece(0, values.numel()), self._context))
        entry.replace(nn.Parameter(values, requires_grad=False))
        piece, context = FlatPiece(0, values.numel()), self._context
        first = context.gradient_group.index == 0 and not (is_tied_apart(entry, context) and context.pipeline_ends.index > 0)
        counted = range(values.numel()) if first and entry.record.counts_at(context) else range(0)
        shard = Shard(entry.record, piece, values.view(-1), values.new_empty(0), counted)
        shard.main, shard.moments = shard.weights, {}
        return shard
