"""The memory of main parameters and moments, by arithmetic."""

from __future__ import annotations

from collections.abc import Iterable

from megatron.config.training import OptimizerConfig
from megatron.data_parallel.state_layout import Bytes, ShardSize, StateMemory
from megatron.optimizer.placement import choose_offloaded
from megatron.optimizer.rules import rules_of
from megatron.parallel.boxes import aligned


class OptimizerState:
    """What an optimizer keeps for each element that it updates, in the dtype of the main parameters.

    Args:
        device_type: that of the device. On all but the CPU host memory is separate: it holds copies of offloaded parameters and
            gradients.
    """

    def __init__(self, config: OptimizerConfig, device_type: str) -> None:
        self._fraction = config.optimizer_offload_fraction if config.optimizer_cpu_offload else 0.0
        self._rule_of, self._staged = rules_of(config), device_type != "cpu"
        self.apart = self._fraction in (0.0, 1.0)
        """Whether a shard is offloaded or not independently of the other shards."""

    def memory(self, shards: Iterable[ShardSize]) -> StateMemory:
        """Memory of main parameters and moments, and of the host's copies of gradients."""
        shards = list(shards)
        movable = [index for index, shard in enumerate(shards) if not shard.on_host]
        offloaded = {movable[index] for index in choose_offloaded([shards[index].numel for index in movable], self._fraction)}
        total = StateMemory()
        for index, shard in enumerate(shards):
            staged = index in offloaded and self._staged
            num_moments = len(self._rule_of(shard.record).moments)
            one = _buffer(shard.numel, shard.main_dtype.itemsize, on_host=index in offloaded)
            total += StateMemory(
                main_params=one if shard.dtype != shard.main_dtype or staged else Bytes(),
                moments=_buffer(shard.numel, num_moments * shard.main_dtype.itemsize, on_host=shard.on_host or index in offloaded),
                buffers=one if staged else Bytes(),
            )
        return total


def _buffer(numel: int, each: int, *, on_host: bool) -> Bytes:
    room = aligned(numel)
    return Bytes(0 if on_host else room * each, room * each if on_host else 0, (room - numel) * each)
