"""Small model and short run that resemble the original model and run, to test a layout.

Dimensions that are split over tensor ranks keep their remainders and ratios. Every phase of the long run occurs: batch-size
ramp-up, warm-up, decay, skipped steps.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import Any

from megatron.config.config import Config
from megatron.config.model import ModelConfig
from megatron.config.param_groups import format_entry, parse_entry
from megatron.config.training import (
    BatchStep,
    OptimizerConfig,
    TrainingConfig,
    format_batch_schedule,
    parse_batch_schedule_or_empty,
)
from megatron.spec.layer_pattern import format_pattern, parse_pattern, parse_window
from megatron.spec.rotary import get_original_context
from megatron.spec.weights import iter_weights
from megatron_lab.planner.costs import get_loss_chunk_tokens
from megatron_lab.proofs.small_layout import AxisSizes
from megatron_lab.verification.reference.training import compute_batch_size

_MAX_TOP_K = 4
"""Maximum number of experts per token."""
_MAX_QUERIES_PER_GROUP = 4
"""Maximum number of query heads per key-value head."""
_SEQ_LENGTH, _FFN_SIZE, _VOCAB_ROWS, _SPARE_POSITIONS = 16, 12, 64, 8


@dataclass(frozen=True)
class Divisors:
    """Numbers by which the layout requires dimensions of the small model to be divisible, such as the tensor-parallel size."""

    tp: int
    num_shards: int
    """Number of data ranks that hold equal shards of every parameter; 1 if data ranks hold full parameters or unequal
    shards."""
    sequence_parallel: bool
    """Whether the tensor ranks split the sequence (--sequence-parallel)."""
    alignment: int = 1
    """Number by which the dimensions of a rank's matrix products must be divisible: more than 1 only with FP8."""
    cp: int = 1
    """Number of context ranks. They split the sequence first; with sequence parallelism, tensor ranks then split the tokens of
    each context rank."""
    ep: int = 1
    """Number of ranks among which the experts are divided (expert-parallel size)."""
    etp: int = 1
    """Number of ranks that split each expert (expert-tensor-parallel size)."""
    min_local_experts: int = 1
    """Minimum number of experts on a rank."""
    splits_heads: bool = False
    """Whether the attention heads of a tensor rank are split over context ranks (all-to-all context parallelism)."""

    @property
    def multiple(self) -> int:
        """Number by which dimensions that FSDP shards and FP8 multiplies must be divisible: the least common multiple of
        `num_shards` and `alignment`."""
        return math.lcm(self.num_shards, self.alignment)


