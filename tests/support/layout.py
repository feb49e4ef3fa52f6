"""Runs the framework at a layout on a reference model's weights and batches, and gives the result in the reference's form."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from megatron.attention.backends import use_backend
from megatron.config.memory import MemoryConfig
from megatron.config.model import ModelConfig
from megatron.config.parallel import CpCommType, FsdpReshard, ParallelConfig, ShardingStrategy, TokenDispatcher
from megatron.config.precision import PrecisionConfig
from megatron.config.training import OptimizerConfig
from megatron.data.samples import DocumentRules, Microbatch
from megatron.model.build import Model, build_model
from megatron.model.compiled import BlockCompiler
from megatron.model.inputs import ModelInputs
from megatron.optimizer.grad_scaler import GradScaler
from megatron.parallel.context import ParallelContext, make_context
from megatron.parallel.overlap import RingOverlap
from megatron.parallel.topology import Topology
from megatron.pipeline_parallel.partition import build_layer_table
from megatron.spec.activations import BUILT_IN_FIELDS
from megatron.spec.attention_backends import AttentionBackend
from megatron.spec.layer_pattern import format_pattern
from megatron.tensor_parallel.cross_entropy import LossOptions
from megatron.training.inputs import BatchBuilder, needs_samples
from megatron.training.step import TrainStep
from megatron_lab.verification.observation import LocalTensor
from megatron_lab.verification.prove import import_before_fork
from megatron_lab.verification.recording import record_params, record_shards, set_weights
from megatron_lab.verification.reference.experts import ExpertsShape
from megatron_lab.verification.reference.model import Batch
from megatron_lab.verification.reference.rotary import RotaryScaling
from megatron_lab.verification.reference.shape import LatentShape, ReferenceShape, Weights
from tests.support.reference_runs import ReferenceRun, count_data
from tests.support.warm import run_warm_ranks
from tests.support.windows import Windows

import_before_fork()


@dataclass(frozen=True)
class Layout:
    """How to run: sizes of the groups and what else must not change the result."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    dispatcher: TokenDispatcher = "alltoall"
    ways: tuple[CpCommType, ...] = ("all_gather",)
    """How context ranks share keys and values, in the layers in turn."""
    sequence_parallel: bool | Literal["overlapping"] = False
    """Overlapping: with products in pieces beside its communication."""
    pp_before_dp: bool = False
    schedule: str = "1f1b"
    virtual_stages: int | None = None
    first_stage_layers: int | None = None
    split: str | None = None
    """A layout string."""
    overlap: bool = True
    overlap_p2p: bool = True
    bucket_size: int | None = 3000
    micro_batch_size: int = 2
    dtype: torch.dtype = torch.float64
    sharding: ShardingStrategy = "no_shard"
    overlap_param_gather: bool = False
    grad_reduce_in_bf16: bool = False
    fsdp_shard_size: int | None = None
    fsdp_reshard: FsdpReshard = "always"
    reduce_once: bool = False
    params_cpu: bool = False
    offload: float | None = None
    """Share of main parameters and moments in host memory."""
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    """What happens to activations."""
    compiler: BlockCompiler | None = None
    """Compiles the layers."""
    attention: AttentionBackend = "auto"

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.pp * self.dp


@dataclass(frozen=True)
class LayoutRun(ReferenceRun):
    """The framework's run in the reference's form."""

    evaluations: list[float]
    """Mean losses of the batch to evaluate, if there was one: at the start and after every step."""
    num_shards: list[int]
    """Of each rank."""


