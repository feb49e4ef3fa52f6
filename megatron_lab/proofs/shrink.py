"""Reduction of settings of any size to small ones, which run on this machine in seconds and still test the layout.

Choices (schedule, sharding strategy, norms, ...) do not change. Sizes are reduced in proportion.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from megatron.config.checks.finding import format_setting, get_value, is_set
from megatron.config.config import Config
from megatron.config.data import DataConfig
from megatron.config.flags import get_flags
from megatron.config.outputs import CheckpointConfig, LoggingConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.precision import Fp8, PrecisionConfig
from megatron.config.rules import find_violations
from megatron.data_parallel.bucket_plan import get_default_bucket_size
from megatron.parallel.params import ParamRecord
from megatron.spec.counts import count_parameters
from megatron.spec.weights import iter_weights
from megatron_lab.data_tools.epochs import assume_run_length
from megatron_lab.proofs.small_layout import (
    DEFAULT_SPLIT,
    AxisSizes,
    LayerSplit,
    apply_layer_split,
    count_layers_of_all_types,
    get_axis_sizes,
    get_layer_split,
    reduce_axis_sizes,
    reduce_layer_split,
    reduce_memory,
)
from megatron_lab.proofs.small_model import (
    Divisors,
    compute_padding,
    keep_matching_param_groups,
    reduce_learning_rates,
    reduce_loss_chunk,
    reduce_model,
    reduce_training,
    reduce_update_rule,
    reduce_vocab,
)

_MAX_BUCKETS = 8


@dataclass(frozen=True)
class ReducedRun:
    """Small settings that are run in place of the user's settings, and a description of the differences."""

    config: Config
    world_size: int
    preserved: list[str]
    """Lines of the report, each about settings that have the same values in the small run as in the user's run."""
    reduced: list[str]
    """Lines of the report, each about settings that were reduced or replaced in the small run."""


def shrink(config: Config, world_size: int, vocab_size: int, *, max_ranks: int = 8, steps: int = 4) -> list[ReducedRun]:
    """Reduce settings to one small run, or to several small runs that together test all axes of the layout. Each run contains as
    many axes as `max_ranks` allows.

    Args:
        config: settings that are valid for `world_size` ranks.
        vocab_size: rows of the word embedding, without padding.
        max_ranks: maximum number of ranks in a run.
        steps: iterations of a run.

    Raises:
        ValueError: no smaller settings are valid.
    """
    config = assume_run_length(config)
    full_sizes = get_axis_sizes(config, world_size)
    hybrid = (config.parallel.fsdp_shard_size or full_sizes.gradient_group_size) < full_sizes.gradient_group_size
    return [
        _reduce_run(config, full_sizes, vocab_size, sizes, steps)
        for sizes in reduce_axis_sizes(full_sizes, max_ranks, is_hybrid=hybrid)
    ]