def reduce_vocab(rows: int, multiple: int, tp: int, divisors: Divisors) -> tuple[int, int]:
    """Choose the number of rows of the small word embedding, and the multiple to which they are padded.

    The small embedding resembles the original in three properties: whether it has padding, whether its number of rows is odd, and
    whether some tensor ranks hold only padding.

    Args:
        rows: original number of rows, without padding.
        multiple: number that must divide the rows of each tensor rank (--make-vocab-size-divisible-by).
        tp: original tensor-parallel size.
        divisors: numbers by which dimensions of the small model must be divisible.

    Returns:
        the reduced number of rows, and the reduced value of `multiple`.
    """
    padding, rows_per_rank = compute_padding(rows, multiple, tp), compute_padded_rows(rows, multiple, tp) // tp
    num_padding_ranks, remainder = divmod(padding, rows_per_rank)
    if num_padding_ranks and divisors.tp > 1:
        small_multiple = _round_up(_VOCAB_ROWS // 2, divisors.num_shards)
        small_padded_rows, small_padding = small_multiple * divisors.tp, min(num_padding_ranks, divisors.tp - 1) * small_multiple
    else:
        small_multiple = min(multiple, 8) if divisors.num_shards == 1 else _round_up(4, divisors.num_shards)
        small_padded_rows, small_padding = _round_up(_VOCAB_ROWS, small_multiple * divisors.tp), 0
    if remainder:
        small_padding += min(2 - remainder % 2, small_multiple * divisors.tp - 1 - small_padding)
    return small_padded_rows - small_padding, small_multiple


def compute_padded_rows(rows: int, multiple: int, tp: int) -> int:
    """Return the number of rows of the word embedding, including padding.

    Args:
        rows: number of rows without padding.
        multiple: number that must divide the rows of each tensor rank (--make-vocab-size-divisible-by).
        tp: tensor-parallel size.
    """
    return _round_up(rows, multiple * tp)


def compute_padding(rows: int, multiple: int, tp: int) -> int:
    """Return the number of padding rows of the word embedding.

    Args:
        rows: number of rows without padding.
        multiple: number that must divide the rows of each tensor rank (--make-vocab-size-divisible-by).
        tp: tensor-parallel size.
    """
    return compute_padded_rows(rows, multiple, tp) - rows


def reduce_model(model: ModelConfig, num_layers: int, vocab_multiple: int, tp: int, divisors: Divisors) -> ModelConfig:
    """Build the settings of the small model.

    Args:
        model: original settings.
        num_layers: number of layers of the small model.
        vocab_multiple: --make-vocab-size-divisible-by of the small model.
        tp: original tensor-parallel size.
        divisors: numbers by which dimensions of the small model must be divisible.
    """
    ranks_per_kv_head = max(1, tp // model.num_key_value_heads)  # tensor ranks that share a key-value head
    num_groups = (
        min(2, model.num_key_value_heads // tp) * divisors.tp
        if ranks_per_kv_head == 1
        else max(1, divisors.tp // ranks_per_kv_head)
    )
    num_groups = _round_up(num_groups, divisors.tp * divisors.cp) if divisors.splits_heads else num_groups
    queries_per_group = min(_MAX_QUERIES_PER_GROUP, model.num_attention_heads // model.num_key_value_heads)
    queries_per_group = _round_up(queries_per_group, divisors.tp // num_groups) if ranks_per_kv_head > 1 else queries_per_group
    latent_fields = _reduce_latent_attention(model, divisors)
    num_heads, head_size = num_groups * queries_per_group, _choose_head_size(model, num_groups, queries_per_group, divisors)
    hidden_size = num_heads * head_size
    attention_size = model.head_size * model.num_attention_heads
    if model.hidden_size != attention_size and not latent_fields:  # the heads do not add up to the hidden size
        hidden_size = (
            _round_up(hidden_size * 3 // 2, 2 * divisors.multiple)
            if model.hidden_size > attention_size
            else _round_up(hidden_size // 2 + 1, 2 * divisors.multiple)
        )
    seq_unit = math.lcm(divisors.tp if divisors.sequence_parallel else 1, divisors.multiple)
    if latent_fields and divisors.sequence_parallel:  # latents are computed from a rank's tokens
        seq_unit = math.lcm(seq_unit, divisors.tp * divisors.alignment)
    seq_length = _round_up(_SEQ_LENGTH, seq_unit if divisors.cp == 1 else divisors.cp * math.lcm(2, seq_unit))
    num_positions = None if model.max_position_embeddings is None else seq_length
    if model.num_positions > model.seq_length:
        num_positions = seq_length + _round_up(_SPARE_POSITIONS, divisors.num_shards)
    return dataclasses.replace(
        model,
        window_size=_reduce_window(model, seq_length),
        window_attn_skip_freq=_reduce_layer_pattern(model.window_attn_skip_freq, num_layers),
        no_rope_freq=_reduce_layer_pattern(model.no_rope_freq, num_layers),
        moe_layer_freq=_reduce_layer_pattern(model.moe_layer_freq, num_layers) or "1",
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_hidden_size=_reduce_ffn_size(model, tp, divisors),
        num_attention_heads=num_heads,
        kv_channels=None if hidden_size == num_heads * head_size or latent_fields else head_size,
        num_query_groups=num_groups if model.group_query_attention else model.num_query_groups,
        seq_length=seq_length,
        mup_base_width=None if model.mup_base_width is None else max(1, round(hidden_size / model.width_multiplier)),
        max_position_embeddings=num_positions,
        make_vocab_size_divisible_by=vocab_multiple,
        **_reduce_rope_scaling(
            model, latent_fields.get("qk_pos_emb_head_dim", int(head_size * model.rotary_percent)) // 2, seq_length
        ),
        **latent_fields,
        **_reduce_experts(model, divisors),
    )


def _reduce_experts(model: ModelConfig, divisors: Divisors) -> dict[str, Any]:
    """Choose few and narrow experts for the small model. Return the changed settings by field name.

    A token selects some but not all experts if it does so in the original model. If the original experts form groups, the small
    experts do too, and some groups are not selected.
    """
    if model.num_experts is None:
        return {}
    shared_size, num_groups = model.moe_shared_expert_intermediate_size, model.moe_router_num_groups or 1
    group_top_k = min(2, model.moe_router_group_topk)
    top_k_in_group = model.moe_router_topk // model.moe_router_group_topk if num_groups > 1 else model.moe_router_topk
    top_k = group_top_k * min(_MAX_TOP_K // group_top_k, top_k_in_group)
    small_groups = min(num_groups, 2 * group_top_k)
    min_group_size = top_k // group_top_k + (model.num_experts // num_groups > top_k_in_group)
    min_experts = max(2, divisors.ep * divisors.min_local_experts)
    group_size = next(
        group_size
        for group_size in itertools.count(min_group_size)
        if small_groups * group_size % divisors.ep == 0 and small_groups * group_size >= min_experts
    )
    return {
        "num_experts": small_groups * group_size,
        "moe_router_topk": top_k,
        "moe_router_num_groups": small_groups if num_groups > 1 else None,
        "moe_router_group_topk": group_top_k,
        "moe_ffn_hidden_size": _round_up(5, divisors.multiple) * divisors.etp,
        "moe_shared_expert_intermediate_size": None if shared_size is None else 6 * divisors.tp,
    }


def _reduce_latent_attention(model: ModelConfig, divisors: Divisors) -> dict[str, Any]:
    """Choose the sizes of latent attention in the small model. Return the changed settings by field name.

    Sizes that differ in the original model stay different, as far as the divisors allow.
    """
    if not model.multi_latent_attention:
        return {}
    rotary_dim = _round_up(4, math.lcm(2, divisors.multiple))
    sizes = {
        "qk_head_dim": _round_up(5, divisors.multiple),
        "qk_pos_emb_head_dim": rotary_dim,
        "kv_lora_rank": _round_up(6, divisors.multiple),
    }
    v_head_dim = sizes["qk_head_dim"] + rotary_dim if model.value_size == model.head_size else _round_up(3, divisors.multiple)
    return {
        **sizes,
        "v_head_dim": v_head_dim,
        "q_lora_rank": None if model.q_lora_rank is None else _round_up(10, divisors.multiple),
    }


def _reduce_rope_scaling(model: ModelConfig, num_pairs: int, seq_length: int) -> dict[str, Any]:
    """Reduce the settings of rotary scaling that depend on the sequence length. Return the changed settings by field name.

    The small sequence exceeds the original context (--original-max-position-embeddings) of the small model exactly if this is so in
    the full model. Each pair of channels in the small model has the scaling factor of some pair in the full model.

    Args:
        num_pairs: number of rotated channel pairs of a small head.
        seq_length: sequence length of the small model.
    """
    if model.rope_type not in ("dynamic", "longrope"):
        return {}
    original_context = get_original_context(model)
    small_context = max(2, original_context * seq_length // model.seq_length) if model.seq_length > original_context else seq_length
    factor_lists = {name: getattr(model, name) for name in ("rope_short_factors", "rope_long_factors")}
    small_factors = {
        name: tuple(factors[pair * len(factors) // num_pairs] for pair in range(num_pairs))
        for name, factors in factor_lists.items()
        if factors
    }
    return {"original_max_position_embeddings": small_context, **small_factors}


def _reduce_window(model: ModelConfig, seq_length: int) -> str | None:
    """Reduce the attention window in proportion to the sequence. Return the value of --window-size, or None without a window.

    The small window has at least one token, and covers the full sequence only if the original window does.
    """
    window = parse_window(model.window_size)
    if window is None or window >= model.seq_length - 1:
        return model.window_size
    return f"{max(1, min(seq_length - 2, window * seq_length // model.seq_length))},0"


def _reduce_layer_pattern(text: str | None, num_layers: int) -> str | None:
    """Reduce a flag value that selects layers, such as that of --moe-layer-freq, to `num_layers` layers.

    If the value is a list with an entry for each layer, the first `num_layers` entries are returned, repeated if the list is
    shorter. A number N (every N-th layer) does not change.
    """
    pattern = parse_pattern(text)
    if not isinstance(pattern, tuple):
        return text
    return format_pattern(tuple(itertools.islice(itertools.cycle(pattern), num_layers)))


def _choose_head_size(model: ModelConfig, num_groups: int, queries_per_group: int, divisors: Divisors) -> int:
    """Choose the smallest valid attention head size of at least 4 channels (8 with rotary positions).

    A head size is valid if all divisors divide the dimensions that follow from it, and if rotary positions rotate an even number of
    channels.

    Args:
        num_groups: number of key-value heads of the small model.
        queries_per_group: query heads per key-value head.
    """
    is_rotated = model.position_embedding_type == "rope" and not model.multi_latent_attention
    for size in range(8 if is_rotated else 4, 4 * max(model.head_size, 8 * divisors.multiple) + 1, 2):
        num_rotary_channels = int(size * model.rotary_percent)
        qkv_rows, query_rows = (
            num_groups // divisors.tp * (queries_per_group + 2) * size,
            num_groups // divisors.tp * queries_per_group * size,
        )
        is_divisible = (
            qkv_rows % divisors.multiple == 0
            and query_rows * divisors.tp % divisors.num_shards == 0
            and query_rows % divisors.alignment == 0
        )
        if (not is_rotated or (num_rotary_channels >= 2 and num_rotary_channels % 2 == 0)) and is_divisible:
            return size
    raise ValueError(
        "these settings cannot be reduced to a small model: no small head size is valid. With --rotary-percent "
        f"{model.rotary_percent}, an even number of channels must be rotated, and the rows of the attention weights must be "
        f"divisible by {divisors.multiple} (for FSDP shards and FP8). Set --rotary-percent to another value for the proof."
    )


def _reduce_ffn_size(model: ModelConfig, tp: int, divisors: Divisors) -> int:
    """Choose the FFN size of the small model. The number of channels of each tensor rank stays odd if it was odd, unless FSDP or
    FP8 requires a divisor."""
    remainder = model.ffn_size // tp % 2 if divisors.multiple == 1 else 0
    return (_round_up(_FFN_SIZE, divisors.multiple) + remainder) * divisors.tp


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


_MIN_PEAK_RATE = 1e-3
"""Minimum peak learning rate. With a smaller one, a step would hardly change the weights."""
_MAX_CLIP_GRAD = 0.05
"""Maximum gradient norm after clipping. It is low enough that clipping takes effect in a small model."""
_MAX_MICRO_BATCH_SIZE = 2
"""Maximum number of samples in a microbatch."""
_MAX_LOSS_CHUNKS = 3
"""Maximum number of chunks in which a loss is computed."""


def reduce_training(config: Config, full_sizes: AxisSizes, small_sizes: AxisSizes, seq_length: int, steps: int) -> TrainingConfig:
    """Build the training settings of the small run: batch sizes, their schedule, and the number of iterations.

    Args:
        config: original settings.
        full_sizes: original number of ranks along each axis.
        small_sizes: number of ranks of the small run along each axis.
        seq_length: reduced sequence length.
        steps: iterations of the small run.
    """
    training, pp, dp = config.training, full_sizes.pp, full_sizes.dp
    micro_batch_size = min(training.micro_batch_size, _MAX_MICRO_BATCH_SIZE)
    batch_unit, rampup, global_batch_size = (
        micro_batch_size * small_sizes.dp,
        training.rampup_batch_size,
        training.global_batch_size,
    )
    small_full, small_ramp = None, None
    schedule: list[BatchStep] = []
    if scheduled := parse_batch_schedule_or_empty(training.step_batch_size_schedule):
        schedule = [BatchStep(0, batch_unit)]
        for index, batch_step in enumerate(scheduled[1:3], start=1):  # after two steps of the first size and one of the second
            offset = batch_step.tokens // config.model.seq_length % scheduled[index - 1].batch_size > 0
            schedule.append(BatchStep((2 * index * batch_unit - offset) * seq_length, (1 + index) * batch_unit))
        small_full = schedule[-1].batch_size
    elif rampup is not None and global_batch_size is not None:
        num_increments = min(2, (global_batch_size - rampup[0]) // rampup[1])
        offset = rampup[2] % (training.micro_batch_size * dp) > 0  # so that the batch size grows within a step
        small_full, small_ramp = (
            (1 + num_increments) * batch_unit,
            (batch_unit, batch_unit, 2 * num_increments * batch_unit + offset),
        )
    elif global_batch_size is not None:
        small_full = batch_unit * _reduce_num_microbatches(
            global_batch_size // (training.micro_batch_size * dp), pp, small_sizes.pp
        )
    train_samples = None
    if training.train_samples is not None:
        final_batch_size = small_full or batch_unit
        consumed = 0
        for _ in range(steps):
            consumed += compute_batch_size(consumed, final_batch_size, small_ramp, dict(schedule), seq_length)
        train_samples = consumed + (training.train_samples % training.get_final_batch_size(dp) > 0)
    return dataclasses.replace(
        training,
        micro_batch_size=micro_batch_size,
        global_batch_size=small_full,
        rampup_batch_size=small_ramp,
        step_batch_size_schedule=format_batch_schedule(schedule) if schedule else (),
        train_iters=None if training.train_iters is None else steps,
        train_samples=train_samples,
        iterations_to_skip=(min(2, steps),) if training.iterations_to_skip and steps > 1 else (),
        eval_interval=None,
        full_validation=False,
        skip_train=False,
        early_stopping_patience=None,
        early_stopping_min_delta=0.0,
        exit_interval=None,
        exit_duration_in_mins=None,
    )


def reduce_loss_chunk(config: Config, vocab_size: int, small_tokens: int) -> int | None:
    """Choose --loss-chunk-tokens of the small run, the number of tokens for which the loss is computed at once. The number of
    chunks does not change, up to a maximum of three.

    Args:
        config: original settings.
        vocab_size: original rows of the word embedding.
        small_tokens: tokens of a microbatch in the small run.
    """
    tokens, size = config.training.micro_batch_size * config.model.seq_length, get_loss_chunk_tokens(config, vocab_size)
    return -(-small_tokens // min(_MAX_LOSS_CHUNKS, -(-tokens // size))) if size else config.memory.loss_chunk_tokens


def _reduce_num_microbatches(num_microbatches: int, full_pp: int, small_pp: int) -> int:
    """Choose the number of microbatches of the small run.

    The number is below the number of stages, or equal to it, if the original number was. Otherwise the small run has at most two
    microbatches per stage, and one more if the original number is not a multiple of the number of stages. With a single stage, the
    small run has at most 3 microbatches, or 4 if the original number is even.

    Args:
        num_microbatches: original number of microbatches.
        full_pp: original number of stages.
        small_pp: number of stages of the small run.
    """
    if small_pp > 1 and num_microbatches <= full_pp:
        return small_pp if num_microbatches == full_pp else min(num_microbatches, small_pp - 1)
    return (
        min(num_microbatches, 2 * small_pp + (num_microbatches % full_pp > 0))
        if small_pp > 1
        else min(num_microbatches, 3 + (num_microbatches % 2 == 0))
    )


def reduce_learning_rates(config: Config, training: TrainingConfig, steps: int) -> OptimizerConfig:
    """Build the optimizer settings of the small run: learning rates, the lengths of their schedules, and gradient clipping.

    Args:
        config: original settings.
        training: training settings of the small run.
        steps: iterations of the small run.
    """
    optimizer = config.optimizer
    unit_name, step_length, run_length = "iters", 1, config.training.train_iters
    if training.train_samples is not None:
        unit_name, step_length, run_length = "samples", training.train_samples // steps, config.training.train_samples
    assert run_length is not None and optimizer.lr is not None, "required"
    changes: dict[str, float | None] = {}
    has_warmup = steps > 1  # a single step has no warm-up
    if getattr(optimizer, f"lr_warmup_{unit_name}"):
        changes[f"lr_warmup_{unit_name}"] = step_length if has_warmup else 0
    if optimizer.lr_warmup_fraction is not None:
        changes["lr_warmup_fraction"] = min(optimizer.lr_warmup_fraction, 0.5) if has_warmup else None
    if (decay_length := getattr(optimizer, f"lr_decay_{unit_name}")) is not None:
        changes[f"lr_decay_{unit_name}"] = step_length * max(2, steps + (decay_length > run_length) - (decay_length < run_length))
    if getattr(optimizer, f"lr_wsd_decay_{unit_name}") is not None:
        changes[f"lr_wsd_decay_{unit_name}"] = step_length
    if getattr(optimizer, f"lr_rewarm_start_{unit_name}") is not None:
        rewarm_step = max(1, steps // 2) if has_warmup else None
        changes[f"lr_rewarm_start_{unit_name}"] = None if rewarm_step is None else step_length * rewarm_step
        has_rewarm = rewarm_step is not None and rewarm_step + 1 < steps and getattr(optimizer, f"lr_rewarm_{unit_name}") > 0
        changes[f"lr_rewarm_{unit_name}"] = step_length if has_rewarm else 0
        changes["lr_rewarm_factor"] = optimizer.lr_rewarm_factor if has_warmup else 1.0
    factor = max(1.0, _MIN_PEAK_RATE / optimizer.lr)

    def raise_rate(rate: float) -> float:
        return min(rate * factor, max(rate, _MIN_PEAK_RATE))

    for rate in ("lr", "min_lr", "lr_warmup_init", "decoupled_lr", "decoupled_min_lr"):
        if getattr(optimizer, rate) is not None:
            changes[rate] = raise_rate(getattr(optimizer, rate))
    if not has_warmup:
        changes["lr_warmup_init"] = 0.0
    changes["clip_grad"] = min(optimizer.clip_grad, _MAX_CLIP_GRAD)
    groups = []
    for entry in map(parse_entry, optimizer.param_groups):
        group_options = {key: value for key, value in vars(entry).items() if value is not None and key != "pattern"}
        group_options |= {key: raise_rate(group_options[key]) for key in ("lr", "min_lr") if key in group_options}
        groups.append(format_entry(entry.pattern, group_options.items()))
    return dataclasses.replace(optimizer, param_groups=tuple(groups), **changes)  # type: ignore[arg-type]


def reduce_update_rule(optimizer: OptimizerConfig) -> OptimizerConfig:
    """Reduce two lengths in the options of optimizers: the block size of 8-bit Adam, so that the small parameters have several
    blocks, and the warm-up of AdEMAMix, so that it ends within the run."""
    optimizers = {optimizer.optimizer, *(parse_entry(text).optimizer for text in optimizer.param_groups)}
    changes: dict[str, int] = {}
    if "adam8bit" in optimizers:
        changes["adam_8bit_block_size"] = min(optimizer.adam_8bit_block_size, 5)
    if optimizer.ademamix_warmup_iters is not None:
        changes["ademamix_warmup_iters"] = min(optimizer.ademamix_warmup_iters, 3)
    return dataclasses.replace(optimizer, **changes)  # type: ignore[arg-type]


def keep_matching_param_groups(model: ModelConfig, optimizer: OptimizerConfig) -> OptimizerConfig:
    """Remove the entries of --param-groups that match no parameter of the small model."""
    names = [weight.name for weight in iter_weights(model, vocab_size=1)]
    param_groups = (text for text in optimizer.param_groups if any(map(parse_entry(text).matches, names)))
    return dataclasses.replace(optimizer, param_groups=tuple(param_groups))
