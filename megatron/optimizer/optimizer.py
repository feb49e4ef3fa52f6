"""Optimizer over the shards of one rank.

A parameter in float32 or wider is its own main parameter. A 16-bit parameter has a float32 copy as its main parameter.

For each group of shards, the optimizer allocates main parameters and states, on the device or in host memory. The update rule of
each parameter decides which states there are. The optimizer updates one group after the other, so that the all-gather of one
group's parameters overlaps the update of the next group. Rules that need statistics of full parameters (`statistics.py`) or full
matrices (`matrix_plan.py`) first run the reductions and exchanges for all groups.

Unscaling and clipping are one factor on the gradient. Torch's fused kernels apply this factor during the update, so it needs no
extra pass over memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from megatron.config.imports import import_object
from megatron.config.training import OptimizerConfig
from megatron.optimizer.placement import HostTransfer, OnDevice, OnHost, StatePlacement, select_offloaded
from megatron.optimizer.rule import Update, UpdateRule
from megatron.optimizer.rules import build_rule_selector
from megatron.optimizer.statistics import ParamStatistics
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamPartition, Shard, ShardGroup
from megatron.spec.groups import DEFAULT_LR_BOUNDS, LearningRateBounds, build_group_lookup

if TYPE_CHECKING:
    from megatron.optimizer.matrices import QKClip


class ShardedOptimizer:
    """Optimizer that allocates and updates the main parameters and optimizer states of this rank's shards.

    Gradients and weights must keep their memory addresses for the lifetime of the optimizer.

    Args:
        groups: groups of shards. The updated parameters of a group are all-gathered together.
        context: gives the local shapes of parameters, and the process groups over which update rules communicate.
        uses_staging: copy gradients of offloaded shards from the device to the host, and updated weights back. False if the
            device's memory is the host's memory. Default: True, except on the CPU and the meta device.
        max_logits: largest attention logit of each head in a step, [layers, query heads]. Required only for --qk-clip.
        frozen_shards: shards that the optimizer does not update but that checkpoints contain.

    Raises:
        ValueError: a package that the settings need is not installed.
    """

    def __init__(
        self,
        groups: Sequence[ShardGroup],
        config: OptimizerConfig,
        context: ParallelContext,
        *,
        uses_staging: bool | None = None,
        max_logits: torch.Tensor | None = None,
        frozen_shards: Sequence[Shard] = (),
    ) -> None:
        self.groups, self.frozen_shards = list(groups), list(frozen_shards)
        self.shards = [shard for group in self.groups for shard in group.shards]
        self.num_steps = 0
        """Updates made so far, including those before a resume. (The states are loaded in place.)"""
        fraction = config.optimizer_offload_fraction if config.optimizer_cpu_offload else 0.0
        offloadable = {shard.record.name: shard.grad.numel() for shard in self.shards if not shard.on_host}
        self._offloaded_names = offloaded_names = select_offloaded(offloadable, fraction)
        if uses_staging is None:
            uses_staging = context.device.type not in ("cpu", "meta")
        transfer = HostTransfer(context.device) if offloaded_names and uses_staging else None
        select_rule, get_group = build_rule_selector(config), build_group_lookup(config)
        self.custom_lr_bounds = {get_group(shard.record).lr_bounds for shard in self.shards} - {DEFAULT_LR_BOUNDS}
        """Maximum and minimum learning rates of parameter groups that differ from --lr and --min-lr."""
        params = [param for group in self.groups for param in group.params]
        self._statistics = ParamStatistics(params, lambda param: select_rule(param.record).statistics(param, context), context)
        self._qk_clip: QKClip | None = None
        if config.qk_clip:
            assert max_logits is not None, "--qk-clip needs the largest attention logits"
            self._qk_clip = import_object("megatron.optimizer.matrices:QKClip")(
                max_logits, config.qk_clip_threshold, config.qk_clip_alpha, context
            )
        self._placements: list[list[StatePlacement]] = []
        for group in self.groups:
            # Placements on the device come first: their kernels are only launched, and run while the host updates offloaded shards.
            shards_by_rule: dict[tuple[bool, UpdateRule], list[Shard]] = {}
            for shard in sorted(group.shards, key=lambda shard: shard.record.name in offloaded_names):
                shards_by_rule.setdefault((shard.record.name in offloaded_names, select_rule(shard.record)), []).append(shard)
            self._placements.append(
                [
                    OnHost(group, shards, rule, get_group, context, self._statistics, config.ema_decay, transfer, self._qk_clip)
                    if offloaded and transfer is not None
                    else OnDevice(shards, rule, get_group, context, self._statistics, config.ema_decay, self._qk_clip)
                    for (offloaded, rule), shards in shards_by_rule.items()
                ]
            )

        all_placements = list(itertools.chain(*self._placements))
        params_by_rule: dict[UpdateRule, list[ParamPartition]] = {}
        for param in params:
            params_by_rule.setdefault(select_rule(param.record), []).append(param)
        self._stage_updates = [
            rule.build_stage_update(
                [target for placement in all_placements if placement.rule is rule for target in placement.targets],
                rule_params,
                context,
            )
            for rule, rule_params in params_by_rule.items()
            if rule.has_stage_update
        ]
        """Updates that all ranks of a stage compute together, in the same order on all of these ranks."""
        self.has_averages = config.ema_decay is not None
        """Whether the shards have an exponential moving average of the weights."""
        self.reset_averages()

    @property
    def checkpoint_shards(self) -> list[Shard]:
        """All shards that checkpoints contain: the updated shards and the frozen ones."""
        return [*self.shards, *self.frozen_shards]

    @torch.no_grad()
    def reset_averages(self) -> None:
        """Set the moving averages of the weights to the current main parameters. Do nothing if the run keeps no averages."""
        for shard in self.shards:
            if shard.average is not None:
                shard.average.copy_(shard.main_param)

    @property
    def offloaded_shards(self) -> list[Shard]:
        """Shards whose main parameters and optimizer states are in host memory."""
        return [shard for shard in self.shards if shard.on_host or shard.record.name in self._offloaded_names]

    @property
    def staging_buffers(self) -> list[torch.Tensor]:
        """Host buffers for the gradients and updated weights of offloaded shards."""
        host_placements = [
            placement for placements in self._placements for placement in placements if isinstance(placement, OnHost)
        ]
        return [tensor for placement in host_placements for tensor in placement.staging_buffers]

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Buffers for statistics of full parameters (such as norms), and for updates that all ranks of a stage compute together."""
        return [*self._statistics.buffers, *(buffer for stage_update in self._stage_updates for buffer in stage_update.buffers)]

    @torch.no_grad()
    def step(
        self,
        learning_rate: float,
        weight_decay: float,
        grad_factor: float,
        group_rates: Mapping[LearningRateBounds, float] = MappingProxyType({}),
    ) -> None:
        """Update all shards once. After each group of shards, start the all-gather of the group's updated parameters.

        Args:
            learning_rate: current value of the --lr schedule.
            weight_decay: current weight decay, before it is multiplied by the factor of each parameter group.
            grad_factor: number by which every gradient is multiplied: clip coefficient / loss scale.
            group_rates: current learning rates of the parameter groups whose bounds differ from --lr and --min-lr, by these bounds.
        """
        update = Update(learning_rate, weight_decay, grad_factor, self.num_steps + 1, group_rates)
        if self._qk_clip is not None:
            self._qk_clip.update_factors()
        updates_by_group = [[placement.update(update) for placement in placements] for placements in self._placements]
        self._statistics.reset()
        for round_index in range(max(self._statistics.num_rounds, int(bool(self._stage_updates)))):
            for placement, placement_update in zip(
                itertools.chain(*self._placements), itertools.chain(*updates_by_group), strict=True
            ):
                if placement.num_rounds > round_index:
                    next(placement_update, None)
            if round_index < self._statistics.num_rounds:
                self._statistics.reduce_round(round_index)
            for stage_update in self._stage_updates if round_index == 0 else ():
                stage_update.run(update)
        for group, group_updates in zip(self.groups, updates_by_group, strict=True):
            for placement_update in group_updates:
                assert next(placement_update, True), "an updater yields more often than its rule has rounds of statistics"
            group.gather_params()
        self.num_steps += 1

    @torch.no_grad()
    def copy_main_to_model_params(self) -> None:
        """Copy the current main parameters to the model's weights, on this rank and on the other ranks that hold these weights."""
        for group, placements in zip(self.groups, self._placements, strict=True):
            for placement in placements:
                placement.copy_main_to_model_params()
            group.gather_params()
