"""The memory of main parameters and moments, by arithmetic."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence

import torch

from megatron.config.config import Config
from megatron.config.training import OptimizerConfig
from megatron.data_parallel.bucket import main_grad_dtype
from megatron.optimizer.placement import choose_offloaded
from megatron.optimizer.rule import StageSize, UpdateRule
from megatron.optimizer.rules import rules_of
from megatron.optimizer.statistics import plan_numbers
from megatron.parallel.boxes import aligned
from megatron.parallel.context import ParallelContext
from megatron.parallel.params import DividedParam, global_records
from megatron.parallel.topology import STAGE_AXES
from megatron_lab.planner.state_layout import Bytes, ShardSize, StateMemory


class OptimizerState:
    """What an optimizer keeps of the shards that it updates.

    Args:
        axis_sizes: ranks along each axis; they decide the shapes of a rank's parameters.
        device_type: that of the device. On all but the CPU host memory is separate: it holds copies of offloaded parameters and
            gradients.
    """

    def __init__(self, config: OptimizerConfig, axis_sizes: dict[str, int], device_type: str) -> None:
        self._fraction = config.optimizer_offload_fraction if config.optimizer_cpu_offload else 0.0
        self._rule_of, self._axis_sizes, self._staged = rules_of(config), axis_sizes, device_type != "cpu"
        self._averages = config.ema_decay is not None
        self.apart = self._fraction in (0.0, 1.0)
        """Whether a shard is offloaded or not independently of the other shards."""

    def memory(self, shards: Iterable[ShardSize]) -> StateMemory:
        """Memory of main parameters and moments, and of the host's copies of gradients."""
        shards = list(shards)
        movable = {shard.record.name: shard.numel for shard in shards if not shard.on_host}
        chosen = choose_offloaded(movable, self._fraction)
        total = StateMemory()
        for shard in shards:
            offloaded = shard.record.name in chosen
            staged = offloaded and self._staged
            one = _buffer(shard.numel, shard.main_dtype.itemsize, on_host=offloaded)
            total += StateMemory(
                main_params=one if shard.dtype != shard.main_dtype or staged else Bytes(),
                moments=self._states(shard, on_host=shard.on_host or offloaded),
                averages=self._average(shard, on_host=shard.on_host or offloaded),
                buffers=one if staged else Bytes(),
            )
        return total

    def _states(self, shard: ShardSize, *, on_host: bool) -> Bytes:
        sizes = [
            state.num_bytes(shard.record, self._axis_sizes, shard.numel, shard.main_dtype)
            for state in self._rule_of(shard.record).states(shard.record)
        ]
        taken, padding = sum(size for size, _ in sizes), sum(more for _, more in sizes)
        return Bytes(0 if on_host else taken, taken if on_host else 0, padding)

    def _average(self, shard: ShardSize, *, on_host: bool) -> Bytes:
        return _buffer(shard.numel, shard.main_dtype.itemsize, on_host=on_host) if self._averages else Bytes()


def saved_bytes(config: Config, vocab_size: int, dtype: torch.dtype) -> int:
    """Bytes of all tensors in a checkpoint: weights, their average, and moments, none of them twice and none padded.

    Args:
        vocab_size: rows of the word embedding, without padding.
        dtype: the model's.
    """
    rule_of, main, total = rules_of(config.optimizer), main_grad_dtype(dtype), 0
    for record in global_records(config.model, vocab_size).values():
        if record.frozen:
            total += math.prod(record.shape) * dtype.itemsize
            continue
        total += (1 + (config.optimizer.ema_decay is not None)) * math.prod(record.shape) * main.itemsize
        for state in rule_of(record).states(record) if config.checkpoint.save_optim else ():
            total += math.prod(state.shape.shape(record.shape)) * (state.dtype or main).itemsize
    return total


def stage_size(params: Sequence[DividedParam], config: OptimizerConfig, context: ParallelContext) -> StageSize:
    """What the ranks of a stage take, and send, for what rules ask of all ranks: numbers of whole parameters, work together."""
    rule_of, by_rule = rules_of(config), dict[UpdateRule, list[DividedParam]]()
    for param in params:
        by_rule.setdefault(rule_of(param.record), []).append(param)
    works = [rule.stage_size(some, context) for rule, some in by_rule.items()]
    plans = itertools.chain(*plan_numbers(params, lambda param: rule_of(param.record).statistics(param, context)))
    group, ends = context.group(*STAGE_AXES), context.pipeline_ends
    for plan in plans:
        within, between = plan.sent(group.size)
        works.append(StageSize(plan.num_bytes, numbers=within, numbers_of_tied=between if ends.size > 1 else 0))
    return functools.reduce(StageSize.plus, works, StageSize())


def _buffer(numel: int, each: int, *, on_host: bool) -> Bytes:
    room = aligned(numel)
    return Bytes(0 if on_host else room * each, room * each if on_host else 0, (room - numel) * each)