def _reduce_run(config: Config, full_sizes: AxisSizes, vocab_size: int, sizes: AxisSizes, steps: int) -> ReducedRun:
    parallel = _reduce_parallel(config.parallel, full_sizes, sizes)
    is_even = parallel.sharding == "optim_grads_params" and is_evenly_sharded(config, full_sizes, vocab_size)
    num_shards = (parallel.fsdp_shard_size or sizes.gradient_group_size) if is_even else 1
    divisors = Divisors(
        *(sizes.tp, num_shards, parallel.sequence_parallel, get_fp8_alignment(config.precision), sizes.cp),
        *(parallel.expert_model_parallel_size, parallel.expert_tensor_size),
        min_local_experts=min(2, (config.model.num_experts or 1) // config.parallel.expert_model_parallel_size),
        splits_heads="a2a" in parallel.cp_comm_type,
    )
    vocab_rows, multiple = reduce_vocab(vocab_size, config.model.make_vocab_size_divisible_by, full_sizes.tp, divisors)
    full_split = get_layer_split(config.model, config.parallel, vocab_size)
    precision = reduce_precision(config.precision)
    min_layers = max(count_layers_of_all_types(config.model), precision.num_layers_in_bf16 + 1)
    if sizes.pp > 1:
        split = reduce_layer_split(full_split, config.parallel.schedule, sizes.pp, min_layers)
        model = reduce_model(config.model, sum(split.chunk_sizes), multiple, full_sizes.tp, divisors)
        parallel, keeps_split_settings = apply_layer_split(model, parallel, vocab_rows, split)
    else:
        num_layers = max(min(2, config.model.num_layers), min_layers)
        model = reduce_model(config.model, num_layers, multiple, full_sizes.tp, divisors)
        parallel, keeps_split_settings = dataclasses.replace(parallel, **{**DEFAULT_SPLIT, "pipeline_schedule": None}), True
    parallel = _reduce_cp_comm_type(parallel, config.model.num_layers, model.num_layers)
    training = reduce_training(config, full_sizes, sizes, model.seq_length, steps)
    parallel = dataclasses.replace(
        parallel, ddp_bucket_size=_reduce_bucket_size(config, vocab_size, full_sizes, count_parameters(model, vocab_rows), sizes)
    )
    small_split = get_layer_split(model, parallel, vocab_rows)
    loss_chunk_tokens = reduce_loss_chunk(config, vocab_size, training.micro_batch_size * model.seq_length // sizes.cp)
    small = dataclasses.replace(
        config,
        model=model,
        memory=dataclasses.replace(reduce_memory(config.memory, full_split, small_split), loss_chunk_tokens=loss_chunk_tokens),
        training=training,
        optimizer=reduce_update_rule(keep_matching_param_groups(model, reduce_learning_rates(config, training, steps))),
        parallel=parallel,
        precision=precision,
        data=_build_data_config(config.data, vocab_rows),
        checkpoint=CheckpointConfig(),
        logging=LoggingConfig(),
    )
    # The attention kernel is valid for the original sizes; a proof replaces a GPU kernel.
    any_kernel = dataclasses.replace(small, speed=dataclasses.replace(small.speed, attention_backend="auto"))
    if violations := find_violations(any_kernel, sizes.world_size):
        raise ValueError(
            "these settings cannot be tested in a small run, because the reduced settings are not valid:\n"
            + "\n".join(str(violation) for violation in violations)
            + "\nChange these settings for the proof."
        )
    preserved, reduced = _describe_settings(
        config,
        small,
        full_sizes,
        sizes,
        (full_split, small_split),
        (vocab_size, vocab_rows),
        keeps_split_settings=keeps_split_settings,
    )
    return ReducedRun(small, sizes.world_size, preserved, reduced)


def get_fp8_alignment(precision: PrecisionConfig) -> int:
    """Return the number by which FP8 requires the dimensions of a rank's matrix products to be divisible; 1 without FP8."""
    return Fp8(precision.fp8_format, precision.fp8_recipe).alignment if precision.fp8_format else 1


def reduce_precision(precision: PrecisionConfig) -> PrecisionConfig:
    """Reduce the number of layers that stay in bfloat16 in an FP8 run: at most one at the start and one at the end of the model."""
    if not precision.first_last_layers_bf16:
        return precision
    first, last = precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16
    return dataclasses.replace(precision, num_layers_at_start_in_bf16=min(1, first), num_layers_at_end_in_bf16=min(1, last))


def is_evenly_sharded(config: Config, sizes: AxisSizes, vocab_size: int) -> bool:
    """Check whether FSDP shards all parameters evenly, that is, without padding. Each rank of a shard group then holds an equal
    number of rows of every parameter."""
    ranks, ep, etp = (
        config.parallel.fsdp_shard_size or sizes.gradient_group_size,
        config.parallel.expert_model_parallel_size,
        config.parallel.expert_tensor_size,
    )
    for weight in iter_weights(config.model, vocab_size):
        record = ParamRecord.of(weight, tensor_size=sizes.tp, sequence_parallel=False, chunks=())
        shape = record.get_local_shape({"tp": sizes.tp, "ep": ep, "etp": etp})
        num_shards = max(1, ranks * sizes.tp // (ep * etp)) if record.is_expert else ranks
        if math.prod(shape if record.param_type == "vector" else shape[:-1]) % num_shards:
            return False
    return True


def _reduce_parallel(parallel: ParallelConfig, full_sizes: AxisSizes, sizes: AxisSizes) -> ParallelConfig:
    fsdp_shard_size = parallel.fsdp_shard_size
    if fsdp_shard_size is not None and sizes.gradient_group_size != full_sizes.gradient_group_size:
        fsdp_shard_size = 2 if fsdp_shard_size < full_sizes.gradient_group_size and sizes.gradient_group_size > 2 else None
    stage_size, etp = sizes.tp * sizes.gradient_group_size, parallel.expert_tensor_parallel_size
    if etp is not None and sizes.tp * sizes.gradient_group_size != full_sizes.tp * full_sizes.gradient_group_size:
        etp = None if etp == full_sizes.tp else min(etp, 2 if stage_size % 2 == 0 else 1)
    max_expert_ranks = stage_size // (sizes.tp if etp is None else etp)
    ep, expert_copy_size, shard_group_size = (
        parallel.expert_model_parallel_size,
        sizes.tp if etp is None else etp,
        (fsdp_shard_size or 1) * sizes.tp,
    )
    ep_sizes = [size for size in range(1, max_expert_ranks + 1) if max_expert_ranks % size == 0 and size <= ep]
    if fsdp_shard_size is not None:  # a shard group holds each expert equally often, or only part of one copy of the experts
        ep_sizes = [
            size
            for size in ep_sizes
            if shard_group_size <= expert_copy_size * size or shard_group_size % (expert_copy_size * size) == 0
        ]
    return dataclasses.replace(
        parallel,
        expert_tensor_parallel_size=etp,
        expert_model_parallel_size=max(ep_sizes),
        tensor_model_parallel_size=sizes.tp,
        context_parallel_size=sizes.cp,
        pipeline_model_parallel_size=sizes.pp,
        fsdp_shard_size=fsdp_shard_size,
    )


def _reduce_cp_comm_type(parallel: ParallelConfig, num_layers: int, small_num_layers: int) -> ParallelConfig:
    """Select the values of --cp-comm-type (one for each layer) for the layers of the small model. The values are those of evenly
    spaced layers of the full model."""
    comm_types = parallel.cp_comm_type
    if len(comm_types) < 2:
        return parallel
    return dataclasses.replace(
        parallel, cp_comm_type=tuple(comm_types[layer * num_layers // small_num_layers] for layer in range(small_num_layers))
    )


def _reduce_bucket_size(
    config: Config, vocab_size: int, full_sizes: AxisSizes, small_parameters: int, sizes: AxisSizes
) -> int | None:
    """Compute the number of elements of a gradient bucket (gradients that are reduced in one collective) in the small run. The
    small run has several buckets if the original run has several."""
    bucket_size = config.parallel.ddp_bucket_size or get_default_bucket_size(full_sizes.dp)
    num_buckets = min(
        _MAX_BUCKETS, math.ceil(count_parameters(config.model, vocab_size) / (full_sizes.tp * full_sizes.pp) / bucket_size)
    )
    if num_buckets == 1 and config.parallel.ddp_bucket_size is None:
        return None
    return max(1, small_parameters // (sizes.tp * sizes.pp) // num_buckets)


def _build_data_config(data: DataConfig, rows: int) -> DataConfig:
    """Build the data settings of the small run: mock data with tokens of NullTokenizer. The end-of-document token of NullTokenizer
    is its vocabulary size V, so the word embedding has V + 1 rows. A proof reads random samples in place of any data, and
    --whole-documents, which cannot be used with mock data, pads them.

    Args:
        rows: rows of the word embedding.
    """
    return DataConfig(
        mock_data=not data.whole_documents,
        data_path=("random",) if data.whole_documents else (),
        tokenizer_type="NullTokenizer",
        vocab_size=rows - 1,
        num_workers=data.num_workers,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
        eod_mask_loss=data.eod_mask_loss,
        whole_documents=data.whole_documents,
    )


_TOPICS = ("model", "training", "optimizer", "parallel", "precision", "memory")
_PACKING = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "whole_documents")
_UNLISTED_FIELDS = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "num_layers", "make_vocab_size_divisible_by"),
    *("num_attention_heads", "num_query_groups"),
    # A proof runs in float64 and in host memory.
    *("bf16", "fp16", "fp32_residual_connection", "grad_reduce_in_bf16", "optimizer_cpu_offload", "optimizer_offload_fraction"),
)
"""Fields that get no line in the description of the settings, because the line of another field mentions them."""


def _describe_settings(
    config: Config,
    small: Config,
    full_sizes: AxisSizes,
    sizes: AxisSizes,
    splits: tuple[LayerSplit, LayerSplit],
    vocab_rows: tuple[int, int],
    *,
    keeps_split_settings: bool,
) -> tuple[list[str], list[str]]:
    """Describe the settings that did not change, and those that were reduced or replaced, as two lists of lines.

    Args:
        config: original settings.
        small: reduced settings.
        full_sizes: original number of ranks along each axis.
        sizes: reduced number of ranks along each axis.
        splits: assignment of layers to stages, before and after the reduction.
        vocab_rows: rows of the word embedding, before and after the reduction.
        keeps_split_settings: whether the small run assigns layers to stages with the original flags.
    """
    preserved, reduced = [], []
    axis_fields = {"tensor": "tp", "context": "cp", "pipeline": "pp", "data": "dp"}
    for quantity, old, new in (
        (quantity, getattr(full_sizes, axis), getattr(sizes, axis)) for quantity, axis in axis_fields.items()
    ):
        if old != new:
            reduced.append(f"{quantity} size {old} -> {new}")
        elif old > 1:
            preserved.append(f"{quantity} size {old}")
    if sizes.pp > 1 and keeps_split_settings:
        preserved.append("the way in which layers are spread over stages")
    if sizes.pp > 1:
        preserved.append(f"schedule {config.parallel.schedule}")
    preserved.append("embedding and output layer tied" if config.model.has_tied_embeddings else "embedding and output layer apart")
    models = ((config.model, full_sizes.tp), (small.model, sizes.tp))
    for quantity, (old_text, new_text) in {
        "layers by stage": map(str, splits),
        "heads of a tensor rank": (
            f"{model.num_attention_heads // tp} over {max(1, model.num_key_value_heads // tp)} key-value" for model, tp in models
        ),
        "vocabulary": (
            f"{num_rows:,} + {compute_padding(num_rows, model.make_vocab_size_divisible_by, tp):,} of padding"
            for num_rows, (model, tp) in zip(vocab_rows, models, strict=True)
        ),
    }.items():
        if old_text != new_text:
            reduced.append(f"{quantity} {old_text} -> {new_text}")
    for flag in get_flags().values():
        if (flag.topic in _TOPICS or flag.field in _PACKING) and flag.field not in _UNLISTED_FIELDS:
            old_value, new_value = get_value(config, flag.field), get_value(small, flag.field)
            if old_value != new_value:
                reduced.append(f"--{flag.name} {_format_value(old_value)} -> {_format_value(new_value)}")
            elif is_set(config, flag.field):
                preserved.append(format_setting(config, flag.field))
    return preserved, reduced


def _format_value(value: object) -> str:
    if value is None:
        return "by default"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
