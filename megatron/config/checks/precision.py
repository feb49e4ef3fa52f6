"""Rules about products in 8 bits. (Those about 16 bits stand beside the loss scale, in `training`.)"""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron.config.checks.finding import (
    Finding,
    change,
    multiples_near,
    rule,
    shown,
    try_values,
    value_of,
    without,
)
from megatron.config.config import Config
from megatron.config.precision import Fp8
from megatron.spec.activations import SETTINGS

_SIZES = (
    *("hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "num_query_groups", "tensor_model_parallel_size"),
    *("group_query_attention", "seq_length", "context_parallel_size", "micro_batch_size", "sequence_parallel", *SETTINGS),
    *("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
)


@rule("fp8_format", "fp8_recipe", reads=_SIZES)
def products_have_whole_blocks(config: Config, world_size: int) -> Iterator[Finding]:
    """Products in 8 bits take multiples of 16 in every dimension, on a CPU as on a GPU. With --fp8-recipe blockwise it is 128, so
    that no block lies on two tensor ranks."""
    if config.precision.fp8_format is None:
        return
    multiple = Fp8(config.precision.fp8_format, config.precision.fp8_recipe).multiple
    odd = {what: (number, named) for what, (number, named) in _dimensions(config).items() if number % multiple}
    smaller = [change(fp8_recipe="tensorwise")] if config.precision.fp8_recipe == "blockwise" else []
    for what, (number, named) in odd.items():
        value, unit = value_of(config, named[0]), multiple
        if named[0] == "micro_batch_size":
            unit //= math.gcd(unit, config.tokens_per_rank)
        elif "tensor rank" in what:
            unit *= config.parallel.tensor_model_parallel_size
        nearest = [] if value is None else [try_values(named[0], value, multiples_near(value, unit, reach=2))]
        yield Finding(
            f"{shown(config, 'fp8_format')} {shown(config, 'fp8_recipe')} with {number:,} {what}: no multiple of {multiple}.",
            [*smaller, *nearest, without(config, "fp8_format", "fp8_recipe")],
            fields=("fp8_format", "fp8_recipe", *named),
        )


def _dimensions(config: Config) -> dict[str, tuple[int, tuple[str, ...]]]:
    """The dimensions of products in layers on one rank, in words: the number and the settings that it follows from."""
    model, ranks = config.model, config.parallel.tensor_model_parallel_size
    heads, tp = ("num_attention_heads", "kv_channels"), "tensor_model_parallel_size"
    tokens = config.tokens_per_rank * config.training.micro_batch_size
    whole: dict[str, tuple[int, tuple[str, ...]]] = {
        "hidden channels": (model.hidden_size, ("hidden_size",)),
        "tokens of a microbatch": (tokens, ("micro_batch_size", "seq_length")),
    }
    if model.multi_latent_attention:
        in_latents, divided = _dimensions_of_latents(config, tokens)
        whole |= in_latents
    else:
        divided = {
            "rows of queries, keys and values": (
                (model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_size,
                heads,
            ),
            "channels of heads": (model.num_attention_heads * model.head_size, heads),
        }
    divided["channels of the MLP"] = (model.ffn_size, ("ffn_hidden_size",))
    return {
        **whole,
        **{
            f"{what} on a tensor rank": (size // ranks, (*named, tp))
            for what, (size, named) in divided.items()
            if size % ranks == 0
        },
    }


def _dimensions_of_latents(
    config: Config, tokens: int
) -> tuple[dict[str, tuple[int, tuple[str, ...]]], dict[str, tuple[int, tuple[str, ...]]]]:
    """The dimensions of products in latent attention: those that every tensor rank has whole, and those that the ranks divide."""
    model, heads = config.model, config.model.num_attention_heads
    whole: dict[str, tuple[int, tuple[str, ...]]] = {
        "channels of the latent of keys and values": (model.kv_lora_rank, ("kv_lora_rank",)),
        "rotated channels of a head": (model.qk_pos_emb_head_dim, ("qk_pos_emb_head_dim",)),
    }
    if model.q_lora_rank is not None:
        whole["channels of the latent of queries"] = (model.q_lora_rank, ("q_lora_rank",))
    divided = {
        "rows of queries": (heads * model.head_size, ("num_attention_heads", "qk_head_dim", "qk_pos_emb_head_dim")),
        "rows of keys and values": (
            heads * (model.qk_head_dim + model.v_head_dim),
            ("num_attention_heads", "qk_head_dim", "v_head_dim"),
        ),
        "channels of values": (heads * model.v_head_dim, ("num_attention_heads", "v_head_dim")),
    }
    if config.parallel.sequence_parallel:  # each rank makes the latents of its part of the sequence
        divided["tokens of a microbatch"] = (tokens, ("micro_batch_size", "seq_length"))
    return whole, divided


@rule(
    "first_last_layers_bf16",
    "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16",
    reads=("fp8_format", "fp8_recipe", "num_layers"),
)
def some_layer_is_in_8_bits(config: Config, world_size: int) -> Iterator[Finding]:
    """With no layer left, --fp8-format would have no effect."""
    precision, count = config.precision, config.model.num_layers
    if precision.fp8_format is not None and not any(precision.fp8_of(layer, count) for layer in range(count)):
        yield Finding(
            f"{shown(config, 'num_layers_at_start_in_bf16')} and {shown(config, 'num_layers_at_end_in_bf16')} leave none of "
            f"--num-layers {count} in 8 bits.",
            [without(config, "first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")],
        )


@rule("fp8_format", "tp_comm_overlap")
def products_do_not_come_in_pieces(config: Config, world_size: int) -> Iterator[Finding]:
    """Products that overlap with communication come in pieces, in bfloat16: a piece has other scales than the whole."""
    if config.precision.fp8_format is not None and config.parallel.tp_comm_overlap:
        message = f"{shown(config, 'fp8_format')} and --tp-comm-overlap exclude each other."
        yield Finding(message, [without(config, "tp_comm_overlap")])
