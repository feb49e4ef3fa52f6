"""Settings of any size made so small that they run here in seconds, and still show what the layout does.

What a setting chooses (schedule, strategy, norms, ...) stays; numbers become small in the same proportions.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from megatron.config.config import Config
from megatron.config.data import DataConfig
from megatron.config.outputs import CheckpointConfig, LoggingConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.rules import violations
from megatron.data_parallel.bucket_plan import default_bucket_size
from megatron.metrics.flops import count_parameters
from megatron.verification.shrinking.course import reduced_rates, reduced_training
from megatron.verification.shrinking.model import Cuts, reduced_model, reduced_vocabulary
from megatron.verification.shrinking.ranks import RankSizes, reduced_sizes
from megatron.verification.shrinking.stages import pattern_of, reduced_pattern, with_pattern, without_split
from megatron.verification.shrinking.words import changed_words, kept_words

_MOST_BUCKETS = 8


@dataclass(frozen=True)
class Reduced:
    """Small settings, and what they have of the given ones."""

    config: Config
    world_size: int
    kept: list[str]
    changed: list[str]


def shrink(config: Config, world_size: int, vocab_size: int, *, max_ranks: int = 8, steps: int = 4) -> list[Reduced]:
    """Small settings, of one run or of several that together have every pair of axes that the layout has.

    Args:
        config: valid for `world_size`.
        vocab_size: rows of the word embedding, without padding.
        max_ranks: of one run.
        steps: iterations of one run.

    Raises:
        ValueError: there is nothing smaller that is valid.
    """
    whole = sizes_of(config, world_size)
    hybrid = (config.parallel.fsdp_shard_size or whole.dp) < whole.dp
    return [_reduced(config, whole, vocab_size, sizes, steps) for sizes in reduced_sizes(whole, max_ranks, hybrid=hybrid)]


def sizes_of(config: Config, world_size: int) -> RankSizes:
    """The layout of settings."""
    tp, pp = config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size
    return RankSizes(tp, pp, world_size // (tp * pp))


def _reduced(config: Config, whole: RankSizes, vocab_size: int, sizes: RankSizes, steps: int) -> Reduced:
    parallel = _ranks(config.parallel, whole, sizes)
    sharded = parallel.sharding == "optim_grads_params"
    cuts = Cuts(sizes.tp, (parallel.fsdp_shard_size or sizes.dp) if sharded else 1, parallel.sequence_parallel)
    rows, multiple = reduced_vocabulary(vocab_size, config.model.make_vocab_size_divisible_by, whole.tp, cuts)
    before = pattern_of(config.model, config.parallel, vocab_size)
    if sizes.pp > 1:
        pattern = reduced_pattern(before, config.parallel.schedule, sizes.pp)
        model = reduced_model(config.model, sum(pattern.sizes), multiple, whole.tp, cuts)
        parallel, same_split = with_pattern(model, parallel, rows, pattern)
    else:
        model = reduced_model(config.model, min(2, config.model.num_layers), multiple, whole.tp, cuts)
        parallel, same_split = dataclasses.replace(without_split(parallel), pipeline_schedule=None), True
    training = reduced_training(config.training, whole.pp, whole.dp, sizes.pp, sizes.dp, steps)
    parallel = dataclasses.replace(
        parallel, ddp_bucket_size=_bucket(config, vocab_size, whole, count_parameters(model, rows), sizes)
    )
    small = dataclasses.replace(
        config,
        model=model,
        training=training,
        optimizer=reduced_rates(config, training, steps),
        parallel=parallel,
        data=_data(config.data, rows),
        checkpoint=CheckpointConfig(),
        logging=LoggingConfig(),
    )
    if found := violations(small, sizes.world_size):
        raise ValueError("these settings could not be made small:\n" + "\n".join(str(violation) for violation in found))
    after = pattern_of(model, parallel, rows)
    return Reduced(
        small,
        sizes.world_size,
        kept_words(config, small, whole, sizes, same_split=same_split),
        changed_words(config, small, whole, sizes, (before, after), (vocab_size, rows)),
    )


def _ranks(parallel: ParallelConfig, whole: RankSizes, sizes: RankSizes) -> ParallelConfig:
    shard = parallel.fsdp_shard_size
    if shard is not None and sizes.dp != whole.dp:
        shard = 2 if shard < whole.dp and sizes.dp > 2 else None
    return dataclasses.replace(
        parallel, tensor_model_parallel_size=sizes.tp, pipeline_model_parallel_size=sizes.pp, fsdp_shard_size=shard
    )


def _bucket(config: Config, vocab_size: int, whole: RankSizes, small_parameters: int, sizes: RankSizes) -> int | None:
    """Elements of a gradient bucket: several buckets where there are several."""
    limit = config.parallel.ddp_bucket_size or default_bucket_size(whole.dp)
    buckets = min(_MOST_BUCKETS, math.ceil(count_parameters(config.model, vocab_size) / (whole.tp * whole.pp) / limit))
    if buckets == 1 and config.parallel.ddp_bucket_size is None:
        return None
    return max(1, small_parameters // (sizes.tp * sizes.pp) // buckets)


def _data(data: DataConfig, rows: int) -> DataConfig:
    """Made-up tokens, of which one more than the size of NullTokenizer is the end of a document."""
    return DataConfig(
        mock_data=True,
        tokenizer_type="NullTokenizer",
        vocab_size=rows - 1,
        num_workers=data.num_workers,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
        eod_mask_loss=data.eod_mask_loss,
    )
