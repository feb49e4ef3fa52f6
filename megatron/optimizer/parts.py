"""A part of the update: the shards of one group that live in one place, updated together or batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron.config.optimizer import OptimizerConfig
from megatron.optimizer.homes import ALIGN, Block, Home
from megatron.optimizer.rules import UpdateRule, as_seen
from megatron.optimizer.updaters import Target, Update, Updater
from megatron.parallel.context import ParallelContext
from megatron.parallel.shards import Granularity

# Elements that a thread updates before it rounds them to the model's dtype: so few that the mains are then still in its cache (Adam
# touches 4 MiB), so many that the calls cost little. In one thread in bfloat16 the whole step takes so many times the update alone:
# 1.23 (1.1 on a machine with other work); with a quarter 1.43 (1.45); with all updated before any is rounded 1.25 (1.4).
_BATCH = 2**18


@dataclass(frozen=True)
class _Batch:
    """What is updated together and then written to the weights."""

    updater: Updater
    write: Callable[[], None]


class Part:
    """The shards of one home and what updates them."""

    def __init__(self, home: Home, rule: UpdateRule, config: OptimizerConfig, context: ParallelContext) -> None:
        self.home = home
        self._moments = {name: home.moments() for name in rule.moments(config)}
        rounds_here = bool(home.main_buffers) and home.mains[0].device.type == "cpu"
        cut = rule.granularity is Granularity.ELEMENTS and rounds_here
        blocks = batches([main.numel() for main in home.mains], _BATCH * torch.get_num_threads() if cut else None)
        self._batches = [
            _Batch(rule.make([self._target(block, rule, context) for block in some], config, context), home.writer(some))
            for some in blocks
        ]

    def update(self, update: Update) -> None:
        """One update; the weights follow, in the order of the current stream."""
        self.home.fetch()
        for batch in self._batches:
            batch.updater.step(update)
            batch.write()
        self.home.finish()

    def write(self) -> None:
        """Carry the mains to the weights as they are."""
        for batch in self._batches:
            batch.write()
        self.home.finish()

    def moments(self, index: int) -> dict[str, torch.Tensor]:
        """State of one of the home's shards, by name."""
        return {name: tensors[index] for name, tensors in self._moments.items()}

    def _target(self, block: Block, rule: UpdateRule, context: ParallelContext) -> Target:
        shard = self.home.shards[block.index]

        def seen(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
            return as_seen(block.of(tensors), rule.granularity, shard.record, shard.piece, context)

        moments = {name: seen(tensors) for name, tensors in self._moments.items()}
        return Target(seen(self.home.mains), seen(self.home.grads), moments, shard.record)


def batches(sizes: Sequence[int], limit: int | None) -> list[list[Block]]:
    """Blocks of flat tensors, in order, in batches of at most `limit` elements.

    Args:
        limit: a multiple of 64, as all cuts are, so that vector kernels see the same vectors; None for one batch of whole tensors.
    """
    if limit is None:
        whole = [Block(index, 0, size) for index, size in enumerate(sizes) if size]
        return [whole] if whole else []
    made: list[list[Block]] = []
    room = 0
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            if room == 0:
                made.append([])
                room = limit
            stop = min(start + room, size)
            made[-1].append(Block(index, start, stop))
            room -= -(-(stop - start) // ALIGN) * ALIGN
            start = stop
    return made
