"""Rules about the model's shape."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.checks.finding import Finding, change, is_changed, multiples_near, positive, rule, shown, try_values, uneven
from megatron.config.config import Config
from megatron.spec.activations import FLAGS, activation_of, spelled
from megatron.spec.layers import rotated_channels


@rule("hidden_size", "num_attention_heads", "kv_channels")
def hidden_divides_by_heads(config: Config, world_size: int) -> Iterator[Finding]:
    """Without --kv-channels the heads share the hidden size evenly."""
    hidden, heads = config.model.hidden_size, config.model.num_attention_heads
    if config.model.kv_channels is not None or not positive(hidden, heads) or hidden % heads == 0:
        return
    why = "The heads share the hidden size evenly, unless --kv-channels sets the size of a head."
    yield uneven(config, "hidden_size", "num_attention_heads", why, fields=("kv_channels",))


@rule("hidden_size", "ffn_hidden_size", *FLAGS, "tensor_model_parallel_size")
def mlp_has_width(config: Config, world_size: int) -> Iterator[Finding]:
    """The default width of a gated MLP is rounded down to a multiple of 64, which a small hidden size does not reach."""
    model = config.model
    if model.ffn_hidden_size is None and positive(model.hidden_size) and model.ffn_size < 1:
        flag = activation_of(model).flag
        assert flag is not None, "an MLP that is not gated is wider than the model"
        yield Finding(
            ("hidden_size", "ffn_hidden_size", flag),
            f"The MLP has no width: {spelled(flag)} with --hidden-size {model.hidden_size} gives "
            f"8 x {model.hidden_size} / 3 rounded down to a multiple of 64, which is 0.",
            "Give --ffn-hidden-size.",
            ((change(ffn_hidden_size=8 * config.parallel.tensor_model_parallel_size),),),
        )


@rule("num_attention_heads", "group_query_attention", "num_query_groups")
def query_groups_divide_heads(config: Config, world_size: int) -> Iterator[Finding]:
    """Each key-value head serves the same number of query heads."""
    heads, groups = config.model.num_attention_heads, config.model.num_query_groups
    if not config.model.group_query_attention or not positive(heads, groups) or heads % groups == 0:
        return
    why = "Each key-value head serves the same number of query heads."
    yield uneven(config, "num_attention_heads", "num_query_groups", why)


@rule(*FLAGS)
def one_activation(config: Config, world_size: int) -> Iterator[Finding]:
    """There is one activation."""
    given = [flag for flag in FLAGS if getattr(config.model, flag)]
    if len(given) > 1:
        yield Finding(
            tuple(given),
            f"{' and '.join(map(spelled, given))} exclude each other.",
            "Each sets the MLP's activation.",
            (tuple(change(**{flag: False for flag in given if flag != kept}) for kept in reversed(given)),),
        )


@rule("hidden_size", "num_attention_heads", "kv_channels", "position_embedding_type", "rotary_percent")
def rotated_channels_pair_up(config: Config, world_size: int) -> Iterator[Finding]:
    """Rotary embeddings turn channels in pairs."""
    model = config.model
    if model.position_embedding_type != "rope" or not 0 < model.rotary_percent <= 1:
        return
    if not positive(model.hidden_size, model.num_attention_heads, model.kv_channels or 1) or model.head_size < 1:
        return
    rotated = rotated_channels(model)
    if rotated >= 2 and rotated % 2 == 0:
        return
    yield Finding(
        ("rotary_percent", "kv_channels", "position_embedding_type", "hidden_size", "num_attention_heads"),
        f"{shown(config, 'rotary_percent')} of a head of {model.head_size} channels rotates {rotated} of them.",
        "Rotary embeddings turn channels in pairs, so the number must be even and at least 2.",
        (
            try_values("rotary_percent", model.rotary_percent, (1.0, 0.75, 0.5, 0.25)),
            try_values("kv_channels", model.head_size, multiples_near(model.head_size, 2)),
        ),
    )


@rule("use_rope_scaling", "rotary_seq_len_interpolation_factor")
def one_rope_scaling(config: Config, world_size: int) -> Iterator[Finding]:
    """Rotary frequencies are stretched in one way."""
    if config.model.use_rope_scaling and is_changed(config, "rotary_seq_len_interpolation_factor"):
        yield Finding(
            ("use_rope_scaling", "rotary_seq_len_interpolation_factor"),
            f"--use-rope-scaling and {shown(config, 'rotary_seq_len_interpolation_factor')} exclude each other.",
            "One stretches low rotary frequencies, the other all of them: a model is trained with one.",
            ((change(rotary_seq_len_interpolation_factor=1.0), change(use_rope_scaling=False)),),
        )


@rule("seq_length", "max_position_embeddings", "position_embedding_type")
def sequence_fits_positions(config: Config, world_size: int) -> Iterator[Finding]:
    """A learned table has a row for every position."""
    model = config.model
    if model.position_embedding_type != "learned_absolute" or not positive(model.seq_length, model.num_positions):
        return
    if model.seq_length > model.num_positions:
        yield Finding(
            ("seq_length", "max_position_embeddings", "position_embedding_type"),
            f"--seq-length {model.seq_length} is more than --max-position-embeddings {model.num_positions}.",
            "The learned position table needs a row for every token of a sequence.",
            ((change(max_position_embeddings=model.seq_length),), (change(seq_length=model.num_positions),)),
        )