@dataclass(frozen=True)
class Recipe:
    """What is trained and how: the arguments of the reference's `train`."""

    shape: ReferenceShape
    weights: Weights
    batches: Sequence[Batch]
    lr: float = 1e-2
    weight_decay: float = 0.1
    clip: float = 0.7
    optimizer: str = "adam"
    update: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of the update rule."""
    ema: float | None = None
    """Decay of the average of the weights, if one is kept."""
    scaler: GradScaler = field(default_factory=lambda: GradScaler(1.0))
    rules: DocumentRules | None = None
    """Read the batches as a run reads its data, by these rules. The rules make the loss mask: that of the batches is to be ones."""
    has_padding: bool = False
    """Whether the samples end with padding: the labels that the masks of the batches leave out. With rules alone."""


def model_config(shape: ReferenceShape, **changes: Any) -> ModelConfig:
    """The framework's settings for a reference shape."""
    settings: dict[str, Any] = dict(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        kv_channels=shape.head_size,
        group_query_attention=shape.kv_heads != shape.heads,
        num_query_groups=shape.kv_heads,
        seq_length=shape.seq,
        max_position_embeddings=shape.num_positions,
        position_embedding_type={"learned": "learned_absolute"}.get(shape.positions, shape.positions),
        rotary_base=shape.rotary_base,
        rotary_percent=shape.rotary_percent,
        rotary_interleaved=shape.rotary_interleaved,
        **stretch_settings(shape.rope_scaling),
        normalization=shape.norm,
        norm_epsilon=shape.epsilon,
        norm_placement=shape.norms,
        norm_weight=shape.norm_weight,
        norm_bias=shape.norm_bias,
        apply_layernorm_1p=shape.zero_centred,
        parallel_residual=shape.parallel,
        residual_multiplier=shape.residual_multiplier,
        **{flag: shape.activation == flag for flag in BUILT_IN_FIELDS},
        glu_linear_offset=shape.offset,
        activation_func_clamp_value=shape.clamp,
        embedding_multiplier=shape.embedding_multiplier,
        embedding_layernorm=shape.embedding_norm,
        output_multiplier=shape.output_multiplier,
        final_logit_softcapping=shape.logit_cap,
        untie_embeddings_and_output_weights=not shape.tied,
        disable_bias_linear=not shape.bias,
        add_qkv_bias=shape.qkv_bias,
        add_attn_output_bias=shape.output_bias,
        add_mlp_bias=shape.mlp_bias,
        qk_layernorm=shape.qk_norm,
        qk_layernorm_all_heads=shape.qk_norm_all_heads,
        **window_settings(shape.windows),
        no_rope_freq=format_pattern(shape.unrotated) if shape.unrotated else None,
        rotary_base_local=shape.local_base,
        softmax_scale=shape.score_scale,
        attn_logit_softcapping=shape.score_cap,
        softmax_type={"none": "vanilla", "one": "off-by-one", "learned": "learnable"}[shape.sink],
        **latent_settings(shape.latent),
        **expert_settings(shape.experts),
        attention_dropout=0.0,
        hidden_dropout=0.0,
        make_vocab_size_divisible_by=1,
        mtp_num_layers=shape.mtp_depths,
        **lora_settings(shape),
    )
    return ModelConfig(**{**settings, **changes})


def lora_settings(shape: ReferenceShape) -> dict[str, Any]:
    if shape.lora_rank is None:
        return {}
    return {
        "lora_rank": shape.lora_rank,
        "lora_alpha": shape.lora_scale * shape.lora_rank,
        "lora_targets": shape.lora_targets,
    }


def latent_settings(latent: LatentShape | None) -> dict[str, Any]:
    if latent is None:
        return {}
    return {
        "multi_latent_attention": True,
        "q_lora_rank": latent.q_lora_rank,
        "kv_lora_rank": latent.kv_lora_rank,
        "qk_head_dim": latent.qk_head_dim,
        "qk_pos_emb_head_dim": latent.qk_pos_emb_head_dim,
        "v_head_dim": latent.v_head_dim,
    }


