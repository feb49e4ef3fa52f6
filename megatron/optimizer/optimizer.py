"""One optimizer over shards, in two forms: FP32Optimizer updates the parameters themselves, Float16Optimizer float32 main copies.

It makes the mains and moments of each group of shards, on the device or in host memory, and updates one group after the other: so
gathering the parameters of one group overlaps the update of the next. Unscaling and clipping are one factor on the gradient, which
torch's fused kernels apply while they update, so it costs no pass over memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from megatron.config.training import OptimizerConfig
from megatron.optimizer.placement import Home, Link, OnDevice, OnHost, Part, choose_offloaded
from megatron.optimizer.rules import RULES, Update
from megatron.parallel.context import ParallelContext
from megatron.parallel.shards import Shard, ShardGroup


@dataclass
class HeldState:
    """Memory that an optimizer keeps, by what it is for."""

    mains: list[torch.Tensor] = field(default_factory=list)
    """Apart from the weights."""
    moments: list[torch.Tensor] = field(default_factory=list)
    buffers: list[torch.Tensor] = field(default_factory=list)
    """Host memory through which gradients and weights pass."""


class ShardedOptimizer:
    """Makes and updates the `main` of each shard of some groups.

    Gradients and weights must stay where they are for its life.

    Args:
        context: for the shapes of parameters, and the groups over which a rule may communicate.
        staged: whether what is offloaded has gradients and weights copied from and to the device; by default where that is not the
            CPU, whose memory is the host's.

    Raises:
        ValueError: something that the settings ask for is not installed.
    """

    def __init__(
        self, groups: Sequence[ShardGroup], config: OptimizerConfig, context: ParallelContext, *, staged: bool | None = None
    ) -> None:
        self.groups = list(groups)
        self.shards = [shard for group in self.groups for shard in group.shards]
        self.num_updates = 0
        fraction = config.optimizer_offload_fraction if config.optimizer_cpu_offload else 0.0
        chosen = choose_offloaded([shard.grad.numel() for shard in self.shards], fraction)
        if staged is None:
            staged = context.device.type not in ("cpu", "meta")
        self._link = Link(context.device) if chosen and staged else None
        self._parts: list[list[Part]] = []
        at = 0
        for group in self.groups:
            mine = range(at, at + len(group.shards))
            at = mine.stop
            homes: list[Home] = []
            # Those on the device first: its kernels only have to be started, and run while the host updates the others.
            if kept := [self.shards[i] for i in mine if i not in chosen]:
                homes.append(OnDevice(kept))
            if moved := [self.shards[i] for i in mine if i in chosen]:
                homes.append(OnDevice(moved, offloaded=True) if self._link is None else OnHost(group, moved, self._link))
            self._parts.append([Part(home, RULES[config.optimizer], config, context) for home in homes])
        self._place_of: dict[int, tuple[Part, int]] = {}
        for part in self._each_part():
            for index, (shard, main) in enumerate(zip(part.home.shards, part.home.mains, strict=True)):
                shard.main = main
                self._place_of[id(shard)] = part, index

    @property
    def offloaded_share(self) -> float:
        """Elements in host memory among all: near to --optimizer-offload-fraction, since shards are offloaded whole."""
        sizes = {True: 0, False: 0}
        for part in self._each_part():
            sizes[part.home.offloaded] += sum(main.numel() for main in part.home.mains)
        return sizes[True] / max(sum(sizes.values()), 1)

    @torch.no_grad()
    def step(self, learning_rate: float, weight_decay: float, factor: float) -> None:
        """One update.

        Args:
            factor: multiplies every gradient: clip coefficient / loss scale.
        """
        update = Update(learning_rate, weight_decay, factor, self.num_updates + 1)
        for group, parts in zip(self.groups, self._parts, strict=True):
            for part in parts:
                part.update(update)
            group.publish()
        self.num_updates += 1

    @torch.no_grad()
    def publish(self) -> None:
        """Carry the mains as they are to the weights, here and on the ranks that hold them too."""
        for group, parts in zip(self.groups, self._parts, strict=True):
            for part in parts:
                part.write()
            group.publish()

    def moments(self, shard: Shard) -> dict[str, torch.Tensor]:
        """The optimizer state of a shard, by name, each of the shard's size."""
        part, index = self._place_of[id(shard)]
        return part.moments(index)

    def set_num_updates(self, count: int) -> None:
        """Continue after this many updates (the moments are loaded in place)."""
        self.num_updates = count

    def held(self) -> tuple[HeldState, HeldState]:
        """Memory on the device, and memory of the host by way of offloading."""
        device, host = HeldState(), HeldState()
        for part in self._each_part():
            kept = host if part.home.offloaded else device
            kept.mains += part.home.main_buffers
            kept.moments += part.home.moment_buffers
            kept.buffers += part.home.grad_buffers
        if self._link is not None:
            host.buffers += self._link.buffers
        return device, host

    def _each_part(self) -> Iterator[Part]:
        return (part for parts in self._parts for part in parts)


class FP32Optimizer(ShardedOptimizer):
    """The parameters are their own mains (float32, or float64 in proofs), but for what is offloaded."""


class Float16Optimizer(ShardedOptimizer):
    """float32 main parameters beside 16-bit model parameters."""


def make_optimizer(
    groups: Sequence[ShardGroup], config: OptimizerConfig, context: ParallelContext, *, staged: bool | None = None
) -> ShardedOptimizer:
    """Float16Optimizer where there are parameters in fewer bits than their gradients, else FP32Optimizer. See ShardedOptimizer."""
    rounds = any(shard.weights.dtype != shard.grad.dtype for group in groups for shard in group.shards)
    return (Float16Optimizer if rounds else FP32Optimizer)(groups, config, context, staged=staged)
