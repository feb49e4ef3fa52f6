"""The recorder of a trace: signatures of gradients and weights of the whole model, from the shards of every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megatron.audit.signature import named, shard_signatures
from megatron.audit.trace_file import Signature
from megatron.parallel.collectives import all_reduce
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamRecord
from megatron.parallel.shards import Shard


class TraceRecorder:
    """Looks at the elements that this rank counts; `collect` puts the ranks' parts together.

    Args:
        shards: this rank's.
        records: of the whole model, the same on every rank.
    """

    def __init__(self, shards: Sequence[Shard], records: Mapping[str, ParamRecord], context: ParallelContext) -> None:
        self._shards, self._records, self._context = [shard for shard in shards if shard.counted], records, context
        self._gradients: torch.Tensor | None = None

    def gradients(self, loss_scale: float) -> None:
        """Look at the gradients: complete, not clipped, still multiplied by the loss scale."""
        found = shard_signatures(self._shards, self._records, self._context, lambda shard: shard.counted_grad)
        found /= loss_scale
        found[:, -1] /= loss_scale
        self._gradients = found

    def collect(self) -> tuple[dict[str, Signature], dict[str, Signature]]:
        """Signatures by name, the same on every rank: of the gradients that were looked at since the last time (none if nobody
        did), and of the weights as they are now. One reduction over the world; all ranks call it together.
        """
        parts = [shard_signatures(self._shards, self._records, self._context, lambda shard: shard.counted_main)]
        if self._gradients is not None:
            parts.append(self._gradients)
        self._gradients = None
        sums = all_reduce(torch.stack(parts), self._context.world).cpu()
        weights, *gradients = ({name: named(row) for name, row in zip(self._records, part, strict=True)} for part in sums)
        return gradients[0] if gradients else {}, weights