def expert_settings(experts: ExpertsShape | None) -> dict[str, Any]:
    if experts is None:
        return {}
    return {
        "num_experts": experts.num_experts,
        "moe_layer_freq": format_pattern(experts.layers),
        "moe_ffn_hidden_size": experts.ffn_size,
        "moe_router_topk": experts.top_k,
        "moe_shared_expert_intermediate_size": experts.shared_ffn_size,
        "moe_shared_expert_gate": experts.has_shared_gate,
        "moe_router_score_function": "sigmoid" if experts.score_function == "sigmoid" else "softmax",
        "moe_router_pre_softmax": experts.score_function == "softmax first",
        "moe_router_topk_scaling_factor": None if experts.scaling_factor == 1.0 else experts.scaling_factor,
        "moe_router_num_groups": None if experts.num_groups == 1 else experts.num_groups,
        "moe_router_group_topk": experts.group_top_k,
        "moe_router_load_balancing_type": _BALANCED[experts.aux_loss_scope],
        "moe_aux_loss_coeff": experts.aux_loss_coeff,
        "moe_z_loss_coeff": experts.z_loss_coeff or None,
        "moe_router_enable_expert_bias": experts.bias_update_rate is not None,
        "moe_router_bias_update_rate": experts.bias_update_rate or 1e-3,
        "moe_expert_capacity_factor": experts.capacity_factor,
        "moe_token_drop_policy": "position" if experts.drops_by_position else "probs",
        # Padding changes no number: one of the policies goes with it.
        "moe_pad_expert_input_to_capacity": experts.capacity_factor is not None and experts.drops_by_position,
    }


_BALANCED = {"none": "none", "microbatch": "aux_loss", "sequence": "seq_aux_loss", "update before": "global_aux_loss"}


def stretch_settings(stretch: RotaryScaling | None) -> dict[str, Any]:
    if stretch is None:
        return {}
    if stretch.scaling_type == "linear":
        return {"rotary_seq_len_interpolation_factor": stretch.factor}
    context = {"original_max_position_embeddings": stretch.original_context}
    if stretch.scaling_type == "llama3":
        turns = {"rope_low_freq_factor": stretch.min_turns, "rope_high_freq_factor": stretch.max_turns}
        return {"use_rope_scaling": True, "rope_scaling_factor": stretch.factor, **context, **turns}
    settings: dict[str, Any] = {"rope_type": stretch.scaling_type, "rotary_scaling_factor": stretch.factor, **context}
    if stretch.scaling_type == "yarn":
        settings |= {"beta_slow": stretch.min_turns, "beta_fast": stretch.max_turns}
        settings["yarn_correction_range_round_to_int"] = stretch.rounds_bounds
    if stretch.scaling_type == "longrope":
        settings |= {"rope_short_factors": stretch.short_factors, "rope_long_factors": stretch.long_factors}
    return settings | ({} if stretch.scaling_type == "dynamic" else {"rope_attention_factor": stretch.attention_factor})


def window_settings(windows: Sequence[int | None]) -> dict[str, Any]:
    """The settings for the window of each layer; all windows are of one size."""
    sizes = {window for window in windows if window is not None}
    if not sizes:
        return {}
    (size,) = sizes
    return {"window_size": f"{size},0", "window_attn_skip_freq": format_pattern(tuple(window is not None for window in windows))}


def context_of(layout: Layout, rank: int) -> ParallelContext:
    """A rank's place and groups; all ranks together."""
    topology = Topology(layout.tp, layout.cp, layout.dp, layout.pp, layout.pp_before_dp, layout.ep, layout.etp)
    return make_context(topology, rank, torch.device("cpu"), fsdp_shard_size=layout.fsdp_shard_size)


def parallel_config(layout: Layout) -> ParallelConfig:
    return ParallelConfig(
        tensor_model_parallel_size=layout.tp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        pipeline_model_parallel_size=layout.pp,
        pipeline_schedule=layout.schedule,  # type: ignore[arg-type]
        num_virtual_stages_per_pipeline_rank=layout.virtual_stages,
        decoder_first_pipeline_num_layers=layout.first_stage_layers,
        pipeline_model_parallel_layout=layout.split,
        overlap_grad_reduce=layout.overlap,
        overlap_p2p_communication=layout.overlap_p2p,
        ddp_bucket_size=layout.bucket_size,
        data_parallel_sharding_strategy=layout.sharding,
        overlap_param_gather=layout.overlap_param_gather,
        grad_reduce_in_bf16=layout.grad_reduce_in_bf16,
        fsdp_shard_size=layout.fsdp_shard_size,
        fsdp_reshard_after_forward=layout.fsdp_reshard,
        fsdp_reduce_once=layout.reduce_once,
        fsdp_params_cpu=layout.params_cpu,
    )


