"""A small model and a short run of the same kind as given ones.

What divides among tensor ranks still does, with the same remainders and ratios; and everything happens that happens in a long run:
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
from megatron.config.param_groups import as_text, entry_of
from megatron.config.training import BatchStep, OptimizerConfig, TrainingConfig, as_words, readable_steps
from megatron.spec.layer_pattern import pattern_text, read_pattern, read_window
from megatron.spec.rotary import original_context
from megatron.spec.weights import model_weights
from megatron_lab.planner.costs import loss_chunk
from megatron_lab.proofs.small_layout import RankSizes
from megatron_lab.verification.reference.training import batch_size

_MOST_CHOSEN = 4
"""The most experts that a token passes."""
_MOST_QUERIES = 4
"""The most query heads that share a key-value head."""
_SEQUENCE, _WIDTH, _ROWS, _SPARE_POSITIONS = 16, 12, 64, 8


@dataclass(frozen=True)
class Cuts:
    """The number of parts that dimensions are cut into."""

    tp: int
    parts: int
    """Number of data ranks that each hold an equal part of every parameter; 1 where they hold all, or parts that are not equal."""
    sequence: bool
    """Whether the tensor ranks cut the sequence too."""
    blocks: int = 1
    """What the dimensions of products on a rank are multiples of: more than 1 where they are computed in 8 bits."""
    context: int = 1
    """Number of context ranks, which cut the sequence first."""
    experts: int = 1
    """Ranks that hold different experts."""
    of_expert: int = 1
    """Ranks that cut each expert."""
    experts_each: int = 1
    """The least number of experts that a rank holds."""
    shares_heads: bool = False
    """Whether context ranks share the heads of a tensor rank among each other."""

    @property
    def multiple(self) -> int:
        """What goes into equal parts and whole blocks."""
        return math.lcm(self.parts, self.blocks)


def reduced_vocabulary(rows: int, multiple: int, tp: int, cuts: Cuts) -> tuple[int, int]:
    """Rows of the word embedding, and the multiple to which they are padded: with as little or as much padding on each tensor rank.

    Args:
        rows: before.
        multiple: before.
        tp: tensor size before.

    Returns:
        both after. There is padding where there was, an odd number of rows of it where it was odd, and tensor ranks that hold
        nothing else where there were.
    """
    padding, each = padding_of(rows, multiple, tp), padded(rows, multiple, tp) // tp
    alone, rest = divmod(padding, each)
    if alone and cuts.tp > 1:
        small = _up(_ROWS // 2, cuts.parts)
        whole, missing = small * cuts.tp, min(alone, cuts.tp - 1) * small
    else:
        small = min(multiple, 8) if cuts.parts == 1 else _up(4, cuts.parts)
        whole, missing = _up(_ROWS, small * cuts.tp), 0
    if rest:
        missing += min(2 - rest % 2, small * cuts.tp - 1 - missing)
    return whole - missing, small


def padded(rows: int, multiple: int, tp: int) -> int:
    """Number of rows with padding."""
    return _up(rows, multiple * tp)


def padding_of(rows: int, multiple: int, tp: int) -> int:
    """Number of rows of padding."""
    return padded(rows, multiple, tp) - rows


def reduced_model(model: ModelConfig, num_layers: int, multiple: int, tp: int, cuts: Cuts) -> ModelConfig:
    """The small model's settings.

    Args:
        model: before.
        num_layers: after.
        multiple: that of the vocabulary, after.
        tp: tensor size before.
        cuts: after.
    """
    sharing = max(1, tp // model.num_key_value_heads)  # ranks to a key-value head
    groups = min(2, model.num_key_value_heads // tp) * cuts.tp if sharing == 1 else max(1, cuts.tp // sharing)
    groups = _up(groups, cuts.tp * cuts.context) if cuts.shares_heads else groups
    queries = min(_MOST_QUERIES, model.num_attention_heads // model.num_key_value_heads)
    queries = _up(queries, cuts.tp // groups) if sharing > 1 else queries
    latents = _latents(model, cuts)
    heads, size = groups * queries, _head_size(model, groups, queries, cuts)
    hidden = heads * size
    wider = model.head_size * model.num_attention_heads
    if model.hidden_size != wider and not latents:  # heads that do not make up the hidden size
        hidden = _up(hidden * 3 // 2, 2 * cuts.multiple) if model.hidden_size > wider else _up(hidden // 2 + 1, 2 * cuts.multiple)
    unit = math.lcm(cuts.tp if cuts.sequence else 1, cuts.multiple)
    if latents and cuts.sequence:  # latents are products of a rank's tokens
        unit = math.lcm(unit, cuts.tp * cuts.blocks)
    sequence = _up(_SEQUENCE, unit if cuts.context == 1 else cuts.context * math.lcm(2, unit))
    positions = None if model.max_position_embeddings is None else sequence
    if model.num_positions > model.seq_length:
        positions = sequence + _up(_SPARE_POSITIONS, cuts.parts)
    return dataclasses.replace(
        model,
        window_size=_window(model, sequence),
        window_attn_skip_freq=_pattern(model.window_attn_skip_freq, num_layers),
        no_rope_freq=_pattern(model.no_rope_freq, num_layers),
        moe_layer_freq=_pattern(model.moe_layer_freq, num_layers) or "1",
        num_layers=num_layers,
        hidden_size=hidden,
        ffn_hidden_size=_width(model, tp, cuts),
        num_attention_heads=heads,
        kv_channels=None if hidden == heads * size or latents else size,
        num_query_groups=groups if model.group_query_attention else model.num_query_groups,
        seq_length=sequence,
        mup_base_width=None if model.mup_base_width is None else max(1, round(hidden / model.mup_width)),
        max_position_embeddings=positions,
        make_vocab_size_divisible_by=multiple,
        **_stretching(model, latents.get("qk_pos_emb_head_dim", int(size * model.rotary_percent)) // 2, sequence),
        **latents,
        **_experts(model, cuts),
    )


def _experts(model: ModelConfig, cuts: Cuts) -> dict[str, Any]:
    """A few narrow experts, of which a token passes some, as it does of the many; in groups if they were, some of them closed."""
    if model.num_experts is None:
        return {}
    shared, groups = model.moe_shared_expert_intermediate_size, model.moe_router_num_groups or 1
    opened = min(2, model.moe_router_group_topk)
    of_group = model.moe_router_topk // model.moe_router_group_topk if groups > 1 else model.moe_router_topk
    chosen = opened * min(_MOST_CHOSEN // opened, of_group)
    several = min(groups, 2 * opened)
    least = chosen // opened + (model.num_experts // groups > of_group)
    fewest = max(2, cuts.experts * cuts.experts_each)
    each = next(each for each in itertools.count(least) if several * each % cuts.experts == 0 and several * each >= fewest)
    return {
        "num_experts": several * each,
        "moe_router_topk": chosen,
        "moe_router_num_groups": several if groups > 1 else None,
        "moe_router_group_topk": opened,
        "moe_ffn_hidden_size": _up(5, cuts.multiple) * cuts.of_expert,
        "moe_shared_expert_intermediate_size": None if shared is None else 6 * cuts.tp,
    }


def _latents(model: ModelConfig, cuts: Cuts) -> dict[str, Any]:
    """Sizes of latent attention: no two are equal that were not, as far as they can be cut."""
    if not model.multi_latent_attention:
        return {}
    rotated = _up(4, math.lcm(2, cuts.multiple))
    sizes = {"qk_head_dim": _up(5, cuts.multiple), "qk_pos_emb_head_dim": rotated, "kv_lora_rank": _up(6, cuts.multiple)}
    value = sizes["qk_head_dim"] + rotated if model.value_size == model.head_size else _up(3, cuts.multiple)
    return {**sizes, "v_head_dim": value, "q_lora_rank": None if model.q_lora_rank is None else _up(10, cuts.multiple)}


def _stretching(model: ModelConfig, pairs: int, sequence: int) -> dict[str, Any]:
    """Settings of rotary frequencies that depend on the length of the sequence: it exceeds the original context where it did, and
    each small pair of channels has the factor of one of the large ones."""
    if model.rope_type not in ("dynamic", "longrope"):
        return {}
    context = original_context(model)
    small = max(2, context * sequence // model.seq_length) if model.seq_length > context else sequence
    lists = {name: getattr(model, name) for name in ("rope_short_factors", "rope_long_factors")}
    picked = {
        name: tuple(factors[pair * len(factors) // pairs] for pair in range(pairs)) for name, factors in lists.items() if factors
    }
    return {"original_max_position_embeddings": small, **picked}


def _window(model: ModelConfig, sequence: int) -> str | None:
    """The window, as long a part of the sequence as before: at least one token, and over the whole sequence only if it was."""
    window = read_window(model.window_size)
    if window is None or window >= model.seq_length - 1:
        return model.window_size
    return f"{max(1, min(sequence - 2, window * sequence // model.seq_length))},0"


def _pattern(text: str | None, num_layers: int) -> str | None:
    """The beginning of a list of layers, begun again if there are more than before; a number means the same at any depth."""
    pattern = read_pattern(text)
    if not isinstance(pattern, tuple):
        return text
    return pattern_text(tuple(itertools.islice(itertools.cycle(pattern), num_layers)))


def _head_size(model: ModelConfig, groups: int, queries: int, cuts: Cuts) -> int:
    """The smallest head size, from 4 channels on (8 where they are rotated), that can be rotated and cut."""
    rope = model.position_embedding_type == "rope" and not model.multi_latent_attention
    for size in range(8 if rope else 4, 4 * max(model.head_size, 8 * cuts.multiple) + 1, 2):
        rotated = int(size * model.rotary_percent)
        rows, own = groups // cuts.tp * (queries + 2) * size, groups // cuts.tp * queries * size
        whole = rows % cuts.multiple == 0 and own * cuts.tp % cuts.parts == 0 and own % cuts.blocks == 0
        if (not rope or (rotated >= 2 and rotated % 2 == 0)) and whole:
            return size
    raise ValueError(f"no small head can be rotated by --rotary-percent {model.rotary_percent} and cut into {cuts.multiple} parts")


def _width(model: ModelConfig, tp: int, cuts: Cuts) -> int:
    """Width of the MLP: as odd on each tensor rank as before, if it is not cut further."""
    odd = model.ffn_size // tp % 2 if cuts.multiple == 1 else 0
    return (_up(_WIDTH, cuts.multiple) + odd) * cuts.tp


def _up(number: int, unit: int) -> int:
    """`number` rounded up to a multiple of `unit`."""
    return -(-number // unit) * unit


_LEAST_RATE = 1e-3
"""With a smaller peak learning rate, a step would hardly change the weights."""
_MOST_CLIP = 0.05
"""The largest norm of the gradient after clipping. Small models have larger norms, so clipping is seen to act."""
_MOST_SAMPLES = 2
"""The most samples of a microbatch."""
_MOST_CHUNKS = 3
"""The most chunks of a loss."""


def reduced_training(config: Config, whole: RankSizes, small: RankSizes, seq_length: int, steps: int) -> TrainingConfig:
    """Batches and length of the small run.

    Args:
        config: before.
        whole, small: the layout before and after.
        seq_length: after.
        steps: iterations.
    """
    training, pp, dp = config.training, whole.pp, whole.dp
    micro = min(training.micro_batch_size, _MOST_SAMPLES)
    unit, ramp, full = micro * small.dp, training.rampup_batch_size, training.global_batch_size
    small_full, small_ramp = None, None
    schedule: list[BatchStep] = []
    if scheduled := readable_steps(training.step_batch_size_schedule):
        schedule = [BatchStep(0, unit)]
        for number, after in enumerate(scheduled[1:3], start=1):  # behind two steps of the first size and one of the second
            between = after.tokens // config.model.seq_length % scheduled[number - 1].batch_size > 0
            schedule.append(BatchStep((2 * number * unit - between) * seq_length, (1 + number) * unit))
        small_full = schedule[-1].batch_size
    elif ramp is not None and full is not None:
        stages = min(2, (full - ramp[0]) // ramp[1])
        between = ramp[2] % (training.micro_batch_size * dp) > 0  # so that the batch grows in the middle of a step
        small_full, small_ramp = (1 + stages) * unit, (unit, unit, 2 * stages * unit + between)
    elif full is not None:
        small_full = unit * _microbatches(full // (training.micro_batch_size * dp), pp, small.pp)
    samples = None
    if training.train_samples is not None:
        last = small_full or unit
        consumed = 0
        for _ in range(steps):
            consumed += batch_size(consumed, last, small_ramp, dict(schedule), seq_length)
        samples = consumed + (training.train_samples % training.final_batch_size(dp) > 0)
    return dataclasses.replace(
        training,
        micro_batch_size=micro,
        global_batch_size=small_full,
        rampup_batch_size=small_ramp,
        step_batch_size_schedule=as_words(schedule) if schedule else (),
        train_iters=None if training.train_iters is None else steps,
        train_samples=samples,
        iterations_to_skip=(min(2, steps),) if training.iterations_to_skip and steps > 1 else (),
        eval_interval=None,
        exit_interval=None,
        exit_duration_in_mins=None,
    )


def reduced_loss(config: Config, vocab_size: int, small_tokens: int) -> int | None:
    """--loss-chunk-tokens of the small run: a whole loss stays whole, and one in chunks has as many, up to three.

    Args:
        config: before.
        vocab_size: rows of the word embedding, before.
        small_tokens: tokens of a microbatch, after.
    """
    tokens, size = config.training.micro_batch_size * config.model.seq_length, loss_chunk(config, vocab_size)
    return -(-small_tokens // min(_MOST_CHUNKS, -(-tokens // size))) if size else config.memory.loss_chunk_tokens


def _microbatches(count: int, pp: int, small_pp: int) -> int:
    """Fewer than stages where there were, as many where there were, else up to two rounds, uneven where they were."""
    if small_pp > 1 and count <= pp:
        return small_pp if count == pp else min(count, small_pp - 1)
    return min(count, 2 * small_pp + (count % pp > 0)) if small_pp > 1 else min(count, 3 + (count % 2 == 0))


def reduced_rates(config: Config, training: TrainingConfig, steps: int) -> OptimizerConfig:
    """Learning rates, the lengths of their schedules, and clipping of the small run.

    Args:
        config: before.
        training: after.
    """
    settings = config.optimizer
    kind, unit, run = "iters", 1, config.training.train_iters
    if training.train_samples is not None:
        kind, unit, run = "samples", training.train_samples // steps, config.training.train_samples
    assert run is not None and settings.lr is not None, "required"
    changed: dict[str, float | None] = {}
    warms_up = steps > 1  # a single step is all decay
    if getattr(settings, f"lr_warmup_{kind}"):
        changed[f"lr_warmup_{kind}"] = unit if warms_up else 0
    if settings.lr_warmup_fraction is not None:
        changed["lr_warmup_fraction"] = min(settings.lr_warmup_fraction, 0.5) if warms_up else None
    if (decay := getattr(settings, f"lr_decay_{kind}")) is not None:
        changed[f"lr_decay_{kind}"] = unit * max(2, steps + (decay > run) - (decay < run))
    if getattr(settings, f"lr_wsd_decay_{kind}") is not None:
        changed[f"lr_wsd_decay_{kind}"] = unit
    if getattr(settings, f"lr_rewarm_start_{kind}") is not None:
        begins = max(1, steps // 2) if warms_up else None
        changed[f"lr_rewarm_start_{kind}"] = None if begins is None else unit * begins
        rises = begins is not None and begins + 1 < steps and getattr(settings, f"lr_rewarm_{kind}") > 0
        changed[f"lr_rewarm_{kind}"] = unit if rises else 0
        changed["lr_rewarm_factor"] = settings.lr_rewarm_factor if warms_up else 1.0
    factor = max(1.0, _LEAST_RATE / settings.lr)

    def raised(rate: float) -> float:
        return min(rate * factor, max(rate, _LEAST_RATE))

    for rate in ("lr", "min_lr", "lr_warmup_init", "decoupled_lr", "decoupled_min_lr"):
        if getattr(settings, rate) is not None:
            changed[rate] = raised(getattr(settings, rate))
    if not warms_up:
        changed["lr_warmup_init"] = 0.0
    changed["clip_grad"] = min(settings.clip_grad, _MOST_CLIP)
    groups = []
    for entry in map(entry_of, settings.param_groups):
        said = {key: value for key, value in vars(entry).items() if value is not None and key != "pattern"}
        said |= {key: raised(said[key]) for key in ("lr", "min_lr") if key in said}
        groups.append(as_text(entry.pattern, said.items()))
    return dataclasses.replace(settings, param_groups=tuple(groups), **changed)  # type: ignore[arg-type]


def reduced_rule(optimizer: OptimizerConfig) -> OptimizerConfig:
    """The update rule's lengths: blocks of which a row of the small model has several, and a warm-up that ends within the run."""
    uses = {optimizer.optimizer, *(entry_of(text).optimizer for text in optimizer.param_groups)}
    changed: dict[str, int] = {}
    if "adam8bit" in uses:
        changed["adam_8bit_block_size"] = min(optimizer.adam_8bit_block_size, 5)
    if optimizer.ademamix_warmup_iters is not None:
        changed["ademamix_warmup_iters"] = min(optimizer.ademamix_warmup_iters, 3)
    return dataclasses.replace(optimizer, **changed)  # type: ignore[arg-type]


def with_groups_of(model: ModelConfig, optimizer: OptimizerConfig) -> OptimizerConfig:
    """Without the parameter groups of layers that the small model does not have."""
    names = [weight.name for weight in model_weights(model, vocab_size=1)]
    kept = (text for text in optimizer.param_groups if any(map(entry_of(text).matches, names)))
    return dataclasses.replace(optimizer, param_groups=tuple(kept))
