"""How the ranks divide the work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PipelineSchedule = Literal["gpipe", "1f1b"]
ShardingStrategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]


@dataclass(frozen=True)
class ParallelConfig:
    """Tensor, pipeline and data parallelism; the data size is world size / (TP x CP x PP)."""

    tensor_model_parallel_size: int = 1
    """Ranks that split each layer (TP)."""
    pipeline_model_parallel_size: int = 1
    """Ranks that split the depth (PP)."""
    context_parallel_size: int = 1
    """Ranks that split the sequence (CP). Only 1 so far."""
    expert_model_parallel_size: int = 1
    """Ranks that split the experts (EP). Only 1 so far."""
    sequence_parallel: bool = False
    """Split norms, dropout and residual along the sequence over the tensor ranks (saves activation memory)."""
    use_tp_pp_dp_mapping: bool = False
    """Number the ranks tp-cp-ep-pp-dp instead of tp-cp-ep-dp-pp."""
    pipeline_schedule: PipelineSchedule = "1f1b"
    """Order of forwards and backwards in the pipeline."""
    data_parallel_sharding_strategy: ShardingStrategy = "no_shard"
    """What each data rank holds a slice of. Only no_shard so far."""
    overlap_grad_reduce: bool = False
    """Reduce each gradient bucket as soon as it is complete, while backward goes on."""
    ddp_bucket_size: int | None = None
    """Elements in a gradient bucket; by default max(40,000,000, 1,000,000 x DP)."""
    distributed_backend: Literal["nccl", "gloo"] | None = None
    """Communication library; by default nccl on CUDA and gloo on CPU."""
    distributed_timeout_minutes: int = 10
    """Give up on a collective after this long."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes CUDA when there is one."""
