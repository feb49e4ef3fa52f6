"""What small settings have of the given ones, in words."""

from __future__ import annotations

from megatron.config.checks.finding import is_changed, shown
from megatron.config.config import Config
from megatron.config.flags import flags
from megatron.config.model import ModelConfig
from megatron.verification.shrinking.model import padding_of
from megatron.verification.shrinking.ranks import RankSizes
from megatron.verification.shrinking.stages import Pattern

_TOPICS = ("model", "training", "optimizer", "parallel", "precision")
_PACKING = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
_TOLD = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "num_layers", "make_vocab_size_divisible_by"),
    *("num_attention_heads", "num_query_groups"),
    # Everything runs in float64 and in one memory.
    *("bf16", "fp16", "fp32_residual_connection", "optimizer_cpu_offload", "optimizer_offload_fraction"),
)
"""Settings of which other lines tell."""


def kept_words(config: Config, small: Config, whole: RankSizes, sizes: RankSizes, *, same_split: bool) -> list[str]:
    """What is as it was."""
    kept = [f"{what} {size}" for what, size, now in _axes(whole, sizes) if size == now and size > 1]
    if sizes.pp > 1 and same_split:
        kept.append("the way in which layers are spread over stages")
    if sizes.pp > 1:
        kept.append(f"schedule {config.parallel.schedule}")
    kept.append("embedding and output layer tied" if config.model.tied else "embedding and output layer apart")
    told = [field for field in _fields() if field not in _TOLD]
    same = [field for field in told if is_changed(config, field) and _value(config, field) == _value(small, field)]
    return [*kept, *(shown(config, field) for field in same)]


def changed_words(
    config: Config,
    small: Config,
    whole: RankSizes,
    sizes: RankSizes,
    patterns: tuple[Pattern, Pattern],
    rows: tuple[int, int],
) -> list[str]:
    """What is not.

    Args:
        patterns: layers of stages before and after.
        rows: of the word embedding before and after.
    """
    changed = [f"{what} {size} -> {now}" for what, size, now in _axes(whole, sizes) if size != now]
    changed.append(_change("layers by stage", *map(str, patterns)))
    changed.append(_change("heads of a tensor rank", _heads(config.model, whole.tp), _heads(small.model, sizes.tp)))
    before, after = _rows(rows[0], config.model, whole.tp), _rows(rows[1], small.model, sizes.tp)
    changed.append(_change("vocabulary", before, after))
    for field in _fields():
        if field not in _TOLD and _value(config, field) != _value(small, field):
            flag = flags()[field.replace("_", "-")]
            changed.append(_change(f"--{flag.name}", _shown(_value(config, field)), _shown(_value(small, field))))
    return [line for line in changed if line]


def _axes(whole: RankSizes, sizes: RankSizes) -> list[tuple[str, int, int]]:
    return [
        ("tensor size", whole.tp, sizes.tp),
        ("pipeline size", whole.pp, sizes.pp),
        ("data size", whole.dp, sizes.dp),
    ]


def _change(what: str, before: str, after: str) -> str:
    return f"{what} {before} -> {after}" if before != after else ""


def _heads(model: ModelConfig, tp: int) -> str:
    return f"{model.num_attention_heads // tp} over {model.num_key_value_heads // tp} key-value"


def _rows(rows: int, model: ModelConfig, tp: int) -> str:
    return f"{rows:,} + {padding_of(rows, model.make_vocab_size_divisible_by, tp):,} of padding"


def _fields() -> list[str]:
    return [flag.field for flag in flags().values() if flag.topic in _TOPICS or flag.field in _PACKING]


def _value(config: Config, field: str) -> object:
    return getattr(getattr(config, flags()[field.replace("_", "-")].topic), field)


def _shown(value: object) -> str:
    if value is None:
        return "by default"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
