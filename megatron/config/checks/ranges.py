"""What every single number may be, and what must be given at all."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.config.checks.finding import Change, Finding, Rule, change, data_size, shown
from megatron.config.config import Config
from megatron.config.flags import flags

LARGEST_WORLD = 1_048_576
"""Ranks: no machine has as many."""
REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size", "lr", "tokenizer_type")
"""Settings without a useful default."""


@dataclass(frozen=True)
class Range:
    """An interval of numbers."""

    low: float
    high: float = math.inf
    with_low: bool = True
    with_high: bool = True

    def holds(self, value: float) -> bool:
        """Whether a finite number lies inside (nan and infinity never do)."""
        above = value >= self.low if self.with_low else value > self.low
        below = value <= self.high if self.with_high else value < self.high
        return math.isfinite(value) and above and below

    def __str__(self) -> str:
        low = f"at least {self.low:g}" if self.with_low else f"above {self.low:g}"
        if self.high == math.inf:
            return low
        return f"{low} and {f'at most {self.high:.12g}' if self.with_high else f'below {self.high:g}'}"


_COUNT = Range(1)
_COUNT_OR_NONE = Range(0)
_ABOVE_ZERO = Range(0.0, with_low=False)
_NOT_NEGATIVE = Range(0.0)
_SHARE = Range(0.0, 1.0, with_high=False)

RANGES: dict[str, Range] = {
    **dict.fromkeys(
        (
            *("hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "num_query_groups"),
            *("seq_length", "max_position_embeddings", "make_vocab_size_divisible_by", "micro_batch_size", "global_batch_size"),
            *("rampup_batch_size", "train_iters", "train_samples", "eval_interval", "iterations_to_skip", "exit_interval"),
            *("lr_decay_iters", "lr_decay_samples", "lr_wsd_decay_iters", "lr_wsd_decay_samples"),
            *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
            *("expert_model_parallel_size", "ddp_bucket_size", "distributed_timeout_minutes", "loss_scale_window", "hysteresis"),
            *("vocab_size", "save_interval", "save_retain_interval", "keep_last", "log_interval", "tensorboard_log_interval"),
            *("profile_step_start", "profile_step_end", "check_replicas_every", "trace_steps"),
            *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
            *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "fsdp_shard_size"),
        ),
        _COUNT,
    ),
    **dict.fromkeys(
        (
            *("eval_iters", "manual_gc_interval", "lr_warmup_iters", "lr_warmup_samples", "num_workers", "ckpt_step"),
            *("profile_ranks", "tiktoken_num_special_tokens"),
        ),
        _COUNT_OR_NONE,
    ),
    **dict.fromkeys(
        (
            *("rotary_base", "rotary_seq_len_interpolation_factor", "rope_scaling_factor"),
            *("norm_epsilon", "init_method_std", "exit_duration_in_mins", "lr"),
            *("adam_eps", "min_loss_scale"),
        ),
        _ABOVE_ZERO,
    ),
    **dict.fromkeys(
        ("min_lr", "lr_warmup_init", "weight_decay", "start_weight_decay", "end_weight_decay", "clip_grad"), _NOT_NEGATIVE
    ),
    **dict.fromkeys(
        (
            *("attention_dropout", "hidden_dropout", "lr_warmup_fraction"),
            *("adam_beta1", "adam_beta2", "sgd_momentum"),
        ),
        _SHARE,
    ),
    "num_layers": Range(1, 100_000),  # each is an entry of the layer table
    "loss_scale": Range(0.0, 2.0**127, with_low=False),  # it is a float32
    "initial_loss_scale": Range(0.0, 2.0**127, with_low=False),
    "rotary_percent": Range(0.0, 1.0, with_low=False),
    "optimizer_offload_fraction": Range(0.0, 1.0),
    "timing_log_level": Range(0, 2),
    "seed": Range(0, 2**32 - 1),
}
"""The allowed numbers of every setting that is a number."""


def required_are_given(config: Config, world_size: int) -> Iterator[Finding]:
    """What has no useful default must be given."""
    for field in REQUIRED:
        if _value(config, field) in (None, 0):
            flag = flags()[field.replace("_", "-")]
            yield Finding((field,), f"--{flag.name} is missing.", f"It takes {flag.expects}{_bound(field)}.")


def as_given(finding: Finding, config: Config, world_size: int, given: Collection[str]) -> Finding:
    """What `required_are_given` finds, of a setting that was given, as 0: settings alone do not tell that from one left out."""
    (field,) = finding.fields
    return _out_of_range(config, world_size, field) if field in given and _value(config, field) == 0 else finding


def numbers_in_range(config: Config, world_size: int) -> Iterator[Finding]:
    """Every number lies in its interval."""
    for field, allowed in RANGES.items():
        value = _value(config, field)
        values = value if isinstance(value, tuple) else (value,)
        if value is not None and not (field in REQUIRED and value == 0) and not all(map(allowed.holds, values)):
            yield _out_of_range(config, world_size, field)


def _out_of_range(config: Config, world_size: int, field: str) -> Finding:
    value, allowed = _value(config, field), RANGES[field]
    nearest = _nearest_bounds(field, value, allowed)
    if field == "global_batch_size" and config.training.micro_batch_size > 0:  # the bound itself is seldom a whole step
        ranks = data_size(config, world_size) or 1
        nearest += (change(global_batch_size=config.training.micro_batch_size * ranks),)
    return Finding(
        (field,),
        f"{shown(config, field)} is out of range.",
        f"{'Each number' if isinstance(value, tuple) else 'It'} must be {allowed}.",
        (tuple(dict.fromkeys(nearest)),),
    )


def world_has_ranks(config: Config, world_size: int) -> Iterator[Finding]:
    """There is at least one rank, and not more than any machine has."""
    if not 1 <= world_size <= LARGEST_WORLD:
        nearest = Change(world_size=min(max(world_size, 1), LARGEST_WORLD))
        bounds = f"It must be at least 1 and at most {LARGEST_WORLD:,}."
        yield Finding((), f"The world size {world_size:,} is out of range.", bounds, ((nearest,),))


def _value(config: Config, field: str) -> Any:
    return getattr(getattr(config, flags()[field.replace("_", "-")].topic), field)


def _bound(field: str) -> str:
    return f", {RANGES[field]}" if field in RANGES else ""


def _nearest_bounds(field: str, value: Any, allowed: Range) -> tuple[Change, ...]:
    """The end of the interval on the side where the number lies, if it belongs to the interval."""
    if isinstance(value, tuple) or math.isnan(value):
        return ()
    end, belongs = (allowed.low, allowed.with_low) if value <= allowed.low else (allowed.high, allowed.with_high)
    return (change(**{field: type(value)(end)}),) if belongs and math.isfinite(end) else ()


RULES: tuple[Rule, ...] = (required_are_given, numbers_in_range, world_has_ranks)