def optimizer_config(recipe: Recipe, layout: Layout) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer=recipe.optimizer,  # type: ignore[arg-type]
        clip_grad=recipe.clip,
        ema_decay=recipe.ema,
        **recipe.update,
        optimizer_cpu_offload=layout.offload is not None,
        optimizer_offload_fraction=1.0 if layout.offload is None else layout.offload,
    )


def precision_config(shape: ReferenceShape) -> PrecisionConfig:
    """The framework's settings for products in 8 bits. (Dtypes are the layout's.)"""
    if shape.fp8 is None:
        return PrecisionConfig()
    first, last = shape.num_unquantized_layers
    return PrecisionConfig(
        fp8_format="hybrid" if shape.fp8.hybrid else "e4m3",
        fp8_recipe=shape.fp8.recipe,  # type: ignore[arg-type]
        first_last_layers_bf16=first + last > 0,
        num_layers_at_start_in_bf16=first,
        num_layers_at_end_in_bf16=last,
    )


def model_on_meta(context: ParallelContext, recipe: Recipe, layout: Layout) -> Model:
    """This rank's part of the framework's model, without memory."""
    config = model_config(recipe.shape)
    return build_model(
        config,
        context,
        dtype=layout.dtype,
        vocab_size=recipe.shape.vocab,
        sequence_parallel=bool(layout.sequence_parallel),
        overlap=RingOverlap() if layout.sequence_parallel == "overlapping" else None,
        seed=1,
        table=build_layer_table(config, parallel_config(layout), recipe.shape.vocab, layout.memory),
        should_materialize=False,
        loss=LossOptions(layout.memory.loss_chunk_tokens, recipe.shape.z_loss, recipe.shape.smoothing, recipe.shape.mtp_factor),
        precision=precision_config(recipe.shape),
        tracks_max_logits=bool(recipe.update.get("qk_clip")),
        compiler=layout.compiler,
        uses_allgather_dispatch=layout.dispatcher == "allgather",
        cp_comm_types=tuple(itertools.islice(itertools.cycle(layout.ways), config.num_layers)),
    )


def build_step(context: ParallelContext, recipe: Recipe, layout: Layout) -> TrainStep:
    """The framework's model with the recipe's weights, and its training step."""
    step = TrainStep(
        model_on_meta(context, recipe, layout),
        context,
        recipe.scaler,
        parallel=parallel_config(layout),
        optimizer=optimizer_config(recipe, layout),
        micro_batch_size=layout.micro_batch_size,
        skip_overflow=layout.dtype == torch.float16,
    )
    set_weights(step, recipe.weights)
    return step


def microbatches(batch: Batch, context: ParallelContext, micro_batch_size: int, depths: int = 0) -> list[ModelInputs]:
    """This rank's microbatches of a global batch: those in turn that belong to its data rank."""
    tokens, labels, mask = batch
    ranks, mine = context.topology.dp, context.coordinates["dp"]
    maker = BatchBuilder(context, 1, tokens.shape[1], micro_batch_size, DocumentRules(0), mtp_depths=depths)
    found = []
    for start in range(mine * micro_batch_size, len(tokens), ranks * micro_batch_size):
        ids, following, counted = (tensor[start : start + micro_batch_size].numpy() for tensor in (tokens, labels, mask))
        found.append(maker.build_inputs(Microbatch(ids, following, counted, start)))
    return found


def read_microbatches(
    batch: Batch, step: TrainStep, micro_batch_size: int, rules: DocumentRules, *, has_padding: bool = False
) -> list[ModelInputs]:
    """The same by way of the loader, on stages that read nothing without."""
    tokens, labels, mask = batch
    assert has_padding or mask.all(), "masks come from the rules"
    stages = [chunk.stage for chunk in step.model.layer_table]
    source = None
    if needs_samples(step.context, stages, rules):
        source = Windows(torch.cat([tokens, labels[:, -1:]], dim=1).numpy(), count_data(batch) if has_padding else None)
    maker = BatchBuilder.for_model(step.model.config, step.context, 1, micro_batch_size, rules)
    return next(maker.iter_evaluation_batches(source, global_batch_size=len(tokens), num_batches=1))


