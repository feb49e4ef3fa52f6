"""Rules about the model's shape."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.checks.finding import (
    Finding,
    at_most,
    change,
    divides,
    exclude_each_other,
    multiples_near,
    rule,
    shown,
    try_values,
)
from megatron.config.config import Config
from megatron.config.setting import acts_with
from megatron.spec.activations import FLAGS, activation_of, spelled
from megatron.spec.layers import rotated_channels

hidden_divides_by_heads = divides(
    "hidden_size",
    "num_attention_heads",
    "The heads share the hidden size evenly, unless --kv-channels sets the size of a head.",
    where=acts_with(kv_channels=None),
)


@rule("hidden_size", "ffn_hidden_size", reads=(*FLAGS, "tensor_model_parallel_size"))
def mlp_has_width(config: Config, world_size: int) -> Iterator[Finding]:
    """The default width of a gated MLP is rounded down to a multiple of 64, which a small hidden size does not reach: give
    --ffn-hidden-size."""
    model = config.model
    if model.ffn_size < 1:
        flag = activation_of(model).flag
        assert flag is not None, "an MLP that is not gated is wider than the model"
        yield Finding(
            f"The MLP has no width: {spelled(flag)} with --hidden-size {model.hidden_size} gives "
            f"8 x {model.hidden_size} / 3 rounded down to a multiple of 64, which is 0.",
            [change(ffn_hidden_size=8 * config.parallel.tensor_model_parallel_size)],
            fields=("hidden_size", "ffn_hidden_size", flag),
        )


query_groups_divide_heads = divides(
    "num_attention_heads",
    "num_query_groups",
    "Each key-value head serves the same number of query heads.",
    where=acts_with(group_query_attention=True),
)
one_activation = exclude_each_other(*FLAGS, why="Each sets the MLP's activation.")


@rule("rotary_percent", "kv_channels", "position_embedding_type", "hidden_size", "num_attention_heads")
def rotated_channels_pair_up(config: Config, world_size: int) -> Iterator[Finding]:
    """Rotary embeddings turn channels in pairs, so the number must be even and at least 2."""
    model = config.model
    if model.position_embedding_type != "rope" or model.head_size < 1:
        return
    rotated = rotated_channels(model)
    if rotated < 2 or rotated % 2:
        yield Finding(
            f"{shown(config, 'rotary_percent')} of a head of {model.head_size} channels rotates {rotated} of them.",
            [
                try_values("rotary_percent", model.rotary_percent, (1.0, 0.75, 0.5, 0.25)),
                try_values("kv_channels", model.head_size, multiples_near(model.head_size, 2)),
            ],
        )


one_rope_scaling = exclude_each_other(
    "use_rope_scaling",
    "rotary_seq_len_interpolation_factor",
    why="One stretches low rotary frequencies, the other all of them: a model is trained with one.",
)
sequence_fits_positions = at_most(
    "seq_length",
    "max_position_embeddings",
    "The learned position table needs a row for every token of a sequence.",
    where=acts_with(position_embedding_type="learned_absolute"),
)
