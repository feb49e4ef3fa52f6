"""Memory of main parameters and optimizer moments, by arithmetic."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence

import torch

from megatron.config.config import Config
from megatron.config.training import OptimizerConfig
from megatron.data_parallel.bucket import main_grad_dtype
from megatron.optimizer.placement import select_offloaded
from megatron.optimizer.rule import StageUpdateSize, UpdateRule
from megatron.optimizer.rules import build_rule_selector
from megatron.optimizer.statistics import plan_statistics_buffers
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import ParamPartition, build_global_records
from megatron.parallel.tensor_slice import align_numel
from megatron.parallel.topology import STAGE_AXES
from megatron_lab.planner.state_layout import Bytes, ShardSize, StateMemory


class OptimizerState:
    """Computes the memory of the optimizer's state (main parameters, moments, moving averages) on a rank from the sizes of the
    shards that it updates.

    Args:
        axis_sizes: number of ranks along each axis. They decide the shapes of a rank's parameters.
        device_type: type of the devices. Unless it is "cpu", host memory is separate and holds copies of offloaded parameters and
            gradients.
    """

    def __init__(self, config: OptimizerConfig, axis_sizes: dict[str, int], device_type: str) -> None:
        self._offload_fraction = config.optimizer_offload_fraction if config.optimizer_cpu_offload else 0.0
        self._select_rule, self._axis_sizes, self._has_staging = build_rule_selector(config), axis_sizes, device_type != "cpu"
        self._has_averages = config.ema_decay is not None
        self.has_independent_shards = self._offload_fraction in (0.0, 1.0)
        """Whether the offload of a shard is independent of the other shards."""

    def compute_memory(self, shards: Iterable[ShardSize]) -> StateMemory:
        """Return the memory of main parameters, moments and moving averages for these shards. Copies of gradients in host memory
        are included."""
        shards = list(shards)
        movable = {shard.record.name: shard.numel for shard in shards if not shard.on_host}
        offloaded_names = select_offloaded(movable, self._offload_fraction)
        total = StateMemory()
        for shard in shards:
            is_offloaded = shard.record.name in offloaded_names
            is_staged = is_offloaded and self._has_staging
            main_bytes = _align_bytes(shard.numel, shard.main_dtype.itemsize, on_host=is_offloaded)
            total += StateMemory(
                main_params=main_bytes if shard.dtype != shard.main_dtype or is_staged else Bytes(),
                moments=self._count_moment_bytes(shard, on_host=shard.on_host or is_offloaded),
                averages=self._count_average_bytes(shard, on_host=shard.on_host or is_offloaded),
                buffers=main_bytes if is_staged else Bytes(),
            )
        return total

    def _count_moment_bytes(self, shard: ShardSize, *, on_host: bool) -> Bytes:
        sizes = [
            state.compute_num_bytes(shard.record, self._axis_sizes, shard.numel, shard.main_dtype)
            for state in self._select_rule(shard.record).states(shard.record)
        ]
        num_bytes, padding = sum(size for size, _ in sizes), sum(pad for _, pad in sizes)
        return Bytes(0 if on_host else num_bytes, num_bytes if on_host else 0, padding)

    def _count_average_bytes(self, shard: ShardSize, *, on_host: bool) -> Bytes:
        return _align_bytes(shard.numel, shard.main_dtype.itemsize, on_host=on_host) if self._has_averages else Bytes()


def count_checkpoint_bytes(config: Config, vocab_size: int, dtype: torch.dtype) -> int:
    """Count the bytes of all tensors in a checkpoint: weights, their moving average, and the optimizer's moments. No tensor is
    stored twice or padded.

    Args:
        vocab_size: rows of the word embedding, without padding.
        dtype: dtype of the model.
    """
    select_rule, main, total = build_rule_selector(config.optimizer), main_grad_dtype(dtype), 0
    for record in build_global_records(config.model, vocab_size).values():
        if record.frozen:
            total += math.prod(record.shape) * dtype.itemsize
            continue
        total += (1 + (config.optimizer.ema_decay is not None)) * math.prod(record.shape) * main.itemsize
        for state in select_rule(record).states(record) if config.checkpoint.save_optim else ():
            total += math.prod(state.shape.get_shape(record.shape)) * (state.dtype or main).itemsize
    return total


def compute_stage_update_size(
    params: Sequence[ParamPartition], config: OptimizerConfig, context: ParallelContext
) -> StageUpdateSize:
    """Compute the buffers and traffic of optimizers for which the ranks of a stage must cooperate. These need statistics (such as
    norms) of full parameters, or divide matrices among the ranks (such as Muon).

    Args:
        params: parameters of the stage, with the elements that each rank updates.
    """
    select_rule, params_of_rule = build_rule_selector(config), dict[UpdateRule, list[ParamPartition]]()
    for param in params:
        params_of_rule.setdefault(select_rule(param.record), []).append(param)
    sizes = [rule.compute_stage_update_size(rule_params, context) for rule, rule_params in params_of_rule.items()]
    plans = itertools.chain(*plan_statistics_buffers(params, lambda param: select_rule(param.record).statistics(param, context)))
    group, pipeline_ends = context.group(*STAGE_AXES), context.pipeline_ends
    for plan in plans:
        stage_bytes, tied_bytes = plan.count_sent_bytes(group.size)
        sizes.append(
            StageUpdateSize(
                plan.num_bytes, statistics_bytes=stage_bytes, tied_statistics_bytes=tied_bytes if pipeline_ends.size > 1 else 0
            )
        )
    return functools.reduce(StageUpdateSize.add, sizes, StageUpdateSize())


def _align_bytes(numel: int, itemsize: int, *, on_host: bool) -> Bytes:
    padded_numel = align_numel(numel)
    return Bytes(
        0 if on_host else padded_numel * itemsize, padded_numel * itemsize if on_host else 0, (padded_numel - numel) * itemsize
    )
