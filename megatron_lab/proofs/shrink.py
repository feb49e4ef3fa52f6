"""Makes settings of any size so small that they run here in seconds, and still show what the layout does.

What a setting chooses (schedule, strategy, norms, ...) stays; numbers become small in the same proportions.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from megatron.config.checks.finding import is_changed, shown, value_of
from megatron.config.config import Config
from megatron.config.data import DataConfig
from megatron.config.flags import flags
from megatron.config.outputs import CheckpointConfig, LoggingConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.precision import Fp8, PrecisionConfig
from megatron.config.rules import violations
from megatron.data_parallel.bucket_plan import default_bucket_size
from megatron.parallel.params import ParamRecord
from megatron.spec.counts import count_parameters
from megatron.spec.weights import model_weights
from megatron_lab.proofs.small_layout import (
    NO_SPLIT,
    Pattern,
    RankSizes,
    layers_of_all_kinds,
    pattern_of,
    reduced_memory,
    reduced_pattern,
    reduced_sizes,
    sizes_of,
    with_pattern,
)
from megatron_lab.proofs.small_model import (
    Cuts,
    padding_of,
    reduced_loss,
    reduced_model,
    reduced_rates,
    reduced_rule,
    reduced_training,
    reduced_vocabulary,
    with_groups_of,
)

_MOST_BUCKETS = 8


@dataclass(frozen=True)
class Reduced:
    """Small settings, and how they relate to the given ones."""

    config: Config
    world_size: int
    kept: list[str]
    changed: list[str]


def shrink(config: Config, world_size: int, vocab_size: int, *, max_ranks: int = 8, steps: int = 4) -> list[Reduced]:
    """Small settings for one run, or for several that together have every pair of axes of the layout.

    Args:
        config: valid for `world_size`.
        vocab_size: rows of the word embedding, without padding.
        max_ranks: the most ranks of one run.
        steps: iterations of one run.

    Raises:
        ValueError: nothing smaller is valid.
    """
    whole = sizes_of(config, world_size)
    hybrid = (config.parallel.fsdp_shard_size or whole.sharing) < whole.sharing
    return [_reduced(config, whole, vocab_size, sizes, steps) for sizes in reduced_sizes(whole, max_ranks, hybrid=hybrid)]


def _reduced(config: Config, whole: RankSizes, vocab_size: int, sizes: RankSizes, steps: int) -> Reduced:
    parallel = _ranks(config.parallel, whole, sizes)
    even = parallel.sharding == "optim_grads_params" and divides_evenly(config, whole, vocab_size)
    shards = (parallel.fsdp_shard_size or sizes.sharing) if even else 1
    cuts = Cuts(
        *(sizes.tp, shards, parallel.sequence_parallel, blocks_of(config.precision), sizes.cp),
        *(parallel.expert_model_parallel_size, parallel.expert_tensor_size),
        experts_each=min(2, (config.model.num_experts or 1) // config.parallel.expert_model_parallel_size),
        shares_heads="a2a" in parallel.cp_comm_type,
    )
    rows, multiple = reduced_vocabulary(vocab_size, config.model.make_vocab_size_divisible_by, whole.tp, cuts)
    before = pattern_of(config.model, config.parallel, vocab_size)
    precision = reduced_precision(config.precision)
    least = max(layers_of_all_kinds(config.model), precision.num_layers_in_bf16 + 1)
    if sizes.pp > 1:
        pattern = reduced_pattern(before, config.parallel.schedule, sizes.pp, least)
        model = reduced_model(config.model, sum(pattern.sizes), multiple, whole.tp, cuts)
        parallel, same_split = with_pattern(model, parallel, rows, pattern)
    else:
        num_layers = max(min(2, config.model.num_layers), least)
        model = reduced_model(config.model, num_layers, multiple, whole.tp, cuts)
        parallel, same_split = dataclasses.replace(parallel, **{**NO_SPLIT, "pipeline_schedule": None}), True
    parallel = _ways(parallel, config.model.num_layers, model.num_layers)
    training = reduced_training(config, whole, sizes, model.seq_length, steps)
    parallel = dataclasses.replace(
        parallel, ddp_bucket_size=_bucket(config, vocab_size, whole, count_parameters(model, rows), sizes)
    )
    after = pattern_of(model, parallel, rows)
    chunk = reduced_loss(config, vocab_size, training.micro_batch_size * model.seq_length // sizes.cp)
    small = dataclasses.replace(
        config,
        model=model,
        memory=dataclasses.replace(reduced_memory(config.memory, before, after), loss_chunk_tokens=chunk),
        training=training,
        optimizer=reduced_rule(with_groups_of(model, reduced_rates(config, training, steps))),
        parallel=parallel,
        precision=precision,
        data=_data(config.data, rows),
        checkpoint=CheckpointConfig(),
        logging=LoggingConfig(),
    )
    # A kernel of attention is asked for at the true sizes; a proof replaces one of GPUs.
    any_kernel = dataclasses.replace(small, speed=dataclasses.replace(small.speed, attention_backend="auto"))
    if found := violations(any_kernel, sizes.world_size):
        raise ValueError("these settings could not be made small:\n" + "\n".join(str(violation) for violation in found))
    kept, changed = _notes(config, small, whole, sizes, (before, after), (vocab_size, rows), same_split=same_split)
    return Reduced(small, sizes.world_size, kept, changed)


def blocks_of(precision: PrecisionConfig) -> int:
    """What the dimensions of products on a rank are multiples of."""
    return Fp8(precision.fp8_format, precision.fp8_recipe).multiple if precision.fp8_format else 1


def reduced_precision(precision: PrecisionConfig) -> PrecisionConfig:
    """At most one layer at each end is not in 8 bits."""
    if not precision.first_last_layers_bf16:
        return precision
    first, last = precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16
    return dataclasses.replace(precision, num_layers_at_start_in_bf16=min(1, first), num_layers_at_end_in_bf16=min(1, last))


def divides_evenly(config: Config, sizes: RankSizes, vocab_size: int) -> bool:
    """Whether the data ranks that share a copy of the parameters each hold as many rows of each, without padding."""
    ranks, ep, etp = (
        config.parallel.fsdp_shard_size or sizes.sharing,
        config.parallel.expert_model_parallel_size,
        config.parallel.expert_tensor_size,
    )
    for weight in model_weights(config.model, vocab_size):
        record = ParamRecord.of(weight, tensor_size=sizes.tp, sequence_parallel=False, chunks=())
        shape = record.local_shape({"tp": sizes.tp, "ep": ep, "etp": etp})
        shared_by = max(1, ranks * sizes.tp // (ep * etp)) if record.of_experts else ranks
        if math.prod(shape if record.kind == "vector" else shape[:-1]) % shared_by:
            return False
    return True


def _ranks(parallel: ParallelConfig, whole: RankSizes, sizes: RankSizes) -> ParallelConfig:
    shard = parallel.fsdp_shard_size
    if shard is not None and sizes.sharing != whole.sharing:
        shard = 2 if shard < whole.sharing and sizes.sharing > 2 else None
    stage, etp = sizes.tp * sizes.sharing, parallel.expert_tensor_parallel_size
    if etp is not None and sizes.tp * sizes.sharing != whole.tp * whole.sharing:
        etp = None if etp == whole.tp else min(etp, 2 if stage % 2 == 0 else 1)
    left = stage // (sizes.tp if etp is None else etp)
    ep, a_copy, neighbours = parallel.expert_model_parallel_size, sizes.tp if etp is None else etp, (shard or 1) * sizes.tp
    may_be = [size for size in range(1, left + 1) if left % size == 0 and size <= ep]
    if shard is not None:  # the ranks that share the rest of the model have each expert as often, or in part
        may_be = [size for size in may_be if neighbours <= a_copy * size or neighbours % (a_copy * size) == 0]
    return dataclasses.replace(
        parallel,
        expert_tensor_parallel_size=etp,
        expert_model_parallel_size=max(may_be),
        tensor_model_parallel_size=sizes.tp,
        context_parallel_size=sizes.cp,
        pipeline_model_parallel_size=sizes.pp,
        fsdp_shard_size=shard,
    )


def _ways(parallel: ParallelConfig, num_layers: int, small: int) -> ParallelConfig:
    """Ways to share keys and values for fewer layers: those of layers spread over the model."""
    given = parallel.cp_comm_type
    if len(given) < 2:
        return parallel
    return dataclasses.replace(parallel, cp_comm_type=tuple(given[layer * num_layers // small] for layer in range(small)))


def _bucket(config: Config, vocab_size: int, whole: RankSizes, small_parameters: int, sizes: RankSizes) -> int | None:
    """Elements of a gradient bucket, so that there are several buckets if there were."""
    limit = config.parallel.ddp_bucket_size or default_bucket_size(whole.dp)
    buckets = min(_MOST_BUCKETS, math.ceil(count_parameters(config.model, vocab_size) / (whole.tp * whole.pp) / limit))
    if buckets == 1 and config.parallel.ddp_bucket_size is None:
        return None
    return max(1, small_parameters // (sizes.tp * sizes.pp) // buckets)


def _data(data: DataConfig, rows: int) -> DataConfig:
    """Made-up tokens. The end of a document is one more than the size of NullTokenizer."""
    return DataConfig(
        mock_data=True,
        tokenizer_type="NullTokenizer",
        vocab_size=rows - 1,
        num_workers=data.num_workers,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
        eod_mask_loss=data.eod_mask_loss,
    )


_TOPICS = ("model", "training", "optimizer", "parallel", "precision", "memory")
_PACKING = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
_TOLD_ELSEWHERE = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "num_layers", "make_vocab_size_divisible_by"),
    *("num_attention_heads", "num_query_groups"),
    # Everything runs in float64 and in one memory.
    *("bf16", "fp16", "fp32_residual_connection", "grad_reduce_in_bf16", "optimizer_cpu_offload", "optimizer_offload_fraction"),
)
"""Settings that other lines mention."""


def _notes(
    config: Config,
    small: Config,
    whole: RankSizes,
    sizes: RankSizes,
    patterns: tuple[Pattern, Pattern],
    rows: tuple[int, int],
    *,
    same_split: bool,
) -> tuple[list[str], list[str]]:
    """Lines on what stayed as it was, and on what changed.

    Args:
        patterns: layers of stages before and after.
        rows: rows of the word embedding before and after.
    """
    kept, changed = [], []
    axes = {"tensor": "tp", "context": "cp", "pipeline": "pp", "data": "dp"}
    for what, old, new in ((what, getattr(whole, axis), getattr(sizes, axis)) for what, axis in axes.items()):
        if old != new:
            changed.append(f"{what} size {old} -> {new}")
        elif old > 1:
            kept.append(f"{what} size {old}")
    if sizes.pp > 1 and same_split:
        kept.append("the way in which layers are spread over stages")
    if sizes.pp > 1:
        kept.append(f"schedule {config.parallel.schedule}")
    kept.append("embedding and output layer tied" if config.model.tied else "embedding and output layer apart")
    both = ((config.model, whole.tp), (small.model, sizes.tp))
    for what, (before, after) in {
        "layers by stage": map(str, patterns),
        "heads of a tensor rank": (
            f"{model.num_attention_heads // tp} over {max(1, model.num_key_value_heads // tp)} key-value" for model, tp in both
        ),
        "vocabulary": (
            f"{number:,} + {padding_of(number, model.make_vocab_size_divisible_by, tp):,} of padding"
            for number, (model, tp) in zip(rows, both, strict=True)
        ),
    }.items():
        if before != after:
            changed.append(f"{what} {before} -> {after}")
    for flag in flags().values():
        if (flag.topic in _TOPICS or flag.field in _PACKING) and flag.field not in _TOLD_ELSEWHERE:
            given, now = value_of(config, flag.field), value_of(small, flag.field)
            if given != now:
                changed.append(f"--{flag.name} {_words(given)} -> {_words(now)}")
            elif is_changed(config, flag.field):
                kept.append(shown(config, flag.field))
    return kept, changed


def _words(value: object) -> str:
    if value is None:
        return "by default"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
