"""Settings of the parallel layout: how the ranks divide model, data and sequences."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from megatron.config.pipeline_layout import parse_layout, parse_layout_or_none
from megatron.config.setting import IS_SET, NotEqual, condition, idle_condition, setting
from megatron.spec.schedules import SCHEDULES, get_default_schedule

if TYPE_CHECKING:  # type checkers need literal values
    PipelineSchedule = str
else:
    PipelineSchedule = Literal[tuple(SCHEDULES)]
PipelineSplit = Literal["even", "balanced"]
ShardingStrategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]
FsdpReshard = Literal["always", "never"]
TokenDispatcher = Literal["alltoall", "allgather"]
CpCommType = Literal["all_gather", "a2a", "p2p"]

_FSDP = condition(data_parallel_sharding_strategy="optim_grads_params", strict=True)
_SHARDED = condition(
    "with --use-distributed-optimizer, or a --data-parallel-sharding-strategy other than no_shard",
    use_distributed_optimizer=True,
    data_parallel_sharding_strategy=NotEqual("no_shard"),
)
_SINGLE_DATA_RANK = idle_condition("there is one data rank", sharing_ranks=1)
_NOT_SHARDED = idle_condition("there is one data rank", effect="hardly saves memory", sharing_ranks=1)
_FULL_PARAMS = idle_condition("every data rank holds all parameters", sharing_ranks=1, fsdp_shard_size=1)
_SINGLE_CHUNK = idle_condition("one rank holds all layers in one chunk", chunks=1)
_SINGLE_STAGE = idle_condition(
    "there is one pipeline stage, which never waits for another",
    effect="saves no time",
    require_all=True,
    pipeline_model_parallel_size=1,
    chunks=NotEqual(1),
)
_SINGLE_STAGE_SCHEDULE = replace(_SINGLE_STAGE, values={"pipeline_model_parallel_size": 1, "pipeline_schedule": NotEqual("1f1b")})


@dataclass(frozen=True)
class ParallelConfig:
    """Tensor, context, pipeline, expert and data parallelism. The data-parallel size is world size / (TP x CP x PP)."""

    tensor_model_parallel_size: int = setting(1, min_value=1, unit="ranks")
    """Number of ranks that split each layer (TP)."""
    pipeline_model_parallel_size: int = setting(1, min_value=1, unit="ranks")
    """Number of pipeline stages (PP), each with its own layers on its own ranks."""
    context_parallel_size: int = setting(1, min_value=1, unit="ranks")
    """Number of ranks that split each sequence (CP)."""
    cp_comm_type: tuple[CpCommType, ...] = setting((), idle_if=idle_condition("there is one context rank", context_parallel_size=1))
    """Communication of context parallelism in attention, one value for all layers or one per layer. all_gather: gather the keys and
    values of all context ranks; a2a: exchange them so that each rank has all tokens of some heads; p2p: pass keys and values around
    a ring. By default all_gather if query heads share key-value heads, else p2p."""
    expert_model_parallel_size: int = setting(1, min_value=1, unit="ranks", active_if=condition(num_experts=IS_SET, strict=True))
    """Number of ranks that hold different experts (EP). EP adds no ranks: these ranks are among the TP x CP x DP ranks of a
    pipeline stage."""
    expert_tensor_parallel_size: int | None = setting(
        None,
        min_value=1,
        unit="ranks",
        active_if=condition(num_experts=IS_SET, strict=True),
    )
    """Number of ranks that split each expert (ETP); by default --tensor-model-parallel-size."""
    moe_token_dispatcher_type: TokenDispatcher = setting(
        "alltoall", active_if=condition(num_experts=IS_SET), idle_if=idle_condition("each rank has all experts", expert_ranks=1)
    )
    """Token dispatcher: alltoall sends each token to the ranks of its experts; allgather sends all tokens to all ranks, which pays
    off if a token has experts on most ranks."""
    sequence_parallel: bool = setting(False, idle_if=idle_condition("there is one tensor rank", tensor_model_parallel_size=1))
    """Split norms, dropout and the residual stream along the sequence over the tensor ranks, which saves activation memory."""
    tp_comm_overlap: bool = setting(
        False,
        active_if=condition(
            "with --sequence-parallel, and without --fp8-format, whose scales are those of whole matrix products",
            require_all=True,
            fix={},
            sequence_parallel=True,
            fp8_format=None,
        ),
        idle_if=idle_condition("there is one tensor rank", tensor_model_parallel_size=1),
    )
    """Overlap the all-gather and reduce-scatter of sequence parallelism with matrix products, by splitting both into chunks. Inside
    a node of GPUs the chunks are read from the peers' memory; elsewhere they are passed around a ring."""
    use_tp_pp_dp_mapping: bool = setting(
        False,
        idle_if=idle_condition("both orders of the ranks are equal in this layout", data_ranks=1, pipeline_model_parallel_size=1),
    )
    """Number the ranks in the order tp-cp-ep-pp-dp instead of tp-cp-ep-dp-pp (the first axis varies fastest)."""
    pipeline_schedule: PipelineSchedule | None = setting(None, idle_if=_SINGLE_STAGE_SCHEDULE)
    """Pipeline schedule, the order of forward and backward passes; by default interleaved with several virtual stages, else
    1f1b."""
    num_layers_per_virtual_pipeline_stage: int | None = setting(None, min_value=1, unit="layers", idle_if=_SINGLE_STAGE)
    """Number of layers of one virtual stage (model chunk); each pipeline rank holds several virtual stages."""
    num_virtual_stages_per_pipeline_rank: int | None = setting(None, min_value=1, unit="chunks of layers", idle_if=_SINGLE_STAGE)
    """Number of virtual stages (model chunks) of each pipeline rank; the alternative to --num-layers-per-virtual-pipeline-stage."""
    pipeline_split: PipelineSplit = setting("even", idle_if=_SINGLE_CHUNK)
    """Distribution of the layers over the stages: even gives each stage the same number of layers, balanced equalizes the stages'
    FLOPs (or the times in --layer-costs), including embedding and loss."""
    layer_costs: str | None = setting(None, active_if=condition(pipeline_split="balanced"), idle_if=_SINGLE_CHUNK, is_path=True)
    """File with measured times of layers, embedding and loss for --pipeline-split balanced, written by --profile-pipeline in a run
    of this model. By default FLOPs are counted instead."""
    decoder_first_pipeline_num_layers: int | None = setting(None, min_value=1, unit="layers")
    """Number of layers on the first pipeline rank; the other ranks share the remaining layers."""
    decoder_last_pipeline_num_layers: int | None = setting(None, min_value=1, unit="layers")
    """Number of layers on the last pipeline rank; the other ranks share the remaining layers."""
    account_for_embedding_in_pipeline_split: bool = setting(False, idle_if=_SINGLE_CHUNK)
    """Count the embedding as a layer when layers are distributed over the stages."""
    account_for_loss_in_pipeline_split: bool = setting(False, idle_if=_SINGLE_CHUNK)
    """Count the output layer and the loss as a layer when layers are distributed over the stages."""
    pipeline_model_parallel_layout: str | None = setting(None, idle_if=(_SINGLE_CHUNK, _SINGLE_STAGE))
    """Explicit content of every stage, such as "Et*3|(tt|)*6L": E embedding, t layer, m layer of --mtp-num-layers (before L, or
    omitted), L loss, | separator of stages, (..)*n repetition."""
    overlap_p2p_communication: bool = setting(
        True, idle_if=idle_condition("nothing is sent between pipeline stages", pipeline_model_parallel_size=1)
    )
    """Overlap sends and receives between stages with computation. Without it, a stage waits for each transfer; the result is
    bitwise the same."""
    data_parallel_sharding_strategy: ShardingStrategy = setting("no_shard", idle_if=_NOT_SHARDED)
    """State that is sharded over the data ranks. optim: main parameters and optimizer moments (ZeRO-1); optim_grads: gradients too
    (ZeRO-2); optim_grads_params: parameters too, gathered block by block when they are used (ZeRO-3)."""
    use_distributed_optimizer: bool = setting(
        False,
        idle_if=(
            idle_condition("the strategy shards the optimizer's state too", data_parallel_sharding_strategy=NotEqual("no_shard")),
            replace(_NOT_SHARDED, values={"sharing_ranks": 1, "data_parallel_sharding_strategy": "no_shard"}, require_all=True),
        ),
    )
    """Equivalent to --data-parallel-sharding-strategy optim. If both are given, the strategy that shards more takes effect."""
    fsdp_shard_size: int | None = setting(
        None,
        min_value=1,
        unit="ranks",
        active_if=_FSDP,
        idle_if=idle_condition(
            "each group has one data rank, so optim_grads_params is the same as optim_grads",
            effect="does not shard parameters",
            require_all=True,
            fsdp_shard_size=1,
            sharing_ranks=NotEqual(1),
        ),
    )
    """Number of data ranks that share one copy of the model under optim_grads_params; each group of this many ranks has its own
    copy (hybrid sharding). By default all data ranks share one copy."""
    fsdp_reshard_after_forward: FsdpReshard = setting("always", active_if=_FSDP, idle_if=_FULL_PARAMS)
    """Under optim_grads_params: free the parameters of a block after its forward pass and gather them again for backward (always),
    or keep them from their first to their last use in a step (never), which communicates less but holds the full parameters of this
    rank's layers in memory in between."""
    fsdp_reduce_once: bool = setting(
        False,
        active_if=_FSDP,
        idle_if=(_FULL_PARAMS, idle_condition("a step has one microbatch on each data rank", microbatches=1)),
    )
    """Under optim_grads_params: keep full gradients until the last microbatch of a step and reduce them then, which communicates
    less but holds the full gradients of this rank's layers in memory in between."""
    fsdp_params_cpu: bool = setting(
        False,
        active_if=_FSDP,
        idle_if=(
            _FULL_PARAMS,
            idle_condition("--device cpu has everything in host memory", effect="saves no memory", device="cpu"),
        ),
    )
    """Under optim_grads_params: keep this rank's shard of parameters, gradients and optimizer moments in host memory and update it
    there; gathered parameters are on the device."""
    overlap_grad_reduce: bool = setting(False, idle_if=_SINGLE_DATA_RANK)
    """Reduce each gradient bucket as soon as it is complete, during the backward pass. (optim_grads_params always does so, block by
    block.)"""
    grad_reduce_in_bf16: bool = setting(False, active_if=condition(bf16=True), idle_if=_SINGLE_DATA_RANK)
    """Reduce the gradients of a bfloat16 model over data ranks in bfloat16: half the bytes, but the sum is rounded on the way. Each
    rank still accumulates its microbatches in float32."""
    overlap_param_gather: bool = setting(False, active_if=_SHARDED, idle_if=_SINGLE_DATA_RANK)
    """Under optim and optim_grads: wait for updated parameters just before the layers that use them in the next forward pass,
    instead of at the end of the step. (optim_grads_params always prefetches the next block.)"""
    ddp_bucket_size: int | None = setting(None, min_value=1, unit="elements")
    """Number of elements in a gradient bucket; by default 1,000,000 x DP, limited to the range from 40,000,000 to 160,000,000."""
    distributed_backend: Literal["nccl", "gloo"] | None = None
    """Communication library for tensors; by default nccl on CUDA and gloo on CPU. With nccl, messages between the hosts use
    gloo."""
    init_method: str = "env://"
    """Rendezvous of the ranks: env:// at MASTER_ADDR and MASTER_PORT of the environment, as torchrun sets them; tcp://HOST:PORT at
    the node of rank 0; file:///PATH through a file that all nodes can access. Rank and world size come from the environment: RANK
    and WORLD_SIZE, or for tcp and file those of SLURM and Open MPI."""
    distributed_timeout_minutes: int = setting(10, min_value=1, unit="minutes")
    """Time after which a collective that has not completed fails."""
    hang_warn_s: float = setting(30.0, min_value=0.0, unit="seconds")
    """Time without progress after which a run reports which rank keeps the others waiting, in which operation, and writes the
    stacks of all ranks. The time is at least three times the longest pause so far. 0: do not watch for hangs."""
    hang_kill_s: float | None = setting(
        None, min_value=1.0, unit="seconds", active_if=condition(hang_warn_s=NotEqual(0.0), strict=True)
    )
    """Time without progress after which a run ends with exit code 86; by default the timeouts of the communication libraries end
    it."""
    straggler_interval: int | None = setting(
        None, min_value=1, unit="steps", active_if=condition(hang_warn_s=NotEqual(0.0), strict=True)
    )
    """Steps between comparisons of the ranks of each stage by their computation time, without waits. Ranks that are slow in two
    consecutive intervals are reported. By default ranks are never compared. On a GPU the times of the hosts are compared."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on; auto uses CUDA if it is available."""

    @property
    def expert_tensor_size(self) -> int:
        """Number of ranks that split each expert: --expert-tensor-parallel-size, or its default."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def schedule(self) -> str:
        """Pipeline schedule after the default is applied: interleaved if several virtual stages are requested, else 1f1b."""
        if self.pipeline_schedule is not None:
            return self.pipeline_schedule
        if self.pipeline_model_parallel_layout is not None:
            # A rule reports an invalid layout.
            is_interleaved = (
                len(parse_layout_or_none(self.pipeline_model_parallel_layout) or ()) > self.pipeline_model_parallel_size
            )
        else:
            # The number of chunks depends on the model; a rule checks that there are several.
            is_interleaved = (
                self.num_layers_per_virtual_pipeline_stage is not None or (self.num_virtual_stages_per_pipeline_rank or 1) > 1
            )
        return get_default_schedule(is_interleaved)

    @property
    def sharding(self) -> ShardingStrategy:
        """Sharding strategy that takes effect: --data-parallel-sharding-strategy, or optim if only --use-distributed-optimizer
        shards anything."""
        if self.use_distributed_optimizer and self.data_parallel_sharding_strategy == "no_shard":
            return "optim"
        return self.data_parallel_sharding_strategy

    def count_split_units(self, num_layers: int) -> int:
        """Return the number of units that are distributed over the stages: the layers, plus one each for the embedding and the loss
        if a flag (--account-for-...-in-pipeline-split) counts them as a layer."""
        return num_layers + self.account_for_embedding_in_pipeline_split + self.account_for_loss_in_pipeline_split

    def get_chunks_per_stage(self, num_layers: int) -> int:
        """Return the number of model chunks (virtual stages) of each pipeline rank, from the layout or the flags, or as the
        schedule requires.

        Args:
            num_layers: number of layers of the model.

        Raises:
            ValueError: the layers or the chunks of the layout cannot be divided evenly, or the layout cannot be parsed. Rules
                report both before a run.
        """
        num_stages, layout = self.pipeline_model_parallel_size, self.pipeline_model_parallel_layout
        if layout is not None:
            num_units, unit_name, units_per_chunk = (
                len(parse_layout_or_none(layout) or parse_layout(layout)),
                "chunks of the layout",
                1,
            )
        elif self.num_layers_per_virtual_pipeline_stage is not None:
            num_units, unit_name, units_per_chunk = (
                self.count_split_units(num_layers),
                "layers",
                self.num_layers_per_virtual_pipeline_stage,
            )
        else:
            return self.num_virtual_stages_per_pipeline_rank or SCHEDULES[self.schedule].chunks_per_stage or 1
        if num_units % (num_stages * units_per_chunk):
            chunks = f", in chunks of {units_per_chunk}" if units_per_chunk > 1 else ""
            raise ValueError(
                f"{num_units} {unit_name} do not divide evenly among {num_stages} pipeline stages{chunks}: the number of "
                f"{unit_name} must be a multiple of {num_stages * units_per_chunk}. Change "
                f"{'--num-layers' if layout is None else 'the layout'} or "
                "--pipeline-model-parallel-size"
            )
        return num_units // (num_stages * units_per_chunk)
