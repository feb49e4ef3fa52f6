"""What of a run goes into a checkpoint.

Weights are stored once, in their most exact form: the float32 mains where the model computes in 16 bits, else the parameters
themselves. So a checkpoint does not depend on the model's dtype, and the 16-bit parameters are the mains rounded, as they were in
the run.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.checkpoint.global_tensor import WEIGHT, GlobalTensor
from megatron.config.training import OptimizerConfig
from megatron.optimizer.lr_schedule import ScheduleLengths
from megatron.optimizer.optimizer import ShardedOptimizer
from megatron.parallel.context import ParallelContext
from megatron.parallel.shards import Shard

_SCHEDULE_FIELDS = (
    "lr",
    "min_lr",
    "lr_decay_style",
    "lr_warmup_init",
    "lr_wsd_decay_style",
    "weight_decay",
    "start_weight_decay",
    "end_weight_decay",
    "weight_decay_incr_style",
)


def global_tensors(
    optimizer: ShardedOptimizer, context: ParallelContext, *, weights: bool = True, state: bool = True
) -> list[GlobalTensor]:
    """This rank's shards as parts of global tensors: `model.<name>`, and the moments such as `exp_avg.<name>`."""
    found = []
    for shard in optimizer.shards:
        parts = {WEIGHT: shard.main} if weights else {}
        if state:
            parts |= optimizer.moments(shard)
        found += [_global(kind, shard, tensor, context) for kind, tensor in parts.items()]
    return found


def _global(kind: str, shard: Shard, tensor: Any, context: ParallelContext) -> GlobalTensor:
    return GlobalTensor(f"{kind}.{shard.record.name}", shard.record.shape, tensor, shard.boxes(context))


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The schedules of learning rate and weight decay: settings, and lengths in samples."""

    optimizer: OptimizerConfig
    lengths: ScheduleLengths

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint."""
        fields = {name: getattr(self.optimizer, name) for name in _SCHEDULE_FIELDS}
        return {**fields, "lengths": dataclasses.asdict(self.lengths)}

    def with_saved(self, saved: dict[str, Any]) -> Schedule:
        """The schedule that a checkpoint was trained with."""
        fields = {name: saved[name] for name in _SCHEDULE_FIELDS}
        return Schedule(dataclasses.replace(self.optimizer, **fields), ScheduleLengths(**saved["lengths"]))
