"""A part of the update: one torch optimizer, or a few in turn, on the shards of one group that live in one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron.config.optimizer import OptimizerConfig
from megatron.optimizer.homes import ALIGN, Block, Home
from megatron.optimizer.rules import Target, UpdateRule, as_seen
from megatron.parallel.context import ParallelContext
from megatron.parallel.shards import Granularity

# Elements that a processor updates before it rounds them to the model's dtype: so few that the mains are then still in its cache
# (Adam touches 16 MiB), so many that calling the optimizer costs little (50 microseconds against 2 milliseconds).
_BATCH = 2**20


class Factor:
    """What every gradient is multiplied by in a step, made once for each device."""

    def __init__(self, value: float) -> None:
        self.value = value
        self._divisors: dict[torch.device, torch.Tensor] = {}

    def divisor(self, device: torch.device) -> torch.Tensor:
        """1 / factor, as torch's fused kernels take it."""
        if device not in self._divisors:
            self._divisors[device] = torch.full((), 1.0 / self.value, dtype=torch.float32, device=device)
        return self._divisors[device]


@dataclass(frozen=True)
class _Batch:
    """What is updated by one call and then written to the weights."""

    optimizer: torch.optim.Optimizer
    grads: list[torch.Tensor]
    write: Callable[[], None]


class Part:
    """The shards of one home and what updates them."""

    def __init__(self, home: Home, rule: UpdateRule, config: OptimizerConfig, context: ParallelContext) -> None:
        self.home, self._rule = home, rule
        self._moments = {name: home.moments() for name in rule.moments(config)}
        cut = rule.granularity is Granularity.ELEMENTS and home.mains[0].device.type == "cpu"
        blocks = batches([main.numel() for main in home.mains], _BATCH if cut else None)
        self._batches = [self._batch(some, config, context) for some in blocks]
        self.set_num_updates(0)

    def update(self, learning_rate: float, weight_decay: float, factor: Factor) -> None:
        """One update; the weights follow, in the order of the current stream."""
        self.home.fetch()
        for batch in self._batches:
            for group in batch.optimizer.param_groups:
                group["lr"] = learning_rate
                group["weight_decay"] = weight_decay if group["decays"] else 0.0
            _scale(batch, factor)
            batch.optimizer.step()
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

    def set_num_updates(self, count: int) -> None:
        """Go on after so many updates."""
        for batch in self._batches:
            self._rule.set_num_updates(batch.optimizer, count)

    def _batch(self, blocks: Sequence[Block], config: OptimizerConfig, context: ParallelContext) -> _Batch:
        def seen(block: Block, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
            shard = self.home.shards[block.index]
            return as_seen(block.of(tensors), self._rule.granularity, shard.record, shard.piece, context)

        grads = [seen(block, self.home.grads) for block in blocks]
        targets = [Target(seen(block, self.home.mains), self.home.shards[block.index].record) for block in blocks]
        optimizer = self._rule.make(targets, config, context)
        for block, target, grad in zip(blocks, targets, grads, strict=True):
            target.tensor.grad = grad
            optimizer.state[target.tensor].update({name: seen(block, tensors) for name, tensors in self._moments.items()})
        return _Batch(optimizer, grads, self.home.writer(blocks))


def _scale(batch: _Batch, factor: Factor) -> None:
    """Unscale and clip: within the update where the optimizer can, else before it."""
    optimizer, first = batch.optimizer, batch.grads[0]
    # By this attribute torch's gradient scaler knows an optimizer that divides by `grad_scale`; in float32, too coarse for float64.
    within = getattr(optimizer, "_step_supports_amp_scaling", False) and first.dtype != torch.float64
    if within:
        optimizer.grad_scale = None if factor.value == 1.0 else factor.divisor(first.device)  # type: ignore[attr-defined]
    elif factor.value != 1.0:
        torch._foreach_mul_(batch.grads, factor.value)


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
