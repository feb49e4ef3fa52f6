"""One optimizer over shards. Parameters in float32 or wider are their own main parameters; those in 16 bits have float32 copies.

It makes the main parameters and moments of each group of shards, on the device or in host memory, by the rule of each parameter. It
updates one group after the other, so that gathering the parameters of one group overlaps the update of the next. (Rules that need
numbers of whole parameters, see `statistics.py`, or whole matrices, see `matrix_plan.py`, begin with all groups.) Unscaling and
clipping are one factor on the gradient, which torch's fused kernels apply while they update, so it costs no pass over memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from megatron.config.imports import named
from megatron.config.training import OptimizerConfig
from megatron.optimizer.placement import Link, OnDevice, OnHost, StatePlacement, choose_offloaded
from megatron.optimizer.rule import Update, UpdateRule
from megatron.optimizer.rules import rules_of
from megatron.optimizer.statistics import WholeNumbers
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import DividedParam, Shard, ShardGroup
from megatron.spec.groups import RUN_ENDS, RateEnds, groups_of

if TYPE_CHECKING:
    from megatron.optimizer.matrices import QKClip


class ShardedOptimizer:
    """Makes and updates `main` and `moments` of each shard of some groups.

    Gradients and weights must stay at the same place in memory as long as the optimizer lives.

    Args:
        context: gives the shapes of parameters, and the groups over which a rule may communicate.
        staged: whether the gradients and weights of offloaded shards are copied from and to the device; by default on every device
            but the CPU, whose memory is the host's.
        largest: the largest scores of a step, [layers, query heads]; only --qk-clip needs them.
        frozen: what it never changes, and checkpoints hold beside its shards.

    Raises:
        ValueError: a package that the settings need is not installed.
    """

    def __init__(
        self,
        groups: Sequence[ShardGroup],
        config: OptimizerConfig,
        context: ParallelContext,
        *,
        staged: bool | None = None,
        largest: torch.Tensor | None = None,
        frozen: Sequence[Shard] = (),
    ) -> None:
        self.groups, self.frozen = list(groups), list(frozen)
        self.shards = [shard for group in self.groups for shard in group.shards]
        self.num_updates = 0
        """Updates made so far, also before a resume. (The moments are loaded in place.)"""
        fraction = config.optimizer_offload_fraction if config.optimizer_cpu_offload else 0.0
        movable = {shard.record.name: shard.grad.numel() for shard in self.shards if not shard.on_host}
        self._chosen = chosen = choose_offloaded(movable, fraction)
        if staged is None:
            staged = context.device.type not in ("cpu", "meta")
        link = Link(context.device) if chosen and staged else None
        rule_of, group_of = rules_of(config), groups_of(config)
        self.own_ends = {group_of(shard.record).ends for shard in self.shards} - {RUN_ENDS}
        """Ends of the learning rate's courses that differ from the run's."""
        params = [param for group in self.groups for param in group.params]
        self._numbers = WholeNumbers(params, lambda param: rule_of(param.record).statistics(param, context), context)
        self._clip: QKClip | None = None
        if config.qk_clip:
            assert largest is not None, "they were watched"
            self._clip = named("megatron.optimizer.matrices:QKClip")(
                largest, config.qk_clip_threshold, config.qk_clip_alpha, context
            )
        self._placements: list[list[StatePlacement]] = []
        for group in self.groups:
            # Placements on the device come first: its kernels only have to be started, and run while the host updates the others.
            together: dict[tuple[bool, UpdateRule], list[Shard]] = {}
            for shard in sorted(group.shards, key=lambda shard: shard.record.name in chosen):
                together.setdefault((shard.record.name in chosen, rule_of(shard.record)), []).append(shard)
            self._placements.append(
                [
                    OnHost(group, shards, rule, group_of, context, self._numbers, config.ema_decay, link, self._clip)
                    if offloaded and link is not None
                    else OnDevice(shards, rule, group_of, context, self._numbers, config.ema_decay, self._clip)
                    for (offloaded, rule), shards in together.items()
                ]
            )

        placed = list(itertools.chain(*self._placements))
        together_by: dict[UpdateRule, list[DividedParam]] = {}
        for param in params:
            together_by.setdefault(rule_of(param.record), []).append(param)
        self._stage_works = [
            rule.stage_work([target for one in placed if one.rule is rule for target in one.targets], some, context)
            for rule, some in together_by.items()
            if rule.works_with_stage
        ]
        """What the ranks of a stage do together, in an order that is the same on all of them."""
        self.averages = config.ema_decay is not None
        """Whether the shards have an average of the weights."""
        self.begin_averages()

    @property
    def held(self) -> list[Shard]:
        """All shards, those that it never changes too: what checkpoints hold."""
        return [*self.shards, *self.frozen]

    @torch.no_grad()
    def begin_averages(self) -> None:
        """Let the averages of the weights, if there are any, begin at the main parameters as they are."""
        for shard in self.shards:
            if shard.average is not None:
                shard.average.copy_(shard.main)

    @property
    def offloaded(self) -> list[Shard]:
        """The shards whose main parameters and moments are in host memory."""
        return [shard for shard in self.shards if shard.on_host or shard.record.name in self._chosen]

    @property
    def staging(self) -> list[torch.Tensor]:
        """Host memory that gradients and weights of offloaded shards pass through."""
        on_host = [placed for placements in self._placements for placed in placements if isinstance(placed, OnHost)]
        return [tensor for placed in on_host for tensor in placed.staging]

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Memory of the numbers of whole parameters, and of what the ranks of a stage do together."""
        return [*self._numbers.buffers, *(buffer for work in self._stage_works for buffer in work.buffers)]

    @torch.no_grad()
    def step(
        self, learning_rate: float, weight_decay: float, factor: float, own_rates: Mapping[RateEnds, float] = MappingProxyType({})
    ) -> None:
        """Make one update.

        Args:
            factor: multiplies every gradient: clip coefficient / loss scale.
            own_rates: the learning rates of groups whose course ends elsewhere.
        """
        update = Update(learning_rate, weight_decay, factor, self.num_updates + 1, own_rates)
        if self._clip is not None:
            self._clip.begin()
        running = [[placement.update(update) for placement in placements] for placements in self._placements]
        self._numbers.begin()
        for number in range(max(self._numbers.num_rounds, int(bool(self._stage_works)))):
            for placement, one in zip(itertools.chain(*self._placements), itertools.chain(*running), strict=True):
                if placement.num_rounds > number:
                    next(one, None)
            if number < self._numbers.num_rounds:
                self._numbers.put_together(number)
            for work in self._stage_works if number == 0 else ():
                work.run(update)
        for group, updates in zip(self.groups, running, strict=True):
            for one in updates:
                assert next(one, True), "a rule has more rounds than statistics"
            group.publish()
        self.num_updates += 1

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the main parameters as they are to the weights, here and on the other ranks that hold them."""
        for group, placements in zip(self.groups, self._placements, strict=True):
            for placement in placements:
                placement.write()
            group.publish()
