"""Runs the framework at a layout on a reference model's weights and batches, and gives the result in the reference's form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import ParallelConfig
from megatron.model.build import Model, build_model
from megatron.model.inputs import ModelInputs
from megatron.optimizer.grad_scaler import ConstantGradScaler, GradScaler
from megatron.parallel.context import ParallelContext, make_context
from megatron.parallel.topology import Topology
from megatron.pipeline_parallel.partition import table_of
from megatron.training.step import TrainStep
from tests.distributed import run_ranks
from tests.reference.model import Weights
from tests.reference.shape import ReferenceShape
from tests.reference.training import Batch, ReferenceRun


@dataclass(frozen=True)
class Layout:
    """How to run: sizes of the groups and what else must not change the result."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    sequence_parallel: bool = False
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
    fp32_residual: bool = False

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp


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
    momentum: float = 0.0
    scaler: GradScaler = field(default_factory=lambda: ConstantGradScaler(1.0))


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
        use_rope_scaling=shape.rope_scaling_factor is not None,
        rope_scaling_factor=shape.rope_scaling_factor or 8.0,
        normalization=shape.norm,
        norm_epsilon=shape.epsilon,
        swiglu=shape.activation == "swiglu",
        squared_relu=shape.activation == "squared_relu",
        untie_embeddings_and_output_weights=not shape.tied,
        disable_bias_linear=not shape.bias,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        make_vocab_size_divisible_by=1,
    )
    return ModelConfig(**{**settings, **changes})


def build_step(context: ParallelContext, recipe: Recipe, layout: Layout) -> TrainStep:
    """The framework's model with the recipe's weights, and its training step."""
    config = model_config(recipe.shape, fp32_residual_connection=layout.fp32_residual)
    parallel = ParallelConfig(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        pipeline_schedule=layout.schedule,  # type: ignore[arg-type]
        num_virtual_stages_per_pipeline_rank=layout.virtual_stages,
        decoder_first_pipeline_num_layers=layout.first_stage_layers,
        pipeline_model_parallel_layout=layout.split,
        overlap_grad_reduce=layout.overlap,
        overlap_p2p_communication=layout.overlap_p2p,
        ddp_bucket_size=layout.bucket_size,
    )
    model = build_model(
        config,
        context,
        dtype=layout.dtype,
        vocab_size=recipe.shape.vocab,
        sequence_parallel=layout.sequence_parallel,
        seed=1,
        table=table_of(config, parallel, recipe.shape.vocab),
    )
    set_weights(model, context, recipe.weights)
    return TrainStep(
        model,
        context,
        recipe.scaler,
        parallel=parallel,
        optimizer=OptimizerConfig(
            optimizer=recipe.optimizer,  # type: ignore[arg-type]
            clip_grad=recipe.clip,
            sgd_momentum=recipe.momentum,
        ),
        micro_batch_size=layout.micro_batch_size,
        skip_overflow=layout.dtype == torch.float16,
    )


def set_weights(model: Model, context: ParallelContext, weights: Weights) -> None:
    """Overwrite this rank's parameters by its boxes of global weights."""
    for entry in model.params:
        box = entry.record.held_box(context.axis_sizes, context.coordinates)
        assert weights[entry.record.name].shape == entry.record.shape
        part = weights[entry.record.name][tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
        with torch.no_grad():
            entry.param[tuple(slice(n) for n in box.sizes)].copy_(part)


def microbatches(batch: Batch, context: ParallelContext, micro_batch_size: int) -> list[ModelInputs]:
    """This rank's microbatches of a global batch: those in turn that belong to its data rank."""
    tokens, labels, mask = batch
    ranks, mine = context.topology.dp, context.coordinates["dp"]
    found = []
    for start in range(mine * micro_batch_size, len(tokens), ranks * micro_batch_size):
        rows = slice(start, start + micro_batch_size)
        positions = torch.arange(tokens.shape[1]).unsqueeze(1).expand(-1, micro_batch_size)
        found.append(
            ModelInputs(positions, tokens[rows].t().contiguous(), labels[rows].t().contiguous(), mask[rows].t().contiguous())
        )
    return found


Boxed = list[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]


def _boxed(step: TrainStep, context: ParallelContext, tensors: dict[str, torch.Tensor]) -> Boxed:
    """Each local tensor with its offsets and its global shape."""
    boxed = []
    for name, tensor in tensors.items():
        record = step.model.params[name].record
        box = record.held_box(context.axis_sizes, context.coordinates)
        part = tensor.detach()[tuple(slice(n) for n in box.sizes)].to(torch.float64, copy=True)
        boxed.append((name, box.offsets, record.shape, part))
    return boxed


def join(ranks: Sequence[Boxed]) -> dict[str, torch.Tensor]:
    """Global tensors from all ranks' boxes; where several ranks hold a box, they must agree bit for bit."""
    whole: dict[str, torch.Tensor] = {}
    for boxed in ranks:
        for name, offsets, shape, part in boxed:
            tensor = whole.setdefault(name, torch.full(shape, torch.nan, dtype=torch.float64))
            view = tensor[tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))]
            fresh = torch.isnan(view)
            assert torch.equal(view[~fresh], part[~fresh]), f"replicas of {name} differ"
            view.copy_(part)
    return whole


def run_layout(recipe: Recipe, layout: Layout) -> ReferenceRun:
    """Train at a layout."""

    def rank_run(rank: int) -> tuple[list[float], list[float], Boxed, Boxed]:
        topology = Topology(tp=layout.tp, pp=layout.pp, dp=layout.dp, pp_before_dp=layout.pp_before_dp)
        context = make_context(topology, rank, torch.device("cpu"))
        step = build_step(context, recipe, layout)
        losses, norms = [], []
        gradients: Boxed = []
        for i, batch in enumerate(recipe.batches):
            inputs = microbatches(batch, context, layout.micro_batch_size)
            if i == 0:
                update = step.optimizer.step

                def first_update(*args: float, update: Any = update) -> None:
                    found = {entry.record.name: grad / step.scaler.scale for entry, grad in step.buckets.gradients()}
                    gradients.extend(_boxed(step, context, found))
                    update(*args)

                step.optimizer.step = first_update  # type: ignore[assignment,method-assign]
            elif i == 1:
                step.optimizer.step = update  # type: ignore[method-assign]
            result = step.run(inputs, iteration=i + 1, learning_rate=recipe.lr, weight_decay=recipe.weight_decay)
            losses.append(result.loss)
            norms.append(result.grad_norm)
        weights = _boxed(step, context, {entry.record.name: entry.param for entry in step.model.params})
        if dist.is_initialized():
            dist.barrier()
        return losses, norms, gradients, weights

    ranks = run_ranks(layout.world_size, rank_run, timeout=240.0)
    losses, norms = ranks[0][:2]
    assert all(r[0] == losses and r[1] == norms for r in ranks), "ranks report different losses or norms"
    return ReferenceRun(losses, norms, join([r[2] for r in ranks]), join([r[3] for r in ranks]))