def join(ranks: Sequence[list[LocalTensor]]) -> dict[str, torch.Tensor]:
    """Global tensors from all ranks' parts; where several ranks hold an element, they must agree bit for bit."""
    whole: dict[str, torch.Tensor] = {}
    for parts in ranks:
        for part in parts:
            if part.name not in whole:
                whole[part.name] = torch.full(part.shape, torch.nan, dtype=torch.float64)
            view = whole[part.name][part.tensor_slice.index]
            fresh = torch.isnan(view)
            assert fresh.all() or torch.equal(view[~fresh], part.values[~fresh]), f"replicas of {part.name} differ"
            view.copy_(part.values)
    return whole


class _RankRun(NamedTuple):
    losses: list[float]
    norms: list[float]
    evaluations: list[float]
    gradients: list[LocalTensor]
    main_params: list[LocalTensor]
    parameters: list[LocalTensor]
    num_shards: int


def _rank_run(rank: int, recipe: Recipe, layout: Layout, evaluate: Batch | None) -> _RankRun:
    use_backend(layout.attention)
    context = context_of(layout, rank)
    step = build_step(context, recipe, layout)

    def inputs_of(batch: Batch) -> list[ModelInputs]:
        if recipe.rules is None:
            return microbatches(batch, context, layout.micro_batch_size, recipe.shape.mtp_depths)
        return read_microbatches(batch, step, layout.micro_batch_size, recipe.rules, has_padding=recipe.has_padding)

    def evaluation() -> list[float]:
        if evaluate is None:
            return []
        total, count, *_ = step.evaluate(inputs_of(evaluate))
        return [total / count]

    evaluations, results, gradients = evaluation(), [], list[LocalTensor]()
    keep_gradients(step, gradients)
    for i, batch in enumerate(recipe.batches):
        results.append(step.run(inputs_of(batch), iteration=i + 1, learning_rate=recipe.lr, weight_decay=recipe.weight_decay))
        evaluations += evaluation()
    losses, norms = [result.loss for result in results], [result.grad_norm for result in results]
    parameters, mains = record_params(step), record_shards(step, lambda shard: shard.main_param)
    if dist.is_initialized():
        dist.barrier()
    return _RankRun(losses, norms, evaluations, gradients, mains, parameters, len(step.optimizer.shards))


def run_layout(recipe: Recipe, layout: Layout, *, evaluate: Batch | None = None) -> LayoutRun:
    """Train at a layout.

    Args:
        evaluate: a batch to evaluate on before the first and after every step.
    """
    ranks: list[_RankRun] = run_warm_ranks(layout.world_size, _rank_run, recipe, layout, evaluate, timeout=240.0)
    first = ranks[0]
    for what in ("losses", "norms", "evaluations"):
        assert all(getattr(r, what) == getattr(first, what) for r in ranks), f"ranks report different {what}"
    weights = join([r.main_params for r in ranks])
    for name, parameter in join([r.parameters for r in ranks]).items():
        assert torch.equal(parameter, weights[name].to(layout.dtype).double()), f"{name} is not what its main says"
    gradients = join([r.gradients for r in ranks])
    return LayoutRun(first.losses, first.norms, gradients, weights, first.evaluations, [r.num_shards for r in ranks])


def keep_gradients(step: TrainStep, kept: list[LocalTensor]) -> None:
    """At the next update, before it is made, keep the gradients, unscaled, not clipped."""
    update = step.optimizer.step

    def keeping(*args: Any, **named: Any) -> None:
        step.optimizer.step = update  # type: ignore[method-assign]
        kept.extend(record_shards(step, lambda shard: shard.grad.double() / step.scaler.scale, with_frozen=False))
        update(*args, **named)

    step.optimizer.step = keeping  # type: ignore[method-assign]
