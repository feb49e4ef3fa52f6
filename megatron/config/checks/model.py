"""Rules about the model's shape."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megatron.config.checks.finding import (
    Finding,
    SettingsRule,
    at_most,
    change,
    divides,
    exclude_each_other,
    multiples_near,
    rule,
    shown,
    try_values,
    value_of,
    without,
)
from megatron.config.config import Config
from megatron.config.setting import acts_with
from megatron.spec.activations import SETTINGS, activation_of
from megatron.spec.layer_pattern import pattern_problem, read_pattern, read_window
from megatron.spec.mlps import has_dense_layers
from megatron.spec.rotary import rotated_channels

_WITH_EXPERTS = ("num_experts", "moe_layer_freq", "num_layers")
"""Settings that say which layers have experts in the place of an MLP."""
_OF_LATENT_HEADS = ("multi_latent_attention", "qk_head_dim", "qk_pos_emb_head_dim")
"""Settings from which the size of a head follows in latent attention."""

hidden_divides_by_heads = divides(
    "hidden_size",
    "num_attention_heads",
    "The heads share the hidden size evenly, unless --kv-channels sets the size of a head.",
    where=acts_with(kv_channels=None, multi_latent_attention=False, every=True),
)


@rule("hidden_size", "ffn_hidden_size", reads=(*SETTINGS, *_WITH_EXPERTS, "moe_ffn_hidden_size", "tensor_model_parallel_size"))
def mlp_has_width(config: Config, world_size: int) -> Iterator[Finding]:
    """The default width of a gated MLP is rounded down to a multiple of 64, which a small hidden size does not reach: give
    --ffn-hidden-size."""
    model = config.model
    if model.ffn_size < 1 and (has_dense_layers(model) or model.moe_ffn_hidden_size is None):
        flag = activation_of(model).flag
        assert flag is not None, "an MLP that is not gated is wider than the model"
        yield Finding(
            f"The MLP has no width: {shown(config, flag)} with --hidden-size {model.hidden_size} gives "
            f"8 x {model.hidden_size} / 3 rounded down to a multiple of 64, which is 0.",
            [change(ffn_hidden_size=8 * config.parallel.tensor_model_parallel_size)],
            fields=("hidden_size", "ffn_hidden_size", flag),
        )


@rule("multi_latent_attention", "position_embedding_type")
def latent_attention_is_rotated(config: Config, world_size: int) -> Iterator[Finding]:
    """Some channels of each head are there for rotary positions alone (--qk-pos-emb-head-dim)."""
    if config.model.multi_latent_attention and config.model.position_embedding_type != "rope":
        yield Finding(
            f"--multi-latent-attention with {shown(config, 'position_embedding_type')}.", [change(position_embedding_type="rope")]
        )


latent_has_no_groups = exclude_each_other(
    "multi_latent_attention",
    "group_query_attention",
    why="Each is a way to keep less of keys and values; a latent gives keys and values to every query head.",
)
latents_have_no_width = exclude_each_other(
    "multi_latent_attention",
    "mup_base_width",
    why="muP scales by how many times wider a product is than that of a small model, and latents have sizes of their own.",
)
latent_norms_are_not_of_heads = exclude_each_other(
    "multi_latent_attention", "qk_layernorm_all_heads", why="Latent attention normalises latents, not heads."
)


@rule("mtp_num_layers", "seq_length")
def depths_have_labels(config: Config, world_size: int) -> Iterator[Finding]:
    """Depth k predicts the token k places behind the next one, so a sample of k tokens has no label for it."""
    depths, length = config.model.mtp_num_layers, config.model.seq_length
    if 0 < length <= depths:
        yield Finding(
            f"--mtp-num-layers {depths} leaves the last depth without a label in samples of --seq-length {length} tokens.",
            [try_values("mtp_num_layers", depths, [length - 1]), try_values("seq_length", length, [depths + 1])],
        )


query_groups_divide_heads = divides(
    "num_attention_heads",
    "num_query_groups",
    "Each key-value head serves the same number of query heads.",
    where=acts_with(group_query_attention=True),
)
one_activation = exclude_each_other(*SETTINGS, why="Each sets the MLP's activation.")


@rule(
    *("rotary_percent", "kv_channels", "position_embedding_type", "hidden_size", "num_attention_heads", "qk_pos_emb_head_dim"),
    reads=_OF_LATENT_HEADS,
)
def rotated_channels_pair_up(config: Config, world_size: int) -> Iterator[Finding]:
    """Rotary embeddings turn channels in pairs, so the number must be even and at least 2."""
    model = config.model
    if model.position_embedding_type != "rope" or model.head_size < 1:
        return
    rotated = rotated_channels(model)
    if model.multi_latent_attention:
        if rotated % 2:
            nearest = try_values("qk_pos_emb_head_dim", rotated, multiples_near(rotated, 2))
            yield Finding(f"{shown(config, 'qk_pos_emb_head_dim')} is odd.", [nearest], fields=("qk_pos_emb_head_dim",))
    elif rotated < 2 or rotated % 2:
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
    "rope_type",
    why="Each is a way to stretch rotary frequencies: a model is trained with one.",
)


@rule("rope_low_freq_factor", "rope_high_freq_factor")
def llama3_bounds_are_apart(config: Config, world_size: int) -> Iterator[Finding]:
    """Between the two bounds stretched and plain frequencies are mixed."""
    low, high = config.model.rope_low_freq_factor, config.model.rope_high_freq_factor
    if low >= high:
        yield Finding(
            f"{shown(config, 'rope_low_freq_factor')} is not below {shown(config, 'rope_high_freq_factor')}.",
            [change(rope_high_freq_factor=4 * low), change(rope_low_freq_factor=high / 4)],
        )


@rule("beta_slow", "beta_fast")
def yarn_bounds_are_apart(config: Config, world_size: int) -> Iterator[Finding]:
    """Between the two bounds stretched and plain frequencies are mixed."""
    slow, fast = config.model.beta_slow, config.model.beta_fast
    if slow >= fast:
        yield Finding(
            f"{shown(config, 'beta_slow')} is not below {shown(config, 'beta_fast')}.",
            [change(beta_fast=32 * slow), change(beta_slow=fast / 32)],
        )


@rule("rope_type", "rotary_base")
def yarn_has_a_falling_course(config: Config, world_size: int) -> Iterator[Finding]:
    """YaRN asks at which pair of channels a number of turns is reached, so frequencies must fall from pair to pair."""
    if config.model.rope_type == "yarn" and config.model.rotary_base <= 1:
        yield Finding(
            f"{shown(config, 'rope_type')} with {shown(config, 'rotary_base')}: frequencies do not fall.",
            [without(config, "rotary_base"), without(config, "rope_type")],
        )


@rule("rope_type", "kv_channels", reads=("rotary_percent", "hidden_size", "num_attention_heads", *_OF_LATENT_HEADS))
def dynamic_base_has_pairs(config: Config, world_size: int) -> Iterator[Finding]:
    """The base grows so that the slowest pair of channels is stretched by the factor and the fastest not at all: there must be
    two."""
    model = config.model
    if model.rope_type == "dynamic" and model.head_size >= 1 and rotated_channels(model) == 2:
        yield Finding(f"{shown(config, 'rope_type')} with one rotated pair of channels.", [without(config, "rope_type")])


@rule(
    "rope_short_factors",
    "rope_long_factors",
    "rope_type",
    reads=("kv_channels", "rotary_percent", "hidden_size", "num_attention_heads", *_OF_LATENT_HEADS),
)
def each_pair_has_its_factors(config: Config, world_size: int) -> Iterator[Finding]:
    """LongRoPE has a factor for each rotated pair of channels, in each of two lists."""
    model = config.model
    if model.rope_type != "longrope" or model.head_size < 1:
        return
    pairs = rotated_channels(model) // 2
    for name in ("rope_short_factors", "rope_long_factors"):
        count = len(getattr(model, name))
        if count != pairs:
            yield Finding(
                f"--{name.replace('_', '-')} has {count} factors, but {pairs} pairs of channels are rotated.",
                [without(config, "rope_type", "rope_short_factors", "rope_long_factors")],
                fields=(name, "rope_type"),
            )


sequence_fits_positions = at_most(
    "seq_length",
    "max_position_embeddings",
    "The learned position table needs a row for every token of a sequence.",
    where=acts_with(position_embedding_type="learned_absolute"),
)


_WINDOW, _WINDOWED, _UNROTATED = "window_size", "window_attn_skip_freq", "no_rope_freq"


@rule(_WINDOW)
def window_can_be_read(config: Config, world_size: int) -> Iterator[Finding]:
    """A window is written as how many tokens before its own a token attends to, and how many after: N,0, since attention is causal.
    Models of transformers count the own token too: a window of N there is N-1,0 here."""
    text = config.model.window_size
    if text is not None and read_window(text) is None:
        numbers = [int(number) for number in re.findall(r"\d{1,15}", text)]
        yield Finding(
            f"{shown(config, _WINDOW)} cannot be read.",
            [[change(window_size=f"{number},0") for number in numbers[:1]], without(config, _WINDOW)],
        )


def _names_layers(field: str) -> SettingsRule:
    @rule(field, "num_layers")
    def check(config: Config, world_size: int) -> Iterator[Finding]:
        """It is a number N, which means every N-th layer, or a list with 0 or 1 for each layer."""
        text = value_of(config, field)
        problem = None if text is None else pattern_problem(text, config.model.num_layers)
        if problem is not None:
            pattern = read_pattern(text)
            other = [change(num_layers=len(pattern))] if isinstance(pattern, tuple) and pattern else []
            yield Finding(f"{shown(config, field)} does not say which layers it means. {problem}", [other, without(config, field)])

    return check


windowed_layers_are_named = _names_layers(_WINDOWED)
unrotated_layers_are_named = _names_layers(_UNROTATED)


@rule("qk_layernorm_all_heads", "normalization", reads=("qk_layernorm",))
def all_heads_have_a_mean_square(config: Config, world_size: int) -> Iterator[Finding]:
    """All heads are normalised together by their mean square (RMSNorm), as models that do so have it."""
    if config.model.qk_layernorm_all_heads and config.model.qk_layernorm and config.model.normalization != "RMSNorm":
        yield Finding(
            f"{shown(config, 'qk_layernorm_all_heads')} does not go with {shown(config, 'normalization')}.",
            [change(normalization="RMSNorm"), without(config, "qk_layernorm_all_heads")],
        )
