"""How the ranks divide the work."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from megatron.config.pipeline_layout import parse_layout, read_layout
from megatron.config.setting import GIVEN, OtherThan, acts_with, idle_with, setting
from megatron.spec.schedules import SCHEDULES, default_schedule

if TYPE_CHECKING:  # a type checker takes no names from a table
    PipelineSchedule = str
else:
    PipelineSchedule = Literal[tuple(SCHEDULES)]
PipelineSplit = Literal["even", "balanced"]
ShardingStrategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]
FsdpReshard = Literal["always", "never"]
TokenDispatcher = Literal["alltoall", "allgather"]
ContextWay = Literal["all_gather", "a2a", "p2p"]

_FSDP = acts_with(data_parallel_sharding_strategy="optim_grads_params", strict=True)
_SHARDED = acts_with(
    "with --use-distributed-optimizer, or a --data-parallel-sharding-strategy other than no_shard",
    use_distributed_optimizer=True,
    data_parallel_sharding_strategy=OtherThan("no_shard"),
)
_ONE_DATA_RANK = idle_with("there is one data rank", sharing_ranks=1)
_NO_SHARES = idle_with("there is one data rank", effect="hardly saves memory", sharing_ranks=1)
_WHOLE = idle_with("every data rank holds the parameters whole", sharing_ranks=1, fsdp_shard_size=1)
_ONE_PIECE = idle_with("one rank computes all layers in one piece", chunks=1)
_ONE_STAGE = idle_with(
    "there is one pipeline stage, which never waits for another",
    effect="saves no time",
    every=True,
    pipeline_model_parallel_size=1,
    chunks=OtherThan(1),
)
_ONE_STAGE_IN_ORDER = replace(_ONE_STAGE, others={"pipeline_model_parallel_size": 1, "pipeline_schedule": OtherThan("1f1b")})


@dataclass(frozen=True)
class ParallelConfig:
    """Tensor, context, pipeline and data parallelism; the data size is world size / (TP x CP x PP)."""

    tensor_model_parallel_size: int = setting(1, at_least=1, unit="ranks")
    """Ranks that split each layer (TP)."""
    pipeline_model_parallel_size: int = setting(1, at_least=1, unit="ranks")
    """Ranks that split the depth (PP)."""
    context_parallel_size: int = setting(1, at_least=1, unit="ranks")
    """Ranks that split each sequence (CP)."""
    cp_comm_type: tuple[ContextWay, ...] = setting((), idle=idle_with("there is one context rank", context_parallel_size=1))
    """How a context rank meets the keys and values of the others, for all layers or for each: all_gather gathers them; a2a gives
    each rank all tokens of some heads; p2p sends them round a ring. By default all_gather where query heads share
    them, else p2p."""
    expert_model_parallel_size: int = setting(1, at_least=1, unit="ranks", acts=acts_with(num_experts=GIVEN, strict=True))
    """Ranks that hold different experts (EP). They are ranks of the same pipeline stage, which TP x CP x DP count already."""
    expert_tensor_parallel_size: int | None = setting(
        None,
        at_least=1,
        unit="ranks",
        acts=acts_with(num_experts=GIVEN, strict=True),
    )
    """Ranks that split each expert (ETP); by default as many as split the other layers."""
    moe_token_dispatcher_type: TokenDispatcher = setting(
        "alltoall", acts=acts_with(num_experts=GIVEN), idle=idle_with("each rank has all experts", expert_ranks=1)
    )
    """How tokens reach the ranks of their experts: alltoall sends each to these; allgather sends all to all, which pays where a
    token passes most of the ranks."""
    sequence_parallel: bool = setting(False, idle=idle_with("there is one tensor rank", tensor_model_parallel_size=1))
    """Split norms, dropout and residual along the sequence over the tensor ranks (saves activation memory)."""
    tp_comm_overlap: bool = setting(
        False,
        acts=acts_with(
            "with --sequence-parallel, and without --fp8-format, whose scales are those of whole products",
            every=True,
            fix={},
            sequence_parallel=True,
            fp8_format=None,
        ),
        idle=idle_with("there is one tensor rank", tensor_model_parallel_size=1),
    )
    """Under sequence parallelism: gather and reduce-scatter in pieces, each while another is multiplied. Inside a node of GPUs the
    pieces are read out of the peers' memory; elsewhere they go round a ring."""
    use_tp_pp_dp_mapping: bool = setting(
        False, idle=idle_with("both numberings of the ranks are the same here", data_ranks=1, pipeline_model_parallel_size=1)
    )
    """Number the ranks tp-cp-ep-pp-dp instead of tp-cp-ep-dp-pp."""
    pipeline_schedule: PipelineSchedule | None = setting(None, idle=_ONE_STAGE_IN_ORDER)
    """Order of forwards and backwards in the pipeline; by default interleaved with several virtual stages, else 1f1b."""
    num_layers_per_virtual_pipeline_stage: int | None = setting(None, at_least=1, unit="layers", idle=_ONE_STAGE)
    """Layers of one virtual stage (chunk); each pipeline rank holds several."""
    num_virtual_stages_per_pipeline_rank: int | None = setting(None, at_least=1, unit="chunks of layers", idle=_ONE_STAGE)
    """Virtual stages (chunks) that each pipeline rank holds; the other way to ask for them."""
    pipeline_split: PipelineSplit = setting("even", idle=_ONE_PIECE)
    """How layers are spread over the stages: the same number each, or by their cost, embedding and loss counted."""
    layer_costs: str | None = setting(None, acts=acts_with(pipeline_split="balanced"), idle=_ONE_PIECE)
    """Costs of layers, embedding and loss for a balanced split: a file that --profile-pipeline wrote in a run of this model. By
    default they are counted in FLOPs."""
    decoder_first_pipeline_num_layers: int | None = setting(None, at_least=1, unit="layers")
    """Layers on the first pipeline rank; the others share the rest."""
    decoder_last_pipeline_num_layers: int | None = setting(None, at_least=1, unit="layers")
    """Layers on the last pipeline rank; the others share the rest."""
    account_for_embedding_in_pipeline_split: bool = setting(False, idle=_ONE_PIECE)
    """Count the embedding as a layer when layers are spread."""
    account_for_loss_in_pipeline_split: bool = setting(False, idle=_ONE_PIECE)
    """Count the output layer and the loss as a layer when layers are spread."""
    pipeline_model_parallel_layout: str | None = setting(None, idle=(_ONE_PIECE, _ONE_STAGE))
    """Every stage by hand: E embedding, t layer, m depth of --mtp-num-layers (in front of L, or left out), L loss, | between
    stages, (..)*n repeats, as in "Et*3|(tt|)*6L"."""
    overlap_p2p_communication: bool = setting(
        True, idle=idle_with("nothing is sent between pipeline stages", pipeline_model_parallel_size=1)
    )
    """Send and receive between stages while computing; without, a stage waits for each exchange (the same result, bit for bit)."""
    data_parallel_sharding_strategy: ShardingStrategy = setting("no_shard", idle=_NO_SHARES)
    """What each data rank keeps only its share of. optim: main parameters and moments (ZeRO-1); optim_grads: gradients too
    (ZeRO-2); optim_grads_params: parameters too, gathered block by block where they are used (ZeRO-3)."""
    use_distributed_optimizer: bool = setting(
        False,
        idle=(
            idle_with("the strategy shards the optimizer's state too", data_parallel_sharding_strategy=OtherThan("no_shard")),
            replace(_NO_SHARES, others={"sharing_ranks": 1, "data_parallel_sharding_strategy": "no_shard"}, every=True),
        ),
    )
    """The same as --data-parallel-sharding-strategy optim. If both are given, what shards more counts."""
    fsdp_shard_size: int | None = setting(
        None,
        at_least=1,
        unit="ranks",
        acts=_FSDP,
        idle=idle_with(
            "each group has one data rank, so optim_grads_params is the same as optim_grads",
            effect="leaves parameters whole",
            every=True,
            fsdp_shard_size=1,
            sharing_ranks=OtherThan(1),
        ),
    )
    """Data ranks that share one copy of the model under optim_grads_params; each group of so many has a copy of its own (hybrid
    sharding). By default all data ranks share one."""
    fsdp_reshard_after_forward: FsdpReshard = setting("always", acts=_FSDP, idle=_WHOLE)
    """Under optim_grads_params: free the parameters of a block after its forward and gather them again for backward (always), or
    keep them from their first use in a step to their last (never: sends less, but in between all of this rank's are in memory)."""
    fsdp_reduce_once: bool = setting(
        False, acts=_FSDP, idle=(_WHOLE, idle_with("a step has one microbatch on each data rank", microbatches=1))
    )
    """Under optim_grads_params: keep gradients whole until the last microbatch of a step and reduce them then (sends less, but in
    between all of this rank's are in memory)."""
    fsdp_params_cpu: bool = setting(
        False,
        acts=_FSDP,
        idle=(_WHOLE, idle_with("--device cpu has everything in host memory", effect="saves no memory", device="cpu")),
    )
    """Under optim_grads_params: keep this rank's part of parameters, gradients and moments in host memory and update it there; what
    is gathered is on the device."""
    overlap_grad_reduce: bool = setting(False, idle=_ONE_DATA_RANK)
    """Reduce each gradient bucket as soon as it is complete, while backward goes on. (optim_grads_params always does, block by
    block.)"""
    grad_reduce_in_bf16: bool = setting(False, acts=acts_with(bf16=True), idle=_ONE_DATA_RANK)
    """Send the gradients of a bfloat16 model in bfloat16 where data ranks add them up: half the bytes, and a sum that is rounded on
    its way. Each rank still sums its microbatches in float32."""
    overlap_param_gather: bool = setting(False, acts=_SHARDED, idle=_ONE_DATA_RANK)
    """Under optim and optim_grads: wait for updated parameters just before the layers that use them in the next forward, not at the
    end of the step. (optim_grads_params always fetches the next block ahead.)"""
    ddp_bucket_size: int | None = setting(None, at_least=1, unit="elements")
    """Elements in a gradient bucket; by default 1,000,000 x DP, but from 40,000,000 to 160,000,000."""
    distributed_backend: Literal["nccl", "gloo"] | None = None
    """Communication library for tensors; by default nccl on CUDA and gloo on CPU. Beside nccl, gloo carries what the hosts say."""
    init_method: str = "env://"
    """How ranks find each other: env:// at MASTER_ADDR and MASTER_PORT of the environment, as torchrun sets them; tcp://HOST:PORT
    at the node of rank 0; file:///PATH by a file that all nodes see. Rank and number of ranks come from the environment: RANK and
    WORLD_SIZE, or for tcp and file those of SLURM and Open MPI."""
    distributed_timeout_minutes: int = setting(10, at_least=1, unit="minutes")
    """Give up on a collective after this long."""
    hang_warn_s: float = setting(30.0, at_least=0.0, unit="seconds")
    """When nothing has moved for this long, or for three times as long as it ever stood still before, say which rank keeps the
    others waiting, in what, and write the stacks of all ranks. 0: do not watch."""
    hang_kill_s: float | None = setting(None, at_least=1.0, unit="seconds", acts=acts_with(hang_warn_s=OtherThan(0.0), strict=True))
    """End a run in which nothing has moved for this long, with exit code 86; by default the libraries' timeouts end it."""
    straggler_interval: int | None = setting(
        None, at_least=1, unit="steps", acts=acts_with(hang_warn_s=OtherThan(0.0), strict=True)
    )
    """Compare, every so many steps, how long each rank computes apart from waits with the other ranks of its stage, and say which
    were slow in two intervals in a row; by default never. On a GPU the hosts' times are compared."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes CUDA when there is one."""

    @property
    def expert_tensor_size(self) -> int:
        """Ranks that split each expert, after the default."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def schedule(self) -> str:
        """The pipeline schedule after defaults: interleaved where several virtual stages are asked for, else 1f1b."""
        if self.pipeline_schedule is not None:
            return self.pipeline_schedule
        if self.pipeline_model_parallel_layout is not None:
            # One that cannot be read is a violation of its own.
            several = len(read_layout(self.pipeline_model_parallel_layout) or ()) > self.pipeline_model_parallel_size
        else:
            # How many stages some layers each give depends on the model; that they are several is a rule.
            several = self.num_layers_per_virtual_pipeline_stage is not None or (self.num_virtual_stages_per_pipeline_rank or 1) > 1
        return default_schedule(several)

    @property
    def sharding(self) -> ShardingStrategy:
        """The sharding strategy that both flags together ask for."""
        if self.use_distributed_optimizer and self.data_parallel_sharding_strategy == "no_shard":
            return "optim"
        return self.data_parallel_sharding_strategy

    def units_to_split(self, num_layers: int) -> int:
        """Layers, with the embedding and the loss where they count as a layer each."""
        return num_layers + self.account_for_embedding_in_pipeline_split + self.account_for_loss_in_pipeline_split

    def chunks_per_stage(self, num_layers: int) -> int:
        """Virtual stages (chunks) that each pipeline rank holds: asked for, or what the schedule needs.

        Raises:
            ValueError: it is no whole number, or the layout cannot be read. (The rules between settings say so before.)
        """
        stages, layout = self.pipeline_model_parallel_size, self.pipeline_model_parallel_layout
        if layout is not None:
            count, what, each = len(read_layout(layout) or parse_layout(layout)), "chunks of the layout", 1
        elif self.num_layers_per_virtual_pipeline_stage is not None:
            count, what, each = self.units_to_split(num_layers), "layers", self.num_layers_per_virtual_pipeline_stage
        else:
            return self.num_virtual_stages_per_pipeline_rank or SCHEDULES[self.schedule].chunks_per_stage or 1
        if count % (stages * each):
            raise ValueError(f"{count} {what} do not divide among {stages} pipeline stages")
        return count // (stages * each)
