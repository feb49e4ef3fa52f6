"""Rules about FP8 matrix products. (The rules about 16-bit formats are in `training`, next to those about the loss scale.)"""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron.config.checks.finding import (
    Finding,
    create_change,
    find_multiples_near,
    format_setting,
    get_value,
    reset,
    rule,
    try_values,
)
from megatron.config.config import Config
from megatron.config.precision import Fp8
from megatron.spec.activations import ACTIVATION_FIELDS

_DIMENSION_SETTINGS = (
    *("hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "num_query_groups", "tensor_model_parallel_size"),
    *("group_query_attention", "seq_length", "context_parallel_size", "micro_batch_size", "sequence_parallel", *ACTIVATION_FIELDS),
    *("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
)


@rule("fp8_format", "fp8_recipe", depends_on=_DIMENSION_SETTINGS)
def check_fp8_dimensions(config: Config, world_size: int) -> Iterator[Finding]:
    """--fp8-format needs matrix products whose dimensions are multiples of 16, on a CPU as on a GPU. With --fp8-recipe blockwise
    the multiple is 128, so that no block is split between tensor ranks."""
    if config.precision.fp8_format is None:
        return
    multiple = Fp8(config.precision.fp8_format, config.precision.fp8_recipe).alignment
    invalid = {name: (size, fields) for name, (size, fields) in _get_gemm_dimensions(config).items() if size % multiple}
    recipe_candidates = [create_change(fp8_recipe="tensorwise")] if config.precision.fp8_recipe == "blockwise" else []
    for name, (size, fields) in invalid.items():
        value, unit = get_value(config, fields[0]), multiple
        if fields[0] == "micro_batch_size":
            unit //= math.gcd(unit, config.tokens_per_rank)
        elif "tensor rank" in name:
            unit *= config.parallel.tensor_model_parallel_size
        nearest = [] if value is None else [try_values(fields[0], value, find_multiples_near(value, unit, num_per_side=2))]
        yield Finding(
            f"{format_setting(config, 'fp8_format')} {format_setting(config, 'fp8_recipe')} cannot be used with {size:,} {name}, "
            f"which is no multiple of {multiple}.",
            [*recipe_candidates, *nearest, reset(config, "fp8_format", "fp8_recipe")],
            fields=("fp8_format", "fp8_recipe", *fields),
        )


def _get_gemm_dimensions(config: Config) -> dict[str, tuple[int, tuple[str, ...]]]:
    """Return the dimensions of the matrix products of a transformer layer on one rank. The key describes a dimension for messages.
    The value is the size and the names of the settings that determine this size."""
    model, tp_size = config.model, config.parallel.tensor_model_parallel_size
    head_fields, tp_field = ("num_attention_heads", "kv_channels"), "tensor_model_parallel_size"
    tokens = config.tokens_per_rank * config.training.micro_batch_size
    replicated: dict[str, tuple[int, tuple[str, ...]]] = {
        "hidden channels": (model.hidden_size, ("hidden_size",)),
        "tokens of a microbatch": (tokens, ("micro_batch_size", "seq_length")),
    }
    if model.multi_latent_attention:
        latent_replicated, sharded = _get_latent_dimensions(config, tokens)
        replicated |= latent_replicated
    else:
        sharded = {
            "rows of queries, keys and values": (
                (model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_size,
                head_fields,
            ),
            "channels of heads": (model.num_attention_heads * model.head_size, head_fields),
        }
    sharded["channels of the MLP"] = (model.ffn_size, ("ffn_hidden_size",))
    return {
        **replicated,
        **{
            f"{name} on a tensor rank": (size // tp_size, (*fields, tp_field))
            for name, (size, fields) in sharded.items()
            if size % tp_size == 0
        },
    }


def _get_latent_dimensions(
    config: Config, tokens: int
) -> tuple[dict[str, tuple[int, tuple[str, ...]]], dict[str, tuple[int, tuple[str, ...]]]]:
    """Return the dimensions of the matrix products in latent attention, as two dictionaries of the form of `_get_gemm_dimensions`.

    Args:
        tokens: tokens of a microbatch on a rank.

    Returns:
        the dimensions that are equal on all tensor ranks, and those that the tensor ranks divide.
    """
    model, num_heads = config.model, config.model.num_attention_heads
    replicated: dict[str, tuple[int, tuple[str, ...]]] = {
        "channels of the latent of keys and values": (model.kv_lora_rank, ("kv_lora_rank",)),
        "rotated channels of a head": (model.qk_pos_emb_head_dim, ("qk_pos_emb_head_dim",)),
    }
    if model.q_lora_rank is not None:
        replicated["channels of the latent of queries"] = (model.q_lora_rank, ("q_lora_rank",))
    sharded = {
        "rows of queries": (num_heads * model.head_size, ("num_attention_heads", "qk_head_dim", "qk_pos_emb_head_dim")),
        "rows of keys and values": (
            num_heads * (model.qk_head_dim + model.v_head_dim),
            ("num_attention_heads", "qk_head_dim", "v_head_dim"),
        ),
        "channels of values": (num_heads * model.v_head_dim, ("num_attention_heads", "v_head_dim")),
    }
    if config.parallel.sequence_parallel:  # each rank computes the latents of its tokens
        sharded["tokens of a microbatch"] = (tokens, ("micro_batch_size", "seq_length"))
    return replicated, sharded


@rule(
    "first_last_layers_bf16",
    "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16",
    depends_on=("fp8_format", "fp8_recipe", "num_layers"),
)
def check_some_layer_in_fp8(config: Config, world_size: int) -> Iterator[Finding]:
    """--num-layers-at-start-in-bf16 and --num-layers-at-end-in-bf16 must leave at least one layer in FP8. If all layers are in
    bfloat16, --fp8-format has no effect."""
    precision, num_layers = config.precision, config.model.num_layers
    if precision.fp8_format is not None and not any(precision.get_fp8(layer, num_layers) for layer in range(num_layers)):
        yield Finding(
            f"{format_setting(config, 'num_layers_at_start_in_bf16')} and "
            f"{format_setting(config, 'num_layers_at_end_in_bf16')} leave no layer of --num-layers {num_layers} in FP8.",
            [reset(config, "first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")],
        )


@rule("fp8_format", "tp_comm_overlap")
def check_no_fp8_with_tp_comm_overlap(config: Config, world_size: int) -> Iterator[Finding]:
    """--fp8-format cannot be used with --tp-comm-overlap. Matrix products that overlap with communication are computed in chunks
    and in bfloat16, because a chunk has other FP8 scales than the full product."""
    if config.precision.fp8_format is not None and config.parallel.tp_comm_overlap:
        message = f"{format_setting(config, 'fp8_format')} and --tp-comm-overlap exclude each other."
        yield Finding(message, [reset(config, "tp_comm_overlap")])
